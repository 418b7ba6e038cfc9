"""From records to numbers: a score per question, a mean with its interval, differences between
systems.

A question's score is the mean over its runs. Runs of one question are not independent of each
other, so intervals are over questions. Failed answers have no score; their number is always
reported beside the mean. Shares (exact match, accuracy) have Wilson's interval, everything else
(F1, rewards, turns) the bootstrap's. Differences are paired, because hard questions are hard for
both systems.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from ..llm.guard import call_guarded, describe
from ..rewards import PromptR1Reward
from ..rollout import Rollout
from ..rollout.environment import same_columns
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
            is_answered = _is_answered(record)
            metric_scores.append(0.0 if is_answered else None)
            if is_answered and (scores_empty_text or record.get("answer") is not None):
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
        `ValueError`: A metric that is a function raises an error, or does not return a value for each answer.
    """
    if isinstance(metric, EvaluateScore):
        return metric(texts, accepted)
    form = (
        "a metric is a function of all answers (a list of texts) and of the accepted answers of each (a list of lists), "
        "and returns a number for each; `agentic_prompting.evaluation.metrics.each` makes one of a function of one answer"
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
        if not _is_answered(record) or not turns or _is_of_program(record):
            scores.append(None)
            continue
        texts = [turn["text"] for turn in turns]
        scores.append(PromptR1Reward().score_turns(texts, record["answers"]).format)
    return scores


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
    system_scores = {
        "format": format_scores(records),
        "iterations": [_iterations_of(record) for record in records],
    }
    for name, metric_scores in system_scores.items():
        if any(score is not None for score in metric_scores):
            scores[name] = metric_scores

    # Failed answers count, but are part of no mean.
    answered = [record for record in records if _is_answered(record)]
    failed = len(records) - len(answered)

    # For each metric: means per question, their estimate, and statistics of several runs.
    values: dict[str, dict[int, float]] = {}
    estimates: dict[str, Estimate | None] = {}
    ungraded: dict[str, int] = {}
    repeated: dict[str, dict[str, Estimate]] = {}
    for name, metric_scores in scores.items():
        values[name] = _mean_per_question(records, metric_scores)
        estimates[name] = estimate_mean(list(values[name].values()), is_share=name in BINARY)
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
            scores_by_question[record["place"]].append(score)
    means = {}
    for question in sorted(scores_by_question):
        question_scores = scores_by_question[question]
        means[question] = sum(question_scores) / len(question_scores)
    return means


def estimate_mean(values: Sequence[float], is_share: bool) -> Estimate | None:
    """Return the mean of scores with its 95 % interval; `None` without scores.

    Shares whose values are all 0 or 1 have Wilson's interval, other scores the bootstrap's.
    """
    if not values:
        return None
    # Wilson's interval even if several runs agree on every question: the bootstrap of such
    # values has no width at 0 or 1.
    if is_share and set(values) <= {0.0, 1.0}:
        return wilson_interval(round(sum(values)), len(values))
    return bootstrap_interval(values)


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


def _is_answered(record: Mapping[str, Any]) -> bool:
    return record.get("error") is None


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


def _iterations_of(record: Mapping[str, Any]) -> float | None:
    """Refinement steps of an answered question (ProRefine, Figure 4)."""
    trajectory = record.get("trajectory")
    if not _is_answered(record) or not isinstance(trajectory, Mapping):
        return None
    return trajectory.get("steps")


# ---- intervals and differences ----


@dataclass(frozen=True)
class Estimate:
    """A mean with its confidence interval.

    Args:
        mean (`float`), low (`float`), high (`float`): The mean over the items, and the ends of the
            interval.
        n (`int`): Number of items.
    """

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] (n={self.n})"


def wilson_interval(successes: int, n: int, level: float = 0.95) -> Estimate:
    """Wilson's score interval for a share.

    Unlike the textbook mean ± 1.96 standard errors it stays within [0, 1] and does not shrink to
    nothing at 0 or n successes (Wilson 1927).

    Args:
        successes (`int`): Number of items that succeeded.
        n (`int`): Number of items, at least 1.
        level (`float`, *optional*, defaults to `0.95`): Nominal coverage.

    Raises:
        `ValueError`: If `n` is not positive, `successes` is not in [0, n] or `level` not in (0, 1).
    """
    _check_level(level)
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(
            f"expected 0 <= successes <= n and n >= 1, got successes={successes}, n={n}"
        )

    # The centre and half-width of Wilson's interval.
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share = successes / n
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half_width = z / (1 + z**2 / n) * (share * (1 - share) / n + z**2 / (4 * n**2)) ** 0.5

    # The ends are exact at 0 and n successes. Rounding must not put the mean outside of the
    # interval.
    low = max(0.0, min(share, centre - half_width))
    high = min(1.0, max(share, centre + half_width))
    return Estimate(share, low, high, n)


