"""From rows as their source has them to rows in our schema: cut, read, each question once, sampled, checked.

The schema: `id`, `question`, `answers` (list of accepted answers), `task`, `meta` (JSON text: sets keep different
things, and Arrow could not put rows with different structs into one table).
"""

from __future__ import annotations

import itertools
import json
import logging
import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .formats import as_text, missing
from .records import Reader, Task

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

Record = dict[str, Any]


class Found(NamedTuple):
    """Rows as their source has them, how to read one, where they come from, and each one's number there.

    Of several files `ends` has the number of rows up to the end of each, and `origins` its name.
    """

    rows: Any
    reader: Reader
    origin: str
    numbers: Sequence[int]
    ends: Sequence[int] = ()
    origins: Sequence[str] = ()

    def place(self, number: int) -> tuple[int, str]:
        """The row with this number of all, as its number in its own file, and the file."""
        if not self.ends:
            return number, self.origin
        file = bisect_right(self.ends, number)
        return number - (self.ends[file - 1] if file else 0), self.origins[file]


def fitting_reader(name: str, task: Task, found: Iterable[str], origin: str) -> Reader:
    """The first reader whose columns are there.

    Raises:
        `ValueError`: If there is none; names the columns that are missing and those that are there.
    """
    found = list(found)
    for reader in task.readers:
        if set(reader.columns) <= set(found):
            return reader
    missing = [column for column in task.readers[0].columns if column not in found]
    raise ValueError(f"{name}: {origin} has no column {_quoted(missing)}; it has: {', '.join(found)}")


def cut_rows(name: str, task: Task, split: str, rows: Any, reader: Reader, origin: str) -> Found:
    """The rows of a split: all there are or, where the task says so, the numbers that its authors picked.

    Raises:
        `ValueError`: If these are not the rows that the numbers are about.
    """
    cut = task.cuts.get(split)
    if cut is None:
        if task.cuts and split not in task.expected_rows:
            raise ValueError(f"{name} has no split {split!r}; it has: {', '.join(task.expected_rows)}")
        return Found(rows, reader, origin, range(len(rows)))
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
    picked = rows.select(numbers) if hasattr(rows, "select") else [rows[number] for number in numbers]
    return Found(picked, reader, origin, numbers)


def read_rows(name: str, task: Task, found: Found, prefix: str) -> Iterable[Record]:
    """Rows in our schema, those without an accepted answer left out.

    Raises:
        `ValueError`: For the first row that is not as documented or has no question; names it.
    """
    rows, reader, origin, numbers = found[:4]
    dropped = 0
    for number, row in zip(numbers, _only(rows, reader.columns + reader.optional), strict=True):
        own_number, file = found.place(number)
        try:
            question, golds, meta = _question(reader.question(row)), _unique(reader.golds(row)), reader.meta(row)
            _storable([question, *golds, meta])
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            problem = f"{name}: row {own_number} of {file} cannot be read: {first_line(error)}"
            raise ValueError(problem) from None
        if not golds and not task.unanswerable:
            dropped += 1
            continue
        yield {
            "id": f"{prefix}-{number}" if missing(row.get("id")) else str(row["id"]),
            "question": question,
            "answers": golds or [""],
            "task": name,
            "meta": {"row": own_number, "source": file, **meta},
        }
    if numbers and dropped == len(numbers):
        raise ValueError(f"{name}: none of the {dropped} rows of {origin} has an accepted answer")
    if dropped:
        logger.warning(f"{name}: {dropped} rows of {origin} have no accepted answer and were dropped")


def in_order(task: Task, records: list[Record]) -> list[Record]:
    """Each question once and in the set's own order, where the task asks for either."""
    if task.unique:
        # As in the released code: the first place stays, the last answers win.
        records = list({record["question"]: record for record in records}.values())
    if task.order is None:
        return records
    return [records[number] for number in task.order(len(records))]


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
    drawn = [distinct[i] for i in random.Random(seed).sample(range(len(distinct)), n)]
    how = {"n": n, "seed": seed, "of": len(distinct)}
    return [{**record, "meta": {**record["meta"], "sample": how}} for record in drawn]


def to_dataset(records: Iterable[Record]) -> Dataset:
    """The records as a table."""
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
    missing = [column for column in columns if column not in first]
    if missing:
        raise ValueError(f"the dataset has no column {_quoted(missing)}; it has: {', '.join(first)}")
    checked = [column for column in columns if column in _CHECKS]
    streamed = not hasattr(dataset, "__len__")
    rows = itertools.islice(dataset, 1) if streamed else _only(dataset, checked) if checked else ()
    for number, row in enumerate(rows):
        # `get`: rows of a list need not have the same keys.
        problem = next(filter(None, (_CHECKS[column](row.get(column)) for column in checked)), "")
        if problem:
            raise ValueError(f"row {number} of the dataset: {problem}")


def first_line(error: BaseException) -> str:
    """An error's first line, for an error of our own that is one line."""
    return (str(error).strip().splitlines() or ["no message"])[0][:300]


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


def _question(question: Any) -> str:
    problem = _wrong_question(question)
    if problem:
        raise ValueError(problem)
    return question.strip()


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
    return dataset.select_columns([column for column in dict.fromkeys(columns) if column in dataset.column_names])


def _unique(texts: Iterable[Any]) -> list[str]:
    """Stripped, without the empty ones, each once, in order."""
    stripped = (as_text(text).strip() for text in texts if not missing(text))
    return list(dict.fromkeys(text for text in stripped if text))


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
