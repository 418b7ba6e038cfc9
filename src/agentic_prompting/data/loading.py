"""`load_task`: every data set in one schema, from the hub or from local files.

Columns: `id`, `question`, `answers` (list of accepted answers), `task`, `meta` (JSON text: sets keep different things,
and Arrow could not put rows with different structs into one table). What the sets are is in `tasks.py`.
"""

from __future__ import annotations

import difflib
import itertools
import json
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .records import Reader, Source, Task
from .tasks import TASKS

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

DataFiles = str | Path | Sequence[str | Path] | Mapping[str, Any]


class _Found(NamedTuple):
    """Rows as their source has them, how to read one, where they come from, and each one's number there."""

    rows: Any
    reader: Reader
    origin: str
    numbers: Sequence[int]


_BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv"}


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
        name (`str`): One of `prompt_r1`, `hotpotqa`, `2wiki`, `gsm8k`, `musique`, `popqa`, `squad_v2`, `triviaqa`,
            `mathqa`; ProRefine's `bbh_object_counting`, `bbh_word_sorting`, `gsm8k_dspy`, `svamp`, `aqua`.
        split (`str`, *optional*, defaults to `"train"`): The split. Prompt-R1's twelve evaluation files are `test`
            together, `test/hotpot` and so on one by one. Of `data_files` it chooses only if they are a dict; the
            splits of both BBH sets and of `gsm8k_dspy` are cut out of the files after that, by row number.
        n (`int`, *optional*): Sample this many rows with different questions, in the order they were drawn:
            `random.Random(seed).sample`. All rows by default.
        seed (`int`, *optional*, defaults to `0`): For the sample.
        data_files (`str`, `list` or `dict`, *optional*): Local files (or addresses) to read instead of the hub:
            parquet, JSON, JSON lines, csv, tsv. A dict gives the files per split.
        revision (`str`, *optional*): Commit or branch of the set's first hub repository. Then no other source is
            tried: what is pinned is not replaced silently. Pin it for anything that is reported.

    Returns:
        `datasets.Dataset`: `meta` holds, as JSON, the row's number (`row`) and origin (`source`) beside what the set
        keeps; rows of `prompt_r1` also the released instruction as `prompt_template`. A question without an answer
        (SQuAD v2) has the one accepted answer `""`. Other rows without an accepted answer are dropped, and the number
        is logged.

    Raises:
        `ValueError`: If the task or split does not exist, a column is missing, a file cannot be read as what it is
            named, its rows are not those a split is cut from, or there are fewer than `n` different questions.
        `FileNotFoundError`: If one of `data_files` does not exist.
        `RuntimeError`: If no source could be loaded; says how each one failed.

    Example:

        >>> from agentic_prompting import load_task
        >>> train = load_task("hotpotqa", split="train", n=5120)  # doctest: +SKIP
    """
    task = _find_task(name)
    if n is not None and n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if data_files is not None and revision is not None:
        raise ValueError("revision says which version of a hub repository to load; with data_files there is none")
    if data_files is not None:
        found = _load_files(name, task, split, _files_of_split(name, data_files, split))
    else:
        found = _load_hub(name, task, split, revision)
    records = list(_read_rows(name, task, found))
    if n is not None:
        records = _sample(name, records, n, seed)
    return _to_dataset(records)


def validate_dataset(dataset: Any, columns: Sequence[str] = ("question", "answers")) -> None:
    """Check that a data set can be trained or evaluated on, before anything expensive begins.

    Args:
        dataset (`datasets.Dataset` or `datasets.IterableDataset`): Of a streamed one only the first row is looked at.
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
    missing = [column for column in columns if column not in first]
    if missing:
        raise ValueError(f"the dataset has no column {_quoted(missing)}; it has: {', '.join(first)}")
    checked = [column for column in columns if column in _CHECKS]
    streamed = not hasattr(dataset, "__len__")
    rows = itertools.islice(dataset, 1) if streamed else _only(dataset, checked) if checked else ()
    for number, row in enumerate(rows):
        problem = next(filter(None, (_CHECKS[column](row[column]) for column in checked)), "")
        if problem:
            raise ValueError(f"row {number} of the dataset: {problem}")


def _wrong_question(question: Any) -> str:
    if not isinstance(question, str) or not question.strip():
        return f"`question` must be a text that is not empty, got {question!r}"
    return ""


def _wrong_answers(answers: Any) -> str:
    if not isinstance(answers, (list, tuple)) or not all(isinstance(answer, str) for answer in answers):
        return f"`answers` must be a list of strings, got {answers!r}"
    if not answers:
        return '`answers` is empty; give at least one accepted answer ("" for a question that has none)'
    return ""


_CHECKS = {"question": _wrong_question, "answers": _wrong_answers}


