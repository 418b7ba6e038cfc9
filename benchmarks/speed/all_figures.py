"""Every ratio of the other scripts in one table, with its target and whether it holds.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.all_figures --json --quick  # about ten minutes on two free cores
    OMP_NUM_THREADS=1 python -m benchmarks.speed.all_figures --json  # everything in full: about an hour and a half
    python -m benchmarks.speed.all_figures --only rollout.py --json --quick  # one of them
    python -m benchmarks.speed.all_figures --only "engine.py --model smollm2" --record  # one on a real model
    python -m benchmarks.speed.all_figures --record --quick  # also appends to records/speed.jsonl.gz
    python -m benchmarks.recompute --write  # writes the tables of these records into the pages

Each script runs by itself, one after another, in a fresh process, and its last line is read. The
figures of a script that fails do not hold. The last line of `--json` holds `rows: [{name, value,
target, holds}]`.
"""

from __future__ import annotations

import argparse
import json
import operator
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.lab import RECORDS, Records, markdown

BENCHMARKS = Path(__file__).parents[1]
COMPARE: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


@dataclass(frozen=True)
class Figure:
    """A figure of a script.

    Args:
        script (`str`): The script's name in its folder, and options if it has any.
        name (`str`): Its name in the table.
        value (`Callable`): Finds it in the script's last line.
        target (`str`): `<=` or `>=` and a number.
        reason (`str`, *optional*): The reason that the table gives where the figure misses its
            target.
    """

    script: str
    name: str
    value: Callable[[Mapping[str, Any]], float | None]
    target: str
    reason: str = ""

    def row(self, run: Mapping[str, Any] | None) -> dict[str, Any]:
        """The table's row for a run of the script, of which `printed`, `quick` and `date` are
        recorded.
        """
        value = None
        when = ""
        if run:
            when = f"{'quick' if run['quick'] else 'full'}, {run['date'][5:]}"
            # The run may have failed, and a quick run may leave this figure out.
            with suppress(KeyError, IndexError, TypeError):
                value = self.value(run["printed"])
        sign, number = self.target.split()
        return {
            "name": self.name,
            "value": value,
            "target": self.target,
            "holds": value is not None and COMPARE[sign](value, float(number)),
            "script": self.script,
            "why": self.reason,
            "run": when,
        }


def key(*path: str | int) -> Callable[[Mapping[str, Any]], Any]:
    """A function that follows a path of keys and indices."""

    def find(printed: Any) -> Any:
        value = printed
        for part in path:
            value = value[part]
        return value

    return find


def float32_loss_difference(printed: Mapping[str, Any]) -> float:
    """The largest difference of the losses in float32; bfloat16 rounds them at 1e-5 already."""
    updates = [update for update in printed["updates"] if update["precision"] == "float32"]
    return max(update["loss_difference"] for update in updates)


FORCED = "a GPU's branch (forced on a CPU)"
ENGINE = "engine.py --model smollm2"
SAME_PRODUCTS = "`generate` spends its time in the same matrix products"
REST = "the model's other operations, attention and Python; the shares are below"
PASSES = ("drafting", "speedup_passes")  # plain / drafted