def bootstrap_interval(
    values: Sequence[float], level: float = 0.95, n_resamples: int = 2000, seed: int = 0
) -> Estimate:
    """Percentile bootstrap interval for a mean.

    Args:
        values (`Sequence[float]`): One number per item, at least one, all finite. Leave out failed
            items, which have no value; `n` is then the number of items that have one.
        level (`float`, *optional*, defaults to `0.95`): Nominal coverage. With fewer than about 30
            items the percentile method covers somewhat less.
        n_resamples (`int`, *optional*, defaults to `2000`): Number of resamples.
        seed (`int`, *optional*, defaults to `0`): The same seed and values give the same interval.

    Raises:
        `ValueError`: If there is no value or a value is not finite, `n_resamples` is below 1 or
            `level` not in (0, 1).
    """
    _check_level(level)
    if n_resamples < 1:
        raise ValueError(f"n_resamples must be at least 1, got {n_resamples}")
    sample = np.asarray(values, dtype=float)
    if sample.ndim != 1 or not sample.size or not np.isfinite(sample).all():
        raise ValueError(
            f"expected finite numbers, at least one, in one dimension; got {len(values)} values"
        )

    # Means of resamples, drawn with replacement; the interval is between their quantiles.
    rng = np.random.default_rng(seed)
    n = sample.size
    means = [sample[rng.integers(0, n, n)].mean() for _ in range(n_resamples)]
    low, high = np.quantile(means, [0.5 - level / 2, 0.5 + level / 2])
    return Estimate(float(sample.mean()), float(low), float(high), n)


@dataclass(frozen=True)
class PairedDifference:
    """The difference between two systems.

    Args:
        difference ([`Estimate`]): Mean of (first - second) over the questions for which both have a
            score, with its bootstrap interval.
        wins (`int`), losses (`int`), ties (`int`): Questions on which the first system is better,
            worse, equally good.
        p_value (`float`): Two-sided p-value of McNemar's exact test; see [`mcnemar`].
        left_out (`int`): Questions for which only one of the systems has a score.
    """

    difference: Estimate
    wins: int
    losses: int
    ties: int
    p_value: float
    left_out: int


def paired_difference(
    first: Mapping[int, float],
    second: Mapping[int, float],
    level: float = 0.95,
    n_resamples: int = 2000,
    seed: int = 0,
) -> PairedDifference:
    """Compare the scores of two systems question by question.

    Args:
        first (`Mapping[int, float]`), second (`Mapping[int, float]`): Scores by question.
        level (`float`), n_resamples (`int`), seed (`int`): Settings of the interval; see
            [`bootstrap_interval`].

    Raises:
        `ValueError`: If the systems have no question in common.
    """
    common_questions = sorted(set(first) & set(second))
    if not common_questions:
        raise ValueError("the two systems have no question in common that both have a score for")

    # The differences are paired, and only of questions for which both systems have a score.
    differences = [float(first[question] - second[question]) for question in common_questions]
    # The first system wins a question if its score is higher.
    wins = sum(difference > 0 for difference in differences)
    losses = sum(difference < 0 for difference in differences)
    return PairedDifference(
        difference=bootstrap_interval(differences, level, n_resamples, seed),
        wins=wins,
        losses=losses,
        ties=len(common_questions) - wins - losses,
        p_value=mcnemar(wins, losses),
        left_out=len(set(first) ^ set(second)),
    )


def mcnemar(wins: int, losses: int) -> float:
    """McNemar's exact test: the probability of a split of wins and losses at least as uneven, if
    neither is better.

    Ties carry no information. For scores that are not 0 or 1 (means over several runs, F1) the
    value is that of the sign test.

    Returns:
        `float`: The two-sided p-value; 1.0 if the systems never differ.

    Raises:
        `ValueError`: If a count is negative.
    """
    if min(wins, losses) < 0:
        raise ValueError(f"counts must not be negative, got {wins} and {losses}")
    # Under the null hypothesis, each question that differs is a fair coin: sum one tail, then
    # double it.
    differing = wins + losses
    tail = sum(comb(differing, k) for k in range(min(wins, losses) + 1))
    return min(1.0, tail * 2 / 2**differing)  # whole numbers, however large, up to this division


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")
