"""The evaluation in a run's folder: its answers scored again, its optimised prompts, and scores against dollars."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ..evaluation import METRICS, Evaluation, bootstrap_interval, find_metrics
from ..evaluation.scoring import score_records, summarise
from ..records import Record
from .rollout_records import exact_match_of_record, groups_of
from .sound_records import read_sound_answers

if TYPE_CHECKING:
    from .run_summary import RunSummary


@dataclass(frozen=True)
class CostPoint:
    """A system's score and cost: mean score with its 95 % interval, US dollars a question, and whether it is on the
    front (no other system is at least as good for no more)."""

    name: str
    usd: float
    mean: float
    low: float
    high: float
    front: bool


@dataclass(frozen=True)
class ScoredAnswer:
    """An answer, or a rollout of training, as part of a [`CostPoint`]."""

    system: str
    question: Any  # what tells it from other questions
    usd: float
    score: float | None  # None if it failed


def read_json_object(path: Path) -> dict[str, Any]:
    """A file's JSON object; an empty one if there is no such file, or no object in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_evaluation(folder: Path) -> Evaluation | None:
    """The evaluation in a folder, by [`evaluate_agent`] or a table of the papers, in the metrics that need no model;
    `None` if there is none."""
    saved = read_json_object(folder / "run.json")
    records: list[Record] = []
    for path in sorted(folder.rglob("*.jsonl") if saved else folder.glob("*.jsonl")):
        records += read_sound_answers(path)
    if not records:
        return None
    metrics_by_task = _object_in(saved, "metrics")
    fit_calls = _object_in(saved, "fit_calls")

    # Score each system on each task in the task's own metrics.
    by_system_and_task: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        by_system_and_task[record["system"], record["task"]].append(record)
    results = []
    for (system, task), task_records in by_system_and_task.items():
        names = [
            name
            for name in metrics_by_task.get(task) or ()
            if name in METRICS and name != "semantic_similarity"
        ]
        metrics = find_metrics(names or ["exact_match", "token_f1"])
        results.append(summarise(system, task, task_records, metrics, fit_calls.get(system, 0)))

    # Systems in the order of the table.
    order = {system: position for position, system in enumerate(fit_calls)}
    results.sort(key=lambda result: order.get(result.system, len(order)))
    records.sort(key=lambda record: order.get(record["system"], len(order)))
    return Evaluation(results, records)


def _object_in(saved: dict[str, Any], name: str) -> dict[str, Any]:
    value = saved.get(name)
    return value if isinstance(value, dict) else {}


def read_optimised_prompts(folder: Path) -> dict[str, str]:
    """The prompts that a table's optimisers found, by system: `prompts/<system>-<digest>.json` of its folder."""
    prompts = {}
    for path in sorted((folder / "prompts").glob("*.json")):
        prompt = read_json_object(path).get("prompt")
        if isinstance(prompt, str):
            system, _, _ = path.stem.rpartition("-")
            prompts[system or path.stem] = prompt
    return prompts


def first_scores(evaluation: Evaluation) -> list[float | None]:
    """Each answer's score in the first metric of its task; `None` for an answer that failed."""
    scores: list[float | None] = [None] * len(evaluation.records)
    for result in evaluation.results:
        positions = [
            position
            for position, record in enumerate(evaluation.records)
            if record["system"] == result.system and record["task"] == result.task
        ]
        metric = next(iter(result.values))
        records = [evaluation.records[position] for position in positions]
        metric_scores = score_records(records, find_metrics([metric]))[metric]
        for position, score in zip(positions, metric_scores, strict=True):
            scores[position] = score
    return scores


def cost_points(runs: Sequence[RunSummary], names: Sequence[str]) -> list[CostPoint]:
    """Each run, or each system of its evaluation, as a point of score against dollars, the cheapest first.

    For a run without an evaluation these are exact match and cost of the training rollouts of the last tenth of its
    steps. A shared or recorded reply costs the price of the original one. Failed answers are left out of both. The
    interval is over questions: answers to the same one say little more than one of them.

    Args:
        runs (`Sequence[RunSummary]`): The runs.
        names (`Sequence[str]`): Their names on the page.
    """
    answers: list[ScoredAnswer] = []
    for run, name in zip(runs, names, strict=True):
        if run.evaluation:
            answers += _evaluation_answers(run.evaluation, f"{name}: " if len(runs) > 1 else "")
        else:
            answers += _training_answers(run.rollouts, name)

    costs: dict[str, list[float]] = defaultdict(list)
    scores: dict[str, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    for answer in answers:
        if answer.score is not None:
            costs[answer.system].append(answer.usd)
            scores[answer.system][answer.question].append(answer.score)
    points = []
    for system, dollars in costs.items():
        question_means = [fmean(values) for values in scores[system].values()]
        interval = bootstrap_interval(question_means)
        points.append(
            CostPoint(
                system,
                fmean(dollars),
                interval.mean,
                interval.low,
                interval.high,
                front=False,
            )
        )
    points.sort(key=lambda point: (point.usd, -point.mean))
    return [_with_front(point, points) for point in points]


def _with_front(point: CostPoint, points: Iterable[CostPoint]) -> CostPoint:
    """The point, on the front unless another one is at least as good for no more dollars."""
    is_beaten = any(
        other.usd <= point.usd
        and other.mean >= point.mean
        and (other.usd, other.mean) != (point.usd, point.mean)
        for other in points
    )
    return CostPoint(point.name, point.usd, point.mean, point.low, point.high, front=not is_beaten)


def _evaluation_answers(evaluation: Evaluation, prefix: str) -> list[ScoredAnswer]:
    answers = []
    for record, score in zip(evaluation.records, first_scores(evaluation), strict=True):
        question = (record["task"], record["place"])
        answers.append(ScoredAnswer(prefix + record["system"], question, _worth(record), score))
    return answers


def _training_answers(rollouts: Sequence[Record], name: str) -> list[ScoredAnswer]:
    """The training rollouts of the last tenth of a run's steps."""
    training = [record for record in rollouts if record.get("mode", "train") == "train"]
    steps = max((record["step"] for record in training), default=0) + 1
    first_step = steps - max(1, steps // 10)
    answers = []
    for group, record in zip(groups_of(training)[0], training, strict=True):
        if record["step"] >= first_step:
            score = exact_match_of_record(record)
            answers.append(ScoredAnswer(name, group, _worth(record), score))
    return answers


def _worth(record: Record) -> float:
    """The dollars of a rollout, or of an answer, as if each of its replies had been paid for it."""
    return record.get("worth_usd", record.get("cost_usd")) or 0.0
