"""The data of a report's page: blocks of plain JSON, each of which a section of the page shows."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations, product
from pathlib import Path
from typing import Any, TypeVar

from ..evaluation import (
    Evaluation,
    compare_runs,
    compare_systems,
    differences_table,
    repeats_table,
    results_table,
)
from ..evaluation.answer_records import row_index_of
from ..evaluation.held_out_gain import describe_held_out_gain, estimate_held_out
from ..evolution import Lineage
from ..evolution.lineage import LINES, Node
from ..evolution.operators import FAILURES_IN_WORDS
from ..records import Record
from ..refine import RefinementResult
from .cost_points import cost_points
from .evaluation_summary import first_scores
from .headroom_comparison import compare_with_headroom
from .plots import PANELS, panels_in
from .rollout_records import (
    exact_match_of_record,
    gradient_counts,
    groups_of,
    logged_step,
    reward_parts,
    total_reward,
)
from .run_summary import RunSummary
from .word_diff import word_diff

T = TypeVar("T")
Block = tuple[str, Any]
"""Data of the page: its name for the page's script, and its content."""

# The number of items in each compressed piece of data.
TRAJECTORIES_PER_CHUNK = 200
STORIES_PER_CHUNK = 20
REFINEMENTS_PER_CHUNK = 50
ANSWERS_PER_CHUNK = 200

NO_CHANGE = "no_change"  # the reason of an attempt whose operator proposed nothing

TITLE_LENGTH = 140  # characters of a question in a list


def run_blocks(run: RunSummary, max_trajectories: int, watch: bool = False) -> Iterator[Block]:
    """The data of a run's page, in the order of its sections."""
    yield (
        "run",
        {
            "name": run.name,
            "folder": run.folder,
            "sandbox": run.sandbox,
            "heldOut": run.held_out,
            "rollouts": len(run.rollouts),
            "gradient": gradient_counts(run.rollouts),
            "watch": watch,
        },
    )
    # A section for whatever the run has left behind.
    if run.headroom:
        yield (
            "headroom",
            {
                "rows": [asdict(row) for row in compare_with_headroom(run)],
                "verdicts": list(run.headroom.sentences.items()),
            },
        )
    if any(run.history.values()):
        yield "history", _history(run)
    if run.lineage:
        yield from _lineage_blocks(run.lineage)
    if run.rollouts:
        yield from _trajectory_blocks(run.rollouts, max_trajectories)
    if run.refinements:
        yield from _refinement_blocks(run.refinements)
    if run.evaluation:
        yield from _front_blocks([run], [run.name])
        yield from _evaluation_blocks(run.evaluation, run.optimised_prompts)


def comparison_blocks(runs: Sequence[RunSummary]) -> Iterator[Block]:
    """The data of a page of several runs: every curve that any of them has, a line for each."""
    if len(runs) > len(LINES):
        raise ValueError(f"at most {len(LINES)} runs can be told apart in a chart, got {len(runs)}")
    names = short_names([run.folder for run in runs])
    # Curves of all runs in the same charts.
    panels, entries = _compared_curves(runs, names)
    # Evaluations are compared pair by pair, on the same questions.
    evaluations = []
    held_out: list[list[Any]] = []
    for name, run in zip(names, runs, strict=True):
        if run.evaluation:
            evaluations.append((name, run.evaluation))
        held_out += [[name, *score] for score in run.held_out]
    differences: list[Mapping[str, str]] = []
    for (first_name, first), (second_name, second) in combinations(evaluations, 2):
        comparisons = compare_runs(first, second, (first_name, second_name))
        differences += differences_table(comparisons)
    # The head of the page, then everything that is compared.
    yield (
        "run",
        {
            "name": " · ".join(names),
            "folder": runs[0].folder,
            "sandbox": any(run.sandbox for run in runs),
            "heldOut": [],
        },
    )
    yield (
        "comparison",
        {
            "folders": [run.folder for run in runs],
            "panels": panels,
            "entries": entries,
            "dashes": [dashes for _, dashes in LINES],
            "heldOut": held_out,
            "intervals": _intervals(
                [(f"{name}: ", evaluation) for name, evaluation in evaluations]
            ),
            "differences": differences,
        },
    )
    yield from _front_blocks(runs, names)


