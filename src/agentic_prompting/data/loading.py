"""`load_task`: every data set in one schema, from the hub or from local files. What the sets are is in `tasks.py`."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .espl import PAIRS
from .files import SUFFIXES, read_file
from .records import Source, Task
from .rows import Found, Record, cut_rows, first_line, fitting_reader, in_order, read_rows, sample_rows, to_dataset
from .tasks import TASKS

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

DataFiles = str | Path | Sequence[str | Path] | Mapping[str, Any]


def load_task(
    name: str,
    split: str = "train",
    n: int | None = None,
    seed: int = 0,
    data_files: DataFiles | None = None,
    revision: str | None = None,
) -> Dataset:
    """Load a data set as `id`, `question`, `answers`, `task`, `meta`.

    Args:
        name (`str`): A set of [`TASKS`] (`agentic-prompting data list` shows them): `prompt_r1`, `hotpotqa`, `gsm8k`,
            `squad_v2`, ... Or a pair of E-SPL's, whose splits are two sets: `dapo_aime25`, `hmmt`, `aimo_beyondaime`,
            `aime_and_amc_to_beyondaime`.
        split (`str`, *optional*, defaults to `"train"`): The split. Prompt-R1's twelve evaluation files are `test`
            together, `test/hotpot` and so on one by one. Of `data_files` it chooses only if they are a dict; splits
            that are cut by row number (both BBH sets, `gsm8k_dspy`, parts of `nq_hotpotqa`) are cut out of the files
            after that.
        n (`int`, *optional*): Sample this many rows with different questions, in the order they were drawn:
            `random.Random(seed).sample`. All rows by default.
        seed (`int`, *optional*, defaults to `0`): For the sample.
        data_files (`str`, `list` or `dict`, *optional*): Local files (or addresses) to read instead of the hub:
            parquet, JSON, JSON lines, csv, tsv. A dict gives the files per split.
        revision (`str`, *optional*): Commit or branch of the set's first hub repository. Then no other source is
            tried: what is pinned is not replaced silently. Pin it for anything that is reported.

    Returns:
        `datasets.Dataset`: `meta` holds, as JSON, the row's number (`row`) and origin (`source`), how a sample was
        drawn (`sample`: `n`, `seed`, `of` how many) and what the set keeps; rows of `prompt_r1` also the released
        instruction as `prompt_template`. A question without an answer (SQuAD v2) has the one accepted answer `""`.
        Other rows without an accepted answer are dropped, and the number is logged.

    Raises:
        `ValueError`: If the task or split does not exist, a column is missing, a file cannot be read as what it is
            named, a row cannot be read (names it), rows are not those a split is cut from, or there are fewer than `n`
            different questions.
        `FileNotFoundError`: If one of `data_files` does not exist.
        `RuntimeError`: If no source could be loaded; says how each one failed.

    Example:

        >>> from agentic_prompting import load_task
        >>> train = load_task("hotpotqa", split="train", n=5120)  # doctest: +SKIP
    """
    name, split, task = find_task(name, split)
    if n is not None and n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if data_files is not None and revision is not None:
        raise ValueError("revision says which version of a hub repository to load; with data_files there is none")
    if data_files is not None:
        records = _load_files(name, task, split, _files_of_split(name, data_files, split))
    else:
        records = _load_hub(name, task, split, revision)
    if n is not None:
        records = sample_rows(name, records, n, seed)
    return to_dataset(records)


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


# From the hub -------------------------------------------------------------------------------------------------------


def _load_hub(name: str, task: Task, split: str, revision: str | None) -> list[Record]:
    """The first source that loads, has the columns and, for a split cut by row numbers, has its rows in order."""
    if split not in task.expected_rows:
        raise ValueError(f"{name} has no split {split!r}; it has: {', '.join(task.expected_rows)}")
    if revision is not None and task.sources[0].also:
        raise ValueError(f"{name} is put together from several repositories: a single revision cannot pin them")
    sources = task.sources if revision is None else task.sources[:1]
    failures = []
    for source in sources:
        origin = f"{source}@{revision}" if revision else str(source)
        try:
            parts = [_load_source(name, task, part, split, revision) for part in source.parts()]
        except Exception as error:  # what a hub, a network and a builder can raise has no common type
            failures.append(f"  {origin}: {type(error).__name__}: {first_line(error)}")
            continue
        records = [record for part in parts for record in read_rows(name, task, part, _prefix(name, part, parts))]
        ours = in_order(task, records)
        found = len(ours) if task.unique or task.order else sum(len(part.rows) for part in parts)
        _check_size(name, split, found, task.expected_rows[split], origin)
        return ours
    raise RuntimeError(
        f"{name}, split {split!r}: no source could be loaded. Without a network, pass data_files=…. Tried:\n"
        + "\n".join(failures)
    )


def _prefix(name: str, part: Found, parts: list[Found]) -> str:
    """What ids begin with where rows have none: the set, and of several repositories also which one."""
    return name if len(parts) == 1 else f"{name}-{parts.index(part)}"


def _load_source(name: str, task: Task, source: Source, split: str, revision: str | None) -> Found:
    """The rows of one repository that belong to a split."""
    rows = open_source(source, split, revision)
    origin = f"{source}@{revision}" if revision else str(source)
    reader = fitting_reader(name, task, rows.column_names, origin)
    return cut_rows(name, task, split, rows, reader, origin)._replace(origin=f"{origin}:{split}")


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


def _check_size(name: str, split: str, found: int, expected: int, origin: str) -> None:
    if abs(found - expected) > 0.01 * expected:
        logger.warning(f"{name}, split {split!r}: {found:,} rows from {origin}, where {expected:,} were expected")


# From files ---------------------------------------------------------------------------------------------------------


def _files_of_split(name: str, data_files: DataFiles, split: str) -> list[str]:
    """The files to read for a split, all of them there."""
    if isinstance(data_files, Mapping):
        if split not in data_files:
            raise ValueError(f"{name}: data_files has no split {split!r}; it has: {', '.join(data_files)}")
        data_files = data_files[split]
    files = [str(file) for file in ([data_files] if isinstance(data_files, (str, Path)) else data_files)]
    if not files:
        raise ValueError(f"{name}: data_files names no file")
    for file in files:
        if "://" not in file and not Path(file).is_file():
            raise FileNotFoundError(f"{name}: no such file: {file} (looked in {Path.cwd()})")
    return files


def _load_files(name: str, task: Task, split: str, files: list[str]) -> list[Record]:
    if not {Path(file).suffix.lower() for file in files} <= set(SUFFIXES):
        raise ValueError(f"{name}: data_files must all end in one of {', '.join(SUFFIXES)}; got {', '.join(files)}")
    columns = {column for reader in task.readers for column in reader.columns + reader.optional}
    rows: list[Any] = []
    ends: list[int] = []
    reader = task.readers[0]
    for file in files:
        try:
            own, names = read_file(file, columns, task.json_field)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        reader = fitting_reader(name, task, names, file)
        rows += own
        ends.append(len(rows))
    found = cut_rows(name, task, split, rows, reader, ", ".join(files))._replace(ends=ends, origins=files)
    return in_order(task, list(read_rows(name, task, found, Path(files[-1]).stem)))
