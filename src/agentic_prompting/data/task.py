"""The description of a data set ([`Task`]), and the functions that cut, read, sample and check its rows.

The schema: `id`, `question`, `answers` (list of accepted answers), `task`, `meta` (JSON text, because data sets have
different columns, and Arrow cannot put rows with different structs into one table).
"""

from __future__ import annotations

import ast
import json
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ..llm.numbers import is_missing, number_text, value_text
from ..rewards.answers import answer_text

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]
Record = dict[str, Any]


@dataclass(frozen=True)
class Reader:
    """Reads rows of one shape.

    Args:
        question (`str` or `Callable`): The column, or a function of the row.
        golds (`str` or `Callable`): The column of the accepted answer or answers, taken as they are, or a function of
            the row. Stripping and removing duplicates is done here.
        needs (`tuple[str, ...]`, *optional*): The columns that the functions read.
        keep (`tuple[str, ...]` or `dict[str, str]`, *optional*): Columns that go into `meta`, if they exist; a dict
            renames them.
        meta (`Callable`, *optional*): A function of the row that returns further values for `meta`, fit for JSON.
        id (`str`, *optional*, defaults to `"id"`): The column of the row's id, if it exists.
    """

    question: str | Callable[[Row], str]
    golds: str | Callable[[Row], Sequence[Any]]
    needs: tuple[str, ...] = ()
    keep: tuple[str, ...] | Mapping[str, str] = ()
    meta: Callable[[Row], dict[str, Any]] = lambda row: {}
    id: str = "id"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it needs. If one is missing, the next reader is tried."""
        named = [column for column in (self.question, self.golds) if isinstance(column, str)]
        return tuple(dict.fromkeys([*named, *self.needs]))

    @property
    def used(self) -> list[str]:
        """All columns that it reads."""
        kept = self.keep.values() if isinstance(self.keep, Mapping) else self.keep
        return list(dict.fromkeys([*self.columns, self.id, *kept]))

    def read(self, row: Row) -> tuple[str, list[str], dict[str, Any]]:
        """The question, the accepted answers (stripped, each once), and the values for `meta`.

        Raises:
            `ValueError`: There is no question, or an answer is neither text nor number.
        """
        question = row[self.question] if isinstance(self.question, str) else self.question(row)
        golds = answers_of(row[self.golds]) if isinstance(self.golds, str) else self.golds(row)
        if problem := wrong_question(question):
            raise ValueError(problem)
        texts = (answer_text(gold).strip() for gold in golds if not is_missing(gold))
        names = (
            self.keep
            if isinstance(self.keep, Mapping)
            else dict(zip(self.keep, self.keep, strict=True))
        )
        kept = {name: row[column] for name, column in names.items() if column in row}
        return (
            question.strip(),
            list(dict.fromkeys(filter(None, texts))),
            {**kept, **self.meta(row)},
        )


@dataclass(frozen=True)
class Source:
    """One place to load a set from.

    Args:
        path (`str`): A hub id, or a builder (`parquet`, `csv`) when `files` are full addresses.
        config (`str`, *optional*), revision (`str`, *optional*), data_dir (`str`, *optional*): As on the hub.
        files (`dict[str, str | list[str]]`, *optional*): Files per split, if the repository does not name them itself.
        options (`dict`, *optional*): Passed on to the builder.
        splits (`dict[str, str]`, *optional*): The source's name for each of our splits, if they differ.
        also (`tuple[str, ...]`, *optional*): Further repositories of the same shape; their rows follow.
    """

    path: str
    config: str | None = None
    revision: str | None = None
    data_dir: str | None = None
    files: Mapping[str, str | list[str]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    splits: Mapping[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()

    def parts(self) -> list[Source]:
        """This repository and each further one, as sources of their own."""
        return [replace(self, path=path, also=()) for path in (self.path, *self.also)]

    def __str__(self) -> str:
        where = " + ".join((self.path, *self.also))
        if "/" not in self.path and self.files:  # a builder: its files say more than its name
            first = next(iter(self.files.values()))
            where = first if isinstance(first, str) else first[0]
        return " ".join(
            filter(None, [where, self.config, self.data_dir, self.revision and f"@{self.revision}"])
        )


@dataclass(frozen=True)
class Cut:
    """Rows by their numbers. It is right only while the order of the rows stays the same.

    Args:
        start (`int`, *optional*, defaults to `0`), stop (`int`, *optional*): The range of numbers, without `stop`.
        seed (`int`, *optional*): Seed of a shuffle before the cut; no shuffle by default.
        whole (`int`, *optional*): The number of rows before the cut, if it is known.
        first (`str`, *optional*): A part of the first question after the cut, to detect another order of the rows.
    """

    start: int = 0
    stop: int | None = None
    seed: int | None = None
    whole: int | None = None
    first: str = ""

    def numbers(self, count: int) -> Sequence[int]:
        """The numbers of the cut's rows among `count`, in its order."""
        numbers = list(range(count))
        if self.seed is not None:
            random.Random(self.seed).shuffle(numbers)
        return numbers[self.start : self.stop]


