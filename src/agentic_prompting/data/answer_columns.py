"""Reads accepted answers from the values of a column."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from typing import cast

from ..llm.numbers import answer_text, is_missing, number_text, value_text


def list_answers(value: object) -> list[str]:
    """Return the accepted answers of a column as a list of texts; missing ones are dropped.

    A value that is not a list is the only answer. A text is never parsed: `"[1, 2]"` stays as it
    is.

    Args:
        value (`str`, a number, or a list or array of these): The value of the column.
    """
    # A data frame has arrays for lists, whose elements keep their types.
    is_array = getattr(value, "ndim", 0) > 0
    if is_array or isinstance(value, (list, tuple)):
        items = list(cast(Iterable[object], value))
    else:
        items = [value]
    return [answer_text(item) for item in items if not is_missing(item)]


def parse_answers(value: object) -> list[str]:
    """Like [`list_answers`], but parse a text that is a list in JSON or as a Python literal.

    Args:
        value (`str`, a number, or a list or array of these): The value of the column.

    Example:

        >>> parse_answers('["a", 1]')
        ['a', '1']
        >>> parse_answers("plain")
        ['plain']
    """
    if not isinstance(value, str):
        return list_answers(value)
    # Lists are written as JSON, or by Python's `repr`.
    for parse in (json.loads, ast.literal_eval):
        try:
            parsed = parse(value)
        # Brackets by the thousand raise the last two.
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(parsed, list):
            return list_answers(parsed)
    return list_answers(value)


def strip_decimals(value: object) -> str:
    """Write a number without needless decimals: `145.0` becomes `"145"`, `"1,000"` `"1000"`.

    Args:
        value (`str` or a number): The number.

    Raises:
        `ValueError`: The value is not a number.
    """
    text = value_text(value).replace(",", "").strip()
    try:
        return number_text(Decimal(text))
    except InvalidOperation:
        raise ValueError(f"{text[:80]!r} is no number") from None
