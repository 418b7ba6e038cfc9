"""Which settings keep the steps of `make demo`'s training steady, alone and beside one busy core.

    python -m benchmarks.speed.demo_under_load --json  # 8 settings, alone and beside: about half an hour
    python -m benchmarks.speed.demo_under_load --json --quick  # 8 steps

Compute threads that spin while they wait for each other lose a whole slice of time whenever one of
them has no core. The settings are one thread and two, waiting that spins and waiting that sleeps
(`OMP_WAIT_POLICY=passive`), and the oracle in the training process and in a process of its own. A
setting is steady if beside one busy core its worst step takes at most twice its median step. The
last line of `--json` holds `settings: [{threads, passive, oracle, alone: {median_s, worst_s,
total_s}, beside: {...}, steady}]`. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

# OpenMP's variables with which a waiting thread sleeps.
PASSIVE = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": "0"}
CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "sandbox.yaml"
LIMIT = 2.0  # worst step / median step, beside one busy core


def train_here(folder: Path, steps: int, base_url: str | None) -> dict[str, Any]:
    """The seconds of the steps of one training in this process, set up as `make demo` does."""
    from agentic_prompting.cli.train_program import parse_method_options
    from agentic_prompting.sandbox.server import MODEL

    options = [
        "--config",
        str(CONFIG),
        "--output_dir",
        str(folder),
        "--max_steps",
        str(steps),
        "--disable_tqdm",
        "true",
    ]
    if base_url:
        options += ["--environment_base_url", base_url, "--environment_model", MODEL]
    script, args, model_args = parse_method_options("prompt-r1", options)
    with ExitStack() as stack:
        trainer, _ = script.build_trainer(args, model_args, stack)
        started = time.perf_counter()
        trainer.train()
        log = trainer.state.log_history
        return {
            "steps": [entry["step_time"] for entry in log if "step_time" in entry],
            "total_s": time.perf_counter() - started,
        }


@contextmanager
def busy_core(busy: bool) -> Iterator[None]:
    """Keep one core busy with another process while the context lasts."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


@contextmanager
def oracle(own_process: bool) -> Iterator[str | None]:
    """The address of an oracle in a process of its own; `None` for the oracle inside the training
    process.
    """
    if not own_process:
        yield None
        return
    command = [
        sys.executable,
        "-m",
        "agentic_prompting.sandbox.server",
        "--port",
        "0",
        "--seed",
        "42",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def run_child(arguments: list[str], threads: int, passive: bool) -> dict[str, Any]:
    """The last line that this script prints in a fresh process with these compute threads."""
    variables = {name: value for name, value in os.environ.items() if name not in PASSIVE}
    variables["OMP_NUM_THREADS"] = str(threads)
    if passive:
        variables |= PASSIVE
    finished = subprocess.run(
        [sys.executable, "-m", __spec__.name, *arguments],
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(finished.stdout.strip().splitlines()[-1])


def measure(
    steps: int, threads: int, passive: bool, own_process: bool, beside: bool
) -> dict[str, float]:
    """Seconds of a training's steps under one setting, alone or beside one busy core."""
    with (
        tempfile.TemporaryDirectory() as folder,
        oracle(own_process) as base_url,
        busy_core(beside),
    ):
        arguments = ["--train-in", folder, "--steps", str(steps)]
        if base_url:
            arguments += ["--base-url", base_url]
        run = run_child(arguments, threads, passive)
    seconds = run["steps"]
    return {
        "median_s": round(statistics.median(seconds), 2),
        "worst_s": round(max(seconds), 2),
        "total_s": round(run["total_s"], 1),
    }


def measure_all(steps: int) -> list[dict[str, Any]]:
    """Every setting, alone and beside one busy core."""
    rows = []
    for threads, passive, own_process in itertools.product((1, 2), (True, False), (False, True)):
        alone = measure(steps, threads, passive, own_process, beside=False)
        beside = measure(steps, threads, passive, own_process, beside=True)
        row = {
            "threads": threads,
            "passive": passive,
            "oracle": "own process" if own_process else "inside",
            "alone": alone,
            "beside": beside,
            "steady": beside["worst_s"] <= LIMIT * beside["median_s"],
        }
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        (
            "| threads | waiting | oracle | alone: median, worst, total (s) | beside a busy core | "
            "steady |"
        ),
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        alone = ", ".join(map(str, row["alone"].values()))
        beside = ", ".join(map(str, row["beside"].values()))
        waiting = "passive" if row["passive"] else "active"
        steady = "yes" if row["steady"] else "no"
        lines.append(
            f"| {row['threads']} | {waiting} | {row['oracle']} | {alone} | {beside} | {steady} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument("--quick", action="store_true", help="8 steps")
    parser.add_argument("--steps", type=int, help="so many steps; 24")
    parser.add_argument("--train-in", type=Path, help=argparse.SUPPRESS)  # one run, in this process
    parser.add_argument("--base-url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    steps = arguments.steps
    if steps is None:
        steps = 8 if arguments.quick else 24
    if arguments.train_in:
        # With its progress bar off, transformers prints every log entry.
        with contextlib.redirect_stdout(io.StringIO()):
            run = train_here(arguments.train_in, steps, arguments.base_url)
        print(json.dumps(run))
        return
    rows = measure_all(steps)
    print(table(rows))
    if arguments.json:
        figures = {
            "quick": arguments.quick,
            "cores": os.cpu_count(),
            "steps": steps,
            "settings": rows,
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
