"""A second run of every kind beside a first, whose lock stands for it: which files does it change?

Used by test_second_starts.py and `benchmarks/reliability/faults.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agentic_prompting import ProRefiner, evaluate_agent
from agentic_prompting.cli import evolve as evolve_module, refine_table, train_program
from agentic_prompting.llm import ScriptedChat
from agentic_prompting.records import only_writer
from support import evolving

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"
ROWS = [{"question": f"q{number}", "answers": ["yes"]} for number in range(6)]


def files_of(folder):
    """Every file with its bytes, but for the locks themselves."""
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def options_of_a_small_run(config, folder):
    return [
        f"--config={config}",
        f"--output_dir={folder}",
        "--max_steps=1",
        "--n_test=8",
        "--warm_start_steps=1",
        "--num_generations=2",
        "--per_device_train_batch_size=6",
    ]


def train(folder):
    train_program.main("prompt-r1", options_of_a_small_run(CONFIGS / "sandbox.yaml", folder))


def espl(folder):
    config = CONFIGS / "espl" / "sandbox.yaml"
    train_program.main("espl", options_of_a_small_run(config, folder))


def evolve(folder):
    evolving.run(
        config=evolving.EvolveConfig(steps=1, problems_per_step=2), checkpoint=folder / "state.json"
    )


def evolve_command(folder):
    words = evolve_module.EvolveOptions(sandbox=True, warm_start_steps=1, output_dir=folder)
    evolve_module.evolve_in_folder(words, evolving.EvolveConfig(steps=1))


def evaluate(folder):
    evaluate_agent(
        lambda questions: ["no" for _ in questions],
        {"mine": ROWS},
        runs=1,
        output=folder,
        progress=False,
    )


def evaluate_command(folder):
    from paper_tables import load_config, run_table

    config = load_config(CONFIGS / "eval_prorefine_table1.yaml")
    run_table(config, True, folder, False)


def refine(folder):
    chat = ScriptedChat(["an answer"])
    refiner = ProRefiner(task=chat, feedback=chat, optimizer=chat, max_steps=1)
    refiner.refine_all("Other words.", ROWS, output=folder / "results.jsonl", progress=False)


def demo_of_prorefine(folder):
    refine_table.refine_table(["--output_dir", str(folder), "--rows", "3"])


SECOND = {
    train: "training",
    espl: "training",
    evolve: "state.json",
    evolve_command: "state.json",
    evaluate: "system.jsonl",
    evaluate_command: "evaluation",
    refine: "results.jsonl",
    demo_of_prorefine: "refine",
}


def beside_a_first(second: Callable[[Path], None], folder: Path) -> tuple[list[Path], str]:
    """The files that a second start changed, and how it was refused; empty if it was not.

    Of what a first run has written there are torn lines, too, which a start of its own would mend.
    """
    folder.mkdir(exist_ok=True)
    for name in (
        "system.jsonl",
        "results.jsonl",
        "state.evolution.jsonl",
        "optimal_verifier.jsonl",
    ):
        (folder / name).write_bytes(b'{"half a line')
    before = files_of(folder)
    refusal = ""
    with only_writer(folder / SECOND[second]):
        try:
            second(folder)
        except ValueError as error:
            refusal = str(error)
    after = files_of(folder)
    paths = before.keys() | after.keys()
    changed = [path for path in paths if before.get(path) != after.get(path)]
    return changed, refusal


def second_starts(folder: Path) -> dict[str, int]:
    """Of all kinds: how many were tried, how many were refused, how many files they changed."""
    results = [beside_a_first(second, folder / second.__name__) for second in SECOND]
    return {
        "tried": len(results),
        "refused": sum("another" in refusal for _, refusal in results),
        "files_changed": sum(len(changed) for changed, _ in results),
    }
