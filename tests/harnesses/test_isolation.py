"""What a confined command can reach: nothing outside of its folders.

As this user, and as another one than root.
"""

import contextlib
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agentic_prompting.harnesses import CommandProgram, Workspace, workspace as module
from agentic_prompting.harnesses.bubblewrap import UNPRIVILEGED_USER
from support.isolation import both_isolations, needs_sandbox
from support.programs import play_program

ROOT = Path(__file__).parents[2]
PROBE = Path(__file__).with_name("probe.py")


@contextlib.contextmanager
def listening(*addresses):
    with contextlib.ExitStack() as stack:
        for address in addresses:
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(address)
            server.listen()
        yield


def probe(folder):
    """Play a rollout of the probe in a folder that this user can write, and return what it saw."""
    project = folder / "project"
    beside = folder / "beside"
    for path in (project / "runs" / "rollouts", project / "task" / "tests", beside):
        path.mkdir(parents=True)
    secrets = [
        project / "runs" / "rollouts" / "rollouts.jsonl",
        project / "task" / "tests" / "test_hidden.py",
        project / "tasks.jsonl",
        project / ".env",
        beside / "data.jsonl",
    ]
    for path in secrets:
        path.write_text("SECRET")
    (project / "lib.py").write_text("shown")
    folder.chmod(0o755)
    os.environ["A_KEY"] = "SECRET"
    sockets = [str(folder / "socket"), str(beside / "socket")]
    with listening(*sockets, "\0agentic-test"), socket.create_server(("127.0.0.1", 0)) as server:
        others = [
            str(module.base_folder()),
            str(project / "runs"),
            os.path.expanduser("~/.ssh"),
            str(project / "task/tests"),
        ]
        asked = {
            "paths": [*map(str, secrets), *others, str(project / "lib.py")],
            "sockets": sockets,
            "abstract": "agentic-test",
            "port": server.getsockname()[1],
        }
        (folder / "asked.json").write_text(json.dumps(asked))
        workspace = Workspace(
            shows=[str(project)], hides=[str(project / ".env")], source=str(project)
        )
        program = CommandProgram(
            [sys.executable, str(PROBE), str(folder / "asked.json")], workspace=workspace
        )
        program.keep_private([str(project / "runs"), str(project / "tasks.jsonl")])
        rollout, _ = play_program(program, row={"question": "q", "tests": "task/tests"})
    assert rollout.status == "answered", rollout.error
    return rollout.returned["seen"], str(project / "lib.py")


def check(seen, shown):
    assert seen["user"] != 0 and seen["no_new_privileges"] == "1" and seen["filter"] == "2"
    assert seen["user_namespace"] == seen["keyring"] == errno.EPERM and seen["vsock"]
    assert seen["readable"] == [shown]
    nothing = [
        "capabilities",
        "kernel_files",
        "run",
        "writable",
        "disks",
        "processes",
        "sockets",
        "memory",
        "secrets",
    ]
    assert not {name: seen[name] for name in nothing if seen[name]}
    assert not seen["abstract"] and not seen["port"]
    assert (seen["home"], seen["cwd"]) == ("/tmp/agent/home", "/tmp/agent/work")


@needs_sandbox
def test_a_command_reaches_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("A_KEY", "SECRET")
    check(*probe(tmp_path))


AS_OTHER_USER = """
import json, sys
from pathlib import Path
from harnesses.test_isolation import probe
print(json.dumps(probe(Path(sys.argv[1]))))
"""


