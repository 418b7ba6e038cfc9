"""`load_task`: the papers' data sets and your own, in one schema. What the sets are is in `tasks.py`.

The schema: `id`, `question`, `answers` (list of accepted answers), `task`, `meta` (JSON text: sets keep different
things, and Arrow could not put rows with different structs into one table).
"""

from __future__ import annotations

import difflib
import json
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .files import SUFFIXES, read_file
from .task import Reader, Source, Task, as_list, missing, wrong_question
from .tasks import PAIRS, TASKS

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

Record = dict[str, Any]
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
            records = _in_order(task, _load_files(name, task, split, files))
    return _to_dataset(records if n is None else sample_rows(name, records, n, seed))


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


class Found(NamedTuple):
    """Rows as their source has them, how to read one, and where they come from; of a part of it each one's number."""

    rows: Any
    reader: Reader
    origin: str
    numbers: Sequence[int] | None = None


def _load_hub(name: str, task: Task, split: str, revision: str | None) -> list[Record]:
    """The first source that loads, has the columns and, for a split cut by row numbers, has its rows in order."""
    _check_split(name, task, split)
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
            records += _read(name, task, part, name if len(parts) == 1 else f"{name}-{number}")
        ours = _in_order(task, records)
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
    return _cut(name, task, split, found)._replace(origin=f"{origin}:{split}")


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
        _check_split(name, task, split)
        whole = Found([row for part in parts for row in part.rows], parts[0].reader, ", ".join(files))
        parts = [_cut(name, task, split, whole)]
    prefix, first, records = Path(files[-1]).stem, 0, []
    for part in parts:
        records += _read(name, task, part, prefix, first)
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
    else:
        rows = list(data)
        names = list(dict.fromkeys(column for row in rows for column in row))
    if not len(rows):
        raise ValueError(f"{name} has no rows")
    where = f"the {type(data).__name__}"
    return name, list(_read(name, task, Found(rows, fitting_reader(name, task, names, where), where), name))


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
    return Reader(tuple(columns.values()), columns["question"], golds, keep, id=columns.get("id", "id"))


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


# From rows to records -------------------------------------------------------------------------------------------------


def fitting_reader(name: str, task: Task, found: Iterable[str], origin: str) -> Reader:
    """The first reader whose columns are there.

    Raises:
        `ValueError`: If there is none; names the columns that are missing and those that are there.
    """
    found = list(found)
    for reader in task.readers:
        if set(reader.columns) <= set(found):
            return reader
    lacking = [[column for column in reader.columns if column not in found] for reader in task.readers]
    # Of a set that is known the first shape is the usual one; of one's own data it is the nearest.
    near, hint = lacking[0], ""
    if not task.sources:
        near, hint = min(lacking, key=len), "; say which is which with columns={'question': …, 'answers': …}"
    has = ", ".join(map(str, found))
    raise ValueError(f"{name}: {origin} has no column {_quoted(near)}; it has: {has}{hint}")


def _check_split(name: str, task: Task, split: str) -> None:
    if split not in task.expected_rows:
        raise ValueError(f"{name} has no split {split!r}; it has: {', '.join(task.expected_rows)}")


def _cut(name: str, task: Task, split: str, found: Found) -> Found:
    """The rows of a split: all there are or, where the task says so, the numbers that its authors picked.

    Raises:
        `ValueError`: If these are not the rows that the numbers are about.
    """
    cut, rows, origin = task.cuts.get(split), found.rows, found.origin
    if cut is None:
        return found
    if cut.whole is not None and len(rows) != cut.whole:
        raise ValueError(
            f"{name}: split {split!r} is cut by row numbers out of {cut.whole:,} rows, but {origin} has {len(rows):,}"
        )
    numbers = cut.numbers(len(rows))
    question = found.reader.read(rows[numbers[0]])[0]
    if cut.first not in question:
        raise ValueError(
            f"{name}: {origin} has its rows in another order: split {split!r} should begin with a question about "
            f"{cut.first!r}, not {question[:80]!r}"
        )
    picked = rows.select(numbers) if hasattr(rows, "select") else [rows[number] for number in numbers]
    return found._replace(rows=picked, numbers=numbers)


