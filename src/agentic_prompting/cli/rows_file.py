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


class RowsFile:
    """A file of the user's own rows, with all of its columns.

    A column that only some rows have is `None` in the others, as in training.

    Args:
        file (`str`): The file, in any format of [`load_task`].
        columns (`Mapping[str, str]`): Our name for a column -> that of the file. The rows have the
            column under both names.
    """

    def __init__(self, file: str, columns: Mapping[str, str]):
        self.columns = columns
        self.rows = read_rows(file)
        self.file_names = list(dict.fromkeys(name for row in self.rows for name in row))
        for row in self.rows:
            for name, file_name in columns.items():
                if file_name in row:
                    row[name] = row[file_name]

    def context_columns(self) -> list[str]:
        """The columns that an agent program may read beside the question, by the file's names."""
        schema = ("id", "question", *SOLUTION_COLUMNS)
        # A column is left out by its own name, and by the one that the user gives it.
        left_out = {self.columns.get(name, name) for name in schema}
        return [name for name in self.file_names if name not in left_out]

    def choose_columns(self, trained: Mapping[str, str]) -> dict[str, str]:
        """The columns for an agent that was trained with others.

        Args:
            trained (`Mapping[str, str]`): Those of its training. The ones that the file has are
                taken where the user has named none.
        """
        names_answers = not {"answer", "answers"}.isdisjoint(self.columns)
        columns = {}
        for name, file_name in trained.items():
            # Accepted answers come from one column only.
            is_replaced = names_answers and name in ("answer", "answers")
            if file_name in self.file_names and not is_replaced:
                columns[name] = file_name
        return {**columns, **self.columns}

    def join(self, rows: Iterable[Row]) -> list[dict[str, Any]]:
        """The rows that [`load_task`] has read from this file, with its other columns.

        Id, question and answers are those of [`load_task`]; of all other columns the file's own
        comes first.
        """
        joined = []
        for row in rows:
            file_row = self.rows[json.loads(row["meta"])["row"]]
            schema = {name: row[name] for name in _SCHEMA}
            joined.append({**row, **file_row, **schema})
        return joined


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
