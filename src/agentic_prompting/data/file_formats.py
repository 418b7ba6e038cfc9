"""Reads a file of rows: Parquet, JSON, JSON lines, CSV, TSV or Excel.

Files are read exactly as they are written: a cell of a CSV is text, and the name of a file is not a
pattern. The builders of `datasets` guess types (`007` becomes 7, `NA` becomes missing), read
brackets in names as patterns, and wrap a file's faults in errors that do not name the line. Here an
error is one line, raised before anything heavy is imported.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from .numeric_columns import restore_integers, restore_short_floats
from .spreadsheets import read_csv, read_excel

UNSUPPORTED_SPREADSHEETS = (".xls", ".xlsm", ".xlsb", ".ods", ".numbers")


@dataclass(frozen=True)
class Table:
    """The rows of a file or of data in memory.

    Args:
        rows (`datasets.Dataset` or `list[dict]`): The rows, with at least the requested columns.
        column_names (`list[str]`): The names of all columns, also of those that were not read.
        line_numbers (`list[int]`, *optional*): The last line of each row, if the file has lines.
    """

    rows: Any
    column_names: list[str]
    line_numbers: list[int] = field(default_factory=list)


def read_file(file: str, columns: Collection[str] | None = None, field: str | None = None) -> Table:
    """Read the rows of a file.

    Args:
        file (`str`): A path or an address (`https://`, `hf://`) that ends in one of
            `FILE_READERS`.
        columns (`Collection[str]`, *optional*): The columns to keep, all by default; large others
            are dropped while reading. A column that an object of a JSON file lacks is `None`.
        field (`str`, *optional*): The field of a `.json` file that holds the list of rows. By
            default the whole file is the list.

    Raises:
        `ValueError`: The file has no rows or cannot be read. Names the row and line if known.
    """
    suffix = Path(file).suffix.lower()
    read_rows = FILE_READERS[suffix]
    # A dict keeps the order in which the columns appear.
    column_names: dict[str, None] = {}
    rows: list[dict[str, Any]] = []
    line_numbers: list[int] = []
    # Read row by row, so that an error can name the row.
    with _open(file) as stream:
        lines = NumberedLines(stream)
        try:
            for row in read_rows(lines, columns, field):
                if not isinstance(row, dict):
                    raise ValueError(
                        f"it should be an object with named columns, got {type(row).__name__}"
                    )
                column_names.update(dict.fromkeys(row))
                if columns is not None:
                    row = {name: value for name, value in row.items() if name in columns}
                rows.append(row)
                if lines.number:
                    line_numbers.append(lines.number)
        except (ValueError, RecursionError, csv.Error) as error:
            position = file
            if rows or lines.number:
                position = describe_position(file, len(rows), lines.number)
            reason = _describe_error(error, is_in_line=bool(lines.number))
            raise ValueError(f"{position} cannot be read as {suffix}: {reason}") from None
    # A file of a header alone is a mistake, too.
    if not rows:
        raise ValueError(f"{file} has no rows")

    # Give every row all of the columns.
    empty_row = dict.fromkeys(name for name in column_names if columns is None or name in columns)
    full_rows = [{**empty_row, **row} for row in rows]
    restore_integers(full_rows)
    return Table(rows=full_rows, column_names=list(column_names), line_numbers=line_numbers)


def describe_position(file: str, row_number: int, line_number: int) -> str:
    """Say where a fault is: the row, and the line of a file that has lines (0 for none)."""
    if line_number:
        return f"row {row_number} (line {line_number}) of {file}"
    return f"row {row_number} of {file}"


class NumberedLines:
    """Decodes a file line by line, and keeps the number of the last line read for errors.

    Args:
        stream (`IO[bytes]`): The file.
    """

    def __init__(self, stream: IO[bytes]):
        self.stream = stream
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        return self.decode(self.stream)

    def decode(self, lines: Iterable[bytes]) -> Iterator[str]:
        """Decode lines that were read from the file."""
        for number, line in enumerate(lines, start=1):
            self.number = number
            # The first line may start with a byte order mark.
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")


def _open(file: str) -> IO[bytes]:
    if "://" not in file:
        return open(file, "rb")
    # An address: `https://`, `hf://`, ...
    import fsspec

    return fsspec.open(file, "rb").open()


def _describe_error(error: Exception, is_in_line: bool) -> str:
    """Say what is wrong with a file, or with a single line of it."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.object[error.start]:#04x} is not UTF-8; save it as UTF-8"
    if isinstance(error, json.JSONDecodeError) and is_in_line:
        # The parser got this line alone. A fault at its end is that of the text, not of the newline.
        column = min(error.pos, len(error.doc.rstrip())) + 1
        return f"no JSON, {error.msg} at column {column}"
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON, {error.msg} at line {error.lineno} column {error.colno}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error)


