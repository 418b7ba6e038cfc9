"""Reads the user's own data: files, data frames, data sets and lists of dicts."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from ..llm.numbers import count_in_words
from .answer_columns import parse_answers
from .file_formats import Table
from .files import check_files, is_file_name, read_records_from_files
from .numeric_columns import is_short_float, restore_integers, restore_short_floats
from .records import Record, SourceRows, question_key, read_records
from .task import Reader, Row, Task

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from pandas import DataFrame

    DataFiles: TypeAlias = str | Path | Sequence[str | Path]
    UserData: TypeAlias = DataFiles | DataFrame | Dataset | IterableDataset | Sequence[Row]

logger = logging.getLogger(__name__)


def is_user_data(name: object) -> bool:
    """Return whether this is data of the user's own, or a file of it, rather than the name of a
    data set.

    Args:
        name (`str`, or data): As for [`load_task`].
    """
    return not isinstance(name, str) or is_file_name(name)


def read_user_data(
    data: UserData, columns: Mapping[str, str], context_columns: Sequence[str] = ()
) -> tuple[str, list[Record]]:
    """Return a name for the user's own data, and its records.

    Args:
        data (`str`, `list[str]`, `DataFrame`, `datasets.Dataset` or `list[dict]`): Files, or rows.
        columns (`Mapping[str, str]`): As for [`load_task`].
        context_columns (`Sequence[str]`, *optional*): As for [`load_task`].
    """
    readers = _user_readers(columns, tuple(context_columns))
    task = Task(sources=(), readers=readers, expected_rows={}, licence="")
    if _is_file_list(data):
        files = check_files("data", data)
        name = Path(files[0]).stem
        records = read_records_from_files(name, task, "", files)
        _warn_of_repeated_questions(name, records)
        return name, records

    # Rows in memory.
    table = _read_memory(data, task.all_columns)
    if not len(table.rows):
        raise ValueError("data has no rows")
    origin = f"the {type(data).__name__}"
    reader = task.find_reader("data", table.column_names, origin)
    source_rows = SourceRows(rows=table.rows, reader=reader, origin=origin)
    records = read_records("data", task, [source_rows], id_prefix="data")
    _warn_of_repeated_questions("data", records)
    return "data", records


def _warn_of_repeated_questions(name: str, records: Sequence[Record]) -> None:
    """Log one warning if a question occurs again with other accepted answers.

    No reply is right in both rows, unless the answers have one in common, or the agent reads
    another context in each of them.
    """
    first_answers: dict[tuple[str, str], set[str]] = {}
    contradictions = []
    for record in records:
        answers = set(record["answers"])
        if not answers & first_answers.setdefault(question_key(record), answers):
            contradictions.append(record["question"])
    if contradictions:
        logger.warning(
            "%s: %s with the question of an earlier row and other answers, such as %.80r: "
            "no reply is right in both. Put all accepted answers of a question into one row",
            name,
            count_in_words(len(contradictions), "row"),
            contradictions[0],
        )


def _is_file_list(data: Any) -> TypeGuard[DataFiles]:
    files = data if isinstance(data, (list, tuple)) else [data]
    return len(files) > 0 and all(isinstance(file, (str, Path)) for file in files)


def _user_readers(
    columns: Mapping[str, str], context_columns: tuple[str, ...]
) -> tuple[Reader, ...]:
    """Return the readers of the user's own data; see `columns` of [`load_task`]."""
    if "answers" in columns and "answer" in columns:
        raise ValueError(f"columns names either `answers` or `answer`, got {dict(columns)}")
    # Each column has its own name unless the user renames it; other names go to `meta`.
    question_column = columns.get("question", "question")
    answers_column = columns.get("answers", "answers")
    id_column = columns.get("id", "id")
    schema = ("question", "answers", "answer", "id")
    meta_columns = {name: column for name, column in columns.items() if name not in schema}
    named_columns = tuple(columns.values())

    # Accepted answers as a list, or a single answer that is used as it is.
    answers_reader = Reader(
        question=question_column,
        answers=lambda row: parse_answers(row[answers_column]),
        function_columns=(answers_column, *named_columns),
        meta_columns=meta_columns,
        id=id_column,
        context_columns=context_columns,
    )
    answer_reader = Reader(
        question=question_column,
        answers=columns.get("answer", "answer"),
        function_columns=named_columns,
        meta_columns=meta_columns,
        id=id_column,
        context_columns=context_columns,
    )
    if "answers" in columns:
        return (answers_reader,)
    if "answer" in columns:
        return (answer_reader,)
    return (answers_reader, answer_reader)


def _read_memory(data: Any, columns: Collection[str]) -> Table:
    """Read data in memory, as [`read_file`] reads a file."""
    # Recognized by their methods, so that neither pandas nor datasets has to be imported.
    if hasattr(data, "iterrows"):
        return _read_data_frame(data, columns)
    if hasattr(data, "select_columns") and hasattr(data, "__len__"):
        return _read_dataset(data, columns)
    if not isinstance(data, Iterable):
        raise ValueError(
            "load_task reads files, frames, data sets and lists of dicts, "
            f"got {type(data).__name__}"
        )
    # A list of dicts, or an iterator of them.
    rows = list(data)
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"data: row {number} should be a dict, got {type(row).__name__}")

    # A column that a row lacks is missing, as in a file.
    column_names = list(dict.fromkeys(column for row in rows for column in row))
    full_rows = [{**dict.fromkeys(column_names), **row} for row in rows]
    restore_integers(full_rows)
    return Table(rows=full_rows, column_names=column_names)


def _read_data_frame(frame: DataFrame, columns: Collection[str]) -> Table:
    selected = [column for column in frame.columns if column in columns]
    # A row can hold only one of two columns of the same name.
    for column in selected:
        if selected.count(column) > 1:
            raise ValueError(f"the DataFrame has several columns called {column!r}: rename one")
    # Empty rows come from spreadsheets.
    filled = frame.dropna(how="all")[selected]
    rows = filled.astype(object).where(filled.notna(), None).to_dict("records")
    # Numbers may have lost digits, or become floats beside missing values.
    types = {str(column): str(dtype) for column, dtype in filled.dtypes.items()}
    restore_short_floats(rows, types)
    restore_integers(rows)
    return Table(rows=rows, column_names=list(frame.columns))


def _read_dataset(dataset: Dataset, columns: Collection[str]) -> Table:
    column_names = dataset.column_names
    selected = [column for column in column_names if column in columns]
    schema = dataset.features.arrow_schema
    types = {column: str(schema.field(column).type) for column in selected}
    # Usually the rows can be used as they are.
    if not any(is_short_float(type_name) for type_name in types.values()):
        return Table(rows=dataset, column_names=column_names)
    rows = list(dataset.select_columns(selected))
    restore_short_floats(rows, types)
    return Table(rows=rows, column_names=column_names)
