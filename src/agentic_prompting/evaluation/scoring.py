"""From records to numbers: the score of each answer, and the [`Result`] of a system on a task.

A question's score is the mean over its runs. Runs of one question are not independent of each
other, so intervals are over questions. Failed answers have no score; their number is always
reported beside the mean.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from types import MappingProxyType
from typing import Any

from ..llm.guard import call_guarded, describe
from ..rewards import PromptR1Reward
from ..rollout import Rollout
from ..rollout.environment import same_columns
from .answer_records import is_answered, row_index_of
from .intervals import Estimate, estimate_mean
from .metrics import BINARY, EvaluateScore, Score, judged
from .repeats import repeat_values
from .systems import worth_of

READ_WHOLE = frozenset({"integer_match", "letter_match", "word_sorting_match"})
"""Metrics that read the whole reply and find the answer in it themselves."""


@dataclass(frozen=True)
class Result:
    """The result of one system on one task.

    Args:
        system (`str`), task (`str`): Names of the system and the task.
        values (`dict[str, dict[int, float]]`): By metric and index of the question, the mean over
            its runs. A question without a score in any run is missing.
        estimates (`dict[str, Estimate | None]`): By metric; `None` if nothing could be scored.
        answers (`int`), failed (`int`): Number of questions times runs, and how many of these
            answers failed and have no score.
        ungraded (`dict[str, int]`): By metric, the number of answers that it could not grade.
        calls (`float`), tokens (`float`), seconds (`float`): Means per answered question.
        worth_usd (`float`): Mean US dollars of an answered question at the price of all its calls,
            those that were replayed included.
        cost_usd (`float`): The part of it that was paid in this run.
        fit_calls (`int`): Calls that were needed to make the system.
        repeated (`dict[str, dict[str, Estimate]]`): Statistics of several runs beyond the mean, by
            metric and name: `pass@1` to `pass@k`, `majority@k`, `spread`; see [`repeat_values`].
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
    worth_usd: float
    cost_usd: float
    seconds: float
    fit_calls: int
    repeated: dict[str, dict[str, Estimate]] = field(default_factory=dict)


def score_records(
    records: Sequence[Mapping[str, Any]], metrics: Mapping[str, Score]
) -> dict[str, list[float | None]]:
    """Score every record with every metric, in order.

    The score of a failed answer is `None`, and so is one that a metric cannot compute.

    Args:
        records (`Sequence[Mapping]`): Records with `answer` (and `whole`) or `error`, and with
            `answers`, the accepted answers.
        metrics (`Mapping[str, Score]`): Metrics by name; see [`find_metrics`].
    """
    scores: dict[str, list[float | None]] = {}
    for name, metric in metrics.items():
        # A system that was asked and gave no answer has the score 0. A metric of `evaluate` is an
        # exception: less may be better there, so it scores the empty text.
        scores_empty_text = isinstance(metric, EvaluateScore)
        metric_scores: list[float | None] = []
        indices: list[int] = []
        for index, record in enumerate(records):
            has_answered = is_answered(record)
            metric_scores.append(0.0 if has_answered else None)
            if has_answered and (scores_empty_text or record.get("answer") is not None):
                indices.append(index)

        # Score the remaining answers together.
        scored_records = [records[index] for index in indices]
        if metric is judged:
            values: Sequence[float | None] = judged(scored_records)
        else:
            texts = [_text_to_score(record, name in READ_WHOLE) for record in scored_records]
            accepted = [record["answers"] for record in scored_records]
            values = _call_metric(name, metric, texts, accepted)
        for index, value in zip(indices, values, strict=True):
            metric_scores[index] = _read_score(value, name)
        scores[name] = metric_scores
    return scores