@needs_sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="this is another user than root")
def test_nothing_is_reached_from_another_user(tmp_path):
    """The trainer runs as a user without rights; root's home is empty for it, but for the
    interpreter and the code.
    """
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.chown(folder, UNPRIVILEGED_USER, UNPRIVILEGED_USER)
    user = str(UNPRIVILEGED_USER)
    home = os.path.expanduser("~")
    needed = [sys.prefix, sys.base_prefix, str(ROOT), str(folder)]
    binds = [("--bind", path, path) for path in needed if path.startswith((home, "/tmp"))]
    paths = os.pathsep.join(
        [str(ROOT / "src"), str(ROOT / "tests"), *filter(os.path.isabs, sys.path)]
    )
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "TMPDIR": str(folder),
        "HOME": str(folder),
        "PATH": "/usr/bin:/bin",
    }
    ended = subprocess.run(
        [
            *("bwrap", "--dev-bind", "/", "/"),
            *("--perms", "0755", "--tmpfs", home, "--perms", "0755", "--tmpfs", "/tmp"),
            *(
                word
                for bind in binds
                for word in ("--perms", "0755", "--dir", str(Path(bind[1]).parent), *bind)
            ),
            *("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--"),
            *("setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--"),
            *(sys.executable, "-c", AS_OTHER_USER, str(folder)),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    check(*json.loads(ended.stdout.splitlines()[-1]))


LEAVES_PROCESSES = """
import json, os, subprocess, sys, urllib.request
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:  # in another session, with another parent and another environment
            os.execve("/bin/sleep", ["sleep", MARK], {})
        os._exit(0)
body = json.dumps({"model": "agent", "messages": [{"role": "user", "content": "q"}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body), timeout=30).read()
print("x", flush=True)
"""


@both_isolations
def test_no_process_outlives_its_rollout(tmp_path, isolation):
    mark = f"{7000 + os.getpid() % 1000}.{isolation == 'none':d}"
    script = tmp_path / "agent.py"
    script.write_text(LEAVES_PROCESSES.replace("MARK", repr(mark)))
    rollout, _ = play_program(
        [sys.executable, str(script)], workspace=Workspace(isolation=isolation)
    )
    assert rollout.answer == "x", rollout.error
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert f"sleep {mark}" not in running


@pytest.mark.parametrize(
    ("isolation", "is_hinted"),
    [pytest.param("bwrap", True, marks=needs_sandbox), ("none", False)],
)
def test_a_file_that_is_not_shown_is_hinted_at(tmp_path, isolation, is_hinted):
    data = tmp_path / "facts.txt"
    data.write_text("")
    script = tmp_path / "agent.py"
    script.write_text(f"open({str(data)!r}).read(); raise SystemExit(3)")
    rollout, _ = play_program(
        [sys.executable, str(script)], workspace=Workspace(isolation=isolation)
    )
    assert rollout.status == "failed"
    assert ("Workspace(shows=" in str(rollout.error)) == is_hinted


@both_isolations
def test_no_secret_is_inherited(tmp_path, monkeypatch, isolation):
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "SSH_AUTH_SOCK"):
        monkeypatch.setenv(name, "SECRET")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:SECRET@proxy:3128")
    workspace = Workspace(isolation=isolation, network=True, environment={"MINE": "1"})
    rollout, _ = play_program(["sh", "-c", 'env > "$HOME/env"; exit 3'], workspace=workspace)
    assert "ended with 3" in str(rollout.error)
    kept = tmp_path / "kept"
    workspace = Workspace(
        isolation=isolation, network=True, environment={"MINE": "1"}, keep_failed=str(kept)
    )
    play_program(["sh", "-c", 'env > "$HOME/env"; exit 3'], workspace=workspace)
    (environment,) = kept.rglob("env")
    assert "SECRET" not in environment.read_text() and "MINE=1" in environment.read_text()


@needs_sandbox
@pytest.mark.timeout(120)  # the command would go on for hours
def test_a_rollout_that_is_cancelled_leaves_nothing(tmp_path):
    mark = f"{8000 + os.getpid() % 1000}.5"
    rollout, _ = play_program(["sleep", mark], workspace=Workspace(), timeout=1.0)
    assert rollout.error.kind == "TimedOut"
    assert (
        f"sleep {mark}"
        not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    )


@needs_sandbox
def test_a_row_shows_no_path(tmp_path):
    """An argument that a row fills names a path of this machine, which stays hidden."""
    secret = tmp_path / "secret.txt"
    secret.write_text("SECRET")
    command = ["sh", "-c", 'cat "$0"; exit 3', "{question}"]
    rollout, _ = play_program(command, row={"question": str(secret)}, workspace=Workspace())
    assert "SECRET" not in str(rollout.error) and "ended with 3" in str(rollout.error)