def _read(name: str, task: Task, found: Found, prefix: str, first: int = 0) -> list[Record]:
    """Rows in our schema, those without an accepted answer left out. `prefix` and number are the ids of rows without.

    Raises:
        `ValueError`: For the first row that is not as documented or has no question; names it.
    """
    rows, reader, origin, numbers = found
    records = []
    for number, row in zip(numbers or range(len(rows)), _only(rows, reader.used), strict=True):
        try:
            question, golds, kept = reader.read(row)
            _storable([question, golds, kept])
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{name}: row {number} of {origin} cannot be read: {first_line(error)}") from None
        if golds or task.unanswerable:
            own = row.get(reader.id)
            records.append(
                {
                    "id": f"{prefix}-{first + number}" if missing(own) else str(own),
                    "question": question,
                    "answers": golds or [""],
                    "task": name,
                    "meta": {"row": number, "source": origin, **kept},
                }
            )
    dropped = len(rows) - len(records)
    if dropped and not records:
        raise ValueError(f"{name}: none of the {dropped} rows of {origin} has an accepted answer")
    if dropped:
        logger.warning(f"{name}: {dropped} rows of {origin} have no accepted answer and were dropped")
    return records


def _in_order(task: Task, records: list[Record]) -> list[Record]:
    """Each question once and in the set's own order, where the task asks for either."""
    if task.unique:
        # As in the released code: the first place stays, the last answers win.
        records = list({record["question"]: record for record in records}.values())
    return records if task.order is None else [records[number] for number in task.order.numbers(len(records))]


def sample_rows(name: str, records: list[Record], n: int, seed: int) -> list[Record]:
    """`n` rows with different questions, in the order they were drawn; how they were drawn goes into `meta`.

    Raises:
        `ValueError`: If there are not so many.
    """
    # Of equal questions the first stands for all: where there are none this is a plain sample of the rows.
    first: dict[str, Record] = {}
    for record in records:
        first.setdefault(record["question"], record)
    distinct = list(first.values())
    if n > len(distinct):
        raise ValueError(f"{name}: n={n}, but there are only {len(distinct)} different questions with an answer")
    how = {"n": n, "seed": seed, "of": len(distinct)}
    drawn = random.Random(seed).sample(range(len(distinct)), n)
    return [{**distinct[i], "meta": {**distinct[i]["meta"], "sample": how}} for i in drawn]


def _to_dataset(records: Iterable[Record]) -> Dataset:
    from datasets import Dataset, Features, List, Value

    text = Value("string")
    features = Features({"id": text, "question": text, "answers": List(text), "task": text, "meta": text})
    rows = [{**record, "meta": json.dumps(record["meta"], ensure_ascii=False)} for record in records]
    return Dataset.from_list(rows, features=features)


def validate_dataset(dataset: Any, columns: Sequence[str] = ("question", "answers")) -> None:
    """Check that a data set can be trained or evaluated on, before anything expensive begins.

    Args:
        dataset (`datasets.Dataset`, `datasets.IterableDataset` or `list[dict]`): Of a streamed one only the first row
            is looked at.
        columns (`Sequence[str]`, *optional*, defaults to `("question", "answers")`): What every row must have:
            `question` (str) and `answers` (list of str) are looked into, others need only be there.

    Raises:
        `ValueError`: If it is missing or empty, lacks a column, or a row has no question or no accepted answer; names
            the first such row.
    """
    if dataset is None:
        raise ValueError("train_dataset is missing; load one with load_task, or make a datasets.Dataset of your rows")
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError("the dataset is empty; check its split, filters and files")
    lacking = [column for column in columns if column not in first]
    if lacking:
        raise ValueError(f"the dataset has no column {_quoted(lacking)}; it has: {', '.join(first)}")
    checked = [column for column in columns if column in _CHECKS]
    streamed = not hasattr(dataset, "__len__")
    rows = islice(dataset, 1) if streamed else _only(dataset, checked) if checked else ()
    for number, row in enumerate(rows):
        # `get`: rows of a list need not have the same keys.
        problem = next(filter(None, (_CHECKS[column](row.get(column)) for column in checked)), "")
        if problem:
            raise ValueError(f"row {number} of the dataset: {problem}")


def _wrong_answers(answers: Any) -> str:
    if not isinstance(answers, (list, tuple)) or not all(isinstance(answer, str) for answer in answers):
        return f"`answers` must be a list of strings, got {answers!r}"
    return "" if answers else '`answers` is empty; give at least one accepted answer ("" for a question that has none)'


_CHECKS = {"question": wrong_question, "answers": _wrong_answers}


def first_line(error: BaseException) -> str:
    """An error's first line, for an error of our own that is one line."""
    return (str(error).strip().splitlines() or ["no message"])[0][:300]


def _storable(values: Any) -> None:
    """Raises `ValueError` for half of a surrogate pair, which JSON can hold and no table can."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it has half of a surrogate pair, {error.object[error.start]!a}") from None


def _only(dataset: Any, columns: Iterable[str]) -> Any:
    """The data set with no more than these columns: contexts are large, and need not be decoded to be ignored."""
    if not hasattr(dataset, "select_columns"):  # a plain list of rows
        return dataset
    return dataset.select_columns([column for column in columns if column in dataset.column_names])


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
