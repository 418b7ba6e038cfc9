"""Files as rows, exactly as they are written: a cell of a CSV is text, and the name of a file is no pattern.

The usual builders guess types (`007` becomes 7, `NA` and `null` nothing at all), read brackets in names as patterns,
and wrap what is wrong with a file in errors that do not say where. Here it is one line with file and row, and it comes
before anything heavy is imported.
"""

from __future__ import annotations

import csv
import json
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

Row = dict[str, Any]

_LONGEST_CELL = 2**31 - 1  # the csv module's own limit, 128 KiB, is less than a chapter of a book


def read_file(file: str, columns: Collection[str], field: str | None = None) -> tuple[list[Row], list[str]]:
    """The rows of a file, and the names of all its columns.

    Args:
        file (`str`): A path that ends in one of `SUFFIXES`, or such an address (`https://`, `hf://`).
        columns (`Collection[str]`): What is kept of each row: contexts are large, and need not be held to be ignored.
            What an object of a JSON file lacks is `None`.
        field (`str`, *optional*): Where a `.json` file holds the list of rows, if it is not the whole file.

    Raises:
        `ValueError`: The file has no rows or cannot be read; names the row if there is one to name.
    """
    suffix = Path(file).suffix.lower()
    names: dict[str, None] = {}
    rows: list[Row] = []
    with _opened(file) as stream:
        for row in SUFFIXES[suffix](stream, file, columns, field):
            names.update(dict.fromkeys(row))
            rows.append({name: value for name, value in row.items() if name in columns})
    if not rows:
        raise ValueError(f"{file} has no rows")
    empty = dict.fromkeys(name for name in names if name in columns)
    return [{**empty, **row} for row in rows], list(names)


def _opened(file: str) -> IO[bytes]:
    if "://" not in file:
        return open(file, "rb")
    import fsspec

    return fsspec.open(file, "rb").open()


def _csv(stream: IO[bytes], file: str, columns: Any, field: Any, delimiter: str = ",") -> Iterator[Row]:
    csv.field_size_limit(_LONGEST_CELL)
    reader = csv.reader(_decoded(stream), delimiter=delimiter, strict=True)
    header: list[str] = []
    number = 0
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except UnicodeDecodeError as error:
            raise _broken(f"row {number} (line {reader.line_num + 1}) of {file}", _not_utf8(error)) from None
        except csv.Error as error:
            raise _broken(f"row {number} (line {reader.line_num}) of {file}", str(error)) from None
        if not cells:  # an empty line is no row
            continue
        if not header:
            header = cells
            twice = [name for name in header if header.count(name) > 1]
            if twice:
                raise ValueError(f"{file} has several columns called {twice[0]!r}")
            continue
        if len(cells) != len(header):
            what = f"{len(cells)} cell{'s' * (len(cells) > 1)} where there are {len(header)} columns"
            raise ValueError(f"row {number} (line {reader.line_num}) of {file} has {what}")
        yield dict(zip(header, cells, strict=True))
        number += 1


def _tsv(stream: IO[bytes], file: str, columns: Any, field: Any) -> Iterator[Row]:
    return _csv(stream, file, columns, field, delimiter="\t")


def _decoded(lines: Iterable[bytes]) -> Iterator[str]:
    """Line by line, so that it is known which one is not UTF-8; the first may begin with a byte order mark."""
    for number, line in enumerate(lines):
        yield line.decode("utf-8-sig" if number == 0 else "utf-8")


def _json_lines(lines: Iterable[bytes], file: str, columns: Any, field: Any) -> Iterator[Row]:
    number = 0
    for line, text in enumerate(lines, start=1):
        if text.strip():
            where = f"row {number} (line {line}) of {file}"
            yield _row(_parsed(text, where), where)
            number += 1


def _json(stream: IO[bytes], file: str, columns: Any, field: str | None) -> Iterator[Row]:
    """One list of objects, in `field` if need be; or objects one to a line, which many call `.json` as well."""
    text = stream.read().removeprefix(BOM_UTF8).strip()
    if not text:
        return
    first, *more = text.splitlines()
    if more and _is_object(first):
        yield from _json_lines([first, *more], file, columns, field)
        return
    rows = _parsed(text, file)
    if field is not None:
        if not isinstance(rows, dict) or not isinstance(rows.get(field), list):
            raise ValueError(f"{file} should hold its rows as a list in the field {field!r}")
        rows = rows[field]
    for number, row in enumerate(rows if isinstance(rows, list) else [rows]):
        yield _row(row, f"row {number} of {file}")


def _is_object(text: bytes) -> bool:
    try:
        return text.startswith(b"{") and isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _parsed(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise _broken(where, _not_utf8(error)) from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise _broken(where, f"no JSON, {error.msg} at {place}") from None
    except RecursionError:
        raise _broken(where, "it is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise _broken(where, str(error)) from None


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise _broken(where, f"it should be an object with named columns, got {type(value).__name__}")
    return value


def _parquet(stream: IO[bytes], file: str, columns: Collection[str], field: Any) -> Iterator[Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(stream)
        names = table.schema_arrow.names
        wanted = [name for name in names if name in columns] or names[:1]  # without any column there are no rows
        for batch in table.iter_batches(columns=wanted):
            yield from ({**dict.fromkeys(names), **row} for row in batch.to_pylist())
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise ValueError(f"{file} cannot be read as .parquet: {reason}") from None


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"byte {error.object[error.start]:#04x} is not UTF-8; save it as UTF-8"


def _broken(where: str, problem: str) -> ValueError:
    return ValueError(f"{where} cannot be read: {problem}")


SUFFIXES: dict[str, Callable[..., Iterator[Row]]] = {
    ".parquet": _parquet,
    ".json": _json,
    ".jsonl": _json_lines,
    ".csv": _csv,
    ".tsv": _tsv,
}
"""What can be read, by how the name ends."""
