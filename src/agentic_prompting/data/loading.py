"""`load_task`: the papers' data sets and your own, from the hub, from files and from memory, in one schema.

What the sets are is in `tasks.py`. Files are read here exactly as they are written: a cell of a CSV is text, and the
name of a file is no pattern. The usual builders guess types (`007` becomes 7, `NA` nothing at all), read brackets in
names as patterns, and wrap a file's faults in errors that do not name the place. Here an error is one line, raised
before anything heavy is imported.
"""

from __future__ import annotations

import csv
import difflib
import json
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..llm.numbers import is_missing
from .spreadsheets import read_csv, read_excel
from .task import (
    Found,
    Reader,
    Record,
    Source,
    Task,
    as_list,
    cut_rows,
    first_line,
    fitting_reader,
    read_all,
    sample_rows,
    to_dataset,
)
from .tasks import PAIRS, TASKS

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

DataFiles = str | Path | Sequence[str | Path] | Mapping[str, Any]


def load_task(
    name: Any,
    split: str = "train",
    n: int | None = None,
    seed: int = 0,
    data_files: DataFiles | None = None,
    revision: str | None = None,
    columns: Mapping[str, str] | None = None,
) -> Dataset:
    """Load a data set as `id`, `question`, `answers`, `task`, `meta`.

    Args:
        name (`str`, or data of your own): A set of [`TASKS`] (`agentic-prompting data list` shows them): `prompt_r1`,
            `hotpotqa`, `gsm8k`, ... Or a pair of E-SPL's, whose splits are two sets: `dapo_aime25`, `hmmt`,
            `aimo_beyondaime`, `aime_and_amc_to_beyondaime`. Your own: a file or several (`.jsonl`, `.json`, `.csv`,
            `.tsv`, `.xlsx`, `.parquet`, also addresses), a pandas `DataFrame`, a `datasets.Dataset`, a list of dicts;
            or a dict of these by split.
        split (`str`, *optional*, defaults to `"train"`): The split. Prompt-R1's twelve evaluation files are `test`
            together, `test/hotpot` and so on one by one. Of files and data of your own it chooses only if they are a
            dict; splits that are cut by row number (both BBH sets, `gsm8k_dspy`, parts of `nq_hotpotqa`) are cut out of
            the files after that.
        n (`int`, *optional*): Sample this many rows with different questions, in the order they were drawn:
            `random.Random(seed).sample`. All rows by default.
        seed (`int`, *optional*, defaults to `0`): For the sample.
        data_files (`str`, `list` or `dict`, *optional*): Files of a named set to read instead of the hub.
        revision (`str`, *optional*): Commit or branch of the set's first hub repository. Then no other source is
            tried: what is pinned is not replaced silently. Pin it for anything that is reported.
        columns (`dict[str, str]`, *optional*): Which column of your own data is which: `question`; `answers` (a list,
            or a text that may be one in JSON) or `answer` (one, as it is); `id`; any other goes into `meta`. By default
            they are called so.

    Returns:
        `datasets.Dataset`: `meta` holds, as JSON, the row's number (`row`) and origin (`source`), how a sample was
        drawn (`sample`: `n`, `seed`, `of` how many) and what the set keeps; rows of `prompt_r1` also the released
        instruction as `prompt_template`. A question without an answer (SQuAD v2) has the one accepted answer `""`.
        Other rows without an accepted answer are dropped, and the number is logged.

    Raises:
        `ValueError`: In one line with file and row: the task or split does not exist, a column is missing, a file or a
            row cannot be read, no row has an accepted answer, rows are not those a split is cut from, or there are
            fewer than `n` different questions.
        `FileNotFoundError`: If a file does not exist.
        `RuntimeError`: If no source could be loaded; says how each one failed.

    Example:

        >>> from agentic_prompting import load_task
        >>> train = load_task("hotpotqa", split="train", n=5120)  # doctest: +SKIP
        >>> own = load_task("support.csv", columns={"question": "request", "answer": "reply"})  # doctest: +SKIP
    """
    if n is not None and n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if data_files is not None and revision is not None:
        raise ValueError(
            "revision says which version of a hub repository to load; with data_files there is none"
        )
    if is_own(name):
        if data_files is not None or revision is not None:
            raise ValueError(
                "data_files and revision are for the sets that have a name; pass your own data alone"
            )
        name, records = _own(_of_split("data", name, split), columns or {})
    elif columns is not None:
        raise ValueError(
            f"columns says how to read data of your own; {name!r} is a set that is known"
        )
    else:
        name, split, task = find_task(name, split)
        if data_files is None:
            records = _load_hub(name, task, split, revision)
        else:
            records = _load_files(
                name, task, split, _existing(name, _of_split(name, data_files, split))
            )
    return to_dataset(records if n is None else sample_rows(name, records, n, seed))


