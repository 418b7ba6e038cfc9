"""The ceiling: the score of a large LLM under the best of several requests, or of the best model of
a pool.

An oracle that picks the best of m requests for each row, by the mean of r repeats, is partly lucky:
with four requests that do not differ at all, its mean is 0.18 too high at r = 2. Choosing on r - 1
repeats and scoring on the repeat left out, averaged over the repeats ("cross"), is free of luck,
but its choice is worse than the oracle's. The true ceiling therefore lies between the two, and
their intervals give a bracket:

    [cross - h_cross, naive + h_naive]                                          h: t intervals over rows

A model that answers the same each time (temperature 0) needs one repeat, and its naive ceiling is
right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..intervals import Estimate
from .group_signal import mean_over_rows
from .prompts import TooFewScores, paired_gain


@dataclass(frozen=True)
class Ceiling:
    """The ceiling of an oracle's choice.

    Args:
        names (`tuple[str, ...]`): Names of the choices, the plain one first.
        each (`dict[str, Estimate]`): Mean score of each choice alone.
        naive ([`Estimate`]): Score of the best choice for each row by all repeats: too high.
        cross ([`Estimate`], *optional*): Score of the best choice by the other repeats: too low.
            `None` with one repeat.
        low (`float`), high (`float`): The bracket of the true ceiling.
        gain ([`Estimate`]): `cross` minus the plain choice, row by row (`naive` with one repeat).
        repeats (`int`): Number of answers of each choice to a row.
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
        """Return the bracket in one sentence."""
        plain = self.each[self.names[0]]
        sentence = (
            f"{self.names[0]} {plain.mean:.3f} [{plain.low:.3f}, {plain.high:.3f}]; the best of "
            f"{len(self.names)} for each row between {self.low:.3f} and {self.high:.3f}"
        )
        if self.cross is None:
            sentence += " (right only if its answers are the same each time)"
        return sentence


def measure_ceiling(scores: ArrayLike, names: Sequence[str]) -> Ceiling:
    """Compute the ceiling from a table of scores.

    Args:
        scores (`ArrayLike` of shape (rows, choices, repeats)): Scores between 0 and 1, the plain
            choice first; NaN for a failed answer, whose row is left out. Ties go to the first
            choice.
        names (`Sequence[str]`): Names of the choices.

    Raises:
        [`TooFewScores`]: If fewer than two rows are complete.
        `ValueError`: If a score is not between 0 and 1, or the shapes differ.
    """
    # Check the table, and leave out incomplete rows.
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

    # Each choice alone, and the oracle's choice by all repeats.
    repeats = table.shape[2]
    means = table.mean(axis=2)  # (rows, choices)
    each = {}
    for column, name in enumerate(names):
        each[name] = mean_over_rows(means[:, column].tolist())
    best_scores = means.max(axis=1)
    naive = mean_over_rows(best_scores.tolist())

    # The choice without luck, for which a single repeat does not suffice.
    cross = None
    if repeats > 1:
        best_scores = cross_choice(table)
        cross = mean_over_rows(best_scores.tolist())
    return Ceiling(
        names=tuple(names),
        each=each,
        naive=naive,
        cross=cross,
        low=naive.low if cross is None else cross.low,
        high=naive.high,
        # With several repeats the gain is that of the choice without luck.
        gain=paired_gain(np.column_stack([means[:, 0], best_scores])).estimate,
        repeats=repeats,
    )


def cross_choice(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each row, the score of the choice that is best on the other repeats, averaged over the
    repeats left out.
    """
    # Subtracting one repeat from these totals leaves the totals of the others.
    n, _, repeats = table.shape
    totals = table.sum(axis=2)
    row_numbers = np.arange(n)
    sum_of_scores = np.zeros(n)
    for left_out in range(repeats):
        # Rounded, because floating-point errors would break ties.
        choosing_totals = np.round(totals - table[:, :, left_out], 12)
        sum_of_scores += table[row_numbers, choosing_totals.argmax(axis=1), left_out]
    return sum_of_scores / repeats
