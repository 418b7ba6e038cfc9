"""One row of `papers.py`: a paper's rule, its value computed by other means, and the code's value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """A formula, number or rule.

    Args:
        at (`str`): The place in the paper: `eq 10`, `Table 6`, `Algorithm 1`, `A.5`.
        rule (`str`): The rule that is checked, in a few words.
        expected: The value by the paper's text, computed without the code under test.
        actual: The code's value.
        within (`float`, *optional*, defaults to `1e-9`): The largest difference of two numbers that
            count as equal.
    """

    at: str
    rule: str
    expected: object
    actual: object
    within: float = 1e-9

    @property
    def holds(self) -> bool:
        return is_same(self.expected, self.actual, self.within)


Part = Callable[[], Iterator[Row]]


def is_same(expected: object, actual: object, within: float) -> bool:
    """Whether two values are equal; numbers, also inside lists and dicts, up to `within`."""
    # True is not 1, and None equals nothing else.
    if any(isinstance(value, bool) or value is None for value in (expected, actual)):
        return expected is actual

    if isinstance(expected, int | float) and isinstance(actual, int | float):
        return math.isclose(expected, actual, rel_tol=0, abs_tol=within)

    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        if expected.keys() != actual.keys():
            return False
        return all(is_same(value, actual[key], within) for key, value in expected.items())

    if _is_list(expected) and _is_list(actual):
        if len(expected) != len(actual):
            return False
        return all(is_same(a, b, within) for a, b in zip(expected, actual, strict=True))

    return bool(expected == actual)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def rows_of(paper: str, parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
    """All rows of a paper; a part that raises gives a row that does not hold."""
    for part in parts:
        try:
            for row in part():
                entry = {"paper": paper, "at": row.at, "rule": row.rule, "holds": row.holds}
                if not row.holds:
                    entry["expected"] = repr(row.expected)
                    entry["got"] = repr(row.actual)
                yield entry
        except Exception as error:
            yield {
                "paper": paper,
                "at": part.__name__,
                "rule": "can be checked",
                "holds": False,
                "got": f"{type(error).__name__}: {error}",
            }