def is_own(name: Any) -> bool:
    """Whether this is the user's own data rather than the name of a set."""
    return not isinstance(name, str) or Path(name).suffix.lower() in (
        *SUFFIXES,
        *_OTHER_SPREADSHEETS,
    )


def find_task(name: str, split: str = "test") -> tuple[str, str, Task]:
    """A set's name, split and record; those behind it, if it is a pair's.

    Raises:
        `ValueError`: There is none of this name (the nearest are offered), or a pair has no such split.
    """
    if name in PAIRS:
        if split not in PAIRS[name]:
            raise ValueError(f"{name} has no split {split!r}; it has: {', '.join(PAIRS[name])}")
        name, split = PAIRS[name][split]
    if name in TASKS:
        return name, split, TASKS[name]
    if near := difflib.get_close_matches(name.lower(), [*TASKS, *PAIRS], n=3, cutoff=0.5):
        guess = (
            f"did you mean {' or '.join(map(repr, near))}? `agentic-prompting data list` shows all"
        )
        raise ValueError(f"unknown task {name!r}; {guess}")
    raise ValueError(f"unknown task {name!r}; known: {', '.join([*TASKS, *PAIRS])}")


# Where rows come from -------------------------------------------------------------------------------------------------


def _load_hub(name: str, task: Task, split: str, revision: str | None) -> list[Record]:
    """The first source that loads, has the columns and, for a split cut by row numbers, has its rows in order."""
    _check_split(name, task, split)
    if revision is not None and task.sources[0].also:
        raise ValueError(
            f"{name} is put together from several repositories: a single revision cannot pin them"
        )
    failures = []
    for source in task.sources if revision is None else task.sources[:1]:
        pinned = f"@{revision}" if revision else ""
        try:
            parts = []
            for one in source.parts():
                rows, origin = open_source(one, split, revision), f"{one}{pinned}"
                found = Found(rows, fitting_reader(name, task, rows.column_names, origin), origin)
                parts.append(
                    cut_rows(name, task, split, found)._replace(origin=f"{origin}:{split}")
                )
        except (
            Exception
        ) as error:  # what a hub, a network and a builder can raise has no common type
            failures.append(f"  {source}{pinned}: {type(error).__name__}: {first_line(error)}")
            continue
        records, expected = read_all(name, task, parts, name), task.expected_rows[split]
        count = len(records) if task.unique or task.order else sum(len(part.rows) for part in parts)
        if abs(count - expected) > 0.01 * expected:
            where = f"{name}, split {split!r}: {count:,} rows from {source}{pinned}"
            logger.warning(f"{where}, where {expected:,} were expected")
        return records
    tried = "\n".join(failures)
    raise RuntimeError(
        f"{name}, split {split!r}: no source could be loaded. Without a network, pass data_files=…. Tried:\n{tried}"
    )


def open_source(source: Source, split: str, revision: str | None = None, **options: Any) -> Any:
    """What the hub has for a split of ours; `options` go to `datasets.load_dataset`."""
    from datasets import load_dataset

    theirs = source.splits.get(split, split)
    options = {**source.options, **options}
    if source.files:
        # Files are named under one split of our own, so that names such as `test/hotpot` need not be legal ones.
        options["data_files"], theirs = {"rows": source.files[split]}, "rows"
    if source.data_dir:
        options["data_dir"] = source.data_dir
    return load_dataset(
        source.path, source.config, split=theirs, revision=revision or source.revision, **options
    )


