"""ProRefine, measured: lossless drafting, many queries at once, and the order of accuracies in the
sandbox.

    OMP_NUM_THREADS=1 python -m benchmarks.learning.prorefine --json  # under eight minutes
    OMP_NUM_THREADS=1 python -m benchmarks.learning.prorefine --json --quick  # a minute and a half

Prints Markdown tables, writes `runs/prorefine/iterations.png`; with `--json` one JSON object as the
last line.

- (a) Drafting (`prorefine_drafting.py` says on what): equal outputs, forward passes, wall and CPU
  time, and what lower precision does. Speed-ups are plain / drafted over n = 25 steps of k = 10
  tokens and the final answer.
- (b) 64 queries whose critic and optimizer take 0.3 s a call (0.1 s in the quick run), all at once
  against one after another; both are measured.
- (c) Accuracy of the verifier settings on the sandbox's puzzles. `none` is no refinement at all
  (the first answer), `no_verifier` refines every query. Scripted models: it shows that the loop and
  the verifier do their work, and says nothing about real models. Needs no torch.
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

# None that the sandbox was made with.
SEED = 11
SETS = {"word sorting": SORTING, "object counting": COUNTING}
METHODS = {
    "none": "no refinement",
    "no_verifier": "no verifier",
    "verifier": "verifier",
    "optimal": "optimal verifier",
}
# Task models, as the paper has three sizes.
CARELESSNESS = {"careless": 0.6, "middling": 0.4, "careful": 0.2}


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Args:
        speed_cases (`int`): Cases of each scenario that speed is measured on, at n = 25, in batches
            of `speed_batch`.
        large_batch (`int`): Cases of each scenario in one batch, for the wall time there; 0 leaves
            it out.
        plain_once (`bool`): Time the plain loop on one scenario for all: it decodes the same number
            of tokens in each.
        equal_cases (`int`), equal_steps (`int`): Cases for equality alone, over all scenarios, and
            their n.
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
QUICK = Size(
    speed_cases=2,
    speed_batch=2,
    large_batch=0,
    plain_once=True,
    equal_cases=100,
    equal_steps=5,
    half_cases=8,
    queries=250,
    task_models=("middling",),
)


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- (a) drafting ---------------------------------------------------------------------------------


def measure_drafting(size: Size) -> dict[str, Any]:
    """Everything about drafting."""
    # Imported here, because (b) and (c) do without torch.
    import torch

    from agentic_prompting.sandbox.policy import keep_freed_memory
    from benchmarks.learning import prorefine_drafting as drafting, prorefine_reciter as reciter

    keep_freed_memory()
    # More threads only get in each other's way on models this small.
    torch.set_num_threads(1)
    tokenizer = reciter.tokenizer()
    model = reciter.reciter(tokenizer)
    log("reciter trained")

    # Speed in each scenario. The strong one comes first, because there the plain loop makes every
    # call.
    speeds: dict[str, dict[str, float]] = {}
    counts: list[dict[str, int]] = []
    plain: drafting.Run | None = None
    for scenario in sorted(reciter.SCENARIOS, key="strong".__ne__):
        cases = reciter.make_cases(scenario, size.speed_cases, 25)
        needs_plain = not size.plain_once or plain is None
        if needs_plain:
            plain = drafting.play(model, tokenizer, cases, draft=False, batch=size.speed_batch)
        drafted = drafting.play(model, tokenizer, cases, batch=size.speed_batch)
        if needs_plain:
            counts.append(drafting.differences(model, tokenizer, plain.results, drafted.results))
        speeds[scenario] = drafting.speed(plain, drafted)
        log(f"{scenario}: {speeds[scenario]}")

    # The same in one large batch.
    large_batch: dict[str, Any] = {"batch": size.large_batch}
    if size.large_batch:
        for scenario in reciter.SCENARIOS:
            cases = reciter.make_cases(scenario, size.large_batch, 25)
            plain = drafting.play(model, tokenizer, cases, draft=False)
            drafted = drafting.play(model, tokenizer, cases, draft=True)
            counts.append(drafting.differences(model, tokenizer, plain.results, drafted.results))
            large_batch[scenario] = drafting.speed(plain, drafted)
            log(f"{scenario}, all {size.large_batch} in one batch: {large_batch[scenario]}")

    # Equality alone. In the full run the reciter's cases have been compared above.
    chaotic = reciter.random_model(tokenizer, seed=SEED)
    compared = [(chaotic, size.equal_cases)]
    if size.plain_once:
        compared.append((model, size.equal_cases // 2))
    for compared_model, n in compared:
        cases = reciter.mixed_cases(n, size.equal_steps)
        plain = drafting.play(compared_model, tokenizer, cases, draft=False)
        drafted = drafting.play(compared_model, tokenizer, cases, draft=True)
        difference = drafting.differences(compared_model, tokenizer, plain.results, drafted.results)
        counts.append(difference)
        log(f"equality: {difference}")

    figures: dict[str, Any] = {}
    for name in counts[0]:
        figures[name] = sum(count[name] for count in counts)
    for name in ("speedup_passes", "speedup_wall", "speedup_cpu", "kept_share"):
        figures[name] = {scenario: speeds[scenario][name] for scenario in reciter.SCENARIOS}
    mixed_steps = 25 if size is FULL else 10
    half_cases = reciter.mixed_cases(size.half_cases, min(8, size.equal_steps))
    return {
        **figures,
        "speed_batch": size.speed_batch,
        "large_batch": large_batch,
        "mixed_batch": drafting.mixed_batch(model, tokenizer, mixed_steps),
        "bfloat16": drafting.lower_precision(chaotic, tokenizer, half_cases),
    }


# --- (b) many queries -----------------------------------------------------------------------------


def batch_speed(n: int = 64, latency: float = 0.3) -> dict[str, float]:
    """Seconds of `n` queries at once, and one after another."""
    rows = make_puzzles(n, SEED)
    refiner = ProRefiner(**{**puzzle_models(SEED, latency), ("verifier"): None})  # type: ignore[arg-type]
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


# --- (c) accuracy ---------------------------------------------------------------------------------


def refine_with_each_verifier(
    task_model: str, task: str, rows: Sequence[Mapping[str, Any]]
) -> dict[str, list[RefinementResult]]:
    """The three verifier settings on one set with one task model."""
    models = puzzle_models(SEED)
    solver = PuzzleSolver(SEED, CARELESSNESS[task_model])
    verifiers = {
        "no_verifier": None,
        "verifier": models["verifier"],
        "optimal": LabelVerifier(score_puzzle),
    }
    results = {}
    for name, verifier in verifiers.items():
        refiner = ProRefiner(solver, models["feedback"], models["optimizer"], verifier)
        results[name] = refiner.refine_all(START_PROMPTS[task], rows, progress=False)
    return results


def score_methods(
    results: Mapping[str, list[RefinementResult]], rows: Sequence[Mapping[str, Any]]
) -> dict[str, list[float]]:
    """1 or 0 per query and method.

    What `none` answers is the first answer of a run that asked for one.
    """
    answers = {"none": [result.initial_answer or "" for result in results["optimal"]]}
    for name, method_results in results.items():
        answers[name] = [result.answer for result in method_results]
    scores = {}
    for name, texts in answers.items():
        pairs = zip(texts, rows, strict=True)
        scores[name] = [score_puzzle(text, row["answers"]) for text, row in pairs]
    return scores


def accuracy(size: Size, picture: Path) -> tuple[dict[str, Any], str]:
    """Accuracies and iterations for the JSON, and the table. Draws the picture."""
    # By set and method, the first two also by task model.
    table: dict[str, dict[str, dict[str, Estimate]]] = {}
    correct: dict[str, dict[str, dict[str, str]]] = {}
    middling_results: dict[str, dict[str, list[RefinementResult]]] = {}
    pooled: dict[str, list[float]] = {name: [] for name in METHODS}
    for title, task in SETS.items():
        rows = make_puzzles(size.queries, SEED, (task,))
        table[title] = {METHODS[name]: {} for name in METHODS}
        correct[title] = {METHODS[name]: {} for name in METHODS}
        for task_model in size.task_models:
            results = refine_with_each_verifier(task_model, task, rows)
            scores = score_methods(results, rows)
            for name, values in scores.items():
                flags = "".join(str(int(value)) for value in values)
                table[title][METHODS[name]][task_model] = share(values)
                correct[title][METHODS[name]][task_model] = flags
            # The picture and the pooled figures are those of the middling task model.
            if task_model == "middling":
                middling_results[title] = {METHODS[name]: results[name] for name in results}
                for name in METHODS:
                    pooled[name] += scores[name]
            shares = ", ".join(f"{name} {share(scores[name])}" for name in METHODS)
            log(f"{title}, {task_model}: {shares}")
    plot_iterations(middling_results, picture, "ProRefine in the sandbox (scripted models)")

    differences = {}
    for worse, better in (
        ("none", "no_verifier"),
        ("none", "verifier"),
        ("verifier", "optimal"),
    ):
        gain = difference(pooled[better], pooled[worse])
        differences[f"{better} - {worse}"] = numbers(gain)
    iterations: dict[str, dict[str, dict[str, float]]] = {}
    for title, by_method in middling_results.items():
        iterations[title] = {}
        for name, method_results in by_method.items():
            iterations[title][name] = numbers(iterations_of(method_results))
    summary = {
        "correct": correct,
        "accuracy": {name: numbers(share(values)) for name, values in pooled.items()},
        "differences": differences,
        "iterations": iterations,
    }
    return summary, accuracy_table(table)


def share(values: Sequence[float]) -> Estimate:
    return wilson_interval(int(sum(values)), len(values))


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Of two methods on the same queries."""
    return bootstrap_interval([a - b for a, b in zip(ours, theirs, strict=True)])


