"""From records to numbers: a score per question, a mean with its interval, differences between systems.

A question's score is the mean over its runs: runs of one question are not independent of each other, so intervals are
over questions. Failed answers have no score; how many there are is always beside the mean. Wilson's interval for shares
(exact match, accuracy), the bootstrap's for everything else (F1, rewards, turns). Differences are paired: hard
questions are hard for both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from ..llm.guard import call_guarded
from ..rewards import PromptR1Reward
from ..rollout import Rollout
from ..rollout.environment import same_columns
from .metrics import BINARY, EvaluateScore, Score, judged
from .repeats import repeat_values

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
        answers (`int`), failed (`int`): Questions times runs, and those of them that failed and have no score.
        ungraded (`dict[str, int]`): By metric, answers that it could not grade.
        calls (`float`), tokens (`float`), cost_usd (`float`), seconds (`float`): Means per answered question.
        fit_calls (`int`): Calls it took to make the system.
        repeated (`dict[str, dict[str, Estimate]]`): Statistics of several runs beyond the mean, by metric and name:
            `pass@1` to `pass@k`, `majority@k`, `spread`; see [`repeat_values`].
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
    repeated: dict[str, dict[str, Estimate]] = field(default_factory=dict)


def score_records(
    records: Sequence[Mapping[str, Any]], metrics: Mapping[str, Score]
) -> dict[str, list[float | None]]:
    """Every metric of every record, in order; `None` for failed answers and where a metric has no score.

    Args:
        records (`Sequence[Mapping]`): With `answer` (and `whole`) or `error`, and `answers`, the accepted ones.
        metrics (`Mapping[str, Score]`): By name; see [`find_metrics`].
    """
    scores: dict[str, list[float | None]] = {}
    for name, metric in metrics.items():
        scores[name] = [0.0 if _given(record) else None for record in records]
        # Asked and without an answer is 0, except where less may be better: there it is what an empty answer is.
        silent = isinstance(metric, EvaluateScore)
        asked = [
            i
            for i, one in enumerate(records)
            if _given(one) and (silent or one.get("answer") is not None)
        ]
        texts = [_read(records[i], whole=name in READ_WHOLE) for i in asked]
        if metric is judged:
            values: Sequence[float | None] = judged([records[i] for i in asked])
        else:
            values = metric(texts, [records[i]["answers"] for i in asked])
        for i, value in zip(asked, values, strict=True):
            scores[name][i] = None if value is None else float(value)
    return scores


async def score_rollouts(
    reward: Callable[..., Any], rollouts: Sequence[Rollout]
) -> list[float | None]:
    """The rewards of finished episodes, by a function with TRL's signature, plain or `async`.

    Args:
        reward (`Callable`): Gets `prompts`, `completions` (the answers), `rollout` (the episodes) and the columns of
            their rows, those that an environment's `reset` added among them.
        rollouts (`Sequence[Rollout]`): The episodes.

    Returns:
        `list[float | None]`: `None` for a failed episode, which the function does not get, and where it returns none.
    """
    finished = [rollout for rollout in rollouts if rollout.error is None]
    if not finished:
        return [None] * len(rollouts)
    rows = same_columns([rollout.row for rollout in finished])
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    prompts = columns.pop("prompt", [row.get("question") for row in rows])
    answers = [rollout.answer or "" for rollout in finished]
    arguments = {**columns, "prompts": prompts, "completions": answers, "rollout": finished}
    given = iter(await call_guarded(reward, **arguments))
    scores: list[float | None] = []
    for rollout in rollouts:
        score: Any = None if rollout.error is not None else next(given)
        is_missing = score is None or score != score
        scores.append(None if is_missing else float(score))
    return scores


def format_scores(records: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """R_fmt (eq 10) of each record whose trajectory has an agent's turns; `None` for others and for failures."""
    return [
        PromptR1Reward().score_turns([turn["text"] for turn in turns], record["answers"]).format
        if _given(record) and (turns := _turns(record))
        else None
        for record in records
    ]