def _load_files(name: str, task: Task, split: str, files: list[str]) -> list[Record]:
    wanted = {column for reader in task.readers for column in reader.used}
    parts = []
    for file in files:
        try:
            rows, names = read_file(file, wanted, task.json_field)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        parts.append(Found(rows, fitting_reader(name, task, names, file), file))
    if task.cuts:  # the numbers are those of all files together
        _check_split(name, task, split)
        whole = Found(
            [row for part in parts for row in part.rows], parts[0].reader, ", ".join(files)
        )
        parts = [cut_rows(name, task, split, whole)]
    return read_all(name, task, parts, Path(files[-1]).stem)


def _own(data: Any, columns: Mapping[str, str]) -> tuple[str, list[Record]]:
    """A name for the user's own data, and its rows."""
    task = Task((), _own_readers(columns), {}, licence="")
    listed = data if isinstance(data, (list, tuple)) else [data]
    if listed and all(isinstance(one, (str, Path)) for one in listed):
        files = _existing("data", listed)
        return Path(files[0]).stem, _load_files(Path(files[0]).stem, task, "", files)
    rows, names = _in_memory(data, {column for reader in task.readers for column in reader.used})
    if not len(rows):
        raise ValueError("data has no rows")
    where = f"the {type(data).__name__}"
    return "data", read_all(
        "data", task, [Found(rows, fitting_reader("data", task, names, where), where)], "data"
    )


def _in_memory(data: Any, columns: Collection[str]) -> tuple[Any, list[str]]:
    """The rows of data in memory, and the names of all its columns, as [`read_file`] returns those of a file."""
    if hasattr(data, "iterrows"):
        filled = data.dropna(how="all")  # an empty row of a spreadsheet
        frame = filled[[column for column in data.columns if column in columns]]
        records = frame.astype(object).where(frame.notna(), None).to_dict("records")
        _restore_short_floats(
            records, {str(name): str(kind) for name, kind in frame.dtypes.items()}
        )
        return _whole_numbers(records), list(data.columns)
    if hasattr(data, "select_columns") and hasattr(data, "__len__"):
        types = {
            name: str(data.features.arrow_schema.field(name).type) for name in data.column_names
        }
        if not any(_SHORT_FLOAT.search(types[name]) for name in columns if name in types):
            return data, data.column_names
        records = list(data.select_columns([name for name in data.column_names if name in columns]))
        _restore_short_floats(records, types)
        return records, data.column_names
    if not isinstance(data, Iterable):
        raise ValueError(
            f"load_task reads files, frames, data sets and lists of dicts, got {type(data).__name__}"
        )
    rows = list(data)
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"data: row {number} should be a dict, got {type(row).__name__}")
    names = list(dict.fromkeys(column for row in rows for column in row))
    # What one lacks is missing, as in a file.
    return _whole_numbers([{**dict.fromkeys(names), **row} for row in rows]), names


_SHORT_FLOAT = re.compile(
    r"half|float(?:16|32)?\b", re.IGNORECASE
)  # as pandas and Arrow name these types


def _restore_short_floats(records: list[Record], types: Mapping[str, str]) -> None:
    """Give floats of 16 or 32 bits the digits that they were written with: as 64 bits, 0.1 is 0.10000000149.

    Args:
        records (`list[dict]`): Changed in place.
        types (`Mapping[str, str]`): The type of each column.
    """
    for name, kind in types.items():
        if not _SHORT_FLOAT.search(kind):
            continue
        import numpy

        short = numpy.float16 if "16" in kind or "half" in kind else numpy.float32

        def restore(value: Any, short: Any = short) -> Any:
            if isinstance(value, float):
                return float(str(short(value)))
            return [restore(item) for item in value] if isinstance(value, list) else value

        for record in records:
            if name in record:
                record[name] = restore(record[name])