def _compared_curves(
    runs: Sequence[RunSummary], names: Sequence[str]
) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """The panels, one for each curve that any of the runs has, and their values by step."""
    # Evaluation has the same keys as training, with a prefix.
    prefixes = {"train": "", "optimisation": "", "evolution": "", "eval": "evaluation: "}
    panels = []
    entries: dict[float, dict[str, float]] = defaultdict(dict)
    for (mode, prefix), panel in product(prefixes.items(), PANELS):
        for key, label in panel.keys.items():
            # A column for each run.
            columns = {f"{prefix}{key} {number}": name for number, name in enumerate(names)}
            histories = [run.history.get(mode, ()) for run in runs]
            has_values = _add_columns(entries, key, dict(zip(columns, histories, strict=True)))
            # A curve that is zero in all runs is left out.
            if has_values:
                # A panel of several curves becomes several panels, each named after its curve.
                title = panel.title if len(panel.keys) == 1 else f"{panel.title}: {label}"
                panels.append({"name": panel.name, "title": prefix + title, "keys": columns})
    return panels, [{"step": step, **entries[step]} for step in sorted(entries)]


def _add_columns(
    entries: Mapping[float, dict[str, float]],
    key: str,
    histories: Mapping[str, Sequence[Mapping[str, float]]],
) -> bool:
    """Add a curve's values by column to the row of each step, and return whether one of them is not
    0.
    """
    has_values = False
    for column, history in histories.items():
        for entry in history:
            if key in entry:
                entries[entry["step"]][column] = entry[key]
                has_values = has_values or bool(entry[key])
    return has_values


def short_names(folders: Sequence[str]) -> list[str]:
    """The shortest names that tell folders apart: their paths without common parents."""
    paths = [Path(folder).parts for folder in folders]
    # Drop the first folder as long as all paths share it.
    while min(len(path) for path in paths) > 1 and len({path[0] for path in paths}) == 1:
        paths = [path[1:] for path in paths]
    return ["/".join(path) for path in paths]


# ---- curves ----


def _history(run: RunSummary) -> dict[str, Any]:
    """The curves of a run and the panels that they are drawn in."""
    # Every panel that any of the logs has something for.
    names: set[str] = set()
    for log in run.history.values():
        names |= {panel.name for panel in panels_in(log)}
    panels = [asdict(panel) for panel in PANELS if panel.name in names]
    # Panels of environments and of pass@k follow the first one.
    panels[1:1] = _panels_of_run(run)
    return {"panels": panels, "modes": run.history, "dashes": [dashes for _, dashes in LINES]}


def _panels_of_run(run: RunSummary) -> list[dict[str, Any]]:
    """Panels whose lines depend on the run: reward and exact match of several environments, and
    pass@k.
    """
    # The keys of all logs.
    keys: dict[str, None] = {}
    for log in run.history.values():
        for entry in log:
            keys |= dict.fromkeys(entry)
    panels = []
    for prefix, title in (
        ("reward in ", "mean reward by environment"),
        ("exact_match in ", "exact match by environment"),
    ):
        # A line for each environment.
        labels = {key: key.removeprefix(prefix) for key in sorted(keys) if key.startswith(prefix)}
        if labels:
            panels.append({"name": title.replace(" ", "_"), "title": title, "keys": labels})
    # pass@k has a line for each k.
    counts = sorted(int(key.removeprefix("pass@")) for key in keys if key.startswith("pass@"))
    if counts:
        title = "pass@k: a right answer among k"
        labels = {f"pass@{count}": f"k = {count}" for count in counts}
        panels.append({"name": title.replace(" ", "_"), "title": title, "keys": labels})
    return panels


# ---- evaluations ----


def _front_blocks(runs: Sequence[RunSummary], names: Sequence[str]) -> Iterator[Block]:
    """Score against dollars, where there are several points and anything costs anything."""
    points = cost_points(runs, names)
    if len(points) > 1 and any(point.usd for point in points):
        yield "front", [asdict(point) for point in points]


