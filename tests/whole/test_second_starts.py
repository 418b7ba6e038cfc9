"""A second run of every kind beside a first, whose lock stands for it: refused in one line, and no
file is another.
"""

import json
import re
import shutil
import subprocess
import sys
import threading

import pytest
from filelock import FileLock

from support.second_starts import ROOT, SECOND, beside_a_first, evaluate, evolve, files_of, refine


@pytest.mark.parametrize("second", SECOND, ids=lambda one: one.__name__)
def test_a_second_start_changes_no_file(tmp_path, second):
    changed, said = beside_a_first(second, tmp_path)
    assert changed == [] and "\n" not in said
    assert re.match("another (process|run) is .*wait for it, end it, or choose another", said)


@pytest.mark.parametrize("kind", [evolve, evaluate, refine], ids=lambda one: one.__name__)
def test_two_real_starts_at_once(tmp_path, kind):
    """Of runs that begin together, from a barrier, one writes; the folder is free again when it
    ended.
    """
    barrier = threading.Barrier(4)
    ended = []
    alone, together = (tmp_path / name for name in ("alone", "together"))

    def start():
        barrier.wait()
        try:
            kind(together)
        except ValueError as error:
            ended.append(str(error))
        else:
            ended.append("")

    kind(alone)
    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(ended) == 4
    assert "" in ended
    assert all("another process" in said for said in ended if said)
    lines = {name.name: data.count(b"\n") for name, data in files_of(together).items()}
    assert lines == {name.name: data.count(b"\n") for name, data in files_of(alone).items()}
    kind(together)


def test_a_lock_ends_with_its_process(tmp_path):
    """Killed, it leaves its lock file behind; nobody is hindered by it."""
    code = f"""
import os
from agentic_prompting.records import only_writer
with only_writer({str(tmp_path / "state.json")!r}):
    print("held", flush=True)
    input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="another process is writing"):
            evolve(tmp_path)
        holder.kill()
    assert (tmp_path / "state.json.lock").exists()
    evolve(tmp_path)
    assert json.loads((tmp_path / "state.json").read_text())


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_demo_leaves_a_running_demo_where_it_is(tmp_path):
    for name in ("constraints.txt", "pyproject.toml"):  # first: the stamps have to be newer
        (tmp_path / name).touch()
    commands = tmp_path / ".venv" / "bin"
    run = tmp_path / "runs" / "demo"
    commands.mkdir(parents=True)
    run.mkdir(parents=True)
    for name, script in (("accelerate", "echo started"), ("python", f'exec {sys.executable} "$@"')):
        (commands / name).write_text(f"#!/bin/sh\n{script}\n")
        (commands / name).chmod(0o755)
    for stamp in (".torch", ".demo"):
        (tmp_path / ".venv" / stamp).touch()
    (run / "trainer_state.json").write_text("{}")

    def make():
        return subprocess.run(
            ["make", "--no-print-directory", "-f", ROOT / "Makefile", "demo"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    with FileLock(run / "training.lock"):
        beside = make()
        assert (run / "trainer_state.json").exists() and beside.returncode != 0
        assert beside.stdout == "another demo is running in runs/demo: wait for it, or end it\n"
    assert make().returncode == 0
    assert (tmp_path / "runs" / "demo.previous" / "trainer_state.json").exists()