def numbers(estimate: Estimate) -> dict[str, float]:
    return {name: round(value, 4) for name, value in asdict(estimate).items()}


# --- the script -----------------------------------------------------------------------------------


def drafting_table(figures: Mapping[str, Any]) -> str:
    """The speed-ups as a Markdown table."""
    columns = {
        "speedup_passes": "forward passes",
        "speedup_wall": "wall time",
        "speedup_cpu": "CPU time",
        "kept_share": "share of an output found again in the next",
    }
    lines = [f"| prompt | {' | '.join(columns.values())} |", "|---" * (1 + len(columns)) + "|"]
    for scenario in figures["speedup_passes"]:
        cells = []
        for name in columns:
            unit = "" if name == "kept_share" else " ×"
            cells.append(f"{figures[name][scenario]:.2f}{unit}")
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

    # (c), (b) and (a): the parts without torch come first.
    started = time.perf_counter()
    picture = options.output / "iterations.png"
    accuracies, table = accuracy(size, picture)
    latency = 0.1 if options.quick else 0.3
    batch = batch_speed(latency=latency)
    log(f"many queries: {batch}")
    figures = measure_drafting(size)
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
        summary = {
            "sandbox": True,
            "quick": options.quick,
            "seconds": seconds,
            "drafting": figures,
            "batch_speedup": batch["speedup"],
            "batch": batch,
            **accuracies,
        }
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
