"""One row of `fidelity.py`: a paper's rule, its value computed by other means, and the code's value."""

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
        got: The code's value.
        within (`float`, *optional*, defaults to `1e-9`): The largest difference of two numbers that count as equal.
    """

    at: str
    rule: str
    expected: Any
    got: Any
    within: float = 1e-9

    @property
    def holds(self) -> bool:
        return same(self.expected, self.got, self.within)


Part = Callable[[], Iterator[Row]]


def same(expected: Any, got: Any, within: float) -> bool:
    """Whether two values are equal; numbers, also inside lists and dicts, up to `within`."""
    if isinstance(expected, bool) or isinstance(got, bool) or expected is None or got is None:
        return expected is got
    if isinstance(expected, int | float) and isinstance(got, int | float):
        return math.isclose(expected, got, rel_tol=0, abs_tol=within)
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        return expected.keys() == got.keys() and all(
            same(expected[key], got[key], within) for key in expected
        )
    if _many(expected) and _many(got):
        return len(expected) == len(got) and all(
            same(a, b, within) for a, b in zip(expected, got, strict=True)
        )
    return bool(expected == got)


def _many(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def rows_of(paper: str, parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
    """All rows of a paper; a part that raises gives a row that does not hold."""
    for part in parts:
        try:
            for row in part():
                known = {"paper": paper, "at": row.at, "rule": row.rule, "holds": row.holds}
                yield (
                    known
                    if row.holds
                    else {**known, "expected": repr(row.expected), "got": repr(row.got)}
                )
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            yield {
                "paper": paper,
                "at": part.__name__,
                "rule": "can be checked",
                "holds": False,
                "got": what,
            }
