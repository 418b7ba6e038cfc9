"""Scores against dollars: each run, or each system of an evaluation, as a point."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ..evaluation import Evaluation
from ..evaluation.answer_records import row_index_of
from ..evaluation.intervals import estimate_mean
from ..evaluation.systems import worth_of
from ..records import Record
from .evaluation_summary import first_scores
from .rollout_records import exact_match_of_record, groups_of
from .run_summary import RunSummary


@dataclass(frozen=True)
class CostPoint:
    """A system's score and cost: mean score with its 95 % interval, US dollars a question, and
    whether it is on the front (no other system is at least as good for no more).
    """

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


def cost_points(runs: Sequence[RunSummary], names: Sequence[str]) -> list[CostPoint]:
    """Return each run, or each system of its evaluation, as a point of score against dollars, the
    cheapest first.

    For a run without an evaluation these are exact match and cost of the training rollouts of the
    last tenth of its steps. A shared or recorded reply costs the price of the original one. Failed
    answers are left out of both. The interval is over questions: answers to the same one say little
    more than one of them.

    Args:
        runs (`Sequence[RunSummary]`): The runs.
        names (`Sequence[str]`): Their names on the page.
    """
    # The answers of evaluations, or else of the last rollouts in training.
    answers: list[ScoredAnswer] = []
    for run, name in zip(runs, names, strict=True):
        if run.evaluation:
            answers += _evaluation_answers(run.evaluation, f"{name}: " if len(runs) > 1 else "")
        else:
            answers += _training_answers(run.rollouts, name)

    # A question counts once, however often it was asked.
    costs: dict[str, list[float]] = defaultdict(list)
    scores: dict[str, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    for answer in answers:
        if answer.score is not None:
            costs[answer.system].append(answer.usd)
            scores[answer.system][answer.question].append(answer.score)
    # Scores are averaged over each question first, costs over all answers.
    points = []
    for system, dollars in costs.items():
        question_means = [fmean(values) for values in scores[system].values()]
        interval = estimate_mean(question_means, is_share=True)
        assert interval is not None  # a system has a point only with scores
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
    # The cheapest point first, and of two with the same cost the better one.
    points.sort(key=lambda point: (point.usd, -point.mean))
    return [_with_front(point, points) for point in points]


def _with_front(point: CostPoint, points: Iterable[CostPoint]) -> CostPoint:
    """Return the point, on the front unless another one is at least as good for no more dollars."""
    # A point with the same cost and score does not beat another.
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
        question = (record["task"], row_index_of(record))
        answers.append(ScoredAnswer(prefix + record["system"], question, worth_of(record), score))
    return answers


def _training_answers(rollouts: Sequence[Record], name: str) -> list[ScoredAnswer]:
    """Return the training rollouts of the last tenth of a run's steps."""
    training = [record for record in rollouts if record.get("mode", "train") == "train"]
    # The last tenth of the steps, at least one; records count them from 0.
    steps = max((record["step"] for record in training), default=0) + 1
    first_step = steps - max(1, steps // 10)
    answers = []
    for group, record in zip(groups_of(training)[0], training, strict=True):
        if record["step"] >= first_step:
            score = exact_match_of_record(record)
            answers.append(ScoredAnswer(name, group, worth_of(record), score))
    return answers
