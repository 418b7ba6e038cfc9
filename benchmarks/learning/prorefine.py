"""ProRefine, measured: lossless drafting, many queries at once, and the order of accuracies in the sandbox.

    OMP_NUM_THREADS=1 python -m benchmarks.learning.prorefine --json  # under eight minutes
    OMP_NUM_THREADS=1 python -m benchmarks.learning.prorefine --json --quick  # a minute and a half

Prints Markdown tables, writes `runs/prorefine/iterations.png`; with `--json` one JSON object as the last line.

- (a) Drafting (`prorefine_drafting.py` says on what): equal outputs, forward passes, wall and CPU time, and what
  lower precision does. Speed-ups are plain / drafted over n = 25 steps of k = 10 tokens and the final answer.
- (b) 64 queries whose critic and optimizer take 0.3 s a call (0.1 s in the quick run), all at once against one after
  another; both are measured.
- (c) Accuracy of the verifier settings on the sandbox's puzzles. `none` is no refinement at all (the first answer),
  `no_verifier` refines every query. Scripted models: it shows that the loop and the verifier do their work, and says
  nothing about real models. Needs no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentic_prompting.evaluation import Estimate, bootstrap_interval, wilson_interval
from agentic_prompting.refine import START_PROMPTS, LabelVerifier, ProRefiner, RefinementResult
from agentic_prompting.report.refine_plots import accuracy_table, iterations_of, plot_iterations
from agentic_prompting.sandbox.puzzles import (
    COUNTING,
    SORTING,
    PuzzleSolver,
    make_puzzles,
    puzzle_models,
    score_puzzle,
)

SEED = 11  # none that the sandbox was made with
SETS = {"word sorting": SORTING, "object counting": COUNTING}
METHODS = {
    "none": "no refinement",
    "no_verifier": "no verifier",
    "verifier": "verifier",
    "optimal": "optimal verifier",
}
CARELESSNESS = {
    "careless": 0.6,
    "middling": 0.4,
    "careful": 0.2,
}  # task models, as the paper has three sizes


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Args:
        speed_cases (`int`): Cases of each scenario that speed is measured on, at n = 25, in batches of `speed_batch`.
        large_batch (`int`): Cases of each scenario in one batch, for the wall time there; 0 leaves it out.
        plain_once (`bool`): Time the plain loop on one scenario for all: it decodes the same number of tokens in each.
        equal_cases (`int`), equal_steps (`int`): Cases for equality alone, over all scenarios, and their n.
        half_cases (`int`): The cases among these that are repeated in bfloat16.
        queries (`int`): Puzzles of each kind.
        task_models (`tuple[str, ...]`): Columns of the accuracy table.
    """

    speed_cases: int = 8
    speed_batch: int = 4
    large_batch: int = 25
    plain_once: bool = False
    equal_cases: int = 100
    equal_steps: int = 25
    half_cases: int = 16
    queries: int = 500
    task_models: tuple[str, ...] = tuple(CARELESSNESS)


FULL = Size()
QUICK = Size(2, 2, 0, True, 100, 5, 8, 250, ("middling",))


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- (a) drafting ---------------------------------------------------------------------------------------------------


