"""The evaluation in a run's folder: its answers scored again, and its optimised prompts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..evaluation import METRICS, Evaluation, find_metrics
from ..evaluation.answer_records import is_answered, row_index_of
from ..evaluation.intervals import estimate_mean
from ..evaluation.saved_runs import RUN_FILE
from ..evaluation.scoring import Result, score_records, summarise
from ..records import Record
from .sound_records import read_sound_answers


def read_json_object(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; an empty one if there is no such file, or no object in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_evaluation(folder: Path) -> Evaluation | None:
    """Return the evaluation in a folder, by [`evaluate_agent`] or a table of the papers, in the
    metrics that need no model; `None` if there is none.
    """
    # With a `run.json` the answers may also be in folders below.
    saved = read_json_object(folder / RUN_FILE)
    records: list[Record] = []
    for path in sorted(folder.rglob("*.jsonl") if saved else folder.glob("*.jsonl")):
        records += read_sound_answers(path)
    if not records:
        return None
    # The metrics of each task, and the calls with which each system was fitted.
    metrics_by_task = _object_in(saved, "metrics")
    fit_calls = _object_in(saved, "fit_calls")

    # Score each system on each task in the task's own metrics.
    by_system_and_task: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        by_system_and_task[record["system"], record["task"]].append(record)
    results = []
    for (system, task), task_records in by_system_and_task.items():
        # semantic_similarity would have to load a model.
        names = [
            name
            for name in metrics_by_task.get(task) or ()
            if name in METRICS and name != "semantic_similarity"
        ]
        saved_values = _saved_values(saved, system, task)
        if not names and not saved_values:
            names = ["exact_match", "token_f1"]
        metrics = find_metrics(names) if names else {}
        result = summarise(system, task, task_records, metrics, fit_calls.get(system, 0))
        results.append(_add_values(result, saved_values, metrics_by_task.get(task) or ()))

    # Systems in the order of the table.
    order = {system: position for position, system in enumerate(fit_calls)}
    results.sort(key=lambda result: order.get(result.system, len(order)))
    records.sort(key=lambda record: order.get(record["system"], len(order)))
    return Evaluation(results, records)


def _saved_values(saved: dict[str, Any], system: str, task: str) -> dict[str, dict[int, float]]:
    """The values by question of the metrics that only the evaluation itself could compute."""
    values: dict[str, dict[int, float]] = {}
    entries = saved.get("values")
    for entry in entries if isinstance(entries, list) else ():
        try:
            if (entry["system"], entry["task"]) == (system, task):
                by_question = {int(place): float(value) for place, value in entry["by_question"]}
                values[str(entry["metric"])] = by_question
        except (LookupError, TypeError, ValueError):
            continue  # a damaged file
    return values


def _add_values(
    result: Result, saved_values: Mapping[str, Mapping[int, float]], order: Sequence[str]
) -> Result:
    """A result with further metrics, in the order of the table."""
    values = {**result.values, **{name: dict(scores) for name, scores in saved_values.items()}}
    estimates = dict(result.estimates)
    ungraded = dict(result.ungraded)
    for name, scores in saved_values.items():
        estimates[name] = estimate_mean(list(scores.values()), is_share=True)
        ungraded[name] = 0
    names = [name for name in order if name in values]
    names += [name for name in values if name not in names]
    return replace(
        result,
        values={name: values[name] for name in names},
        estimates={name: estimates[name] for name in names},
        ungraded={name: ungraded[name] for name in names},
    )


def _object_in(saved: dict[str, Any], name: str) -> dict[str, Any]:
    value = saved.get(name)
    return value if isinstance(value, dict) else {}


def read_optimised_prompts(folder: Path) -> dict[str, str]:
    """Return the prompts that a table's optimisers found, by system:
    `prompts/<system>-<digest>.json` of its folder.
    """
    prompts = {}
    for path in sorted((folder / "prompts").glob("*.json")):
        prompt = read_json_object(path).get("prompt")
        if isinstance(prompt, str):
            # The file's name ends in a digest.
            system, _, _ = path.stem.rpartition("-")
            prompts[system or path.stem] = prompt
    return prompts


def first_scores(evaluation: Evaluation) -> list[float | None]:
    """Return each answer's score in the first metric of its task; `None` for an answer that failed.

    In a metric that is not ours it is the mean of the answers to the question.
    """
    scores: list[float | None] = [None] * len(evaluation.records)
    for result in evaluation.results:
        # Where the answers of this system to this task are among all records.
        positions = [
            position
            for position, record in enumerate(evaluation.records)
            if record["system"] == result.system and record["task"] == result.task
        ]
        # Score them in the first metric, and put the scores back in their places.
        metric = next(iter(result.values))
        records = [evaluation.records[position] for position in positions]
        metric_scores: Sequence[float | None]
        if metric in METRICS:
            metric_scores = score_records(records, find_metrics([metric]))[metric]
        else:
            # Its values are saved by question.
            metric_scores = [
                result.values[metric].get(row_index_of(record)) if is_answered(record) else None
                for record in records
            ]
        for position, score in zip(positions, metric_scores, strict=True):
            scores[position] = score
    return scores