def _call_metric(
    name: str, metric: Score, texts: Sequence[str], accepted: Sequence[Sequence[str]]
) -> Sequence[float | None]:
    """The scores of all answers.

    Raises:
        `ValueError`: A metric that is a function raises an error, or does not return a value for
        each answer.
    """
    if isinstance(metric, EvaluateScore):
        return metric(texts, accepted)
    form = (
        "a metric is a function of all answers (a list of texts) and of the accepted answers of "
        "each (a list of lists), and returns a number for each; "
        "`agentic_prompting.evaluation.metrics.each` makes one of a function of one answer"
    )
    try:
        values = list(metric(texts, accepted))
    except Exception as error:
        raise ValueError(f"the metric {name} failed: {describe(error)}; {form}") from error
    if len(values) != len(texts):
        raise ValueError(
            f"the metric {name} returned {len(values)} values for {len(texts)} answers; {form}"
        )
    return values


def _read_score(value: Any, metric: str) -> float | None:
    """Read what a metric has returned for one answer: a number or `None`."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"the metric {metric} must return a number or None for each answer, not {value!r:.80}"
        ) from None


async def score_rollouts(
    reward: Callable[..., Any], rollouts: Sequence[Rollout]
) -> list[float | None]:
    """Score finished episodes with a reward function of TRL's signature, plain or `async`.

    Args:
        reward (`Callable`): Called with `prompts`, `completions` (the answers), `rollout` (the
            episodes) and the columns of their rows, including those that an environment's `reset`
            added.
        rollouts (`Sequence[Rollout]`): The episodes.

    Returns:
        `list[float | None]`: `None` for a failed episode, which the function does not see, and
            where the function returns `None`.
    """
    finished = [rollout for rollout in rollouts if rollout.error is None]
    if not finished:
        return [None] * len(rollouts)

    # The arguments of the reward function: a list per column of the rows.
    rows = same_columns([rollout.row for rollout in finished])
    columns: dict[str, list[Any]] = {}
    for name in rows[0]:
        columns[name] = [row[name] for row in rows]
    prompts = columns.pop("prompt", [row.get("question") for row in rows])
    answers = [rollout.answer or "" for rollout in finished]
    arguments = {**columns, "prompts": prompts, "completions": answers, "rollout": finished}
    # Only finished episodes have been passed, so there may be fewer rewards than rollouts.
    returned = list(await call_guarded(reward, **arguments))
    if len(returned) != len(finished):
        name = getattr(reward, "__name__", type(reward).__name__)
        raise ValueError(
            f"the reward function {name} must return one number or None for each of the "
            f"{len(finished)} completions; it returned {len(returned)}"
        )
    rewards = iter(returned)

    # Back in the order of all rollouts.
    scores: list[float | None] = []
    for rollout in rollouts:
        score: Any = None if rollout.error is not None else next(rewards)
        # NaN is the only number that differs from itself.
        is_missing = score is None or score != score
        scores.append(None if is_missing else float(score))
    return scores


def format_scores(records: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """R_fmt (eq 10) of each record whose trajectory has an agent's turns; `None` for others, for
    failures, and for agent programs, whose turns have a form of their own.
    """
    scores: list[float | None] = []
    for record in records:
        # Only an agent's trajectory has turns, and only an answered record has a score.
        turns = _turns_of(record)
        if not is_answered(record) or not turns or _is_of_program(record):
            scores.append(None)
            continue
        texts = [turn["text"] for turn in turns]
        scores.append(PromptR1Reward().score_turns(texts, record["answers"]).format)
    return scores


def count_iterations(records: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Refinement steps of each answered question (ProRefine, Figure 4); `None` for other records."""
    counts: list[float | None] = []
    for record in records:
        trajectory = record.get("trajectory")
        if is_answered(record) and isinstance(trajectory, Mapping):
            counts.append(trajectory.get("steps"))
        else:
            counts.append(None)
    return counts


SYSTEM_METRICS = MappingProxyType({"format": format_scores, "iterations": count_iterations})
"""Metrics that [`summarise`] adds by itself to the results of the systems that have them."""