@dataclass(frozen=True)
class Task:
    """One data set.

    Args:
        sources (`tuple[Source, ...]`): Tried in this order; the first that loads wins.
        readers (`tuple[Reader, ...]`): The shapes its rows come in; the first whose columns are there is used.
        expected_rows (`dict[str, int]`): The splits there are and their sizes at the first source. Splits without
            public answers are left out.
        licence (`str`): As its source states it.
        cuts (`dict[str, Cut]`, *optional*): For splits that are a part of what the source calls one; others are whole.
        json_field (`str`, *optional*): Where a JSON file holds the list of rows, if it is not the whole file.
        unanswerable (`bool`, *optional*, defaults to `False`): Whether a row without golds is a question without an
            answer, kept with the one gold `""`, rather than a blind test's row, dropped.
        metrics (`tuple[str, ...]`, *optional*): The metrics to report, the main one first; see [`METRICS`].
        unique (`bool`, *optional*, defaults to `False`): Keep each question once: its first place, its last answers.
        order (`Cut`, *optional*): After that, which rows belong to the set.
    """

    sources: tuple[Source, ...]
    readers: tuple[Reader, ...]
    expected_rows: Mapping[str, int]
    licence: str
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    json_field: str | None = None
    unanswerable: bool = False
    metrics: tuple[str, ...] = ("exact_match", "token_f1")
    unique: bool = False
    order: Cut | None = None


# Values as they are found ---------------------------------------------------------------------------------------------


def answers_of(value: Any) -> list[str]:
    """The answers in a column: those of a list, or the one there is, never parsed: `"[1, 2]"` stays the text it is."""
    is_array = (
        getattr(value, "ndim", 0) > 0
    )  # a list in a data frame; its elements keep their types
    items = list(value) if is_array or isinstance(value, (list, tuple)) else [value]
    return [answer_text(item) for item in items if not is_missing(item)]


def as_list(value: Any) -> list[str]:
    """As [`answers_of`], but a text may be a list in JSON or a Python literal: `'["a", 1]'` becomes `["a", "1"]`."""
    for parse in (json.loads, ast.literal_eval) if isinstance(value, str) else ():
        try:
            parsed = parse(value)
        except (
            ValueError,
            SyntaxError,
            RecursionError,
            MemoryError,
        ):  # the last two: brackets by the thousand
            continue
        if isinstance(parsed, list):
            return answers_of(parsed)
    return answers_of(value)


def whole_number(value: Any) -> str:
    """A number, or one in a text, without needless decimals: `145.0` and `"145.0"` are `"145"`, `"1,000"` is `"1000"`.

    Raises:
        `ValueError`: It is no number.
    """
    text = value_text(value).replace(",", "").strip()
    try:
        return number_text(Decimal(text))
    except InvalidOperation:
        raise ValueError(f"{text[:80]!r} is no number") from None


