"""Intervals of means, and paired differences between two systems: pure functions of scores.

Scores that are all 0 or 1 have Wilson's interval, all others (partial scores, turns) the
bootstrap's. Differences are paired, because hard questions are hard for both systems.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import NormalDist

import numpy as np


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


def estimate_mean(values: Sequence[float], is_share: bool) -> Estimate | None:
    """Return the mean of some values with its 95 % interval; `None` without values.

    Scores that are all 0 or 1 have Wilson's interval, other values the bootstrap's.

    Args:
        values (`Sequence[float]`): One for each question.
        is_share (`bool`): Whether they are scores from 0 to 1, and no counts.
    """
    if not values:
        return None
    # Wilson's interval even if several runs agree on every question: the bootstrap of such
    # values has no width at 0 or 1.
    if is_share and set(values) <= {0.0, 1.0}:
        return wilson_interval(round(sum(values)), len(values))
    return bootstrap_interval(values)


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


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")


@dataclass(frozen=True)
class PairedDifference:
    """The difference between two systems.

    Args:
        difference ([`Estimate`]): Mean of (first - second) over the questions for which both have a
            score, with its interval.
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

    The interval of the difference is the bootstrap's. Where all differences are equal, which would
    give it no width, Wilson's upper limit for what was seen in none of the questions takes its
    place.

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
    scores = [*first.values(), *second.values()]
    if len(set(differences)) == 1 and all(0 <= score <= 1 for score in scores):
        difference = _equal_differences_interval(differences[0], len(differences), level)
    else:
        difference = bootstrap_interval(differences, level, n_resamples, seed)
    return PairedDifference(
        difference=difference,
        wins=wins,
        losses=losses,
        ties=len(common_questions) - wins - losses,
        p_value=mcnemar(wins, losses),
        left_out=len(set(first) ^ set(second)),
    )


def _equal_differences_interval(difference: float, n: int, level: float) -> Estimate:
    """Return the interval of a difference that is the same on all of n questions.

    At most a share u of further questions has another one, which is at least -1 and at most 1.
    """
    unseen_share = wilson_interval(0, n, level).high
    low = difference - unseen_share * (1 + difference)
    high = difference + unseen_share * (1 - difference)
    return Estimate(difference, low, high, n)


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
