"""Intervals, so that no number of ours stands alone, and differences between systems on the same questions.

Over test items; a second training seed is another matter. Wilson for shares (exact match, accuracy), bootstrap for
everything else (F1, rewards, turns). Differences are paired: hard questions are hard for both.
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
        mean (`float`): The mean over the items.
        low (`float`), high (`float`): The ends of the interval.
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
        raise ValueError(f"expected 0 <= successes <= n and n >= 1, got successes={successes}, n={n}")
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share = successes / n
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * (share * (1 - share) / n + z**2 / (4 * n**2)) ** 0.5
    # The ends are exact at 0 and n successes; rounding must not put the mean outside.
    return Estimate(share, max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)), n)


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
        raise ValueError(f"expected finite numbers, at least one, in one dimension; got {len(values)} values")
    rng = np.random.default_rng(seed)
    n = sample.size
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
        level (`float`, *optional*, defaults to `0.95`): Of the interval.
        n_resamples (`int`, *optional*, defaults to `2000`): Of the bootstrap.
        seed (`int`, *optional*, defaults to `0`): Of the bootstrap.

    Raises:
        `ValueError`: If they have no question in common.
    """
    both = sorted(set(first) & set(second))
    if not both:
        raise ValueError("the two systems have no question in common that both have a score for")
    differences = [float(first[question] - second[question]) for question in both]
    wins = sum(difference > 0 for difference in differences)
    losses = sum(difference < 0 for difference in differences)
    return PairedDifference(
        bootstrap_interval(differences, level, n_resamples, seed),
        wins,
        losses,
        len(both) - wins - losses,
        mcnemar(wins, losses),
        len(set(first) ^ set(second)),
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
