"""Differences between two systems on the same questions: paired, so that hard questions are hard for both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb

from .intervals import Estimate, bootstrap_interval


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