def _own_readers(columns: Mapping[str, str]) -> tuple[Reader, ...]:
    """Readers of the user's own data; see `columns` of [`load_task`]."""
    if {"answers", "answer"} <= set(columns):
        raise ValueError(f"columns names either `answers` or `answer`, got {dict(columns)}")
    keep = {
        ours: theirs
        for ours, theirs in columns.items()
        if ours not in ("question", "answers", "answer", "id")
    }
    question, answers, answer, key = (
        columns.get(name, name) for name in ("question", "answers", "answer", "id")
    )
    needs = tuple(columns.values())
    several = Reader(question, lambda row: as_list(row[answers]), (answers, *needs), keep, id=key)
    one = Reader(question, answer, needs, keep, id=key)
    return (several,) if "answers" in columns else (one,) if "answer" in columns else (several, one)


def _check_split(name: str, task: Task, split: str) -> None:
    if split not in task.expected_rows:
        raise ValueError(f"{name} has no split {split!r}; it has: {', '.join(task.expected_rows)}")


def _of_split(name: str, data: Any, split: str) -> Any:
    if not isinstance(data, Mapping):
        return data
    if split not in data:
        raise ValueError(f"{name}: data_files has no split {split!r}; it has: {', '.join(data)}")
    return data[split]


def _existing(name: str, data_files: Any) -> list[str]:
    files = [
        str(file) for file in ([data_files] if isinstance(data_files, (str, Path)) else data_files)
    ]
    if not files:
        raise ValueError(f"{name}: data_files names no file")
    for file in files:
        if "://" not in file and not Path(file).is_file():
            raise FileNotFoundError(f"{name}: no such file: {file} (looked in {Path.cwd()})")
        if Path(file).suffix.lower() in _OTHER_SPREADSHEETS:
            raise ValueError(f"{name}: this spreadsheet cannot be read, save it as CSV: {file}")
        if Path(file).suffix.lower() not in SUFFIXES:
            raise ValueError(
                f"{name}: data_files must all end in one of {', '.join(SUFFIXES)}; got {file}"
            )
    return files


# Files as rows --------------------------------------------------------------------------------------------------------


def read_file(
    file: str, columns: Collection[str], field: str | None = None
) -> tuple[list[Record], list[str]]:
    """The rows of a file, and the names of all its columns.

    Args:
        file (`str`): A path that ends in one of `SUFFIXES`, or such an address (`https://`, `hf://`).
        columns (`Collection[str]`): The columns to keep of each row; large contexts are dropped while reading. A column
            that an object of a JSON file lacks is `None`.
        field (`str`, *optional*): Where a `.json` file holds the list of rows, if it is not the whole file.

    Raises:
        `ValueError`: The file has no rows or cannot be read; names the row if there is one to name.
    """
    suffix = Path(file).suffix.lower()
    names: dict[str, None] = {}
    rows: list[Record] = []
    with _opened(file) as stream:
        lines = _Lines(stream)
        try:
            for row in SUFFIXES[suffix](lines, columns, field):
                if not isinstance(row, dict):
                    raise ValueError(
                        f"it should be an object with named columns, got {type(row).__name__}"
                    )
                names.update(dict.fromkeys(row))
                rows.append({name: value for name, value in row.items() if name in columns})
        except (ValueError, RecursionError, csv.Error) as error:
            line = f" (line {lines.number})" if lines.number else ""
            where = f"row {len(rows)}{line} of {file}" if rows or line else file
            raise ValueError(f"{where} cannot be read as {suffix}: {_reason(error)}") from None
    if not rows:
        raise ValueError(f"{file} has no rows")
    empty = dict.fromkeys(name for name in names if name in columns)
    return _whole_numbers([{**empty, **row} for row in rows]), list(names)


