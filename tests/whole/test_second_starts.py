"""A second run of every kind beside a first, whose lock stands for it: refused in one line, and no file is another."""

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from agentic_prompting import ProRefiner, evaluate_agent
from agentic_prompting.cli import optimize, programs
from agentic_prompting.llm import ScriptedChat
from agentic_prompting.records import only_writer
from support import evolving

ROOT = Path(__file__).parents[2]
ROWS = [{"question": f"q{number}", "answers": ["yes"]} for number in range(6)]


def files_of(folder):
    """Every file with its bytes, but for the locks themselves."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


def small(folder):
    return [
        "--config", ROOT / "examples" / "configs" / "sandbox.yaml", "--output_dir", folder, "--max_steps", 1,
        "--n_test", 8, "--warm_start_steps", 1, "--num_generations", 2, "--per_device_train_batch_size", 6,
    ]  # fmt: skip


def train(folder):
    programs.main("prompt-r1", [*map(str, small(folder))])


def espl(folder):
    words = [*map(str, small(folder))]
    words[1] = str(ROOT / "examples" / "configs" / "espl" / "sandbox.yaml")
    programs.main("espl", words)


def evolve(folder):
    evolving.run(config=evolving.EvolveConfig(steps=1, problems_per_step=2), checkpoint=folder / "state.json")


def evolve_command(folder):
    words = optimize.Evolving(sandbox=True, warm_start_steps=1, output_dir=folder)
    optimize._evolved(words, evolving.EvolveConfig(steps=1), None)


def evaluate(folder):
    evaluate_agent(lambda questions: ["no" for _ in questions], {"mine": ROWS}, runs=1, output=folder, progress=False)


def evaluate_command(folder):
    from paper_tables import load_config, run_table

    run_table(load_config(ROOT / "examples/configs/eval_prorefine_table1.yaml"), True, folder, False)


def refine(folder):
    chat = ScriptedChat(["an answer"])
    refiner = ProRefiner(task=chat, feedback=chat, optimizer=chat, max_steps=1)
    refiner.refine_all("Other words.", ROWS, output=folder / "results.jsonl", progress=False)


def demo_of_prorefine(folder):
    optimize.main(["--output_dir", str(folder), "--rows", "3"])


SECOND = {
    train: "training", espl: "training", evolve: "state.json", evolve_command: "state.json",
    evaluate: "system.jsonl", evaluate_command: "evaluation", refine: "results.jsonl", demo_of_prorefine: "refine",
}  # fmt: skip


@pytest.mark.parametrize("second", SECOND, ids=lambda one: one.__name__)
def test_a_second_start_changes_no_file(tmp_path, second):
    """What a first run would have written so far: torn lines, too, which a start of its own would mend."""
    for name in ("system.jsonl", "results.jsonl", "state.evolution.jsonl", "optimal_verifier.jsonl"):
        (tmp_path / name).write_bytes(b'{"half a line')
    before = files_of(tmp_path)
    with only_writer(tmp_path / SECOND[second]), pytest.raises(ValueError, match="another (process|run) is") as said:
        second(tmp_path)
    assert files_of(tmp_path) == before and "\n" not in str(said.value)
    assert "wait for it, end it, or choose another" in str(said.value)


@pytest.mark.parametrize("kind", [evolve, evaluate, refine], ids=lambda one: one.__name__)
def test_two_real_starts_at_once(tmp_path, kind):
    """Of runs that begin together, from a barrier, one writes; the folder is free again when it ended."""
    barrier, ended, (alone, together) = threading.Barrier(4), [], (tmp_path / name for name in ("alone", "together"))

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
    assert len(ended) == 4 and "" in ended and all("another process" in said for said in ended if said)
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
    commands, run = tmp_path / ".venv" / "bin", tmp_path / "runs" / "demo"
    commands.mkdir(parents=True)
    run.mkdir(parents=True)
    for name, script in (("accelerate", "echo started"), ("python", f'exec {sys.executable} "$@"')):
        (commands / name).write_text(f"#!/bin/sh\n{script}\n")
        (commands / name).chmod(0o755)
    for stamp in (".torch", ".demo"):
        (tmp_path / ".venv" / stamp).touch()
    (run / "trainer_state.json").write_text("{}")

    def make():
        return subprocess.run(["make", "-f", ROOT / "Makefile", "demo"], cwd=tmp_path, capture_output=True, text=True)

    with FileLock(run / "training.lock"):
        beside = make()
        assert (run / "trainer_state.json").exists() and beside.returncode != 0
        assert beside.stdout == "another demo is running in runs/demo: wait for it, or end it\n"
    assert make().returncode == 0 and (tmp_path / "runs" / "demo.previous" / "trainer_state.json").exists()
