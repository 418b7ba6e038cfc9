"""Work folders of commands: what they hold, what a command can reach, and that nothing of it is
left.
"""

import asyncio
import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

from agentic_prompting.harnesses import CommandProgram, Workspace, workspace as module
from agentic_prompting.llm import Misconfigured
from agentic_prompting.llm.loop import run
from agentic_prompting.programs import Program
from agentic_prompting.rollout import Rollout
from support.isolation import ISOLATION, both_isolations, needs_sandbox
from support.programs import LIMITS, Scripted, byte_format, play_program

WORKSPACE = Workspace(isolation=ISOLATION)
ASK = """
import json, os, sys, urllib.request
def ask(base=os.environ["OPENAI_BASE_URL"], key=os.environ["OPENAI_API_KEY"], text="q"):
    body = json.dumps({"model": "agent", "messages": [{"role": "user", "content": text}]}).encode()
    request = urllib.request.Request(base + "/chat/completions", body, {"Authorization": "Bearer " + key})
    return json.load(urllib.request.urlopen(request, timeout=20))["choices"][0]["message"]["content"]
"""


def script(tmp_path, text):
    """A command that calls the policy: `ask()`, then what the test adds."""
    path = tmp_path / "agent.py"
    path.write_text(ASK + textwrap.dedent(text))
    return [sys.executable, str(path)]


def left_over():
    own = module.process_folder(os.getpid())
    return [path for path in own.iterdir() if path.name != "lock"]


