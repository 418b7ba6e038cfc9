"""Whether continuous integration notices a mistake: the two runs of `.ci/run` with one part of them
broken.

    python -m benchmarks.learning.broken none  # nothing broken: learning.py finds no problem
    python -m benchmarks.learning.broken sign  # the reward's sign flipped
    python -m benchmarks.learning.broken mask  # gradients on observation tokens, none on the agent's
    python -m benchmarks.learning.broken ratings  # each batch's scores rate its prompts in another order

Ends with an error if the broken part goes unnoticed, or if `none` has a problem. The problems that
it finds are recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.lab import RECORDS, REPOSITORY, Records
from benchmarks.learning.smoke import agreement_in, problems

# The method's program, its configuration and the options of .ci/run.
RUNS = {
    "demo": ("prompt-r1", "sandbox.yaml", []),
    "espl": ("espl", "espl/sandbox.yaml", ["--max_steps", "10"]),
}


def flip_sign() -> None:
    from agentic_prompting.rewards import PromptR1Reward

    unbroken = PromptR1Reward.__call__

    def flipped(self: Any, *args: Any, **columns: Any) -> list[float | None]:
        rewards = unbroken(self, *args, **columns)
        return [None if reward is None else -reward for reward in rewards]

    PromptR1Reward.__call__ = flipped  # type: ignore[method-assign]


def invert_mask() -> None:
    from agentic_prompting.trainers.rollouts import Batch

    unbroken = Batch.to_trl

    def inverted(*args: Any, **options: Any) -> dict[str, Any]:
        batch = unbroken(*args, **options)
        masks = []
        for mask in batch["env_mask"]:
            masks.append([1 - flag for flag in mask])
        return {**batch, "env_mask": masks}

    Batch.to_trl = inverted  # type: ignore[method-assign]


def shuffle_ratings(seed: int) -> None:
    from agentic_prompting.evolution import Population

    unbroken = Population.record
    rng = random.Random(seed)

    def shuffled(self: Any, prompts: Any, scores: Any) -> Any:
        return unbroken(self, prompts, rng.sample(scores, len(scores)))

    Population.record = shuffled  # type: ignore[method-assign]


BREAK: dict[str, Callable[[int], None]] = {
    "none": lambda seed: None,
    "sign": lambda seed: flip_sign(),
    "mask": lambda seed: invert_mask(),
    "ratings": shuffle_ratings,
}


def train(broken_part: str, run: str, folder: Path, seed: int) -> None:
    """Train one run in this process, which must not be used for anything else afterwards."""
    from agentic_prompting.cli import train_program

    BREAK[broken_part](seed)
    method, config, options = RUNS[run]
    file = REPOSITORY / "examples" / "configs" / config
    train_program.main(method, ["--config", str(file), "--output_dir", str(folder), *options])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The runs of .ci/run with one thing in them broken."
    )
    parser.add_argument("what", choices=BREAK)
    parser.add_argument("--folder", type=Path, default=Path("runs/broken"), help="the runs")
    parser.add_argument("--run", choices=RUNS, help="one of them, trained in this process")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffled ratings")
    options = parser.parse_args()
    name = options.what
    if options.seed:
        name += f"-{options.seed}"
    if options.run:
        return train(options.what, options.run, options.folder / name / options.run, options.seed)

    # Train what has not been trained yet, each in a process of its own.
    summaries = {}
    for run in RUNS:
        folder = options.folder / name / run
        # The demo has no ratings, so that broken ratings do not change it.
        if options.what == "ratings" and run == "demo":
            folder = options.folder / "none" / run
        if not (folder / "summary.json").exists():
            command = [sys.executable, "-m", __spec__.name, options.what, "--run", run]
            command += ["--folder", str(options.folder), "--seed", str(options.seed)]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        summaries[run] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))

    agree = agreement_in(options.folder / name / "espl")
    complaints = problems(summaries["demo"], summaries["espl"], agree)
    scores: dict[str, dict[str, Any]] = {}
    for run, summary in summaries.items():
        scores[run] = {key: summary[key] for key in summary if "exact_match" in key}
    # The README's output of `make demo`.
    if options.what == "none":
        demo = options.folder / "none" / "demo"
        examples = json.loads((demo / "trajectories.json").read_text(encoding="utf-8"))
        record = {"summary": summaries["demo"], "trajectories": examples}
        Records(RECORDS / "demo.jsonl.gz").add(record)
    record = {"what": name, **scores, "agreement": round(agree, 4), "found": complaints}
    Records(RECORDS / "broken.jsonl.gz").add(record)
    lines = [f"broken: {name}", json.dumps(scores), f"agreement of ratings: {agree:.3f}"]
    print("\n".join([*lines, *complaints]))
    sys.exit(bool(complaints) == (options.what == "none"))


if __name__ == "__main__":
    main()