def summarise(
    system: str,
    task: str,
    records: Sequence[Mapping[str, Any]],
    metrics: Mapping[str, Score],
    fit_calls: int = 0,
) -> Result:
    """Summarise the records of one system on one task.

    An agent's results also have the metric `format`, and ProRefine's the metric `iterations`.
    """
    scores = score_records(records, metrics)

    # Metrics that only some systems have.
    for name, score_system in SYSTEM_METRICS.items():
        metric_scores = score_system(records)
        if any(score is not None for score in metric_scores):
            scores[name] = metric_scores

    # Failed answers count, but are part of no mean.
    answered = [record for record in records if is_answered(record)]
    failed = len(records) - len(answered)

    # For each metric: means per question, their estimate, and statistics of several runs.
    values: dict[str, dict[int, float]] = {}
    estimates: dict[str, Estimate | None] = {}
    ungraded: dict[str, int] = {}
    repeated: dict[str, dict[str, Estimate]] = {}
    for name, metric_scores in scores.items():
        values[name] = _mean_per_question(records, metric_scores)
        # All metrics are scores from 0 to 1, but for the number of iterations.
        estimates[name] = estimate_mean(list(values[name].values()), is_share=name != "iterations")
        # Failed answers have no score in any metric; the others without one could not be graded.
        ungraded[name] = metric_scores.count(None) - failed
        statistics = _estimate_repeats(records, metric_scores, name in BINARY)
        if statistics:
            repeated[name] = statistics

    # The mean cost of an answered question.
    def mean_of(field_name: str) -> float:
        if not answered:
            return 0.0
        return fmean(record.get(field_name, 0) for record in answered)

    worths = [worth_of(record) for record in answered]

    return Result(
        system=system,
        task=task,
        values=values,
        estimates=estimates,
        answers=len(records),
        failed=failed,
        ungraded=ungraded,
        calls=mean_of("calls"),
        tokens=mean_of("tokens"),
        worth_usd=fmean(worths) if worths else 0.0,
        cost_usd=mean_of("cost_usd"),
        seconds=mean_of("seconds"),
        fit_calls=fit_calls,
        repeated=repeated,
    )


def _mean_per_question(
    records: Sequence[Mapping[str, Any]], scores: Sequence[float | None]
) -> dict[int, float]:
    """Return the mean score of each question over its runs, by index of the question."""
    scores_by_question: dict[int, list[float]] = defaultdict(list)
    for record, score in zip(records, scores, strict=True):
        if score is not None:
            scores_by_question[row_index_of(record)].append(score)
    means = {}
    for question in sorted(scores_by_question):
        question_scores = scores_by_question[question]
        means[question] = sum(question_scores) / len(question_scores)
    return means


def _estimate_repeats(
    records: Sequence[Mapping[str, Any]], scores: Sequence[float | None], is_binary: bool
) -> dict[str, Estimate]:
    """Statistics of several runs, as means over the questions."""
    estimates = {}
    for name, value_of_question in repeat_values(records, scores, is_binary).items():
        # pass@k and majority@k are shares, the spread is not.
        estimate = estimate_mean(list(value_of_question.values()), is_share="@" in name)
        if estimate is not None:
            estimates[name] = estimate
    return estimates


def _text_to_score(record: Mapping[str, Any], read_whole: bool) -> str:
    if not read_whole:
        return "" if record["answer"] is None else str(record["answer"])
    if record.get("whole"):
        # These metrics find the answer in the reply themselves.
        return str(record["whole"])
    # An answer without a reply gets the mark that these metrics search for.
    return f"Answer: {record['answer']}"


def _turns_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    trajectory = record.get("trajectory")
    return trajectory.get("turns", []) if isinstance(trajectory, Mapping) else []


def _is_of_program(record: Mapping[str, Any]) -> bool:
    """Whether an agent program has answered, which counts its calls."""
    trajectory = record.get("trajectory")
    return isinstance(trajectory, Mapping) and "program/calls" in trajectory.get("counts", {})
