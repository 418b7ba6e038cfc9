"""Accepted answers that a rule can never match: an error before a run, instead of a score of 0 for every reply."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from .answers import accepted_answers
from .math import math_match, math_problem, math_reward
from .qa import normalize_answer, search_reward
from .reasoning import (
    integer_match,
    integer_problem,
    letter_match,
    letter_problem,
    word_sorting_match,
    word_sorting_problem,
)


def _search_problem(answer: str) -> str:
    return (
        ""
        if normalize_answer(answer)
        else "search_reward asks for an answer, and it is empty when normalised"
    )


_PROBLEMS: tuple[tuple[Any, Callable[[str], str]], ...] = (
    (integer_match, integer_problem),
    (letter_match, letter_problem),
    (word_sorting_match, word_sorting_problem),
    (math_match, math_problem),
    (math_reward, math_problem),
    (search_reward, _search_problem),
)


def _find_problem(rule: Any) -> Callable[[str], str] | None:
    """The function that says why no reply can match an accepted answer of a rule; `None` where any can be matched."""
    unwrapped = inspect.unwrap(rule) if callable(rule) else rule
    for known_rule, find_problem in _PROBLEMS:
        if unwrapped is known_rule:
            return find_problem
    return getattr(unwrapped, "answer_problem", None)


def check_answers(rule: Any, answers: Sequence[Any]) -> None:
    """Raise `ValueError` if a rule can never match an accepted answer, or if there is no accepted answer.

    Trainers, [`evaluate_agent`], [`evolve`] and [`ProRefiner`] call this for each row before anything is paid for. A
    rule of your own may have an attribute `answer_problem`: a function of an accepted answer (`str`) that returns why
    no reply can match it, or an empty text.

    Args:
        rule (`Callable`): A comparison or a reward function. For a wrapper (`__wrapped__`) its function is checked.
        answers (`Sequence`): The accepted answers of a row.
    """
    find_problem = _find_problem(rule)
    if find_problem is None:
        return
    for answer in accepted_answers(answers):
        problem_text = find_problem(answer)
        if problem_text:
            raise ValueError(
                f"no reply can match the accepted answer {answer[:80]!r}: {problem_text}"
            )


def check_answers_of_rows(rule: Any, rows: Any, column: str = "answers") -> None:
    """[`check_answers`] for rows; of streamed ones for the first.

    Args:
        rule (`Callable`): A comparison or a reward function.
        rows (`Dataset`, `IterableDataset` or `Sequence`): Rows without the column are not checked.
        column (`str`, *optional*, defaults to `"answers"`): The column of the accepted answers.

    Raises:
        `ValueError`: Names the first row that has such an answer.
    """
    if _find_problem(rule) is None:
        return
    if hasattr(rows, "select_columns") and column in (rows.column_names or ()):
        rows = rows.select_columns([column])
    for number, row in enumerate(rows if hasattr(rows, "__len__") else islice(rows, 1)):
        if row.get(column) is None:
            continue
        try:
            check_answers(rule, row[column])
        except ValueError as error:
            raise ValueError(f"row {number} of the dataset: {error}") from None
