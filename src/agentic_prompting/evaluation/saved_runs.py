"""Saves finished evaluations, and loads them without asking anything again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..records import atomic_write
from .answer_records import read_records
from .evaluate import Evaluation
from .metrics import METRICS, Encoder, Metric, find_metrics
from .scoring import SYSTEM_METRICS, summarise

RUN_FILE = "run.json"
"""The file of a finished evaluation in its folder."""


def save_run(folder: str | Path, evaluation: Evaluation) -> None:
    """Save what [`load_run`] and the report need besides the answers: metrics of each task, calls to
    make each system, and the values of metrics that are not ours, which the report cannot compute.
    """
    # Metrics by task, and the calls to make each system, in a form that JSON can hold.
    metric_names: dict[str, list[str]] = {}
    fit_calls: dict[str, int] = {}
    values: list[dict[str, Any]] = []
    for result in evaluation.results:
        metric_names[result.task] = [
            name for name in result.estimates if name not in SYSTEM_METRICS
        ]
        fit_calls[result.system] = result.fit_calls
        for name in metric_names[result.task]:
            if name not in METRICS:
                origin = {"system": result.system, "task": result.task, "metric": name}
                values.append({**origin, "by_question": list(result.values[name].items())})
    summary = {"metrics": metric_names, "fit_calls": fit_calls, "values": values}
    atomic_write(Path(folder) / RUN_FILE, json.dumps(summary, indent=2) + "\n")


def load_run(
    folder: str | Path,
    encoder: str | Encoder | None = None,
    metrics: Mapping[str, Metric] = MappingProxyType({}),
) -> Evaluation:
    """Load an evaluation from its folder and score it again. No question is asked.

    Args:
        folder (`str` or `Path`): Folder with the answers and the file of [`save_run`].
        encoder (`str` or [`Encoder`], *optional*): Encoder for `semantic_similarity`.
        metrics (`dict`, *optional*): Metrics that cannot be loaded by name (functions and objects),
            by name.

    Raises:
        `FileNotFoundError`: If the folder contains no finished evaluation.
        `ValueError`: If one of its files is broken.
    """
    # Read the summary that `save_run` wrote, and the answers.
    path = Path(folder) / RUN_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no finished evaluation: there is no {RUN_FILE}")
    summary = json.loads(path.read_text(encoding="utf-8"))
    records = read_records(sorted(Path(folder).rglob("*.jsonl")))

    # The metrics of each task: objects passed by the caller, the others by their names.
    metrics_by_task = {}
    for task, names in summary["metrics"].items():
        task_metrics = {name: metrics.get(name, name) for name in names}
        metrics_by_task[task] = find_metrics(task_metrics, encoder)

    # One result per system and task that have records.
    results = []
    for system, fit_calls in summary["fit_calls"].items():
        system_records = [record for record in records if record["system"] == system]
        for task, scores in metrics_by_task.items():
            task_records = [record for record in system_records if record["task"] == task]
            if task_records:
                results.append(summarise(system, task, task_records, scores, fit_calls))
    return Evaluation(results, records)