def drafting(size: Size) -> dict[str, Any]:
    """Everything about drafting."""
    import torch

    from agentic_prompting.sandbox.policy import keep_freed_memory
    from benchmarks.learning import (
        prorefine_drafting as d,  # here: (b) and (c) do without torch
        prorefine_reciter as r,
    )

    keep_freed_memory()
    torch.set_num_threads(1)  # more only get in each other's way on models this small
    tokens = r.tokenizer()
    model = r.reciter(tokens)
    log("reciter trained")
    speeds = {}
    counts = []
    plain: d.Run | None = None
    for scenario in sorted(
        r.SCENARIOS, key="strong".__ne__
    ):  # the strong one first: the plain loop makes every call
        cases = r.make_cases(scenario, size.speed_cases, 25)
        own = not size.plain_once or plain is None
        plain = d.play(model, tokens, cases, draft=False, batch=size.speed_batch) if own else plain
        drafted = d.play(model, tokens, cases, batch=size.speed_batch)
        if own:
            counts.append(d.differences(model, tokens, plain.results, drafted.results))
        speeds[scenario] = d.speed(plain, drafted)
        log(f"{scenario}: {speeds[scenario]}")
    large = {}
    for scenario in r.SCENARIOS if size.large_batch else ():
        cases = r.make_cases(scenario, size.large_batch, 25)
        runs = [d.play(model, tokens, cases, draft=draft) for draft in (False, True)]
        counts.append(d.differences(model, tokens, runs[0].results, runs[1].results))
        large[scenario] = d.speed(*runs)
        log(f"{scenario}, all {size.large_batch} in one batch: {large[scenario]}")
    chaotic = r.random_model(tokens, seed=SEED)
    # In the full run the reciter's cases have been compared above.
    for weights, n in (
        (chaotic, size.equal_cases),
        (model, size.equal_cases // 2 if size.plain_once else 0),
    ):
        if n == 0:
            continue
        cases = r.mixed_cases(n, size.equal_steps)
        runs = [d.play(weights, tokens, cases, draft=draft) for draft in (False, True)]
        counts.append(d.differences(weights, tokens, runs[0].results, runs[1].results))
        log(f"equality: {counts[-1]}")
    total = {key: sum(count[key] for count in counts) for key in counts[0]}
    keys = ("speedup_passes", "speedup_wall", "speedup_cpu", "kept_share")
    return {
        **total,
        **{key: {scenario: speeds[scenario][key] for scenario in r.SCENARIOS} for key in keys},
        "speed_batch": size.speed_batch,
        "large_batch": {"batch": size.large_batch, **large},
        "mixed_batch": d.mixed_batch(model, tokens, 25 if size is FULL else 10),
        "bfloat16": d.lower_precision(
            chaotic, tokens, r.mixed_cases(size.half_cases, min(8, size.equal_steps))
        ),
    }


# --- (b) many queries -----------------------------------------------------------------------------------------------


def batch_speed(n: int = 64, latency: float = 0.3) -> dict[str, float]:
    """Seconds of `n` queries at once, and one after another."""
    rows = make_puzzles(n, SEED)
    refiner = ProRefiner(**{**puzzle_models(SEED, latency), "verifier": None})  # type: ignore[arg-type]
    started = time.perf_counter()
    together = refiner.refine_all(START_PROMPTS[SORTING], rows, progress=False)
    wall = time.perf_counter() - started
    started = time.perf_counter()
    alone = [refiner.refine(START_PROMPTS[SORTING], row) for row in rows]
    one_by_one = time.perf_counter() - started
    assert [result.answer for result in alone] == [result.answer for result in together]
    return {
        "queries": n,
        "seconds": round(wall, 2),
        "seconds_one_by_one": round(one_by_one, 1),
        "latency": latency,
        "speedup": round(one_by_one / wall, 1),
    }


# --- (c) accuracy ---------------------------------------------------------------------------------------------------


def refined(
    task_model: str, kind: str, rows: Sequence[Mapping[str, Any]]
) -> dict[str, list[RefinementResult]]:
    """The three verifier settings on one set with one task model."""
    models = puzzle_models(SEED)
    task = PuzzleSolver(SEED, CARELESSNESS[task_model])
    verifiers = {
        "no_verifier": None,
        "verifier": models["verifier"],
        "optimal": LabelVerifier(score_puzzle),
    }
    return {
        name: ProRefiner(task, models["feedback"], models["optimizer"], verifier).refine_all(
            START_PROMPTS[kind], rows, progress=False
        )
        for name, verifier in verifiers.items()
    }


def right_ones(
    results: Mapping[str, list[RefinementResult]], rows: Sequence[Mapping[str, Any]]
) -> dict[str, list[float]]:
    """1 or 0 per query and method. What `none` answers is the first answer of a run that asked for one."""
    answers = {"none": [result.initial_answer or "" for result in results["optimal"]]}
    answers |= {
        name: [result.answer for result in of_method] for name, of_method in results.items()
    }
    return {
        name: [
            score_puzzle(answer, row["answers"]) for answer, row in zip(given, rows, strict=True)
        ]
        for name, given in answers.items()
    }


def accuracy(size: Size, picture: Path) -> tuple[dict[str, Any], str]:
    """Accuracies and iterations for the JSON, and the table. Draws the picture."""
    table: dict[str, dict[str, dict[str, Estimate]]] = {}
    shown: dict[str, dict[str, list[RefinementResult]]] = {}
    pooled: dict[str, list[float]] = {name: [] for name in METHODS}
    correct: dict[str, dict[str, dict[str, str]]] = {}
    for title, kind in SETS.items():
        rows = make_puzzles(size.queries, SEED, (kind,))
        for task_model in size.task_models:
            results = refined(task_model, kind, rows)
            right = right_ones(results, rows)
            for name, values in right.items():
                table.setdefault(title, {}).setdefault(METHODS[name], {})[task_model] = share(
                    values
                )
                ones = "".join(str(int(value)) for value in values)
                correct.setdefault(title, {}).setdefault(METHODS[name], {})[task_model] = ones
            if task_model == "middling":
                shown[title] = {METHODS[name]: of_method for name, of_method in results.items()}
                pooled = {name: pooled[name] + right[name] for name in METHODS}
            log(
                f"{title}, {task_model}: "
                + ", ".join(f"{name} {share(right[name])}" for name in METHODS)
            )
    plot_iterations(shown, picture, "ProRefine in the sandbox (scripted models)")
    return {
        "correct": correct,
        "accuracy": {name: numbers(share(values)) for name, values in pooled.items()},
        "differences": {
            f"{better} - {worse}": numbers(difference(pooled[better], pooled[worse]))
            for worse, better in (
                ("none", "no_verifier"),
                ("none", "verifier"),
                ("verifier", "optimal"),
            )
        },
        "iterations": {
            title: {name: numbers(iterations_of(results)) for name, results in by_method.items()}
            for title, by_method in shown.items()
        },
    }, accuracy_table(table)


def share(values: Sequence[float]) -> Estimate:
    return wilson_interval(int(sum(values)), len(values))


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Of two methods on the same queries."""
    return bootstrap_interval([a - b for a, b in zip(ours, theirs, strict=True)])


def numbers(estimate: Estimate) -> dict[str, float]:
    return {name: round(value, 4) for name, value in asdict(estimate).items()}


# --- the script -----------------------------------------------------------------------------------------------------


def drafting_table(found: Mapping[str, Any]) -> str:
    """The speed-ups as a Markdown table."""
    columns = {
        "speedup_passes": "forward passes",
        "speedup_wall": "wall time",
        "speedup_cpu": "CPU time",
        "kept_share": "share of an output found again in the next",
    }
    lines = [f"| prompt | {' | '.join(columns.values())} |", "|---" * (1 + len(columns)) + "|"]
    for scenario in found["speedup_passes"]:
        cells = [
            f"{found[key][scenario]:.2f}" + ("" if key == "kept_share" else " ×") for key in columns
        ]
        lines.append(f"| {scenario} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="ProRefine: drafting, batching, accuracy in the sandbox."
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer and shorter cases, a minute and a half"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/prorefine"), help="folder for the picture"
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    size = QUICK if options.quick else FULL
    started = time.perf_counter()
    picture = options.output / "iterations.png"
    accuracies, table = accuracy(size, picture)
    batch = batch_speed(latency=0.1 if options.quick else 0.3)
    log(f"many queries: {batch}")
    figures = drafting(size)
    seconds = round(time.perf_counter() - started, 1)
    print(
        f"ProRefine in the sandbox (scripted or tiny models; says nothing about real ones), {seconds} s\n\n"
        f"Lossless drafting: {figures['identical']} of {figures['cases']} cases equal in every step, {figures['ties']} ties, "
        f"{figures['mismatches']} mismatches\n\n{drafting_table(figures)}\n\n"
        f"{batch['queries']} queries at once: {batch['seconds']} s, one after another {batch['seconds_one_by_one']} s: "
        f"{batch['speedup']} ×\n\nAccuracy with 95 % intervals, {size.queries} puzzles of each kind\n\n{table}\n\n"
        f"Mean iterations: {picture}"
    )
    if options.json:
        summary = {"sandbox": True, "quick": options.quick, "seconds": seconds, "drafting": figures}
        print(
            json.dumps({**summary, "batch_speedup": batch["speedup"], "batch": batch, **accuracies})
        )


if __name__ == "__main__":
    main()