def summarise(
    system: str,
    task: str,
    records: Sequence[Mapping[str, Any]],
    metrics: Mapping[str, Score],
    fit_calls: int = 0,
) -> Result:
    """One system on one task, from its records; an agent's also have the metric `format`, ProRefine's `iterations`."""
    scores: dict[str, list[float | None]] = score_records(records, metrics)
    for name, given_by in (
        ("format", format_scores(records)),
        ("iterations", [_iterations(one) for one in records]),
    ):
        if any(score is not None for score in given_by):
            scores[name] = given_by
    given = [record for record in records if _given(record)]
    failed = len(records) - len(given)
    values = {name: _per_question(records, of_all) for name, of_all in scores.items()}
    repeated = {name: _repeated(records, of_all, name in BINARY) for name, of_all in scores.items()}
    return Result(
        system=system,
        task=task,
        values=values,
        estimates={name: _estimate(name, list(means.values())) for name, means in values.items()},
        answers=len(records),
        failed=failed,
        ungraded={name: of_all.count(None) - failed for name, of_all in scores.items()},
        fit_calls=fit_calls,
        repeated={name: found for name, found in repeated.items() if found},
        **{
            name: fmean(record.get(name, 0) for record in given) if given else 0.0
            for name in ("calls", "tokens", "cost_usd", "seconds")
        },
    )


def _per_question(
    records: Sequence[Mapping[str, Any]], scores: Sequence[float | None]
) -> dict[int, float]:
    runs: dict[int, list[float]] = defaultdict(list)
    for record, score in zip(records, scores, strict=True):
        if score is not None:
            runs[record["place"]].append(score)
    return {place: sum(of_one) / len(of_one) for place, of_one in sorted(runs.items())}


def _estimate(name: str, values: Sequence[float]) -> Estimate | None:
    if not values:
        return None
    # Also of several runs that agree on every question: the bootstrap would be certain of 0 or 1.
    if name in BINARY and set(values) <= {0.0, 1.0}:
        return wilson_interval(round(sum(values)), len(values))
    return bootstrap_interval(values)


def _repeated(
    records: Sequence[Mapping[str, Any]], scores: Sequence[float | None], is_binary: bool
) -> dict[str, Estimate]:
    """Statistics of several runs, as means over the questions."""
    found = {
        key: list(one.values()) for key, one in repeat_values(records, scores, is_binary).items()
    }
    return {
        key: wilson_interval(round(sum(values)), len(values))
        if "@" in key and set(values) <= {0.0, 1.0}  # shares of questions
        else bootstrap_interval(values)
        for key, values in found.items()
        if values
    }


def _given(record: Mapping[str, Any]) -> bool:
    return record.get("error") is None


def _read(record: Mapping[str, Any], whole: bool) -> str:
    if not whole:
        return "" if record["answer"] is None else str(record["answer"])
    # An answer without a reply around it is given the mark that these metrics look for.
    return str(record["whole"]) if record.get("whole") else f"Answer: {record['answer']}"


