"""A real model of 135 million parameters learns to look facts up: `demo --real` on the seeds of the
protocol.

    python -m benchmarks.real.library --json  # three seeds, about ten minutes each on two quiet cores
    python -m benchmarks.real.library --json --device gpu  # the comparison: nine runs at once, minutes on one H200
    python -m benchmarks.real.library  # the tables, from the records

Appends a record for each seed to `--records`; what is recorded is not run again. The setting
*alone* there is `make real` with its default seed on two quiet cores (a Xeon with AMX, in
bfloat16): the minutes of a demonstration beside which nothing runs.

Protocol, written before any run on a town. The settings are those of `examples/configs/real.yaml`.
They were chosen on questions about countries with tuning seeds 1 to 3, and nothing was chosen on a
town.

1. Task. 576 facts about 96 invented towns, which no model has read about. A library answers a
   question with the fact that fits it best. 128 questions are about towns of which training sees
   none.
2. Model. SmolLM2-135M-Instruct, out of a package. It first imitates 64 uneven demonstrations (8
   steps of 8): half of them guess without asking, a third repeat the library's whole sentence,
   about a sixth give the fact alone. Then 12 steps of `PromptR1Trainer` with LoRA, 4 questions of 8
   rollouts each; the reward is the mean of exact match and token F1.
3. Compared, on the same questions: the published model, the model after its warm start, and the
   trained one.
4. Seeds 961, 962 and 963; a seed decides towns, split, demonstrations and order.
5. Expected on every seed: the trained model asks in at least .9; exact match rises by at least .4
   over the published model, and by rewards alone with an interval above 0; no rollout fails; at
   most 10 minutes on two quiet cores. Against us: any of these is missed. The figures are printed
   whatever they are.

Second protocol, written before any run of it: which part does what? On one GPU, in bfloat16, with
192 held-out questions and seeds 971 to 973, three settings. *Demo* is the one above. *Rewards
alone* has no warm start, and 48 steps. *More imitation* has 60 supervised steps and then the 12
steps. Expected: the demo as above; rewards alone below the demo in exact match on average, since
its answers begin as sentences, whose groups hardly differ; the model after 60 steps of imitation at
.4 or below, since the demonstrations are uneven, and so only rewards can go beyond them. Against
us: any of these is missed.

Third protocol, written after the runs of the second, in which one seed of the demo was still
learning when its 12 steps ended (.41, the others .97 and .80): *longer*, the demo with 24 steps, on
new seeds 981 to 986. Expected: exact match of at least .8 on each seed. Against us: it is not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lab import RECORDS, REPOSITORY, Records, log, markdown

SEEDS: Mapping[str, Mapping[str, Sequence[int]]] = {
    "cpu": {"demo": (961, 962, 963)},
    "gpu": {
        "demo": (971, 972, 973),
        "rewards alone": (971, 972, 973),
        "more imitation": (971, 972, 973),
        "longer": (981, 982, 983, 984, 985, 986),
    },
}
ON_GPU = ("--use_cpu", "false", "--bf16", "true", "--gradient_accumulation_steps", "4")
SETTINGS: Mapping[str, Sequence[str]] = {
    "demo": (),
    "rewards alone": ("--warm_start_steps", "0", "--max_steps", "48"),
    "more imitation": ("--warm_start_steps", "60"),
    "longer": ("--max_steps", "24"),
}


COLUMNS = ("asked", "exact match", "gained", "by rewards", "failed", "minutes")


def command(setting: str, device: str, seed: int, output: Path) -> list[str]:
    """The words that run a setting: on the CPU the demonstration, on a GPU its program with 192
    questions.
    """
    words = ["--seed", str(seed), *SETTINGS[setting]]
    if device == "cpu":
        program = Path(sys.executable).with_name("agentic-prompting")
        return [str(program), "demo", "--real", "--output-dir", str(output), *words]
    program = REPOSITORY / "examples" / "train_prompt_r1.py"
    config = REPOSITORY / "examples" / "configs" / "real.yaml"
    words = ["--output_dir", str(output), "--n_test", "192", *ON_GPU, *words]
    return [sys.executable, str(program), "--config", str(config), *words]


def run_all(runs: Sequence[tuple[str, int]], device: str, folder: Path, records: Records) -> None:
    """Run settings with seeds and record their summaries: one after another on the CPU, all at once
    on a GPU.
    """
    running: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
    for setting, seed in runs:
        log(f"{setting}, seed {seed}")
        output = _output(folder, setting, seed)
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.with_suffix(".log").open("wb") as file:
            process = subprocess.Popen(
                command(setting, device, seed, output), stdout=file, stderr=subprocess.STDOUT
            )
        if device == "cpu":
            process.wait()
        running[setting, seed] = process

    for (setting, seed), process in running.items():
        output = _output(folder, setting, seed)
        if process.wait():
            log(f"{setting}, seed {seed} failed: see {output.with_suffix('.log')}")
            continue
        summary = json.loads((output / "summary.json").read_text())
        records.add({"setting": setting, "device": device, "seed": seed, "summary": summary})


def _output(folder: Path, setting: str, seed: int) -> Path:
    return folder / f"real-{setting.replace(' ', '-')}-{seed}"


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """A row for each seed of the first protocol: the three models, and what the rewards alone
    gained.
    """
    rows = []
    for record in records:
        if (record["device"], record["setting"]) == ("cpu", "demo"):
            rows.append((record["seed"], *_cells(record["summary"])))
    return markdown(("seed", *COLUMNS), rows)


def settings_table(records: Sequence[Mapping[str, Any]]) -> str:
    """A row for each run of the second protocol."""
    rows = []
    for record in records:
        if record["device"] != "cpu":
            rows.append((record["setting"], record["seed"], *_cells(record["summary"])))
    return markdown(("setting", "seed", *COLUMNS), rows)


def _cells(summary: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of a run: its models one after the other, its gains, failures and minutes."""
    by_rewards = summary.get("exact_match_by_rewards", summary["exact_match_difference"])
    return (
        _of_all_models(summary, "asked"),
        _of_all_models(summary, "exact_match"),
        _with_interval(summary["exact_match_difference"]),
        _with_interval(by_rewards),
        str(summary["failed_rollouts"]),
        f"{summary['seconds'] / 60:.1f}",
    )


def _of_all_models(summary: Mapping[str, Any], name: str) -> str:
    """The share of the published model, after the warm start if there was one, and after training."""
    keys = [f"{name}_{stage}" for stage in ("before", "warm", "after")]
    return " → ".join(f"{summary[key]:.3f}" for key in keys if key in summary)


def _with_interval(numbers: Sequence[float]) -> str:
    mean, low, high = numbers
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def main() -> None:
    """Run what has no record yet, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=Path, default=RECORDS / "real.jsonl.gz")
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("--device", choices=tuple(SEEDS), default="cpu")
    parser.add_argument("--settings", nargs="+", choices=tuple(SETTINGS), help="by default all")
    parser.add_argument("--json", action="store_true", help="run what has no record")
    options = parser.parse_args()
    records = Records(options.records)
    if options.json:
        protocol = []
        for setting, seeds in SEEDS[options.device].items():
            if not options.settings or setting in options.settings:
                protocol += [(setting, options.device, seed) for seed in seeds]
        missing = records.missing(["setting", "device", "seed"], protocol)
        runs = [(setting, seed) for setting, _, seed in missing]
        run_all(runs, options.device, options.folder, records)
        print(json.dumps(records.read()))
    else:
        print(table(records.read()), settings_table(records.read()), sep="\n\n")


if __name__ == "__main__":
    main()