def wrong_question(question: Any) -> str:
    """The error of a question; empty if there is none."""
    if not isinstance(question, str) or not question.strip():
        return f"`question` must be a text that is not empty, got {question!r:.200}"
    return ""


def wrong_answers(answers: Any) -> str:
    """The error of a row's `answers`; empty if there is none."""
    if not isinstance(answers, (list, tuple)) or not all(
        isinstance(answer, str) for answer in answers
    ):
        return f"`answers` must be a list of strings, got {answers!r}"
    return (
        ""
        if answers
        else '`answers` is empty; give at least one accepted answer ("" for a question that has none)'
    )


# From rows as their source has them to records in our schema ----------------------------------------------------------


class Found(NamedTuple):
    """Rows as their source has them, how to read one, where they come from and, if they are a part, their numbers."""

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
    lacking = [
        [column for column in reader.columns if column not in found] for reader in task.readers
    ]
    # A known set usually has its first shape; the user's own data is compared with the nearest one.
    near, hint = lacking[0], ""
    if not task.sources:
        near, hint = (
            min(lacking, key=len),
            "; say which is which with columns={'question': …, 'answers': …}",
        )
    raise ValueError(
        f"{name}: {origin} has no column {_quoted(near)}; it has: {', '.join(map(str, found))}{hint}"
    )