def _whole_numbers(rows: list[Record]) -> list[Record]:
    """The rows, with whole numbers in columns that hold nothing else: pandas, and what it writes, makes floats of all
    where a single one is missing, and an answer of 145.0 is matched by nothing."""
    for name in rows[0] if rows else ():
        known = [row for row in rows if not is_missing(row[name])]
        if all(isinstance(row[name], float) and row[name].is_integer() for row in known):
            for row in known:
                row[name] = int(row[name])
    return rows


def _opened(file: str) -> IO[bytes]:
    if "://" not in file:
        return open(file, "rb")
    import fsspec

    return fsspec.open(file, "rb").open()


class _Lines:
    """A file line by line; `number` is that of the last line read, for errors."""

    def __init__(self, stream: IO[bytes]):
        self.stream, self.number = stream, 0

    def __iter__(self) -> Iterator[str]:
        return self.of(self.stream)

    def of(self, lines: Iterable[bytes]) -> Iterator[str]:
        for self.number, line in enumerate(lines, start=1):
            yield line.decode(
                "utf-8-sig" if self.number == 1 else "utf-8"
            )  # the first may have a byte order mark


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.object[error.start]:#04x} is not UTF-8; save it as UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON, {error.msg} at line {error.lineno} column {error.colno}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _csv(lines: _Lines, columns: Collection[str], field: Any) -> Iterator[Record]:
    return read_csv(lines, columns, delimiter=",")


def _tsv(lines: _Lines, columns: Collection[str], field: Any) -> Iterator[Record]:
    return read_csv(lines, columns, delimiter="\t")


def _xlsx(lines: _Lines, columns: Any, field: Any) -> Iterator[Record]:
    return read_excel(lines.stream)


def _json_lines(lines: Iterable[str], columns: Any, field: Any) -> Iterator[Any]:
    return (_parsed(line) for line in lines if line.strip())


def _parsed(text: str) -> Any:
    """A text as JSON, without numbers that no other program could read back."""

    def number(digits: str) -> float:
        if math.isinf(value := float(digits)):
            raise ValueError(f"the number {digits[:40]} is too large")
        return value

    def constant(name: str) -> None:
        if name != "NaN":  # which is how pandas has a missing value
            raise ValueError(f"{name} is no number")

    return json.loads(text, parse_float=number, parse_constant=constant)


def _json(lines: _Lines, columns: Any, field: str | None) -> Iterator[Any]:
    """One list of objects, in `field` if need be; or objects one to a line, which many call `.json` as well."""
    text = lines.stream.read()
    try:
        rows = _parsed(text.decode("utf-8-sig")) if text.strip() else []
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        return _json_lines(lines.of(text.splitlines()), columns, field)
    if field is not None:
        if not isinstance(rows, dict) or not isinstance(rows.get(field), list):
            raise ValueError(f"it should hold its rows as a list in the field {field!r}")
        rows = rows[field]
    return iter(rows if isinstance(rows, list) else [rows])


def _parquet(lines: _Lines, columns: Collection[str], field: Any) -> Iterator[Record]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        table = ParquetFile(lines.stream)
        names = table.schema_arrow.names
        wanted = [name for name in names if name in columns] or names[
            :1
        ]  # without any column there are no rows
        types = {name: str(table.schema_arrow.field(name).type) for name in wanted}
        for batch in table.iter_batches(columns=wanted):
            records = batch.to_pylist()
            _restore_short_floats(records, types)
            yield from ({**dict.fromkeys(names), **row} for row in records)
    except (ArrowException, OSError) as error:
        raise ValueError(str(error).strip().partition("\n")[0][:200]) from None


SUFFIXES: dict[str, Callable[..., Iterator[Record]]] = {
    ".parquet": _parquet,
    ".json": _json,
    ".jsonl": _json_lines,
    ".csv": _csv,
    ".tsv": _tsv,
    ".xlsx": _xlsx,
}
"""The readers, by the ending of a file's name."""

_OTHER_SPREADSHEETS = (".xls", ".xlsm", ".xlsb", ".ods", ".numbers")