FIGURES = [
    Figure(
        "rollout.py",
        "rollouts: ours / longest chain, worst of the grid",
        key("worst_to_limit"),
        "<= 1.25",
    ),
    Figure(
        "rollout.py",
        "rollouts: lock-step / ours, median",
        key("median_lockstep_over_ours"),
        ">= 1.7",
    ),
    Figure(
        "rollout.py",
        "rollouts: TRL's asynchronous loop / ours, median",
        key("async_loop_over_ours"),
        ">= 1",
    ),
    Figure(
        "rollout.py",
        "rollouts: TRL's tool loop / ours, first setting",
        key("trl_over_ours"),
        ">= 10",
    ),
    Figure("traces.py", "rollouts: with spans / without", key("overhead"), "<= 1.02"),
    Figure(
        "async_training.py", "a step, replies of 1 s: lead 0 / lead 2", key("speedup_lead2"), ">= 2"
    ),
    Figure(
        "async_training.py",
        "a step at lead 3 / its bound, virtual clock",
        key("step_over_bound"),
        "<= 1.1",
    ),
    Figure(
        "async_training.py", "10 kills at lead 2: replies paid twice", key("paid_twice"), "<= 0"
    ),
    Figure(
        "async_training.py", "10 kills at lead 2: replies for nothing", key("discarded"), "<= 0"
    ),
    Figure(
        "engine.py",
        "engine / batches to the end, turns of mixed length",
        key("mixed_speedup"),
        ">= 1.5",
    ),
    Figure(
        "engine.py",
        "engine / batches to the end, turns of one length",
        key("uniform_speedup"),
        ">= 0.95",
    ),
    Figure(
        "engine.py",
        "engine / batches: share of rollouts with the same tokens",
        key("identical_share"),
        ">= 0.99",
    ),
    Figure(
        "engine.py",
        "prefix kept between turns: wall, without / with",
        key("prefix_wall_ratio"),
        ">= 1.5",
    ),
    Figure(
        "engine.py",
        "prefix kept between turns: tokens read, without / with",
        key("prefix_read_ratio"),
        ">= 2.5",
    ),
    Figure(
        "training_step.py",
        f"loss at 70 % observation, {FORCED}: TRL / ours",
        key("head_ratio"),
        ">= 1.1",
    ),
    Figure(
        "training_step.py",
        f"memory of that loss, {FORCED}: TRL / ours",
        key("memory_ratio"),
        ">= 1.1",
    ),
    Figure(
        "training_step.py",
        "largest relative difference of gradients",
        key("gradient_difference"),
        "<= 1e-4",
    ),
    Figure(
        "training_step.py",
        "whole step: ours / plain GRPO on the same tokens",
        key("overhead"),
        "<= 1.03",
    ),
    Figure(
        "espl_sandbox.py",
        "E-SPL: joint step / step without evolution",
        key("overhead_ratio"),
        "<= 1.05",
    ),
    Figure(
        "prorefine.py", "drafting, prompt unchanged: passes", key(*PASSES, "unchanged"), ">= 12"
    ),
    Figure(
        "prorefine.py", "drafting, half of them changed: passes", key(*PASSES, "half"), ">= 2.5"
    ),
    Figure(
        "prorefine.py", "drafting, prompt slightly changed: passes", key(*PASSES, "slight"), ">= 2"
    ),
    Figure(
        "prorefine.py", "drafting, prompt strongly changed: passes", key(*PASSES, "strong"), ">= 1"
    ),
    Figure(
        "prorefine.py",
        "drafting, prompt strong: wall",
        key("drafting", "speedup_wall", "strong"),
        ">= 0.9",
    ),
    Figure(
        "prorefine.py",
        "64 queries at once: one after another / at once",
        key("batch_speedup"),
        ">= 20",
    ),
    Figure(
        "calls.py",
        "calls until the agent is good: replies shared / today",
        key("calls_ratio_shared"),
        "<= 0.5",
    ),
    Figure("calls.py", "replies shared in a step: paid twice", key("paid_twice"), "<= 0"),
    Figure(
        "program.py",
        "programs: gradient of split rollouts, relative error",
        key("split_error"),
        "<= 1e-6",
    ),
    Figure(
        "program.py",
        "programs: share of rollouts like the native loop's",
        key("same_rollouts"),
        ">= 1",
    ),
    Figure(
        "program.py",
        "programs: step of a program / of the native loop",
        key("wall_ratio"),
        "<= 1.5",
        "a call costs the openai client 3 ms in the trainer's process, which the native loop does "
        "not use",
    ),
    Figure(
        "program.py",
        "programs: the same with workers=1",
        key("workers_wall_ratio"),
        "<= 1.5",
        "the client is in the worker; templates and HTTP of the address stay with the trainer",
    ),
    Figure(
        "program.py",
        "programs: calls a second at the gateway",
        key("calls_per_second"),
        ">= 2000",
        "two fifths of a call is its chat template, in jinja's sandbox",
    ),
    Figure("program.py", "programs: tokens of all sequences / of one", key("fork_ratio"), "<= 1"),
    Figure("program.py", "OpenAIChat: processor time of a call, ms", key("chat_ms"), "<= 0.8"),
    Figure(ENGINE, "engine / `generate`, 1 row", key("ratio_1"), ">= 0.95", SAME_PRODUCTS),
    Figure(ENGINE, "engine / `generate`, 8 rows", key("ratio_8"), ">= 1.1", SAME_PRODUCTS),
    Figure(ENGINE, "engine / `generate`, 32 rows", key("ratio_32"), ">= 1.1", SAME_PRODUCTS),
    Figure(
        ENGINE, "matrix products / step, 32 rows, bf16", key("of_limit_bfloat16"), ">= 0.65", REST
    ),
    Figure(
        ENGINE, "matrix products / step, 32 rows, fp32", key("of_limit_float32"), ">= 0.65", REST
    ),
    Figure(
        "program.py --model smollm2",
        "programs: step of a program / of the native loop",
        key("wall_ratio"),
        "<= 1.15",
    ),
    Figure(
        "program.py --model smollm2",
        "programs: share of rollouts like the native loop's",
        key("same_rollouts"),
        ">= 1",
        "rounding depends on the other rows of a batch, and moves a token at the edge of its share",
    ),
    Figure(
        "training_step.py --model smollm2",
        "loss on a CPU: head at every position / at the scored ones",
        key("ratio"),
        ">= 1.1",
    ),
    Figure(
        "training_step.py --model smollm2",
        "the same in float32: difference of the losses",
        float32_loss_difference,
        "<= 1e-6",
    ),
    Figure("growth.py", "cost of a rollout: many / 64", key("growth_rollouts"), "<= 1.25"),
    Figure("growth.py", "cost of a turn: turns 5-8 / turn 2", key("growth_turns"), "<= 1.5"),
    Figure("growth.py", "memory of a rollout: many / 64", key("growth_memory"), "<= 1.25"),
    Figure(
        "growth.py", "10,000 living prompts: select 3 and rate, ms", key("population_ms"), "<= 5"
    ),
    Figure(
        "growth.py",
        "10,000 living prompts, slowest rule: the same, ms",
        key("population_worst_ms"),
        "<= 5",
        "it weighs each of them; a window of 10, the default, takes .3 ms",
    ),
    Figure("growth.py", "replay cache: lookup, ms", key("lookup_ms"), "<= 0.2"),
    Figure("growth.py", "replay cache: opening, s", key("opening_s"), "<= 0.2"),
    Figure("growth.py", "import agentic_prompting, s", key("import_s"), "<= 0.3"),
    Figure("growth.py", "agentic-prompting --help, s", key("help_s"), "<= 0.4"),
]


