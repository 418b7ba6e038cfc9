"""Checks that a data set can be trained or evaluated on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from ..llm.numbers import count_in_words

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    Rows: TypeAlias = Dataset | IterableDataset | Sequence[Mapping[str, Any]]


_NAMED_ROWS = 5  # in an error about several rows


def validate_dataset(
    dataset: Rows | None, columns: Sequence[str] = ("question", "answers")
) -> None:
    """Check that a data set can be trained or evaluated on, before anything expensive starts.

    Args:
        dataset (`datasets.Dataset`, `datasets.IterableDataset` or `list[dict]`): The rows. Of
            streamed rows only the first one is checked.
        columns (`Sequence[str]`, *optional*, defaults to `("question", "answers")`): The columns
            that every row must have. The values of `question` (`str`) and `answers` (list of
            `str`) are checked as well.

    Raises:
        `ValueError`: The data set is missing or empty, lacks a column, or has a row without a
            question or an accepted answer. Names the first such row.
    """
    # Something has to be there.
    if dataset is None:
        raise ValueError(
            "train_dataset is missing: load one with load_task, or make a datasets.Dataset of "
            "your rows"
        )
    first_row = next(iter(dataset), None)
    if first_row is None:
        raise ValueError("the dataset is empty; check its split, filters and files")
    # The columns have to exist.
    missing = [column for column in columns if column not in first_row]
    if missing:
        hint = ""
        if "question" in missing:
            hint = (
                "; rename yours (on a command line: --columns question=YOURS), or give a trainer a "
                "column `prompt`, which it uses as it is"
            )
        names = ", ".join(first_row)
        raise ValueError(f"the dataset has no column {quote_names(missing)}; it has: {names}{hint}")

    # Check the values of the columns whose type is known.
    checks = {column: _CHECKS[column] for column in columns if column in _CHECKS}
    if not checks:
        return
    rows: Iterable[Mapping[str, Any]] = islice(dataset, 1)
    if hasattr(dataset, "__len__"):
        # Decode only what is checked.
        rows = select_columns(dataset, checks)
    for number, row in enumerate(rows):
        for column, find_problem in checks.items():
            # Not every row of a list needs to have all columns.
            problem = find_problem(row.get(column))
            if problem:
                raise ValueError(f"row {number} of the dataset: {problem}")


class MissingQuestion(ValueError):
    """A row has no question: its cell is empty, or has blanks alone."""


def describe_missing_questions(origin: str, column: str, positions: Sequence[str]) -> str:
    """Return an error message about all rows of a source that have no question.

    Args:
        origin (`str`): The source.
        column (`str`): The column of the question, as the source calls it.
        positions (`Sequence[str]`): The place of each such row: `row 31 (line 33)`.
    """
    named_positions = ", ".join(positions[:_NAMED_ROWS])
    if len(positions) > _NAMED_ROWS:
        named_positions += f" and {count_in_words(len(positions) - _NAMED_ROWS, 'other row')}"
    return (
        f"the question is missing in {count_in_words(len(positions), 'row')} of {origin}: the "
        f"column {column!r} is empty in {named_positions}; fill it in, or delete the rows"
    )


def find_question_problem(question: object) -> str:
    """Return what is wrong with a row's `question`, or an empty text."""
    if isinstance(question, str) and question.strip():
        return ""
    return f"`question` must be a text that is not empty, got {question!r:.200}"


def find_answers_problem(answers: object) -> str:
    """Return what is wrong with a row's `answers`, or an empty text."""
    if not isinstance(answers, (list, tuple)) or not all(
        isinstance(answer, str) for answer in answers
    ):
        return f"`answers` must be a list of strings, got {answers!r}"
    if not answers:
        return (
            "`answers` is empty; give at least one accepted answer "
            '("" for a question that has no answer)'
        )
    return ""


_CHECKS: dict[str, Callable[[object], str]] = {
    "question": find_question_problem,
    "answers": find_answers_problem,
}


def select_columns(rows: Any, columns: Iterable[str]) -> Any:
    """Return a data set with only these columns, so that large other columns are not decoded.

    Args:
        rows (`datasets.Dataset` or `list[dict]`): The rows. A list is returned as it is.
        columns (`Iterable[str]`): The names of the columns; those that do not exist are ignored.
    """
    if not hasattr(rows, "select_columns"):
        return rows
    return rows.select_columns([column for column in columns if column in rows.column_names])


def quote_names(names: Iterable[str]) -> str:
    """Return names in quotes, separated by commas."""
    return ", ".join(f"'{name}'" for name in names)
