"""Which paths a sandbox shows, and the filter of system calls."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from agentic_prompting.harnesses import bubblewrap as module, seccomp
from support.isolation import needs_sandbox


def made(path, text="", mode=0o755):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return tmp_path


def below(paths, home):
    return {path.removeprefix(f"{home}/") for path in paths if path.startswith(f"{home}/")}


def test_a_program_shows_its_installation(home, monkeypatch):
    """And no more of the home folder: not what a person keeps in `~/.local/share`, not the project
    around a `bin`.
    """
    node = made(home / ".nvm" / "node" / "v22" / "bin" / "node")
    made(home / ".nvm" / "node" / "v22" / "lib" / "x.js")
    agent = made(
        home / ".nvm" / "node" / "v22" / "lib" / "node_modules" / "agent" / "cli.js", f"#!{node}\n"
    )
    os.symlink(agent, home / ".nvm" / "node" / "v22" / "bin" / "agent")
    made(home / ".local" / "bin" / "tool")
    made(home / ".local" / "share" / "keyrings" / "secret")
    made(home / ".local" / "lib" / "python3" / "x.py")
    made(home / "project" / "bin" / "run")
    made(home / "project" / "data.jsonl")
    made(home / "bin" / "mine")
    monkeypatch.setenv(
        "PATH", f"{home}/.nvm/node/v22/bin:{home}/.local/bin:{home}/project/bin:{home}/bin:/usr/bin"
    )
    assert below(module.paths_of(["agent"]), home) == {
        ".nvm/node/v22/bin",
        ".nvm/node/v22/lib",
        ".nvm/node/v22/bin/agent",
        ".nvm/node/v22/bin/node",
        ".nvm/node/v22/lib/node_modules",
        ".nvm/node/v22/lib/node_modules/agent/cli.js",
        ".local/bin",
        ".local/lib",
        "project/bin",
        "bin",
    }


def test_an_interpreter_is_found_by_its_line(home):
    python = made(home / "env" / "bin" / "python")
    made(home / "env" / "pyvenv.cfg")
    script = made(home / "env" / "bin" / "agent", f"#!{python}\n")
    assert below(module.paths_of([script]), home) == {
        "env/bin",
        "env/pyvenv.cfg",
        "env/bin/agent",
        "env/bin/python",
    }
    by_env = made(home / "other" / "agent", "#!/usr/bin/env -S sh -e\n")
    assert below(module.paths_of([by_env]), home) == {"other/agent"}


def test_only_paths_of_the_disk_are_shown(home):
    """Not everything, and no socket of a service."""
    folder = home / "data"
    folder.mkdir()
    words = [
        "sh",
        str(folder),
        "/",
        "/proc/self",
        "/dev/null",
        "/run",
        "/sys",
        "relative",
        "{question}",
        "/no/such",
    ]
    shown = module.paths_of(words)
    assert str(folder) in shown
    assert not shown & {
        "/",
        "/proc/self",
        "/dev/null",
        "/run",
        "/sys",
        "/no/such",
    }


@needs_sandbox
def test_the_deeper_path_counts(tmp_path):
    """Hidden in what is shown, and shown in what is hidden; a link above does not change that."""
    for name in ("a/shown.txt", "a/hidden/deep.txt", "a/hidden/again/shown.txt", "a/hidden.txt"):
        made(tmp_path / "real" / name, "x", 0o644)
    tmp_path.chmod(0o755)
    os.symlink("real", tmp_path / "link")
    (tmp_path / "tmp").mkdir(mode=0o777)
    shown = tmp_path / "link" / "a"
    command = ["sh", "-c", f"cd {shown} && grep -rls x . | sort && ls {tmp_path / 'real'}"]
    sandbox = module.BubblewrapSandbox(
        tmp=tmp_path / "tmp",
        cwd="/tmp",
        shows=[str(shown), str(shown / "hidden" / "again")],
        hides=[
            str(tmp_path / "real" / "a" / "hidden"),
            str(tmp_path / "real" / "a" / "hidden.txt"),
        ],
    )
    filter_descriptor = seccomp.open_filter()
    line = sandbox.command_line(command, filter_descriptor)
    ended = subprocess.run(line, pass_fds=[filter_descriptor], capture_output=True, text=True)
    os.close(filter_descriptor)
    assert ended.stdout.split() == ["./hidden/again/shown.txt", "./shown.txt"], ended.stderr
    assert "No such file" in ended.stderr


def test_a_sandbox_needs_its_program(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "bwrap" in module.why_unavailable.__wrapped__()


def test_an_unknown_processor_has_no_sandbox(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    assert module.why_unavailable.__wrapped__()


@needs_sandbox
def test_calls_with_fallbacks_work(tmp_path):
    """Threads and processes start, though the newest calls for them are refused."""
    text = (
        "import subprocess, threading\nt = threading.Thread(target=print, "
        "args=['thread'])\nt.start(); t.join()\n"
    )
    text += "print(subprocess.run(['echo', 'process'], capture_output=True, text=True).stdout)"
    command = [sys.executable, "-c", text]
    tmp_path.chmod(0o777)
    filter_descriptor = seccomp.open_filter()
    sandbox = module.BubblewrapSandbox(
        tmp=Path(tmp_path), cwd="/tmp", shows=module.paths_of(command)
    )
    line = sandbox.command_line(command, filter_descriptor)
    ended = subprocess.run(line, pass_fds=[filter_descriptor], capture_output=True, text=True)
    os.close(filter_descriptor)
    assert ended.stdout.split() == ["thread", "process"], ended.stderr
