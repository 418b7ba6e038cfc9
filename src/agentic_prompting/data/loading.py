"""`load_task`: the papers' data sets and your own, in one schema. What the sets are is in `tasks.py`."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import SUFFIXES, read_file
from .rows import (
    Found,
    Record,
    check_split,
    cut_rows,
    first_line,
    fitting_reader,
    in_order,
    read_rows,
    sample_rows,
    to_dataset,
)
from .task import Reader, Source, Task, as_list
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
            `.tsv`, `.parquet`, also addresses), a pandas `DataFrame`, a `datasets.Dataset`, a list of dicts; or a dict
            of these by split.
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
        raise ValueError("revision says which version of a hub repository to load; with data_files there is none")
    if is_own(name):
        if data_files is not None or revision is not None:
            raise ValueError("data_files and revision are for the sets that have a name; pass your own data alone")
        name, records = _own(name, split, columns)
    elif columns is not None:
        raise ValueError(f"columns says how to read data of your own; {name!r} is a set that is known")
    else:
        name, split, task = find_task(name, split)
        if data_files is None:
            records = _load_hub(name, task, split, revision)
        else:
            files = _existing(name, _of_split(name, data_files, split))
            records = in_order(task, _load_files(name, task, split, files))
    return to_dataset(records if n is None else sample_rows(name, records, n, seed))


def is_own(name: Any) -> bool:
    """Whether this is data of one's own, and not the name of a set."""
    return not isinstance(name, str) or Path(name).suffix.lower() in SUFFIXES


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
    near = difflib.get_close_matches(name.lower(), [*TASKS, *PAIRS], n=3, cutoff=0.5)
    if near:
        guess = f"did you mean {' or '.join(map(repr, near))}? `agentic-prompting data list` shows all"
        raise ValueError(f"unknown task {name!r}; {guess}")
    raise ValueError(f"unknown task {name!r}; known: {', '.join([*TASKS, *PAIRS])}")


# Where rows come from -------------------------------------------------------------------------------------------------


def _load_hub(name: str, task: Task, split: str, revision: str | None) -> list[Record]:
    """The first source that loads, has the columns and, for a split cut by row numbers, has its rows in order."""
    check_split(name, task, split)
    if revision is not None and task.sources[0].also:
        raise ValueError(f"{name} is put together from several repositories: a single revision cannot pin them")
    failures = []
    for source in task.sources if revision is None else task.sources[:1]:
        origin = f"{source}@{revision}" if revision else str(source)
        try:
            parts = [_load_source(name, task, part, split, revision) for part in source.parts()]
        except Exception as error:  # what a hub, a network and a builder can raise has no common type
            failures.append(f"  {origin}: {type(error).__name__}: {first_line(error)}")
            continue
        records = []
        for number, part in enumerate(parts):  # ids of rows that have none also say which repository of several
            records += read_rows(name, task, part, name if len(parts) == 1 else f"{name}-{number}")
        ours = in_order(task, records)
        found = len(ours) if task.unique or task.order else sum(len(part.rows) for part in parts)
        if abs(found - task.expected_rows[split]) > 0.01 * task.expected_rows[split]:
            expected = f"{task.expected_rows[split]:,} were expected"
            logger.warning(f"{name}, split {split!r}: {found:,} rows from {origin}, where {expected}")
        return ours
    tried = "\n".join(failures)
    raise RuntimeError(
        f"{name}, split {split!r}: no source could be loaded. Without a network, pass data_files=…. Tried:\n{tried}"
    )


def _load_source(name: str, task: Task, source: Source, split: str, revision: str | None) -> Found:
    rows = open_source(source, split, revision)
    origin = f"{source}@{revision}" if revision else str(source)
    found = Found(rows, fitting_reader(name, task, rows.column_names, origin), origin)
    return cut_rows(name, task, split, found)._replace(origin=f"{origin}:{split}")


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
    return load_dataset(source.path, source.config, split=theirs, revision=revision or source.revision, **options)


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
        check_split(name, task, split)
        whole = Found([row for part in parts for row in part.rows], parts[0].reader, ", ".join(files))
        parts = [cut_rows(name, task, split, whole)]
    prefix, first, records = Path(files[-1]).stem, 0, []
    for part in parts:
        records += read_rows(name, task, part, prefix, first)
        first += len(part.rows)
    return records