def _turns(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    trajectory = record.get("trajectory")
    return trajectory.get("turns", []) if isinstance(trajectory, Mapping) else []


def _iterations(record: Mapping[str, Any]) -> float | None:
    """Refinement steps of an answered question (ProRefine, Figure 4)."""
    trajectory = record.get("trajectory") if _given(record) else None
    return trajectory.get("steps") if isinstance(trajectory, Mapping) else None


# Intervals and differences --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A mean with its confidence interval.

    Args:
        mean (`float`), low (`float`), high (`float`): The mean over the items, and the ends of the interval.
        n (`int`): How many items it is over.
    """

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] (n={self.n})"


def wilson_interval(successes: int, n: int, level: float = 0.95) -> Estimate:
    """Wilson's score interval for a share.

    Unlike the textbook mean ± 1.96 standard errors it stays within [0, 1] and does not shrink to nothing at 0 or n
    successes (Wilson 1927).

    Args:
        successes (`int`): How many items succeeded.
        n (`int`): Out of how many, at least 1.
        level (`float`, *optional*, defaults to `0.95`): The coverage aimed at.

    Raises:
        `ValueError`: If `n` is not positive, `successes` is not in [0, n] or `level` not in (0, 1).
    """
    _check_level(level)
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(
            f"expected 0 <= successes <= n and n >= 1, got successes={successes}, n={n}"
        )
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share = successes / n
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * (share * (1 - share) / n + z**2 / (4 * n**2)) ** 0.5
    # The ends are exact at 0 and n successes; rounding must not put the mean outside.
    return Estimate(
        share, max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)), n
    )


def bootstrap_interval(
    values: Sequence[float], level: float = 0.95, n_resamples: int = 2000, seed: int = 0
) -> Estimate:
    """Percentile bootstrap interval for a mean.

    Args:
        values (`Sequence[float]`): One number per item, at least one, all finite. Leave failed items out: they have no
            value, and `n` then says how many had one.
        level (`float`, *optional*, defaults to `0.95`): The coverage aimed at. Below about 30 items the percentile
            method covers somewhat less.
        n_resamples (`int`, *optional*, defaults to `2000`): Resamples drawn.
        seed (`int`, *optional*, defaults to `0`): The same seed and values give the same interval.

    Raises:
        `ValueError`: If there is no value or one is not finite, `n_resamples` is below 1 or `level` not in (0, 1).
    """
    _check_level(level)
    if n_resamples < 1:
        raise ValueError(f"n_resamples must be at least 1, got {n_resamples}")
    sample = np.asarray(values, dtype=float)
    if sample.ndim != 1 or not sample.size or not np.isfinite(sample).all():
        raise ValueError(
            f"expected finite numbers, at least one, in one dimension; got {len(values)} values"
        )
    rng, n = np.random.default_rng(seed), sample.size
    means = [sample[rng.integers(0, n, n)].mean() for _ in range(n_resamples)]
    low, high = np.quantile(means, [0.5 - level / 2, 0.5 + level / 2])
    return Estimate(float(sample.mean()), float(low), float(high), n)


@dataclass(frozen=True)
class PairedDifference:
    """One system against another.

    Args:
        difference ([`Estimate`]): Mean of (first - second) over the questions that both have a score for, with its
            bootstrap interval.
        wins (`int`), losses (`int`), ties (`int`): Questions on which the first is better, worse, as good.
        p_value (`float`): Two-sided; McNemar's exact test. See [`mcnemar`].
        left_out (`int`): Questions that only one of them has a score for.
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
    """Compare scores by question.

    Args:
        first (`Mapping[int, float]`), second (`Mapping[int, float]`): Score by question.
        level (`float`), n_resamples (`int`), seed (`int`): Settings of the interval; see [`bootstrap_interval`].

    Raises:
        `ValueError`: If they have no question in common.
    """
    both = sorted(set(first) & set(second))
    if not both:
        raise ValueError("the two systems have no question in common that both have a score for")
    differences = [float(first[question] - second[question]) for question in both]
    wins = sum(difference > 0 for difference in differences)
    losses = sum(difference < 0 for difference in differences)
    interval, ties = (
        bootstrap_interval(differences, level, n_resamples, seed),
        len(both) - wins - losses,
    )
    return PairedDifference(
        interval, wins, losses, ties, mcnemar(wins, losses), len(set(first) ^ set(second))
    )


def mcnemar(wins: int, losses: int) -> float:
    """McNemar's test in its exact form: how likely so uneven a split of the questions on which two systems differ is,
    if neither is better. Ties say nothing.

    For scores that are not 0 or 1 (means over several runs, F1) the same number is that of the sign test.

    Returns:
        `float`: The two-sided p-value; 1.0 where they never differ.

    Raises:
        `ValueError`: If a count is negative.
    """
    if min(wins, losses) < 0:
        raise ValueError(f"counts must not be negative, got {wins} and {losses}")
    differing = wins + losses
    tail = sum(comb(differing, k) for k in range(min(wins, losses) + 1))
    return min(1.0, tail * 2 / 2**differing)  # whole numbers, however large, up to this division


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")