def _find_task(name: str) -> Task:
    if name in TASKS:
        return TASKS[name]
    near = difflib.get_close_matches(name.lower(), TASKS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ValueError(f"unknown task {name!r}; {hint}known: {', '.join(TASKS)}")


# From the hub -------------------------------------------------------------------------------------------------------


def _load_hub(name: str, task: Task, split: str, revision: str | None) -> _Found:
    """The first source that loads, has the columns and, for a split cut by row numbers, has its rows in order."""
    if split not in task.expected_rows:
        raise ValueError(f"{name} has no split {split!r}; it has: {', '.join(task.expected_rows)}")
    sources = task.sources if revision is None else task.sources[:1]
    failures = []
    for source in sources:
        origin = f"{source}@{revision}" if revision else str(source)
        try:
            rows = _load_source(source, split, revision)
            found = _cut(name, task, split, rows, _fitting_reader(name, task, rows.column_names, origin), origin)
        except Exception as error:  # what a hub, a network and a builder can raise has no common type
            failures.append(f"  {origin}: {type(error).__name__}: {_first_line(error)}")
            continue
        _check_size(name, split, len(found.rows), task.expected_rows[split], origin)
        return found._replace(origin=f"{origin}:{split}")
    raise RuntimeError(
        f"{name}, split {split!r}: no source could be loaded. Without a network, pass data_files=…. Tried:\n"
        + "\n".join(failures)
    )


def _load_source(source: Source, split: str, revision: str | None) -> Dataset:
    from datasets import load_dataset

    theirs = source.splits.get(split, split)
    options: dict[str, Any] = dict(source.options)
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


def _load_files(name: str, task: Task, split: str, files: list[str]) -> _Found:
    from datasets import load_dataset

    suffixes = {Path(file).suffix.lower() for file in files}
    if len(suffixes) > 1 or not suffixes <= set(_BUILDERS):
        raise ValueError(f"{name}: data_files must all end in one of {', '.join(_BUILDERS)}; got {', '.join(files)}")
    (suffix,) = suffixes
    options = {"sep": "\t"} if suffix == ".tsv" else {}
    if suffix == ".json" and task.json_field:
        options["field"] = task.json_field
    origin = ", ".join(files)
    try:
        rows = load_dataset(_BUILDERS[suffix], data_files={"rows": files}, split="rows", **options)
    except Exception as error:  # a broken file fails in as many ways as there are formats
        raise ValueError(f"{name}: {origin} cannot be read as {suffix}: {_first_line(error)}") from error
    return _cut(name, task, split, rows, _fitting_reader(name, task, rows.column_names, origin), origin)


# Rows ---------------------------------------------------------------------------------------------------------------


def _fitting_reader(name: str, task: Task, found: Iterable[str], origin: str) -> Reader:
    """The first reader whose columns are there."""
    found = list(found)
    for reader in task.readers:
        if set(reader.columns) <= set(found):
            return reader
    missing = [column for column in task.readers[0].columns if column not in found]
    raise ValueError(f"{name}: {origin} has no column {_quoted(missing)}; it has: {', '.join(found)}")


def _cut(name: str, task: Task, split: str, rows: Any, reader: Reader, origin: str) -> _Found:
    """The rows of a split: all there are or, where the task says so, the numbers that its authors picked."""
    if not task.cuts:
        return _Found(rows, reader, origin, range(len(rows)))
    if split not in task.cuts:
        raise ValueError(f"{name} has no split {split!r}; it has: {', '.join(task.cuts)}")
    cut = task.cuts[split]
    if len(rows) != cut.whole:
        raise ValueError(
            f"{name}: split {split!r} is cut by row numbers out of {cut.whole:,} rows, but {origin} has {len(rows):,}"
        )
    numbers = cut.pick(cut.whole)
    question = reader.question(rows[numbers[0]])
    if cut.first not in question:
        raise ValueError(
            f"{name}: {origin} has its rows in another order: split {split!r} should begin with a question about "
            f"{cut.first!r}, not {question[:80]!r}"
        )
    return _Found(rows.select(numbers), reader, origin, numbers)


def _read_rows(name: str, task: Task, found: _Found) -> Iterable[dict[str, Any]]:
    """Rows in our schema, those without an accepted answer left out."""
    rows, reader, origin, numbers = found
    prefix = Path(origin).stem if Path(origin).suffix in _BUILDERS else name
    dropped = 0
    for number, row in zip(numbers, _only(rows, reader.columns + reader.optional), strict=True):
        try:
            question, golds, meta = reader.question(row).strip(), _unique(reader.golds(row)), reader.meta(row)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{name}: row {number} of {origin} cannot be read: {_first_line(error)}") from error
        if not golds and not task.unanswerable:
            dropped += 1
            continue
        yield {
            "id": str(row["id"]) if row.get("id") is not None else f"{prefix}-{number}",
            "question": question,
            "answers": golds or [""],
            "task": name,
            "meta": json.dumps({"row": number, "source": origin, **meta}, ensure_ascii=False),
        }
    if dropped:
        logger.warning(f"{name}: {dropped} rows of {origin} have no accepted answer and were dropped")


def _sample(name: str, records: list[dict[str, Any]], n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows with different questions, in the order they were drawn."""
    # Of equal questions the first stands for all: where there are none this is a plain sample of the rows.
    first: dict[str, dict[str, Any]] = {}
    for record in records:
        first.setdefault(record["question"], record)
    distinct = list(first.values())
    if n > len(distinct):
        raise ValueError(f"{name}: n={n}, but there are only {len(distinct)} different questions with an answer")
    return [distinct[i] for i in random.Random(seed).sample(range(len(distinct)), n)]


def _to_dataset(records: list[dict[str, Any]]) -> Dataset:
    from datasets import Dataset, Features, List, Value

    text = Value("string")
    features = Features({"id": text, "question": text, "answers": List(text), "task": text, "meta": text})
    return Dataset.from_list(records, features=features)


def _only(dataset: Any, columns: Iterable[str]) -> Any:
    """The data set with no more than these columns: contexts are large, and need not be decoded to be ignored."""
    return dataset.select_columns([column for column in dict.fromkeys(columns) if column in dataset.column_names])


def _unique(texts: Iterable[Any]) -> list[str]:
    """Stripped, without the empty ones, each once, in order."""
    return list(dict.fromkeys(text for text in (str(text).strip() for text in texts if text is not None) if text))


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:300]
