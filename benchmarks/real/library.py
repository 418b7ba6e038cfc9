"""A real model of 135 million parameters learns to look facts up: `demo --real` on the seeds of the protocol.

    python -m benchmarks.real.library --json  # three seeds, about ten minutes each on two quiet cores
    python -m benchmarks.real.library  # the table, from the records

Appends a record for each seed to `--records`; what is recorded is not run again.

Protocol, written before any run on a town. The settings are those of `examples/configs/real.yaml`. They were chosen on
questions about countries with tuning seeds 1 to 3, and nothing was chosen on a town.

1. Task. 576 facts about 96 invented towns, which no model has read about. A library answers a question with the fact
   that fits it best. 128 questions are about towns of which training sees none.
2. Model. SmolLM2-135M-Instruct, out of a package. It first imitates 64 uneven demonstrations (8 steps of 8): half of them
   guess without asking, a third repeat the library's whole sentence, about a sixth give the fact alone. Then 12 steps
   of `PromptR1Trainer` with LoRA, 4 questions of 8 rollouts each; the reward is the mean of exact match and token F1.
3. Compared, on the same questions: the published model, the model after its warm start, and the trained one.
4. Seeds 961, 962 and 963; a seed decides towns, split, demonstrations and order.
5. Expected on every seed: the trained model asks in at least .9; exact match rises by at least .4 over the published
   model, and by rewards alone with an interval above 0; no rollout fails; at most 10 minutes on two quiet cores.
   Against us: any of these is missed. The figures are printed whatever they are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lab import RECORDS, Records, log, markdown

SEEDS = (961, 962, 963)


def run_seed(seed: int, folder: Path, words: Sequence[str] = ()) -> dict[str, Any]:
    """Run the demonstration with one seed; its summary."""
    output = folder / f"real-{seed}"
    program = Path(sys.executable).with_name("agentic-prompting")
    command = [str(program), "demo", "--real"]
    command += ["--output-dir", str(output), "--seed", str(seed), *words]
    subprocess.run(command, check=True, stdout=sys.stderr)
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return summary


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """A row for each seed: asking and exact match of the three models, and what the rewards alone gained."""
    titles = ("seed", "asked", "exact match", "gained", "by rewards alone", "failed", "minutes")
    rows = []
    for record in records:
        summary = record["summary"]
        rows.append(
            (
                record["seed"],
                _three_times(summary, "asked"),
                _three_times(summary, "exact_match"),
                _with_interval(summary["exact_match_difference"]),
                _with_interval(summary["exact_match_by_rewards"]),
                summary["failed_rollouts"],
                f"{summary['seconds'] / 60:.1f}",
            )
        )
    return markdown(titles, rows)


def _three_times(summary: Mapping[str, Any], name: str) -> str:
    """The share before, after the warm start and after training."""
    return " → ".join(f"{summary[f'{name}_{time}']:.3f}" for time in ("before", "warm", "after"))


def _with_interval(numbers: Sequence[float]) -> str:
    mean, low, high = numbers
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def main() -> None:
    """Run the missing seeds, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=Path, default=RECORDS / "real.jsonl.gz")
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--json", action="store_true", help="run the seeds without a record")
    options, words = parser.parse_known_args()
    records = Records(options.records)
    if options.json:
        for (seed,) in records.missing(["seed"], [(seed,) for seed in options.seeds]):
            log(f"seed {seed}")
            records.add({"seed": seed, "summary": run_seed(seed, options.folder, words)})
        print(json.dumps(records.read()))
    else:
        print(table(records.read()))


if __name__ == "__main__":
    main()
