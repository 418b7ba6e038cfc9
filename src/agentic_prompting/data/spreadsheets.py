"""Tables as spreadsheets save them: CSV with commas, semicolons or tabs, and `.xlsx`.

Empty rows, and empty columns beside the table, are no part of it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import date, datetime, time
from itertools import chain
from typing import IO, Any

_QUOTED = re.compile(r'"[^"]*"')
_SEPARATOR_LINE = re.compile(
    r"sep=(.)\s*", re.IGNORECASE
)  # which Excel writes and reads as the first line
_DELIMITERS = (",", ";", "\t")


def read_csv(
    lines: Iterable[str], columns: Collection[str], delimiter: str
) -> Iterator[dict[str, Any]]:
    """The rows of a CSV file, each cell the text it is.

    Args:
        lines (`Iterable[str]`): The lines of the file.
        columns (`Collection[str]`): The columns that are looked for. If another delimiter than `delimiter` gives more
            of them in the header, the file is read with that one: spreadsheets write semicolons in many languages.
        delimiter (`str`): The usual delimiter of such files.

    Raises:
        `ValueError`: A row has more or fewer cells than the header, or a name is there twice.
    """
    csv.field_size_limit(
        2**31 - 1
    )  # the csv module's own limit, 128 KiB, is less than a chapter of a book
    rest = iter(lines)
    first = next((line for line in rest if line.strip(" \t\r\n,;")), "")
    separator = _SEPARATOR_LINE.fullmatch(first)
    if separator is not None:
        delimiter = separator[1]
    else:
        delimiter = _find_delimiter(first, columns, delimiter)
        rest = chain([first], rest)
    header = next(
        (row for row in csv.reader(rest, delimiter=delimiter, strict=True) if any(row)), []
    )

    # Blanks behind each delimiter of the header: the file is written so throughout. Else a cell's blanks are its own.
    names = [name for name in header if name]
    is_spaced = len(names) > 1 and all(name[:1] == " " for name in names[1:])
    if is_spaced:
        header = next(
            csv.reader([delimiter.join(header)], delimiter=delimiter, skipinitialspace=True)
        )
    return read_table(
        header, csv.reader(rest, delimiter=delimiter, strict=True, skipinitialspace=is_spaced)
    )


def read_excel(stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    """The rows of the first sheet of an `.xlsx` file. Numbers stay numbers; dates and truth values become text.

    Raises:
        `ValueError`: openpyxl is not installed or cannot read the file, or a cell holds a formula's error.
    """
    try:
        from openpyxl import load_workbook
    except ImportError:
        raise ValueError(
            "this needs openpyxl: save the sheet as CSV, or pip install openpyxl"
        ) from None
    try:
        workbook = load_workbook(stream, read_only=True, data_only=True)
        rows = workbook.worksheets[0].iter_rows()
        header = next((row for row in map(_cell_values, rows) if not _is_blank(row)), [])
        yield from read_table(
            ["" if name is None else str(name) for name in header], map(_cell_values, rows)
        )
    except ValueError:
        raise
    except Exception as error:  # what a damaged archive makes openpyxl raise has no common type
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{reason[:200]}; save the sheet as CSV") from None


def read_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Rows of cells as dicts by the names of the header. Columns without a name and empty rows are left out.

    Raises:
        `ValueError`: A row has more or fewer cells than the header, or a name is there twice.
    """
    names = [name.strip() for name in header]
    width = max((place + 1 for place, name in enumerate(names) if name), default=0)
    named = [name for name in names if name]
    if twice := [name for name in named if named.count(name) > 1]:
        raise ValueError(f"it has several columns called {twice[0]!r}")
    for row in rows:
        if _is_blank(row):
            continue
        if len(row) < width or not _is_blank(row[len(names) :]):
            raise ValueError(
                f"it has {len(row)} cell{'s' * (len(row) > 1)} where there are {len(names)} columns"
            )
        yield {name: cell for name, cell in zip(names, row, strict=False) if name}


def _find_delimiter(header: str, columns: Collection[str], usual: str) -> str:
    """The delimiter that splits a header into most of the columns looked for; of equal ones the usual, then the one
    that splits it into most cells."""
    unquoted = _QUOTED.sub("", header)

    def fit(delimiter: str) -> tuple[int, bool, int]:
        names = [name.strip().strip('"') for name in header.split(delimiter)]
        is_usual = delimiter == usual and usual in unquoted
        return sum(name in columns for name in names), is_usual, unquoted.count(delimiter)

    return max((usual, *_DELIMITERS), key=fit)


def _is_blank(row: Sequence[Any]) -> bool:
    return all(cell is None or (isinstance(cell, str) and not cell.strip()) for cell in row)


def _cell_values(cells: Iterable[Any]) -> list[Any]:
    return [_cell_value(cell) for cell in cells]


def _cell_value(cell: Any) -> Any:
    value = cell.value
    if getattr(cell, "data_type", "") == "e":
        raise ValueError(f"the cell {cell.coordinate} holds the error {value}")
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, datetime):
        return value.date().isoformat() if value.time() == time() else value.isoformat(" ")
    return value.isoformat() if isinstance(value, (date, time)) else value
