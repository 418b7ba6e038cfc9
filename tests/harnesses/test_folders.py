"""Folders that an agent left: too deep, too many, closed; and what a row may put into one."""

import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from agentic_prompting.harnesses import Workspace, folders as module, workspace
from agentic_prompting.llm import ServerFailed
from support.isolation import ISOLATION, both_isolations
from support.programs import play_program


def make_deep(folder, depth):
    """A shell descends by names of one level: a path that deep has no name that the system takes."""
    loop = f"i=0; while [ $i -lt {depth} ]; do mkdir d; cd ./d; i=$((i+1)); done"
    subprocess.run(["sh", "-c", loop], cwd=folder, check=True, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("depth", [50, 150, 1500, 6000])
def test_deep_folders_are_removed(tmp_path, depth):
    folder = tmp_path / "work"
    folder.mkdir()
    make_deep(folder, depth)
    assert module.make_safe_to_read(folder) == (depth <= module.MAX_DEPTH)
    assert sum(1 for _ in module.walk(folder)) <= module.MAX_DEPTH + 1
    module.remove(folder)
    assert not list(tmp_path.iterdir())


def test_long_names_are_too_deep(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    loop = "i=0; while [ $i -lt 40 ]; do mkdir $0; cd ./$0; i=$((i+1)); done"
    subprocess.run(["sh", "-c", loop, "n" * 250], cwd=folder, check=True, stderr=subprocess.DEVNULL)
    assert not module.make_safe_to_read(folder)
    module.remove(folder)
    assert not list(tmp_path.iterdir())


DEEP = """
import json, os, urllib.request
body = json.dumps({"model": "agent", "messages": [{"role": "user", "content": "q"}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body), timeout=20).read()
os.chdir(WHERE)
for _ in range(1500):
    os.mkdir("d")
    os.chdir("d")
print("x", flush=True)
"""


@both_isolations
@pytest.mark.parametrize("where", ["'.'", "os.environ['HOME']", "os.environ['TMPDIR']"])
def test_deep_folders_are_malformed(tmp_path, caplog, isolation, where):
    script = tmp_path / "agent.py"
    script.write_text(DEEP.replace("WHERE", where))
    with caplog.at_level(logging.INFO):
        options = {
            "workspace": Workspace(isolation=isolation),
            "reward": lambda rollout, folder: 0.5,
        }
        rollout, _ = play_program([sys.executable, str(script)], **options)
    assert rollout.status == "malformed"
    assert rollout.returned["reward"] == 0.5
    assert "deep" in caplog.text
    own = workspace.process_folder(os.getpid())
    assert [path.name for path in own.iterdir()] == ["lock"]


def test_a_start_removes_deep_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    left = module.base_folder() / "9-left" / "7"
    left.mkdir(parents=True)
    make_deep(left, 2000)
    own = module.process_folder.__wrapped__(1)
    assert [*module.base_folder().iterdir()] == [own]


@both_isolations
def test_many_empty_files_are_too_many(tmp_path, caplog, isolation):
    """Also where the command has ended before the trainer has looked for the first time."""
    script = tmp_path / "agent.py"
    text = (
        DEEP.partition("os.chdir(WHERE)")[0]
        + "[open(str(i), 'w').close() for i in range(3000)]\nprint('x')"
    )
    script.write_text(text)
    for limits in ({"max_files": 2000}, {"max_bytes": 2**19}):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            rollout, _ = play_program(
                [sys.executable, str(script)], workspace=Workspace(isolation=isolation, **limits)
            )
        assert rollout.status == "malformed" and "workspace allows" in caplog.text


def test_kept_files_give_nobody_rights(tmp_path):
    """A program of the user's with setuid would run for whoever starts it with the user's rights."""
    kept = tmp_path / "kept"
    command = [
        "sh",
        "-c",
        "touch $HOME/tool ./tool; chmod 6755 $HOME/tool ./tool; chmod 1777 $TMPDIR; exit 3",
    ]
    play_program(command, workspace=Workspace(isolation=ISOLATION, keep_failed=str(kept)))
    modes = [path.lstat().st_mode for path in kept.rglob("*")]
    assert len([*kept.rglob("tool")]) == 2
    assert not any(mode & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX) for mode in modes)


# --- files of a row -------------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path):
    """A file that no row may reach, beside the folder that rows may name."""
    secret = tmp_path / "outside" / "key"
    secret.parent.mkdir()
    secret.write_text("SECRET")
    (tmp_path / "tasks" / "a").mkdir(parents=True)
    (tmp_path / "tasks" / "a" / "x.txt").write_text("X")
    return secret


def test_a_row_names_no_path_by_itself(tmp_path, outside):
    work = tmp_path / "work"
    work.mkdir()
    for files in (str(outside.parent), "~/.ssh", str(tmp_path / "tasks" / "a"), outside):
        with pytest.raises(ServerFailed, match="source"):
            module.fill_folder(work, files, None)
    assert not list(work.iterdir())


@pytest.mark.parametrize(
    "files", ["../outside", "a/../../outside", "/etc", "~", "link", "link/key"]
)
def test_no_path_leads_out_of_the_source(tmp_path, outside, files):
    work = tmp_path / "work"
    tasks = tmp_path / "tasks"
    work.mkdir()
    (tasks / "link").symlink_to(outside.parent)
    with pytest.raises(ServerFailed, match="outside"):
        module.fill_folder(work, files, str(tasks))
    assert not list(work.iterdir())


def test_no_link_leads_out_of_the_source(tmp_path, outside):
    work = tmp_path / "work"
    tasks = tmp_path / "tasks"
    work.mkdir()
    (tasks / "a" / "inside").symlink_to("x.txt")
    module.fill_folder(work, "a", str(tasks))
    assert (work / "inside").read_text() == (work / "x.txt").read_text() == "X"
    (tasks / "a" / "key").symlink_to(outside)
    with pytest.raises(ServerFailed, match="link"):
        module.fill_folder(work, "a", str(tasks))


def test_tests_of_a_bundle_join_the_work(tmp_path):
    source = tmp_path / "source"
    work = tmp_path / "agent" / "work"
    (source / "tests").mkdir(parents=True)
    (source / "tests" / "test_a.py").write_text("A")
    work.mkdir(parents=True)
    (work / "left.txt").write_text("by the agent")
    git = ["git", "-C", str(source), "-c", "user.name=n", "-c", "user.email=e@x"]
    for arguments in (
        ["init", "-q"],
        ["add", "."],
        ["commit", "-qm", "x"],
        ["bundle", "create", "-q", "b", "HEAD"],
    ):
        subprocess.run([*git, *arguments], check=True)
    module.fill_folder(work, "b", str(source))
    assert {path.name for path in work.iterdir()} == {"left.txt", "tests"}
    assert Path(work, "tests", "test_a.py").read_text() == "A"