def _own(data: Any, split: str, columns: Mapping[str, str] | None) -> tuple[str, list[Record]]:
    """Data of one's own: what to call it, and its rows."""
    data = _of_split("data", data, split)
    task = Task((), own_readers(columns or {}), {}, licence="")
    listed = data if isinstance(data, (list, tuple)) else [data]
    if listed and all(isinstance(one, (str, Path)) for one in listed):
        files = _existing("data", listed)
        name = Path(files[0]).stem
        return name, _load_files(name, task, split, files)
    name, wanted = "data", {column for reader in task.readers for column in reader.used}
    if hasattr(data, "iterrows"):
        frame = data[[column for column in data.columns if column in wanted]]
        names, rows = list(data.columns), frame.astype(object).where(frame.notna(), None).to_dict("records")
    elif hasattr(data, "select_columns") and hasattr(data, "__len__"):
        names, rows = data.column_names, data
    elif not isinstance(data, Iterable):
        raise ValueError(f"load_task reads files, frames, data sets and lists of dicts, got {type(data).__name__}")
    else:
        rows = list(data)
        odd = next((number for number, row in enumerate(rows) if not isinstance(row, Mapping)), None)
        if odd is not None:
            raise ValueError(f"{name}: row {odd} should be a dict, got {type(rows[odd]).__name__}")
        names = list(dict.fromkeys(column for row in rows for column in row))
        rows = [{**dict.fromkeys(names), **row} for row in rows]  # what one lacks is missing, as in a file
    if not len(rows):
        raise ValueError(f"{name} has no rows")
    where = f"the {type(data).__name__}"
    return name, read_rows(name, task, Found(rows, fitting_reader(name, task, names, where), where), name)


def own_readers(columns: Mapping[str, str]) -> tuple[Reader, ...]:
    """How to read data of one's own; see `columns` of [`load_task`].

    Raises:
        `ValueError`: Both `answers` and `answer` are named.
    """
    if {"answers", "answer"} <= set(columns):
        raise ValueError(f"columns names either `answers` or `answer`, got {dict(columns)}")
    return tuple(
        _own_reader({"question": "question", gold: gold, **columns})
        for gold in ("answers", "answer")
        if gold in columns or not {"answers", "answer"} & set(columns)
    )


def _own_reader(columns: Mapping[str, str]) -> Reader:
    keep = {ours: theirs for ours, theirs in columns.items() if ours not in ("question", "answers", "answer", "id")}
    golds = columns.get("answer") or (lambda row: as_list(row[columns["answers"]]))
    return Reader(columns["question"], golds, tuple(columns.values()), keep, id=columns.get("id", "id"))


def _of_split(name: str, data: Any, split: str) -> Any:
    if not isinstance(data, Mapping):
        return data
    if split not in data:
        raise ValueError(f"{name}: data_files has no split {split!r}; it has: {', '.join(data)}")
    return data[split]


def _existing(name: str, data_files: Any) -> list[str]:
    files = [str(file) for file in ([data_files] if isinstance(data_files, (str, Path)) else data_files)]
    if not files:
        raise ValueError(f"{name}: data_files names no file")
    for file in files:
        if "://" not in file and not Path(file).is_file():
            raise FileNotFoundError(f"{name}: no such file: {file} (looked in {Path.cwd()})")
    if not {Path(file).suffix.lower() for file in files} <= set(SUFFIXES):
        raise ValueError(f"{name}: data_files must all end in one of {', '.join(SUFFIXES)}; got {', '.join(files)}")
    return files