# The formats. Each reader takes the lines, the columns to keep and the field with the rows.


def _read_csv(
    lines: NumberedLines, columns: Collection[str] | None, field: str | None
) -> Iterator[object]:
    return read_csv(lines, columns or (), delimiter=",")


def _read_tsv(
    lines: NumberedLines, columns: Collection[str] | None, field: str | None
) -> Iterator[object]:
    return read_csv(lines, columns or (), delimiter="\t")


def _read_excel(
    lines: NumberedLines, columns: Collection[str] | None, field: str | None
) -> Iterator[object]:
    return read_excel(lines.stream)


def _read_json_lines(
    lines: Iterable[str], columns: Collection[str] | None, field: str | None
) -> Iterator[object]:
    return (_parse_json(line) for line in lines if line.strip())


def _read_json(
    lines: NumberedLines, columns: Collection[str] | None, field: str | None
) -> Iterator[object]:
    # JSON has to be parsed as a whole.
    text = lines.stream.read()
    content: object = []
    try:
        if text.strip():
            content = _parse_json(text.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        # Many files of JSON lines are called `.json`.
        if error.msg != "Extra data":
            raise
        return _read_json_lines(lines.decode(text.splitlines()), columns, field)
    # Some files have the rows in a field of one object.
    if field is not None:
        if not isinstance(content, dict) or not isinstance(content.get(field), list):
            raise ValueError(f"it should hold its rows as a list in the field {field!r}")
        content = content[field]
    return iter(content if isinstance(content, list) else [content])


def _read_parquet(
    lines: NumberedLines, columns: Collection[str] | None, field: str | None
) -> Iterator[object]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(lines.stream)
        column_names = table.schema_arrow.names
        selected = [name for name in column_names if columns is None or name in columns]
        if not selected:
            # Without any column there would be no rows.
            selected = column_names[:1]
        # Floats that are stored in few bits have lost the digits they were written with.
        types = {name: str(table.schema_arrow.field(name).type) for name in selected}
        # Name the columns that were not read, too: an error lists them.
        empty_row = dict.fromkeys(column_names)
        for batch in table.iter_batches(columns=selected):
            rows = batch.to_pylist()
            restore_short_floats(rows, types)
            for row in rows:
                yield {**empty_row, **row}
    except (ArrowException, OSError) as error:
        # Arrow's messages may have several lines; the first one says what is wrong.
        first_line, _, _ = str(error).strip().partition("\n")
        raise ValueError(first_line[:200]) from None


FILE_READERS: dict[
    str, Callable[[NumberedLines, Collection[str] | None, str | None], Iterator[object]]
] = {
    ".parquet": _read_parquet,
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".xlsx": _read_excel,
}
"""The readers by file name suffix."""


def _parse_json(text: str) -> object:
    """Parse JSON, and refuse numbers that no other program could read back."""
    return json.loads(text, parse_float=_parse_float, parse_constant=_parse_constant)


def _parse_float(digits: str) -> float:
    value = float(digits)
    # Python reads 1e400 as infinity, which JSON cannot hold.
    if math.isinf(value):
        raise ValueError(f"the number {digits[:40]} is too large")
    return value


def _parse_constant(name: str) -> None:
    # pandas writes NaN for a missing value.
    if name != "NaN":
        raise ValueError(f"{name} is no number")
