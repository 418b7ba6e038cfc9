"""The M×b matrix of mean rewards (eq 9): a row per system prompt, a column per problem, `None` where all failed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

_ROUNDING = 1e-9

Row = Sequence[float | None]


def mean(values: Row) -> float | None:
    """The mean of what there is; `None` if there is nothing."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def cell_means(rows: Sequence[Row]) -> list[float | None]:
    """Several rows of one prompt as one: per problem the mean of those that have a score."""
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"rows of scores differ in length: {[len(row) for row in rows]}")
    return [mean(column) for column in zip(*rows, strict=True)]


def common_columns(rows: Sequence[Row]) -> list[int]:
    """The problems on which every prompt that has a score at all has one: there conditions are matched."""
    return _complete([row for row in rows if mean(row) is not None])


def common_means(rows: Sequence[Row]) -> list[float | None]:
    """V_i of each prompt: its mean over the common problems; `None` for a prompt without any score.

    Where the prompts have no problem in common, nobody gets a value: there is nothing to compare.
    """
    columns = common_columns(rows)
    return [mean([row[column] for column in columns]) for row in rows]


def sole_wins(rows: Sequence[Row]) -> list[list[int]]:
    """For each prompt the problems on which it alone did best (ρ_i of Algorithm 2).

    Ties are nobody's win, and neither is a problem on which one of the prompts has no score.
    """
    wins: list[list[int]] = [[] for _ in rows]
    for column in _complete(rows):
        values = [row[column] or 0.0 for row in rows]
        top = max(values)
        holders = [index for index, value in enumerate(values) if value >= top - _ROUNDING]
        if len(holders) == 1:
            wins[holders[0]].append(column)
    return wins


def _complete(rows: Sequence[Row]) -> list[int]:
    if not rows:
        return []
    return [column for column in range(len(rows[0])) if all(row[column] is not None for row in rows)]
