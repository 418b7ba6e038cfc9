"""Checks accepted answers before a run.

With an accepted answer that a rule can never match, every reply would score 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from .answers import accepted_answers
from .math import math_match, math_problem, math_reward
from .qa import normalize_answer
from .reasoning import (
    integer_match,
    integer_problem,
    letter_match,
    letter_problem,
    word_sorting_match,
    word_sorting_problem,
)
from .search import search_reward

FindProblem = Callable[[str], str]
"""Returns why no reply can match an accepted answer; an empty text if one can."""


def check_answers(rule: object, answers: Sequence[Any]) -> None:
    """Raise `ValueError` if a rule can never match an accepted answer, or if there is none.

    Trainers, [`evaluate_agent`], [`evolve`] and [`ProRefiner`] call this for each row before they
    spend anything. A user's rule may have an attribute `answer_problem`: a function of an accepted
    answer (`str`) that returns why no reply can match it, or an empty text.

    Args:
        rule (`Callable`): A comparison or a reward function. For a wrapper (`__wrapped__`) its
            function is checked. Anything else, such as a reward model, can match any answer.
        answers (`Sequence`): The accepted answers of a row.
    """
    find_problem = _find_check(rule)
    if find_problem is None:
        return
    for answer in accepted_answers(answers):
        problem = find_problem(answer)
        if problem:
            raise ValueError(f"no reply can match the accepted answer {answer[:80]!r}: {problem}")


def check_answers_of_rows(
    rule: object, rows: Iterable[Mapping[str, Any]], column: str = "answers"
) -> None:
    """Call [`check_answers`] for each row; for the first one if the rows are streamed.

    Args:
        rule (`Callable`): A comparison or a reward function.
        rows (`Dataset`, `IterableDataset` or `Sequence`): Rows without the column are not checked.
        column (`str`, *optional*, defaults to `"answers"`): The column of the accepted answers.

    Raises:
        `ValueError`: Names the first row that has such an answer.
    """
    if _find_check(rule) is None:
        return
    # Read no other column of a dataset: that is slow.
    if hasattr(rows, "select_columns") and column in (getattr(rows, "column_names", None) or ()):
        rows = rows.select_columns([column])
    # Streamed rows can be read only once; the first one is read anyway.
    if not hasattr(rows, "__len__"):
        rows = islice(rows, 1)
    for number, row in enumerate(rows):
        if row.get(column) is None:
            continue
        try:
            check_answers(rule, row[column])
        except ValueError as error:
            raise ValueError(f"row {number} of the dataset: {error}") from None


def _search_problem(answer: str) -> str:
    if normalize_answer(answer):
        return ""
    return "search_reward needs an answer, and this one is empty when normalised"


# The rules that cannot match every answer.
_CHECKS: tuple[tuple[Callable[..., Any], FindProblem], ...] = (
    (integer_match, integer_problem),
    (letter_match, letter_problem),
    (word_sorting_match, word_sorting_problem),
    (math_match, math_problem),
    (math_reward, math_problem),
    (search_reward, _search_problem),
)


def _find_check(rule: object) -> FindProblem | None:
    """Return the check of a rule's accepted answers.

    `None` for a rule that can match any answer.
    """
    function = inspect.unwrap(rule) if callable(rule) else rule
    for known_rule, find_problem in _CHECKS:
        if function is known_rule:
            return find_problem
    return getattr(function, "answer_problem", None)
