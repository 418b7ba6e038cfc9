"""From records to numbers: a score per question, a mean with its interval, and what was left out of it.

A question's score is the mean over its runs: runs of one question are not independent of each other, so intervals are
over questions. Failed answers have no score; how many there are is always beside the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..rewards import prompt_r1_score
from .metrics import BINARY, EvaluateScore, Score
from .statistics import Estimate, bootstrap_interval, wilson_interval

READ_WHOLE = frozenset({"integer_match", "letter_match", "word_sorting_match"})
"""Metrics that find the answer in the reply themselves."""


@dataclass(frozen=True)
class Result:
    """One system on one task.

    Args:
        system (`str`), task (`str`): Which.
        values (`dict[str, dict[int, float]]`): By metric and place of the question, the mean over its runs. A question
            without a score in any run is not there.
        estimates (`dict[str, Estimate | None]`): By metric; `None` if nothing could be scored.
        answers (`int`): Questions times runs.
        failed (`int`): Those of them that failed and have no score.
        ungraded (`dict[str, int]`): By metric, answers that it could not grade.
        calls (`float`), tokens (`float`), cost_usd (`float`), seconds (`float`): Means per answered question.
        fit_calls (`int`): Calls it took to make the system.
    """

    system: str
    task: str
    values: dict[str, dict[int, float]]
    estimates: dict[str, Estimate | None]
    answers: int
    failed: int
    ungraded: dict[str, int]
    calls: float
    tokens: float
    cost_usd: float
    seconds: float
    fit_calls: int


def score_records(records: Sequence[Mapping[str, Any]], metrics: Mapping[str, Score]) -> dict[str, list[float | None]]:
    """Every metric of every record, in order; `None` for failed answers and where a metric cannot tell.

    Args:
        records (`Sequence[Mapping]`): With `answer` (and `whole`) or `error`, and `answers`, the accepted ones.
        metrics (`Mapping[str, Score]`): By name; see [`find_metrics`].
    """
    given = [number for number, record in enumerate(records) if record.get("error") is None]
    scores: dict[str, list[float | None]] = {}
    for name, metric in metrics.items():
        read = _whole if name in READ_WHOLE else _answer
        # Asked and without an answer is 0, except where less may be better: there it is what an empty answer is.
        silent = isinstance(metric, EvaluateScore)
        answered = [number for number in given if silent or records[number].get("answer") is not None]
        values = metric(
            [read(records[number]) for number in answered], [records[number]["answers"] for number in answered]
        )
        scores[name] = [None if record.get("error") is not None else 0.0 for record in records]
        for number, value in zip(answered, values, strict=True):
            scores[name][number] = None if value is None else float(value)
    return scores


def format_scores(records: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """R_fmt (eq 10) of each record whose trajectory has an agent's turns; `None` for others and for failures."""
    return [
        prompt_r1_score([turn["text"] for turn in turns], record["answers"]).format
        if record.get("error") is None and (turns := _turns(record))
        else None
        for record in records
    ]


def summarise(
    system: str, task: str, records: Sequence[Mapping[str, Any]], metrics: Mapping[str, Score], fit_calls: int = 0
) -> Result:
    """One system on one task, from its records; an agent's also have the metric `format`."""
    scores: dict[str, list[float | None]] = score_records(records, metrics)
    forms = format_scores(records)
    if any(form is not None for form in forms):
        scores["format"] = forms
    given = [record for record in records if record.get("error") is None]
    one_run = len({record["run"] for record in records}) <= 1
    values = {name: _per_question(records, of_all) for name, of_all in scores.items()}
    return Result(
        system=system,
        task=task,
        values=values,
        estimates={name: _estimate(name, list(mean.values()), one_run) for name, mean in values.items()},
        answers=len(records),
        failed=len(records) - len(given),
        ungraded={name: of_all.count(None) - (len(records) - len(given)) for name, of_all in scores.items()},
        fit_calls=fit_calls,
        **{name: _mean(given, name) for name in ("calls", "tokens", "cost_usd", "seconds")},
    )


def _per_question(records: Sequence[Mapping[str, Any]], scores: Sequence[float | None]) -> dict[int, float]:
    runs: dict[int, list[float]] = {}
    for record, score in zip(records, scores, strict=True):
        if score is not None:
            runs.setdefault(record["place"], []).append(score)
    return {place: sum(of_one) / len(of_one) for place, of_one in sorted(runs.items())}


def _estimate(name: str, values: Sequence[float], one_run: bool) -> Estimate | None:
    if not values:
        return None
    if name in BINARY and one_run:
        return wilson_interval(round(sum(values)), len(values))
    return bootstrap_interval(values)


def _mean(records: Sequence[Mapping[str, Any]], name: str) -> float:
    return sum(record.get(name, 0) for record in records) / len(records) if records else 0.0


def _answer(record: Mapping[str, Any]) -> str:
    return "" if record["answer"] is None else str(record["answer"])


def _whole(record: Mapping[str, Any]) -> str:
    # An answer without a reply around it is given the mark that these metrics look for.
    return str(record["whole"]) if record.get("whole") else f"Answer: {record['answer']}"


def _turns(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    trajectory = record.get("trajectory")
    return trajectory.get("turns", []) if isinstance(trajectory, Mapping) else []
