"""Reads tables as spreadsheet programs save them: CSV with commas, semicolons or tabs, and `.xlsx`.

Empty rows and unnamed columns are skipped.
"""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import date, datetime, time
from itertools import chain
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from openpyxl.cell import Cell

logger = logging.getLogger(__name__)

# Excel writes `sep=;` as the first line of a CSV file, and reads it there.
_SEPARATOR_LINE = re.compile(r"sep=(.)\s*", re.IGNORECASE)
_QUOTED = re.compile(r'"[^"]*"')
_DELIMITERS = (",", ";", "\t")
# The csv module's default limit, 128 KiB, is less than a chapter of a book.
_MAX_CELL_LENGTH = 2**31 - 1


def read_csv(
    lines: Iterable[str], columns: Collection[str], delimiter: str
) -> Iterator[dict[str, object]]:
    """Read the rows of a CSV file. Every cell is text, exactly as written.

    Args:
        lines (`Iterable[str]`): The lines of the file.
        columns (`Collection[str]`): The column names to look for. Spreadsheet programs write
            semicolons in many languages, so the delimiter that yields the most of these names wins.
        delimiter (`str`): The delimiter to use if no other one yields more of the names.

    Raises:
        `ValueError`: A row has more or fewer cells than the header, or two columns share a name.
    """
    csv.field_size_limit(_MAX_CELL_LENGTH)

    # Find the delimiter in the first line that has any content.
    lines = iter(lines)
    first_line = next((line for line in lines if line.strip(" \t\r\n,;")), "")
    separator = _SEPARATOR_LINE.fullmatch(first_line)
    if separator is not None:
        delimiter = separator[1]
    else:
        delimiter = _find_delimiter(first_line, columns, delimiter)
        lines = chain([first_line], lines)

    # The header is the first row that has a name.
    header_rows = csv.reader(lines, delimiter=delimiter, strict=True)
    header = next((row for row in header_rows if any(row)), [])

    # If a blank follows every delimiter of the header, the whole file is written that way.
    # Otherwise the blanks around a value belong to it.
    names = [name for name in header if name]
    is_spaced = len(names) > 1 and all(name.startswith(" ") for name in names[1:])
    if is_spaced:
        header_line = delimiter.join(header)
        header = next(csv.reader([header_line], delimiter=delimiter, skipinitialspace=True))
    # A second reader goes on after the header, with what the header has shown.
    rows = csv.reader(lines, delimiter=delimiter, strict=True, skipinitialspace=is_spaced)
    return read_table(header, rows)


def read_excel(stream: IO[bytes]) -> Iterator[dict[str, object]]:
    """Read the rows of the first sheet of an `.xlsx` file.

    Numbers stay numbers; dates and truth values become text.

    Raises:
        `ValueError`: openpyxl is not installed or cannot read the file, or a cell holds a formula
            error.
    """
    try:
        from openpyxl import load_workbook
    except ImportError:
        raise ValueError(
            "this needs openpyxl: save the sheet as CSV, or pip install openpyxl"
        ) from None
    try:
        # `data_only` reads the value of a formula rather than its text.
        workbook = load_workbook(stream, read_only=True, data_only=True)
        other_sheets = workbook.sheetnames[1:]
        if other_sheets:
            logger.warning(
                "only the first sheet, %r, is read; the others are not: %s",
                workbook.sheetnames[0],
                ", ".join(map(repr, other_sheets)),
            )
        rows = map(_cell_values, workbook.worksheets[0].iter_rows())
        # The header is the first row that is not blank, as in a CSV file.
        header = next((row for row in rows if not _is_blank(row)), [])
        names = ["" if name is None else str(name) for name in header]
        yield from read_table(names, rows)
    except ValueError:
        raise
    except Exception as error:  # openpyxl's errors on damaged archives have no common type
        message = str(error).strip() or type(error).__name__
        reason = message.splitlines()[0]
        raise ValueError(f"{reason[:200]}; save the sheet as CSV") from None


def read_table(
    header: Sequence[str], rows: Iterable[Sequence[object]]
) -> Iterator[dict[str, object]]:
    """Turn rows of cells into dicts. Columns without a name and empty rows are skipped.

    Args:
        header (`Sequence[str]`): The column names.
        rows (`Iterable[Sequence]`): The cells of each row.

    Raises:
        `ValueError`: A row has more or fewer cells than the header, or two columns share a name.
    """
    names = [name.strip() for name in header]
    column_names = [name for name in names if name]
    # A dict can hold only one of two columns of the same name.
    for name in column_names:
        if column_names.count(name) > 1:
            raise ValueError(f"it has several columns called {name!r}")

    # A row may omit the cells of unnamed columns at its end.
    min_cells = 0
    for position, name in enumerate(names, start=1):
        if name:
            min_cells = position
    for row in rows:
        if _is_blank(row):
            continue
        # Blank cells after the last column are harmless.
        if len(row) < min_cells or not _is_blank(row[len(names) :]):
            plural = "s" if len(row) > 1 else ""
            raise ValueError(f"it has {len(row)} cell{plural} where there are {len(names)} columns")
        yield {name: cell for name, cell in zip(names, row, strict=False) if name}


def _find_delimiter(header: str, columns: Collection[str], default: str) -> str:
    """Return the delimiter that splits a header into the most of the columns looked for.

    Among equals the default wins, then the one that splits the header into the most cells.
    """
    # A delimiter within quotes separates nothing.
    unquoted_header = _QUOTED.sub("", header)

    def rank(delimiter: str) -> tuple[int, bool, int]:
        names = [name.strip().strip('"') for name in header.split(delimiter)]
        # First by the columns that are looked for, then by the default.
        matching_columns = sum(name in columns for name in names)
        is_default = delimiter == default and default in unquoted_header
        return matching_columns, is_default, unquoted_header.count(delimiter)

    return max((default, *_DELIMITERS), key=rank)


def _is_blank(row: Sequence[object]) -> bool:
    return all(cell is None or (isinstance(cell, str) and not cell.strip()) for cell in row)


def _cell_values(cells: Iterable[Cell]) -> list[object]:
    return [_cell_value(cell) for cell in cells]


def _cell_value(cell: Cell) -> object:
    value = cell.value
    # Empty cells of a read-only sheet have no data type.
    if getattr(cell, "data_type", "") == "e":
        raise ValueError(f"the cell {cell.coordinate} holds the error {value}")
    # As Excel shows them: TRUE and FALSE.
    if isinstance(value, bool):
        return str(value).upper()
    # A cell with a date alone is a date and time at midnight.
    if isinstance(value, datetime):
        if value.time() == time():
            return value.date().isoformat()
        return value.isoformat(" ")
    if isinstance(value, (date, time)):
        return value.isoformat()
    return value