@needs_sandbox
def test_what_a_command_sees_and_what_not(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    text = """
    import pathlib, socket
    def fails(do):
        try:
            do()
        except OSError as error:
            return type(error).__name__
    seen = dict(cwd=os.getcwd(), home=os.environ["HOME"], stdin=sys.stdin.read(), secret="HF_TOKEN" in os.environ)
    seen["row"] = json.load(open(os.environ["AGENTIC_PROMPTING_ROW"]))
    seen["files"] = {str(p): p.read_text() for p in pathlib.Path().rglob("*") if p.is_file()}
    seen["others"] = [p for p in os.listdir("/proc") if p.isdigit() and int(p) > 2]
    seen["write"] = fails(lambda: open(pathlib.Path(__file__).with_name("x"), "w"))
    seen["reach"] = fails(lambda: socket.create_connection(("1.1.1.1", 53), timeout=5))
    seen["host"] = fails(lambda: socket.create_connection(("127.0.0.1", PORT), timeout=5))
    pathlib.Path("/tmp/own").write_text("x")
    ask()
    print(json.dumps({"answer": "x", "seen": seen}))
    """
    with (
        open(tmp_path / "port", "w"),
        __import__("socket").create_server(("127.0.0.1", 0)) as server,
    ):
        command = script(tmp_path, text.replace("PORT", str(server.getsockname()[1])))
        row = {
            "question": "q",
            "answer": "SECRET",
            "files": {"a.txt": "A", "b/c.txt": "C", "none": None},
            "tests": {},
        }
        rollouts, _ = play_program(command, row=row, n=2, workspace=WORKSPACE)
    for rollout in rollouts:
        assert rollout.answer == "x", rollout.error
        seen = rollout.returned["seen"]
        assert (seen["cwd"], seen["home"]) == ("/tmp/agent/work", "/tmp/agent/home"), (
            "the same in each rollout"
        )
        assert seen["files"] == {"a.txt": "A", "b/c.txt": "C"} and seen["row"] == {"question": "q"}
        assert seen["stdin"] == "" and not seen["secret"] and seen["others"] == []
        assert all(seen[name] for name in ("write", "reach", "host")), seen
    assert not left_over() and not Path("/tmp/own").exists()


@both_isolations
def test_the_tests_of_a_row_come_with_the_reward(tmp_path, isolation):
    """In place of what the agent has put there: a link out of the folder, and a pipe that would
    block the reward.
    """
    outside = tmp_path / "outside"
    outside.mkdir()
    text = f"""
    assert not os.path.exists("test_a.py")
    os.symlink({str(outside)!r}, "tests"), os.mkfifo("pipe"), open("hello.txt", "w").write("hi")
    os.symlink("hello.txt", "inside")
    ask()
    print("done")
    """
    seen = []

    async def reward(rollout, folder):
        assert rollout.answer == "done"
        seen.append(sorted(str(path.relative_to(folder)) for path in folder.rglob("*")))
        return (folder / "inside").read_text() == "hi"

    program = CommandProgram(
        script(tmp_path, text), workspace=Workspace(isolation=isolation), reward=reward
    )
    rollout, _ = play_program(
        program, row={"question": "q", "tests": {"tests/test_a.py": "assert 1"}}
    )
    assert seen == [["hello.txt", "inside", "tests", "tests/test_a.py"]]
    assert not list(outside.iterdir())
    assert Program.reward([rollout]) == [1.0] and not left_over()


SPOILS = {
    "the work folder is a link": (
        "os.chdir('/'), os.rename(work, work + '2'), os.symlink(OUTSIDE, work)"
    ),
    "the folder above is a link": (
        "os.chdir('/'), os.rename(agent, agent + '2'), os.symlink(OUTSIDE, agent)"
    ),
    "the work folder is a file": (
        "os.chdir('/'), os.rename(work, work + '2'), open(work, 'w').close()"
    ),
    "the work folder is gone": "os.chdir('/'), os.rename(work, work + '2')",
    "a link leads to itself": "os.symlink('loop', 'loop')",
    "a folder is closed": (
        "os.mkdir('closed'), os.mkfifo('closed/pipe'), os.chmod('closed', 0), os.chmod('.', 0)"
    ),
}


@both_isolations
@pytest.mark.parametrize("spoils", SPOILS)
def test_spoilt_folders_reach_nothing_outside(tmp_path, isolation, spoils):
    """Neither are pipes removed elsewhere, nor tests written there, nor does the reward read there."""
    outside = tmp_path / "outside"
    for folder in (outside, outside / "work"):
        folder.mkdir()
        os.mkfifo(folder / "pipe")
    work = "work, agent = os.getcwd(), os.path.dirname(os.getcwd())\n"
    made = script(
        tmp_path,
        "ask()\n"
        + work
        + SPOILS[spoils].replace("OUTSIDE", repr(str(outside)))
        + "\nprint('done')",
    )
    seen = []

    def reward(rollout, folder):
        seen.append({str(path.relative_to(folder)) for path in folder.rglob("*")} - {"closed"})
        return (folder / "test_a.py").read_text() == "assert 1"

    program = CommandProgram(made, workspace=Workspace(isolation=isolation), reward=reward)
    rollout, _ = play_program(program, row={"question": "q", "tests": {"test_a.py": "assert 1"}})
    assert rollout.error is None and rollout.returned["reward"] == 1.0
    assert seen == [{"test_a.py"}] and not left_over()
    assert sorted(str(path.relative_to(outside)) for path in outside.rglob("*")) == [
        "pipe",
        "work",
        "work/pipe",
    ]


def test_a_folder_and_a_git_bundle_fill_the_work_folder(tmp_path):
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "a.txt").write_text("A")
    git = ["git", "-C", str(source), "-c", "user.name=n", "-c", "user.email=e@x"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    subprocess.run([*git, "bundle", "create", "-q", str(tmp_path / "a.bundle"), "HEAD"], check=True)
    for files in (source, tmp_path / "a.bundle", "source"):
        place = Workspace(source=str(tmp_path), isolation="none").open({"files": str(files)})
        assert (place.work / "deep" / "a.txt").read_text() == "A"
        place.close()
    assert not left_over()


@pytest.mark.parametrize(
    "files", ["no/such/folder", {"../x": "y"}, {"/etc/x": "y"}, {"": "y"}, {"a\0": "y"}, 7]
)
def test_a_row_with_wrong_files_fails_its_rollout(tmp_path, files):
    workspace = Workspace(source=str(tmp_path), isolation=ISOLATION)
    rollout, policy = play_program(
        ["true"], row={"question": "q", "files": files}, workspace=workspace
    )
    assert rollout.status == "failed"
    assert "the row" in str(rollout.error)
    assert not policy.requests
    assert not left_over()


def test_a_failed_rollout_is_kept_on_another_disk(tmp_path, monkeypatch):
    """But for a pipe, which cannot be copied."""

    def other_disk(source, target, **options):
        raise OSError(errno.EXDEV, "another disk")

    monkeypatch.setattr(module.shutil.os, "rename", other_disk)
    made = script(
        tmp_path,
        "ask(), os.mkfifo(os.environ['TMPDIR'] + '/pipe'), open('a', 'w').close(), sys.exit(3)",
    )
    rollout, _ = play_program(
        made, workspace=Workspace(isolation=ISOLATION, keep_failed=str(tmp_path / "kept"))
    )
    assert "ended with 3" in str(rollout.error) and not left_over()
    assert len(list((tmp_path / "kept").rglob("a"))) == 1
    assert not list((tmp_path / "kept").rglob("pipe"))


def test_folders_of_failed_rollouts_are_kept_on_request(tmp_path):
    kept = tmp_path / "kept"
    command = script(tmp_path, "open('trace', 'w').write('x'); ask(); sys.exit(3)")
    rollout, _ = play_program(
        command, workspace=Workspace(isolation=ISOLATION, keep_failed=str(kept))
    )
    (found,) = kept.rglob("trace")
    assert rollout.status == "failed" and found.read_text() == "x" and not left_over()


def broken(rollout, folder):
    raise ZeroDivisionError


def none_is_a_number(value):
    return lambda rollout, folder: value, f"{value!r}, not a number"


@pytest.mark.parametrize(
    "reward, says",
    [(broken, "ZeroDivisionError"), *map(none_is_a_number, (None, "good", [1.0], float("nan")))],
)
def test_a_reward_that_fails_fails_the_rollout(tmp_path, reward, says):
    rollout, _ = play_program(
        script(tmp_path, "ask(); print('x')"),
        row={"question": "q", "answers": ["x"]},
        workspace=WORKSPACE,
        reward=reward,
    )
    assert rollout.status == "failed" and says in str(rollout.error)


def test_an_episode_without_an_answer_has_a_reward_by_its_folder(tmp_path):
    command = script(tmp_path, "ask(); open('a', 'w').close()")
    rollout, _ = play_program(
        command, workspace=WORKSPACE, reward=lambda rollout, folder: (folder / "a").exists()
    )
    assert rollout.status == "malformed" and Program.reward([rollout]) == [1.0]


def test_reward_and_workspace_are_a_commands():
    async def agent(row, base_url, api_key): ...

    with pytest.raises(TypeError, match="workspace"):
        Program(agent, workspace=WORKSPACE)


# --- faults: nothing of them reaches another rollout ----------------------------------------------


def running(mark):
    return [entry.name for entry in Path("/proc").glob("[0-9]*") if mark in _words(entry)]


def _words(entry):
    try:
        return (entry / "cmdline").read_text()
    except OSError:
        return ""


@needs_sandbox
def test_children_that_ignore_every_signal_end_with_the_rollout(tmp_path):
    text = """
    import signal, subprocess, time
    for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(name, signal.SIG_IGN)
    for _ in range(3):
        subprocess.Popen(["sleep", "3217"], start_new_session=True)
    ask()
    print("x", flush=True)
    if {}: time.sleep(1000)
    """
    rollout, _ = play_program(script(tmp_path, text.format(0)), workspace=WORKSPACE)
    assert rollout.answer == "x" and not running("sleep\x003217"), (
        "at once: the namespace has ended before the reward"
    )
    rollout, _ = play_program(script(tmp_path, text.format(1)), workspace=WORKSPACE, timeout=3.0)
    assert rollout.status == "failed" and not running("sleep\x003217") and not left_over()


@pytest.mark.parametrize(
    "space, text, says",
    [
        (
            Workspace(max_bytes=2**20),
            "[open(str(i), 'wb').write(bytes(2**19)) for i in range(9)]",
            "disk",
        ),
        (
            Workspace(max_processes=9),
            "import subprocess as s; [s.Popen(['sleep', '99']) for _ in range(20)]",
            "proc",
        ),
        (Workspace(max_memory=2**26), "x = bytearray(2**27)", "memory"),
    ],
)
@needs_sandbox
@pytest.mark.timeout(120)  # the command would go on for hours
def test_a_command_that_uses_too_much_is_ended_and_learns(tmp_path, caplog, space, text, says):
    command = script(tmp_path, f"ask()\n{text}\nimport time; time.sleep(10_000)")
    with caplog.at_level(logging.INFO):
        rollout, _ = play_program(command, workspace=space)
    assert rollout.status == "malformed" and rollout.counts["program/limits_reached"] == 1
    assert says in caplog.text and not left_over()


@needs_sandbox
def test_other_keys_and_a_thousand_connections_stay_with_their_rollout(tmp_path):
    """The second rollout knows the key of the first and calls with it, and opens more connections
    than it may.
    """
    text = """
    import socket, time, urllib.error
    base = os.environ["OPENAI_BASE_URL"]
    if json.load(open(os.environ["AGENTIC_PROMPTING_ROW"]))["question"] == "first":
        ask()
        while not os.path.exists(GO):
            time.sleep(0.1)
        print(ask(text="again"))
    else:
        time.sleep(1)
        host = ("127.0.0.1", 8000)
        held = []
        for _ in range(1000):
            try:
                held.append(socket.create_connection(host, timeout=5))
            except OSError:
                break
        held.clear()
        try:
            ask(base="http://127.0.0.1:8000/v1", key=KEY)
        except urllib.error.HTTPError as error:
            refused = error.code
        ask(text="own")
        print(json.dumps({"answer": "x", "refused": refused}))
    """
    shared = tmp_path / "shared"
    shared.mkdir()
    known = shared / "key"
    go = shared / "go"
    command = script(
        tmp_path, text.replace("KEY", f"open({str(known)!r}).read()").replace("GO", repr(str(go)))
    )
    program = CommandProgram(command, workspace=Workspace(shows=[str(shared)]))
    policy = Scripted(lambda *_: "hello", byte_format())
    first, second = (
        Rollout([1], row={"question": name}, seed=i) for i, name in enumerate(("first", "second"))
    )

    async def both():
        playing = asyncio.ensure_future(program.play_episode(first, policy, policy.form, LIMITS))
        while not program._gateway._sessions:
            await asyncio.sleep(0.01)
        known.write_text(next(iter(program._gateway._sessions)))
        await program.play_episode(second, policy, policy.form, LIMITS)
        go.touch()
        await playing

    run(both())
    assert first.answer == "hello" and len(first.turns) == 2, first.error
    assert (
        second.returned == {"answer": "x", "refused": 401, "reward": None}
        and len(second.turns) == 1
    ), second.error


@needs_sandbox
def test_names_that_a_command_looks_up_are_listed(tmp_path):
    """It reaches nothing by them, nor by an address."""
    text = """
    import socket
    seen = []
    for where in ("registry.example.org", "192.0.2.1"):
        try:
            socket.create_connection((where, 443), timeout=20)
        except OSError as error:
            seen.append(type(error).__name__)
    print(json.dumps({"answer": ask(), "seen": seen}))
    """
    names = []
    rollout, _ = play_program(
        script(tmp_path, text), workspace=Workspace(on_dns_lookup=names.append), n=1
    )
    assert rollout.answer == "hello" and rollout.returned["seen"] == ["gaierror", "OSError"]
    assert "registry.example.org" in names


@needs_sandbox
@pytest.mark.parametrize("highest", range(88, 98))
def test_any_number_of_open_files_leaves_room_for_the_dns_socket(tmp_path, highest):
    """The sandbox inherits descriptors of any number, here of some around 100."""
    held = [os.dup(0)]
    while held[-1] < highest:
        held.append(os.dup(0))
    try:
        rollout, _ = play_program(
            script(tmp_path, "print(ask())"),
            workspace=Workspace(on_dns_lookup=[].append),
            n=1,
            timeout=20,
        )
    finally:
        for descriptor in held:
            os.close(descriptor)
    assert rollout.answer == "hello", rollout.error


@needs_sandbox
def test_many_at_once(tmp_path):
    rollouts, _ = play_program(script(tmp_path, "print(ask())"), workspace=WORKSPACE, n=16)
    assert [rollout.answer for rollout in rollouts] == ["hello"] * 16 and not left_over()


# --- the end of the trainer -----------------------------------------------------------------------

TRAINER = """
import sys, os
from agentic_prompting.harnesses import Workspace
from support.programs import play_program
play_program([sys.executable, sys.argv[1]], workspace=Workspace(isolation=sys.argv[2]), n=2)
"""


@both_isolations
def test_after_a_kill_nothing_is_left_at_the_next_start(tmp_path, isolation):
    mark = f"sleep\x00{4000 + os.getpid() % 1000}.{isolation == 'none':d}"
    began = tmp_path / "began"
    text = f"""
    import subprocess, time
    ask()
    subprocess.Popen(["sleep", {mark.split(chr(0))[1]!r}], start_new_session=True)
    time.sleep(1000)
    """
    command = script(tmp_path, text)
    paths = os.pathsep.join([str(Path(module.__file__).parents[2]), str(Path(__file__).parents[1])])
    own = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(tmp_path)}
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, command[1], isolation], env=own)
    deadline = time.monotonic() + 60
    while len(running(mark)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    began.touch()
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    base = tmp_path / f"agentic-prompting-{os.getuid()}"
    assert len(list(base.iterdir())) == 1
    next_start = (
        "from agentic_prompting.harnesses.workspace import Workspace; "
        "Workspace(isolation='none').open({}).close()"
    )
    subprocess.run([sys.executable, "-c", next_start], env=own, check=True)
    assert not list(tmp_path.glob("agentic-prompting-*/*")), "nor the files with its output"
    deadline = time.monotonic() + 5
    while running(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(mark)


def test_two_starts_at_once_keep_their_folders(tmp_path, monkeypatch):
    """The second one looks for what was left when the first has a folder, and no lock on it yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own_folder = module.process_folder.__wrapped__
    flock = fcntl.flock
    second = []

    def start_another(file, operation):
        if not second and str(getattr(file, "name", "")).endswith("lock"):
            second.append(threading.Thread(target=own_folder, args=[2]))
            second[0].start()
            second[0].join(1)
        return flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", start_another)
    own = own_folder(1)
    second[0].join(10)
    assert own.is_dir() and len(list(own.parent.iterdir())) == 2


def test_a_folder_without_a_lock_was_left(tmp_path, monkeypatch):
    """A start that was killed before it had one, or a removal that was killed behind it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (module.base_folder() / "9-left" / "7").mkdir(parents=True)
    own = module.process_folder.__wrapped__(1)
    assert [*module.base_folder().iterdir()] == [own]


def test_no_sandbox_no_command(tmp_path, monkeypatch, caplog):
    """Unless it is said that there shall be none."""
    monkeypatch.setattr(
        module, "why_unavailable", lambda network=False: "unshare: Operation not permitted"
    )
    ran = tmp_path / "ran"
    program = CommandProgram(["touch", str(ran)], workspace=Workspace())
    with pytest.raises(Misconfigured, match="unshare: Operation not permitted") as refused:
        program.check()
    # The option is only for those commands whose workspace it sets.
    assert "isolation='none'" in str(refused.value)
    assert "--isolation none of a --harness" in str(refused.value)
    rollout, policy = play_program(program)
    assert rollout.status == "failed"
    assert rollout.error.fatal
    assert not policy.requests
    assert not ran.exists()
    module._warn_unconfined.cache_clear()
    play_program(CommandProgram(["touch", str(ran)], workspace=Workspace(isolation="none")))
    assert ran.exists() and "lose" in caplog.text


def test_an_unknown_isolation_is_refused():
    with pytest.raises(ValueError, match="isolation"):
        Workspace(isolation="docker")


def test_a_program_that_is_not_there_is_named():
    rollout, _ = play_program(["no-such-program"], workspace=WORKSPACE)
    assert rollout.status == "failed" and "no-such-program" in str(rollout.error)


def test_environments_of_other_vendors_name_the_address(tmp_path):
    text = (
        "ask(); print(json.dumps({'answer': 'x', **{n: v for n, v in os.environ.items() if n[-3:] "
        "in ('URL', 'KEY')}}))"
    )
    rollout, _ = play_program(script(tmp_path, text))
    found = rollout.returned
    assert (
        found["ANTHROPIC_BASE_URL"] + "/v1"
        == found["GOOGLE_GEMINI_BASE_URL"] + "/v1"
        == found["OPENAI_BASE_URL"]
    )
    assert found["ANTHROPIC_API_KEY"] == found["GEMINI_API_KEY"] == found["OPENAI_API_KEY"]
    assert json.dumps(found)


@pytest.mark.timeout(120)  # the command would go on until its own time limit
def test_a_command_that_goes_on_after_its_rollout_is_over_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("agentic_prompting.programs.agent_program._GRACE_SECONDS", 1.0)
    text = """
    import time, urllib.error
    while True:
        try:
            ask()
        except urllib.error.HTTPError:
            time.sleep(0.05)
    """
    rollout, policy = play_program(
        script(tmp_path, text), workspace=WORKSPACE, max_calls=2, timeout=10_000
    )
    assert rollout.status == "out_of_turns"
    assert len(policy.requests) == 2