def run(script: str, quick: bool) -> dict[str, Any]:
    """Run a script; the record has its last line as `printed`, `None` if it failed."""
    name, *options = script.split()
    (path,) = BENCHMARKS.glob(f"*/{name}")
    module = f"benchmarks.{path.parent.name}.{path.stem}"
    command = [sys.executable, "-m", module, *options, "--json"]
    if quick:
        command.append("--quick")
    print(f"running {' '.join(command[1:])}", file=sys.stderr, flush=True)
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=BENCHMARKS.parent)
    printed = None
    if finished.returncode == 0:
        with suppress(IndexError, ValueError):
            printed = json.loads(finished.stdout.strip().splitlines()[-1])
    return {"script": script, "quick": quick, "date": date.today().isoformat(), "printed": printed}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table, with the reason beside a missed target."""
    lines = []
    for row in rows:
        figure = f"{row['name']} (`{row['script']}`)"
        if row["value"] is None:
            value = ""
            holds = "no record"
        else:
            value = f"{row['value']:.3g}"
            holds = "yes" if row["holds"] else "no"
            if not row["holds"] and row["why"]:
                holds = f"no: {row['why']}"
        lines.append([figure, value, row["target"], holds, row["run"]])
    return markdown(("figure", "measured", "target", "holds", "run"), lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument("--quick", action="store_true", help="pass --quick on")
    parser.add_argument("--only", action="append", help="these scripts only")
    parser.add_argument(
        "--record", action="store_true", help="append the results to records/speed.jsonl.gz"
    )
    arguments = parser.parse_args()
    # Each script once, in the order of the figures.
    scripts = list(dict.fromkeys(figure.script for figure in FIGURES))
    if arguments.only:
        scripts = [script for script in scripts if script in arguments.only]
    runs = {}
    for script in scripts:
        record = run(script, arguments.quick)
        runs[script] = record
        if arguments.record and record["printed"] is not None:
            Records(RECORDS / "speed.jsonl.gz").add(record)
    rows = [figure.row(runs[figure.script]) for figure in FIGURES if figure.script in runs]
    print(table(rows))
    if arguments.json:
        print(json.dumps({"quick": arguments.quick, "rows": rows}))


if __name__ == "__main__":
    main()
