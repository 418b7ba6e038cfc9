"""Rows of a user's own file with all of its columns, as agent programs and rewards of stored
rollouts read them.

[`load_task`] keeps the columns that are named, in one schema. Every command that needs the others
joins them here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..data import read_rows
from ..data.answer_columns import list_answers, parse_answers
from ..harnesses import SOLUTION_COLUMNS

Row = Mapping[str, Any]

_SCHEMA = ("id", "question", "answers")


def read_own_rows(file: str, columns: Mapping[str, str]) -> list[dict[str, Any]]:
    """The rows of a file with all of its columns, and with ours where they are called otherwise.

    A column that only some rows have is `None` in the others, as in training.

    Args:
        file (`str`): The file, in any format of [`load_task`].
        columns (`Mapping[str, str]`): Our name for a column -> that of the file.
    """
    rows = read_rows(file)
    for row in rows:
        for name, own_name in columns.items():
            if own_name in row:
                row[name] = row[own_name]
    return rows


def list_context_columns(file: str, columns: Mapping[str, str]) -> list[str]:
    """The columns of a file that an agent program may read beside the question.

    Args:
        file (`str`): The file.
        columns (`Mapping[str, str]`): Our name for a column -> that of the file.
    """
    schema = ("id", "question", *SOLUTION_COLUMNS)
    # A column is left out by its own name, and by the one that the user gives it.
    left_out = {columns.get(name, name) for name in schema}
    names = dict.fromkeys(name for row in read_rows(file) for name in row)
    return [name for name in names if name not in left_out]


def choose_columns(
    file: str, chosen: Mapping[str, str], trained: Mapping[str, str]
) -> dict[str, str]:
    """The columns of a file for an agent that was trained with `--columns`.

    Args:
        file (`str`): The file.
        chosen (`Mapping[str, str]`): Those of the command itself, which come first.
        trained (`Mapping[str, str]`): Those of its training; of them the ones that the file has.
    """
    file_columns = set(read_rows(file)[0])
    names_answers = not {"answer", "answers"}.isdisjoint(chosen)
    columns = {}
    for name, own_name in trained.items():
        # Accepted answers come from one column only.
        is_replaced = names_answers and name in ("answer", "answers")
        if own_name in file_columns and not is_replaced:
            columns[name] = own_name
    return {**columns, **chosen}


def has_labels(rows: Sequence[Row]) -> bool:
    """Whether [`load_task`] would keep all of these rows: each has a question and an accepted
    answer.
    """
    return all(isinstance(row.get("question"), str) and read_answers(row) for row in rows)


def read_answers(row: Row) -> list[str]:
    """The accepted answers of a row, from `answers` or `answer`, as [`load_task`] reads them; empty
    without any.
    """
    if "answers" in row:
        return parse_answers(row["answers"])
    return list_answers(row.get("answer"))


def join_columns(rows: Iterable[Row], file_rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows of [`load_task`] with the other columns of their file.

    Id, question and answers are those of [`load_task`]; of all other columns the file's own comes
    first.

    Args:
        rows (`Iterable[Mapping]`): Rows that [`load_task`] has read from one file.
        file_rows (`Sequence[Mapping]`): All rows of this file.
    """
    joined = []
    for row in rows:
        file_row = file_rows[json.loads(row["meta"])["row"]]
        schema = {name: row[name] for name in _SCHEMA}
        joined.append({**row, **file_row, **schema})
    return joined
