"""E-SPL in its sandbox: the time that evolution adds to a training step; and rank correlations of
ratings and scores.

    python -m benchmarks.learning.espl_sandbox --json  # the step, on one seed

`league.py` compares the methods. The figures say nothing about real models.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lab import ESPL, interval, markdown, settings, shown, train

SEED = 321


# --- pure: rank correlations ----------------------------------------------------------------------


def spearman(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Rank correlation, ties at their mean rank; NaN where one side is constant."""
    from scipy.stats import spearmanr

    if len(set(ours)) < 2 or len(set(theirs)) < 2:
        return math.nan
    return float(spearmanr(ours, theirs).statistic)


def partial(ab: float, ac: float, bc: float) -> float:
    """The correlation of a and b with c held fixed."""
    unexplained = (1 - ac**2) * (1 - bc**2)
    if unexplained <= 0:
        return math.nan
    return (ab - ac * bc) / unexplained**0.5


def correlations(rated: Sequence[tuple[float, float, int]]) -> dict[str, float]:
    """Rank correlations with the held-out score: the rating's, the birth order's, and the rating's
    at fixed order.
    """
    mu, score, birth = (list(column) for column in zip(*rated, strict=True))
    rating = spearman(mu, score)
    born = spearman(birth, score)
    both = spearman(mu, birth)
    return {
        "rating": rating,
        "birth order": born,
        "rating, birth order held fixed": partial(rating, both, born),
    }


def table(records: Iterable[Mapping[str, Any]]) -> str:
    """The correlations of the recorded seeds as a Markdown table, means with intervals."""
    rated = [record["rated"] for record in records]
    correlations_of_seeds = [correlations(prompts) for prompts in rated]
    rows = []
    for name in correlations_of_seeds[0]:
        values = [of_seed[name] for of_seed in correlations_of_seeds]
        values = [value for value in values if not math.isnan(value)]
        listed = ", ".join(f"{value:.2f}" for value in values)
        rows.append([name, shown(interval(values), digits=2), listed])
    best = [max(prompts, key=lambda prompt: prompt[0])[1] for prompts in rated]
    newest = [prompts[-1][1] for prompts in rated]
    best_scores = ", ".join(f"{score:.3f}" for score in best)
    newest_scores = ", ".join(f"{score:.3f}" for score in newest)
    text = (
        f"Exact match under the prompt rated highest, by seed: {best_scores}; "
        f"under the newest that played: {newest_scores}."
    )
    return f"{markdown(('', 'Spearman with exact match [95 %]', 'by seed'), rows)}\n\n{text}"


# --- runs -----------------------------------------------------------------------------------------


def measure_overhead(folder: Path, rounds: int, steps: int) -> dict[str, float]:
    """Median step times of `joint` and `rl` on the very same rollouts, run in turns on the same
    machine.

    The reference LLM answers after 50 ms a call and edits nothing, so that prompts and sampled
    tokens stay those of `rl`. The two differ in E-SPL's work alone, not in the length of the
    rollouts.
    """
    from agentic_prompting import ESPLConfig, ESPLTrainer, LLMEnvironment, PromptR1Reward
    from agentic_prompting.llm import ScriptedChat
    from benchmarks.learning.league_cell import prepare

    sandbox = prepare("rules", SEED)
    times: dict[str, list[float]] = {"joint": [], "rl": []}
    for turn in range(rounds):
        # They take turns at being first, in a fresh process.
        modes = ("joint", "rl") if turn % 2 else ("rl", "joint")
        for mode in modes:
            options = {
                "max_steps": steps,
                "seed": SEED,
                "mode": mode,
                "output_dir": str(folder / f"{mode}-{turn}"),
            }
            args = ESPLConfig(**settings(ESPL, **options))
            idle_reflector = ScriptedChat(lambda messages: "```json\n[]\n```", latency=0.05)
            trainer = train(
                ESPLTrainer,
                args,
                sandbox,
                LLMEnvironment(sandbox.oracle),
                reward_funcs=PromptR1Reward(),
                reference=idle_reflector if args.evolves else None,
                initial_prompt=sandbox.root,
            )
            logs = trainer.state.log_history
            step_times = [entry["step_time"] for entry in logs if "step_time" in entry]
            # The first step compiles and fills caches.
            times[mode] += step_times[1:]
    return {mode: statistics.median(values) for mode, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of evolution.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds of the step")
    parser.add_argument("--output", type=Path, default=Path("runs/espl_benchmark"), help="models")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    options = parser.parse_args()
    started = time.perf_counter()
    os.environ["OMP_NUM_THREADS"] = "1"
    rounds = 2 if options.quick else 3
    seconds = measure_overhead(options.output, rounds, steps=6)
    ratio = seconds["joint"] / seconds["rl"]
    print(
        f"median step: joint {seconds['joint']:.3f} s, rl {seconds['rl']:.3f} s, ratio {ratio:.3f}"
    )
    result = {
        "overhead_ratio": round(ratio, 3),
        "step_seconds": {mode: round(value, 3) for mode, value in seconds.items()},
    }
    if options.json:
        result |= {
            "sandbox": True,
            "quick": options.quick,
            "seconds": round(time.perf_counter() - started),
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
