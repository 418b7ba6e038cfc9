"""Finished evaluations on disk: saved beside their answers, loaded again, and compared with each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..llm.files import write_whole
from .harness import Evaluation
from .paired import PairedDifference, paired_difference
from .records import read_records
from .scores import find_metrics
from .scoring import summarise
from .similarity import Encoder

_SUMMARY = "run.json"


@dataclass(frozen=True)
class Comparison:
    """Two systems on one task in one metric.

    Args:
        task (`str`), metric (`str`): Which.
        first (`str`), second (`str`): Names for people; a positive difference is the first one's.
        paired ([`PairedDifference`]): The difference.
    """

    task: str
    metric: str
    first: str
    second: str
    paired: PairedDifference


def save_run(folder: str | Path, evaluation: Evaluation) -> None:
    """Write what [`load_run`] needs beside the answers: each task's metrics, the calls each system took to make."""
    summary = {
        "metrics": {
            result.task: [name for name in result.estimates if name != "format"] for result in evaluation.results
        },
        "fit_calls": {result.system: result.fit_calls for result in evaluation.results},
    }
    write_whole(Path(folder) / _SUMMARY, json.dumps(summary, indent=2) + "\n")


def load_run(folder: str | Path, encoder: str | Encoder | None = None) -> Evaluation:
    """An evaluation from its folder, scored anew; nothing is asked.

    Raises:
        `FileNotFoundError`: The folder holds no finished evaluation.
        `ValueError`: One of its files is broken.
    """
    path = Path(folder) / _SUMMARY
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no finished evaluation: there is no {_SUMMARY}")
    summary = json.loads(path.read_text(encoding="utf-8"))
    records = read_records(sorted(Path(folder).rglob("*.jsonl")))
    metrics = {task: find_metrics(names, encoder) for task, names in summary["metrics"].items()}
    results = [
        summarise(
            system,
            task,
            [record for record in records if (record["system"], record["task"]) == (system, task)],
            metrics[task],
            fit_calls,
        )
        for system, fit_calls in summary["fit_calls"].items()
        for task in metrics
    ]
    return Evaluation([result for result in results if result.answers], records)


def compare_systems(evaluation: Evaluation, baseline: str) -> list[Comparison]:
    """Every other system of an evaluation against one of it, on each task in the metric that counts first.

    Raises:
        `ValueError`: The evaluation has no such system.
    """
    systems = list(dict.fromkeys(result.system for result in evaluation.results))
    if baseline not in systems:
        raise ValueError(f"there is no system {baseline!r} to compare with; there are: {', '.join(systems)}")
    return [
        comparison
        for result in evaluation.results
        if result.system != baseline
        for comparison in _against(
            result.values, evaluation.result(baseline, result.task).values, result.task, result.system, baseline
        )
    ]


def compare_runs(
    first: Evaluation, second: Evaluation, names: tuple[str, str] = ("first", "second")
) -> list[Comparison]:
    """The systems that two evaluations have in common, on the tasks that they have in common.

    Raises:
        `ValueError`: They have nothing in common, or asked different questions.
    """
    _check_same_questions(first, second)
    theirs = {(result.system, result.task): result for result in second.results}
    comparisons = [
        comparison
        for result in first.results
        if (result.system, result.task) in theirs
        for comparison in _against(
            result.values,
            theirs[(result.system, result.task)].values,
            result.task,
            f"{result.system} ({names[0]})",
            f"{result.system} ({names[1]})",
        )
    ]
    if not comparisons:
        raise ValueError("the two runs have no system on the same task in common")
    return comparisons


def _against(
    ours: Mapping[str, Mapping[int, float]],
    others: Mapping[str, Mapping[int, float]],
    task: str,
    first: str,
    second: str,
) -> list[Comparison]:
    """In the first metric; none if no question has a score from both."""
    metric = next(iter(ours))
    if not set(ours[metric]) & set(others.get(metric, {})):
        return []
    return [Comparison(task, metric, first, second, paired_difference(ours[metric], others[metric]))]


def _check_same_questions(first: Evaluation, second: Evaluation) -> None:
    asked = {(record["task"], record["place"]): record["question"] for record in first.records}
    for record in second.records:
        question = asked.get((record["task"], record["place"]))
        if question is not None and question != record["question"]:
            raise ValueError(
                f"the runs asked different questions of {record['task']} (place {record['place']}): nothing is paired. "
                "Give both the same n and seed"
            )