def cut_rows(name: str, task: Task, split: str, found: Found) -> Found:
    """The rows of a split: all of them, or those that the data set's authors picked, if the task has their numbers.

    Raises:
        `ValueError`: The source has other rows than those that the numbers refer to.
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
    picked = (
        rows.select(numbers) if hasattr(rows, "select") else [rows[number] for number in numbers]
    )
    return found._replace(rows=picked, numbers=numbers)


def read_all(name: str, task: Task, parts: Iterable[Found], prefix: str) -> list[Record]:
    """All parts in our schema, in the task's own order if it has one; of a unique set each question once.

    Rows without an accepted answer are left out. Rows without an id get one of `prefix` and their number.

    Raises:
        `ValueError`: A row is not as documented or has no question; the message names the first such row.
    """
    first, records = 0, []
    for part in parts:
        records += _read_part(name, task, part, prefix, first)
        first += len(part.rows)
    if task.unique:  # as in the released code: the first place stays, the last answers win
        records = list({record["question"]: record for record in records}.values())
    return (
        records
        if task.order is None
        else [records[number] for number in task.order.numbers(len(records))]
    )


def _read_part(name: str, task: Task, found: Found, prefix: str, first: int) -> list[Record]:
    rows, reader, origin, numbers = found
    records = []
    for number, row in zip(numbers or range(len(rows)), _only(rows, reader.used), strict=True):
        try:
            question, golds, kept = reader.read(row)
            json.dumps(
                [question, golds, kept], ensure_ascii=False
            ).encode()  # JSON can hold what no table can
        except UnicodeEncodeError as error:
            half = f"half of a surrogate pair, {error.object[error.start]!a}"
            raise ValueError(
                f"{name}: row {number} of {origin} cannot be read: it has {half}"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{name}: row {number} of {origin} cannot be read: {first_line(error)}"
            ) from None
        if golds or task.unanswerable:
            own, meta = row.get(reader.id), {"row": number, "source": origin, **kept}
            key = f"{prefix}-{first + number}" if is_missing(own) else value_text(own)
            records.append(
                {
                    "id": key,
                    "question": question,
                    "answers": golds or [""],
                    "task": name,
                    "meta": meta,
                }
            )
    dropped = len(rows) - len(records)
    if dropped and not records:
        raise ValueError(f"{name}: none of the {dropped} rows of {origin} has an accepted answer")
    if dropped:
        logger.warning(
            f"{name}: {dropped} rows of {origin} have no accepted answer and were dropped"
        )
    return records


def sample_rows(name: str, records: list[Record], n: int, seed: int) -> list[Record]:
    """`n` rows with different questions, in the order of the draw, whose parameters go into `meta`.

    Raises:
        `ValueError`: There are fewer than `n`.
    """
    # The first of equal questions stands for all. Without equal questions this is a plain sample of the rows.
    first: dict[str, Record] = {}
    for record in records:
        first.setdefault(record["question"], record)
    distinct = list(first.values())
    if n > len(distinct):
        raise ValueError(
            f"{name}: n={n}, but there are only {len(distinct)} different questions with an answer"
        )
    how = {"n": n, "seed": seed, "of": len(distinct)}
    drawn = random.Random(seed).sample(range(len(distinct)), n)
    return [{**distinct[i], "meta": {**distinct[i]["meta"], "sample": how}} for i in drawn]


def to_dataset(records: Iterable[Record]) -> Dataset:
    """Records as a data set, `meta` as JSON."""
    from datasets import Dataset, Features, List, Value

    text = Value("string")
    features = Features(
        {"id": text, "question": text, "answers": List(text), "task": text, "meta": text}
    )
    rows = [
        {**record, "meta": json.dumps(record["meta"], ensure_ascii=False)} for record in records
    ]
    return Dataset.from_list(rows, features=features)


def as_dataset(data: Any) -> Any:
    """A `datasets.Dataset` of a pandas `DataFrame` or a list of dicts, also in a dict of splits; else `data` itself."""
    from datasets import Dataset

    if isinstance(data, Mapping):
        return {name: as_dataset(split) for name, split in data.items()}
    if type(data).__module__.partition(".")[0] == "pandas":
        return Dataset.from_pandas(data, preserve_index=False)
    return Dataset.from_list(data) if isinstance(data, list) and data else data


def validate_dataset(dataset: Any, columns: Sequence[str] = ("question", "answers")) -> None:
    """Check that a data set can be trained or evaluated on, before anything expensive begins.

    Args:
        dataset (`datasets.Dataset`, `datasets.IterableDataset` or `list[dict]`): The rows; if streamed, only the
            first row is checked.
        columns (`Sequence[str]`, *optional*, defaults to `("question", "answers")`): The columns that every row must
            have. `question` (str) and `answers` (list of str) are checked, others need only exist.

    Raises:
        `ValueError`: The data set is missing or empty, lacks a column, or a row has no question or no accepted answer;
            the message names the first such row.
    """
    if dataset is None:
        raise ValueError(
            "train_dataset is missing; load one with load_task, or make a datasets.Dataset of your rows"
        )
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError("the dataset is empty; check its split, filters and files")
    lacking = [column for column in columns if column not in first]
    if lacking:
        raise ValueError(
            f"the dataset has no column {_quoted(lacking)}; it has: {', '.join(first)}"
        )
    checks = {"question": wrong_question, "answers": wrong_answers}
    checked = [column for column in columns if column in checks]
    rows = _only(dataset, checked) if hasattr(dataset, "__len__") else islice(dataset, 1)
    for number, row in enumerate(rows if checked else ()):
        for column in checked:
            if problem := checks[column](
                row.get(column)
            ):  # `get`: rows of a list need not have the same keys
                raise ValueError(f"row {number} of the dataset: {problem}")


def first_line(error: BaseException) -> str:
    """The first line of an error, for our own errors of one line."""
    return (str(error).strip().splitlines() or ["no message"])[0][:300]


def _only(dataset: Any, columns: Iterable[str]) -> Any:
    """The data set with these columns alone, so that large contexts are not decoded in vain."""
    if not hasattr(dataset, "select_columns"):  # a plain list of rows
        return dataset
    return dataset.select_columns([column for column in columns if column in dataset.column_names])


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
