"""Small readers of odd formats: lists stored as text, numbers with needless decimals, options in one string."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from math import isnan
from typing import Any


def as_text(value: Any) -> str:
    """One accepted answer as text. Texts and numbers only: what else turns up among answers is a broken row.

    Raises:
        `ValueError`: It is something else, a dict or a truth value for example.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"an accepted answer must be a text or a number, got {type(value).__name__}: {value!r:.80}")
    return str(value)


def missing(value: Any) -> bool:
    """Whether there is no value: `None`, or the NaN that a column of numbers holds in its place."""
    return value is None or (isinstance(value, float) and isnan(value))


def as_list(value: Any) -> list[str]:
    """A list that may be stored as JSON, as a Python literal or as itself; a scalar is a list of one."""
    if missing(value):
        return []
    if not isinstance(value, str):
        items = value if isinstance(value, (list, tuple)) else [value]
        return [as_text(item) for item in items if not missing(item)]
    for parse in (json.loads, ast.literal_eval):
        try:
            parsed = parse(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # nested too deeply to be a list of answers
            continue
        if isinstance(parsed, list):
            return [as_text(item) for item in parsed if not missing(item)]
    return [value]


def one_answer(value: Any) -> list[str]:
    """One answer, never parsed: `"[1, 2]"` stays the text it is. A missing one is none."""
    return [] if missing(value) else [as_text(value)]


def whole_number(value: Any) -> str:
    """A number without its needless decimals: `145.0`, `"145.0"` and `"145"` are `"145"`; `"1,000"` is `"1000"`."""
    number = float(str(value).replace(",", "").strip())
    return str(int(number)) if number.is_integer() else repr(number)


def gsm8k_answer(solution: str) -> str:
    """GSM8K's final number, commas removed and sign kept: `"… #### 24,960"` gives `"24960"`."""
    return solution.split("####")[-1].strip().replace(",", "")


def last_integer(solution: str) -> str:
    """The last token of a GSM8K solution as an integer: `"… #### 24,960"` gives `"24960"`."""
    return str(int(solution.split()[-1].replace(",", "")))


_MATHQA_OPTION = re.compile(r"([a-e]) \) (.*?)(?=\s*,?\s*[a-e] \) |\s*$)", re.DOTALL)


def mathqa_options(options: str) -> dict[str, str]:
    """MathQA's options, which are one string: `"a ) 38 , b ) 27.675"` gives `{"a": "38", "b": "27.675"}`."""
    return {letter: text.strip() for letter, text in _MATHQA_OPTION.findall(options)}


def squad_answers(answers: Any) -> list[str]:
    """SQuAD's answer texts, whether the list of structs came back as a dict of lists or as it is."""
    if isinstance(answers, Mapping):
        return list(answers["text"])
    return [answer["text"] for answer in answers or []]