def _evaluation_blocks(
    evaluation: Evaluation, optimised_prompts: Mapping[str, str]
) -> Iterator[Block]:
    """Tables as they are printed, every pair of systems tested, the optimised prompts, and each
    answer.
    """
    # Compare each pair of systems once.
    systems = list(dict.fromkeys(result.system for result in evaluation.results))
    pairs = set(combinations(systems, 2))
    comparisons = []
    for system in systems:
        for comparison in compare_systems(evaluation, system):
            if (system, comparison.first) in pairs:
                comparisons.append(comparison)
    # Columns for the list of answers, which are unpacked when they are opened.
    records = evaluation.records
    columns: dict[str, Any] = {
        "system": [record["system"] for record in records],
        "task": [record["task"] for record in records],
        "run": [record["run"] for record in records],
        "row": [row_index_of(record) for record in records],
        "title": [str(record["question"])[:TITLE_LENGTH] for record in records],
        "match": first_scores(evaluation),
    }
    yield (
        "evaluation",
        {
            "results": results_table(evaluation),
            "repeats": repeats_table(evaluation),
            "differences": differences_table(comparisons),
            "prompts": list(optimised_prompts.items()),
            "intervals": _intervals([("", evaluation)]),
            "chunk": ANSWERS_PER_CHUNK,
            "columns": columns,
        },
    )
    # Texts and costs of the answers, in chunks.
    names = (
        "question",
        "answers",
        "answer",
        "whole",
        "error",
        "calls",
        "tokens",
        "cost_usd",
        "seconds",
    )
    answers = []
    for record in records:
        returned = _returned(record.get("trajectory") or {})
        answers.append({**_select(record, names), **returned})
    yield from _chunks("answers", answers, ANSWERS_PER_CHUNK)


def _select(record: Record, names: Iterable[str]) -> dict[str, Any]:
    """The fields of a record that have a value."""
    return {name: record[name] for name in names if record.get(name) is not None}


def _returned(record: Record) -> dict[str, str]:
    """What a program returned besides its answer, as a text, if there is anything."""
    returned = record.get("returned")
    if not returned:
        return {}
    return {"returned": json.dumps(returned, ensure_ascii=False, indent=1)}


def _intervals(evaluations: Iterable[tuple[str, Evaluation]]) -> list[dict[str, Any]]:
    """For each task and its first metric, where that is a share, the systems with mean and
    interval.
    """
    figures: dict[tuple[str, str], list[tuple[str, float, float, float]]] = defaultdict(list)
    for prefix, evaluation in evaluations:
        for result in evaluation.results:
            # Only the first metric of a task, and only if its interval lies within 0 and 1.
            metric, estimate = next(iter(result.estimates.items()))
            if estimate and 0 <= estimate.low <= estimate.high <= 1:
                figures[result.task, metric].append(
                    (prefix + result.system, estimate.mean, estimate.low, estimate.high)
                )
    return [
        {"task": task, "metric": metric, "systems": systems}
        for (task, metric), systems in figures.items()
    ]


def _chunks(name: str, items: Sequence[Any], size: int) -> Iterator[Block]:
    """`items` in blocks of `size` each, `<name>-0`, `<name>-1`, ..."""
    for start in range(0, len(items), size):
        yield f"{name}-{start // size}", items[start : start + size]


# ---- trajectories ----


def sample_evenly(records: Sequence[T], max_records: int) -> list[T]:
    """At most `max_records` records, drawn over the whole run, in their order.

    The same ones each time.
    """
    if len(records) <= max_records:
        return list(records)
    # A fixed seed, so that the same records are drawn each time.
    positions = random.Random(0).sample(range(len(records)), max_records)
    return [records[position] for position in sorted(positions)]


def _trajectory_blocks(all_records: Sequence[Record], max_records: int) -> Iterator[Block]:
    """An index to filter by, and the texts in chunks."""
    # Groups are those of all records, before some are drawn.
    groups, advantages = groups_of(all_records)
    positions = sample_evenly(range(len(all_records)), max_records)
    records = [all_records[position] for position in positions]
    # The columns of the list, by which it is filtered.
    columns: dict[str, Any] = {
        "number": positions,
        "group": [groups[position] for position in positions],
        "advantage": [advantages[position] for position in positions],
        "step": [logged_step(record) for record in records],
        "mode": [record.get("mode", "train") for record in records],
        "status": [record["status"] for record in records],
        "task": [str(record.get("task") or "") for record in records],
        "reward": [total_reward(record) for record in records],
        "match": [exact_match_of_record(record) for record in records],
        "turns": [len(record["turns"]) for record in records],
        "prompt": [record.get("system_prompt") for record in records],
        "title": [str(record.get("question") or "")[:TITLE_LENGTH] for record in records],
    }
    index = {"total": len(all_records), "chunk": TRAJECTORIES_PER_CHUNK, "columns": columns}
    yield "trajectories", index
    # The content of each trajectory, which the page shows once it is opened.
    trajectories = [_trajectory(record) for record in records]
    yield from _chunks("trajectories", trajectories, TRAJECTORIES_PER_CHUNK)


