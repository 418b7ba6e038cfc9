"""Reads a data set from files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .file_formats import FILE_READERS, UNSUPPORTED_SPREADSHEETS, read_file
from .records import Record, SourceRows, read_records, select_subset
from .task import Task
from .tasks import check_split


def is_file_name(name: str) -> bool:
    """Return whether a name ends like a file of rows, rather than being the name of a data set."""
    return Path(name).suffix.lower() in (*FILE_READERS, *UNSUPPORTED_SPREADSHEETS)


def check_files(name: str, data_files: str | Path | Sequence[str | Path]) -> list[str]:
    """Check that files exist and have a readable format.

    Args:
        name (`str`): The name of the data set, for the errors.
        data_files (`str` or `list[str]`): Paths or addresses.

    Returns:
        `list[str]`: The files.
    """
    # A single file may be passed without a list.
    if isinstance(data_files, (str, Path)):
        data_files = [data_files]
    files = [str(file) for file in data_files]
    if not files:
        raise ValueError(f"{name}: data_files names no file")
    for file in files:
        # An address is checked when it is read.
        is_address = "://" in file
        if not is_address and not Path(file).is_file():
            raise FileNotFoundError(f"{name}: no such file: {file} (looked in {Path.cwd()})")
        # Only formats that can be read exactly as written.
        suffix = Path(file).suffix.lower()
        if suffix in UNSUPPORTED_SPREADSHEETS:
            raise ValueError(f"{name}: this spreadsheet cannot be read, save it as CSV: {file}")
        if suffix not in FILE_READERS:
            raise ValueError(
                f"{name}: data_files must all end in one of {', '.join(FILE_READERS)}; got {file}"
            )
    return files


def read_rows(file: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a file as they are, with all of their columns.

    Raises:
        `FileNotFoundError`, `ValueError`: As [`load_task`], in one line.
    """
    (name,) = check_files("data", file)
    return list(read_file(name).rows)


def read_records_from_files(name: str, task: Task, split: str, files: list[str]) -> list[Record]:
    """Read the records of a split from files, one after the other.

    Args:
        name (`str`): The name of the data set.
        task (`Task`): The data set.
        split (`str`): The split. Used only if the task has subsets of its files.
        files (`list[str]`): The files, as [`check_files`] returns them.
    """
    # Each file may have its own columns, and so its own reader.
    columns = task.all_columns
    parts = []
    for file in files:
        try:
            table = read_file(file, columns, task.json_field)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        reader = task.find_reader(name, table.column_names, file)
        parts.append(
            SourceRows(rows=table.rows, reader=reader, origin=file, line_numbers=table.line_numbers)
        )

    # A subset counts the rows of all files together.
    if task.subsets:
        check_split(name, task, split)
        all_rows = [row for part in parts for row in part.rows]
        merged = SourceRows(rows=all_rows, reader=parts[0].reader, origin=", ".join(files))
        parts = [select_subset(name, task, split, merged)]
    return read_records(name, task, parts, id_prefix=Path(files[-1]).stem)
