"""Restores the numbers that were written where a table has stored them as other floats."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..llm.numbers import is_missing

# As pandas and Arrow name these types.
_SHORT_FLOAT = re.compile(r"half|float(?:16|32)?\b", re.IGNORECASE)


def is_short_float(type_name: str) -> bool:
    """Return whether a column type of pandas or Arrow holds floats of 16 or 32 bits."""
    return _SHORT_FLOAT.search(type_name) is not None


def restore_short_floats(rows: Sequence[dict[str, Any]], types: Mapping[str, str]) -> None:
    """Give floats of 16 or 32 bits the digits that they were written with.

    Read as 64 bits, 0.1 becomes 0.10000000149.

    Args:
        rows (`Sequence[dict]`): Changed in place.
        types (`Mapping[str, str]`): The type of each column.
    """
    short_float_types = {
        column: type_name for column, type_name in types.items() if is_short_float(type_name)
    }
    if not short_float_types:
        return
    # numpy is slow to import, and only needed for such columns.
    import numpy

    def restore(value: object, float_type: type[numpy.floating[Any]]) -> object:
        if isinstance(value, float):
            return float(str(float_type(value)))
        if isinstance(value, list):
            return [restore(item, float_type) for item in value]
        return value

    for column, type_name in short_float_types.items():
        # NumPy prints a short float with the digits that it needs.
        is_half = "16" in type_name or "half" in type_name
        float_type = numpy.float16 if is_half else numpy.float32
        for row in rows:
            if column in row:
                row[column] = restore(row[column], float_type)


def restore_integers(rows: Sequence[dict[str, Any]]) -> None:
    """Turn the floats of each column into integers if all of them are whole numbers.

    Where a single value is missing, pandas makes floats of all, and no reply matches an accepted
    answer of 145.0.

    Args:
        rows (`Sequence[dict]`): Rows that all have the same columns. Changed in place.
    """
    if not rows:
        return
    for column in rows[0]:
        # A missing value does not keep the others from being whole numbers.
        rows_with_value = [row for row in rows if not is_missing(row[column])]
        if all(_is_whole_float(row[column]) for row in rows_with_value):
            for row in rows_with_value:
                row[column] = int(row[column])


def _is_whole_float(value: object) -> bool:
    return isinstance(value, float) and value.is_integer()
