"""From rows as their source has them to rows in our schema: cut, read, each question once, sampled, checked.

The schema: `id`, `question`, `answers` (list of accepted answers), `task`, `meta` (JSON text: sets keep different
things, and Arrow could not put rows with different structs into one table).
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from .task import Reader, Task, missing, wrong_question

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

Record = dict[str, Any]


class Found(NamedTuple):
    """Rows as their source has them, how to read one, and where they come from; of a part of it each one's number."""

    rows: Any
    reader: Reader
    origin: str
    numbers: Sequence[int] | None = None


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


def check_split(name: str, task: Task, split: str) -> None:
    if split not in task.expected_rows:
        raise ValueError(f"{name} has no split {split!r}; it has: {', '.join(task.expected_rows)}")


def cut_rows(name: str, task: Task, split: str, found: Found) -> Found:
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


def read_rows(name: str, task: Task, found: Found, prefix: str, first: int = 0) -> list[Record]:
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


def in_order(task: Task, records: list[Record]) -> list[Record]:
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


def to_dataset(records: Iterable[Record]) -> Dataset:
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