def _trajectory(record: Record) -> dict[str, Any]:
    """The content of one opened trajectory, with the parts of its reward."""
    names = (
        "question",
        "answers",
        "answer",
        "error",
        "first_request",
        "turns",
        "observations",
        "tokens",
        "cost_usd",
        "run",
    )
    # The seed is a text, because a browser's numbers end at 2**53.
    return {
        **_select(record, names),
        **_returned(record),
        "seed": str(record.get("seed", "")),
        "parts": reward_parts(record),
    }


# ---- evolution ----


def _lineage_blocks(lineage: Lineage) -> Iterator[Block]:
    """One entry per prompt, with the diff to each of its parents. What led to it is in chunks."""
    texts = [node.member.prompt.text for node in lineage.nodes]
    # Attempts that were refused, with their reasons in words.
    refused = []
    for attempt in lineage.refused:
        refused.append(
            {
                "batch": attempt["step"] + 1,  # the journal counts from 0
                "operator": attempt["operator"],
                "reason": _reason_in_words(attempt["reason"]),
                "parents": attempt["parents"],
            }
        )
    without_change = sum(attempt["reason"] == NO_CHANGE for attempt in lineage.refused)
    # `chunk` tells the script whether there are stories to unpack.
    has_stories = any(node.story for node in lineage.nodes) or bool(lineage.refused)
    yield (
        "lineage",
        {
            "nodes": [_node(node, texts) for node in lineage.nodes],
            "window": lineage.window,
            "chunk": STORIES_PER_CHUNK if has_stories else None,
            "refused": refused,
            "refusedWithoutChange": without_change,
            "gain": _describe_gain(lineage),
        },
    )
    if has_stories:
        stories = [node.story for node in lineage.nodes]
        yield from _chunks("stories", stories, STORIES_PER_CHUNK)


def _reason_in_words(reason: str) -> str:
    """The reason why an attempt made no prompt."""
    if reason == NO_CHANGE:
        return "no change proposed"
    return FAILURES_IN_WORDS.get(reason, reason.replace("_", " "))


def _describe_gain(lineage: Lineage) -> str:
    """The best prompt against the first one on the same held-out questions; empty if not known."""
    best = next(node for node in lineage.nodes if node.best)
    return describe_held_out_gain(lineage.nodes[0].member, best.member)


def _node(node: Node, texts: Sequence[str]) -> dict[str, Any]:
    """A prompt of the tree."""
    prompt = node.member.prompt
    rating = node.member.rating
    held_out = estimate_held_out(node.member)
    return {
        "operator": prompt.operator,
        "born": prompt.born_at,
        "parents": list(prompt.parents),
        "mu": rating.mu,
        "sigma": rating.sigma,
        "matches": node.member.matches,
        "lane": node.lane,
        "alive": node.in_window,
        "best": node.best,
        "counts": node.counts,
        "heldOut": None if held_out is None else asdict(held_out),
        "text": prompt.text,
        "diffs": [word_diff(texts[parent], prompt.text) for parent in prompt.parents],
    }


# ---- refinements ----


def _refinement_blocks(results: Sequence[RefinementResult]) -> Iterator[Block]:
    """ProRefine's results: each query's steps, each step's change of the prompt as a diff."""
    # How many steps of each query changed the prompt.
    changes = []
    for result in results:
        changes.append(sum(step.new_prompt != step.prompt for step in result.steps))
    # What the list shows.
    columns: dict[str, Any] = {
        "title": [result.query[:TITLE_LENGTH] for result in results],
        "stop": [result.stop_reason for result in results],
        "verdict": [result.verdict for result in results],
        "steps": [len(result.steps) for result in results],
        "changed": changes,
    }
    yield "refinements", {"chunk": REFINEMENTS_PER_CHUNK, "columns": columns}
    refinements = [_refinement(result) for result in results]
    yield from _chunks("refinements", refinements, REFINEMENTS_PER_CHUNK)


def _refinement(result: RefinementResult) -> dict[str, Any]:
    """The content of one opened refinement."""
    steps = []
    for step in result.steps:
        # A step that left the prompt as it was has no diff.
        is_changed = step.new_prompt != step.prompt
        steps.append(
            {
                "output": step.output,
                "complete": step.complete,
                "feedback": step.feedback,
                "problem": step.problem,
                "diff": word_diff(step.prompt, step.new_prompt) if is_changed else None,
            }
        )
    return {
        "query": result.query,
        "prompt": result.initial_prompt,
        "first": result.initial_answer,
        "answer": result.answer,
        "error": None if result.error is None else str(result.error),
        "steps": steps,
        # From the first prompt to the final one.
        "diff": word_diff(result.initial_prompt, result.prompt),
    }
