"""The ceiling: what a large LLM answers right when it is asked in the best of several ways, or the best of a pool.

An oracle that picks the best of m requests for each row, by the mean of r repeats, picks luck as well: with four
requests that do not differ at all, its mean is 0.18 too high at r = 2. Choosing on r - 1 repeats and scoring on the one
left out, averaged over which one ("cross"), is free of luck, but its choice is worse than the oracle's. So the true
ceiling lies between the two, and their intervals give a bracket:

    [cross - h_cross, naive + h_naive]                                          h: t intervals over rows

A model that answers the same each time (temperature 0) needs one repeat, and its naive ceiling is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..scoring import Estimate
from .group_signal import mean_over_rows
from .prompts import TooFewScores, paired_gain


@dataclass(frozen=True)
class Ceiling:
    """The ceiling of an oracle's choice.

    Args:
        names (`tuple[str, ...]`): The choices, the plain one first.
        each (`dict[str, Estimate]`): The mean score of each alone.
        naive ([`Estimate`]): The best choice of each row by all its repeats: too high.
        cross ([`Estimate`], *optional*): The best choice by the other repeats: too low; `None` with one repeat.
        low (`float`), high (`float`): The bracket of the true ceiling.
        gain ([`Estimate`]): `cross` minus the plain choice, row by row (`naive` with one repeat).
        repeats (`int`): Answers of each choice to a row.
    """

    names: tuple[str, ...]
    each: dict[str, Estimate] = field(repr=False)
    naive: Estimate
    cross: Estimate | None
    low: float
    high: float
    gain: Estimate
    repeats: int

    def sentence(self) -> str:
        """The bracket in one sentence."""
        plain = self.each[self.names[0]]
        luck = (
            "" if self.cross is not None else " (right only if its answers are the same each time)"
        )
        return (
            f"{self.names[0]} {plain.mean:.3f} [{plain.low:.3f}, {plain.high:.3f}]; the best of {len(self.names)} for "
            f"each row between {self.low:.3f} and {self.high:.3f}{luck}"
        )


def measure_ceiling(scores: ArrayLike, names: Sequence[str]) -> Ceiling:
    """The ceiling in a table of scores.

    Args:
        scores (`ArrayLike` of shape (rows, choices, repeats)): Between 0 and 1, the plain choice first; NaN for an
            answer that failed, whose row is left out. Ties go to the first choice.
        names (`Sequence[str]`): Of the choices.

    Raises:
        [`TooFewScores`]: Fewer than two rows are complete.
        `ValueError`: A score is not between 0 and 1, or the shapes differ.
    """
    table = np.asarray(scores, dtype=float)
    if table.ndim != 3 or table.shape[1] != len(names):
        raise ValueError(
            f"expected scores of rows x {len(names)} choices x repeats, got the shape {table.shape}"
        )
    table = table[~np.isnan(table).any(axis=(1, 2))]
    if len(table) < 2:
        raise TooFewScores(f"a ceiling needs two complete rows, got {len(table)}")
    if table.min() < 0 or table.max() > 1:
        raise ValueError(f"scores must be between 0 and 1, got {table.min():g} to {table.max():g}")

    repeats = table.shape[2]
    means = table.mean(axis=2)
    best = means.max(axis=1)
    naive = mean_over_rows(best.tolist())
    each = {name: mean_over_rows(means[:, place].tolist()) for place, name in enumerate(names)}
    if repeats == 1:
        gain = paired_gain(np.column_stack([means[:, 0], best])).estimate
        return Ceiling(tuple(names), each, naive, None, naive.low, naive.high, gain, repeats)

    crossed = cross_choice(table)
    cross = mean_over_rows(crossed.tolist())
    gain = paired_gain(np.column_stack([means[:, 0], crossed])).estimate
    return Ceiling(tuple(names), each, naive, cross, cross.low, naive.high, gain, repeats)


def cross_choice(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each row, the score of the choice that is best on the other repeats, averaged over the repeats left out."""
    n, _, repeats = table.shape
    total = table.sum(axis=2)
    row_numbers = np.arange(n)
    scored = np.zeros(n)
    for left_out in range(repeats):
        others = np.round(total - table[:, :, left_out], 12)  # or rounding would break ties
        scored += table[row_numbers, others.argmax(axis=1), left_out]
    return scored / repeats
