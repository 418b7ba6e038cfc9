"""What the record of a data set is made of: where it lies, how a row is read, how a split is cut. No data set here."""

from __future__ import annotations

import ast
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Reader:
    """How to read a row of one shape.

    Args:
        question (`str` or `Callable`): The column, or a function of the row.
        golds (`str` or `Callable`): The column of the accepted answer or answers, taken as they are, or a function of
            the row. Stripping and removing duplicates is the loader's work.
        needs (`tuple[str, ...]`, *optional*): The columns that the functions read.
        keep (`tuple[str, ...]` or `dict[str, str]`, *optional*): Columns that go into `meta` where they exist; a dict
            gives them other names.
        meta (`Callable`, *optional*): Row to what else goes there, JSON-able.
        id (`str`, *optional*, defaults to `"id"`): The column of the row's name, where it exists.
    """

    question: str | Callable[[Row], str]
    golds: str | Callable[[Row], Sequence[Any]]
    needs: tuple[str, ...] = ()
    keep: tuple[str, ...] | Mapping[str, str] = ()
    meta: Callable[[Row], dict[str, Any]] = lambda row: {}
    id: str = "id"

    @property
    def columns(self) -> tuple[str, ...]:
        """All that it needs; where one is missing the next reader is tried."""
        named = [column for column in (self.question, self.golds) if isinstance(column, str)]
        return tuple(dict.fromkeys([*named, *self.needs]))

    @property
    def used(self) -> list[str]:
        """All columns that are looked at."""
        return list(dict.fromkeys([*self.columns, self.id, *self._kept.values()]))

    @property
    def _kept(self) -> Mapping[str, str]:
        return self.keep if isinstance(self.keep, Mapping) else {name: name for name in self.keep}

    def read(self, row: Row) -> tuple[str, list[str], dict[str, Any]]:
        """Question, accepted answers (stripped, each once) and what is kept.

        Raises:
            `ValueError`: There is no question, or an answer is neither text nor number.
        """
        question = row[self.question] if isinstance(self.question, str) else self.question(row)
        golds = answers_of(row[self.golds]) if isinstance(self.golds, str) else self.golds(row)
        kept = {name: row[column] for name, column in self._kept.items() if column in row}
        texts = (as_text(gold).strip() for gold in golds if not missing(gold))
        if problem := wrong_question(question):
            raise ValueError(problem)
        return question.strip(), list(dict.fromkeys(filter(None, texts))), {**kept, **self.meta(row)}


@dataclass(frozen=True)
class Source:
    """One place to load a set from.

    Args:
        path (`str`): A hub id, or a builder (`parquet`, `csv`) when `files` are full addresses.
        config (`str`, *optional*), revision (`str`, *optional*), data_dir (`str`, *optional*): As on the hub.
        files (`dict[str, str | list[str]]`, *optional*): Files per split, where the repository does not say so itself.
        options (`dict`, *optional*): Passed on to the builder.
        splits (`dict[str, str]`, *optional*): Our name of a split to theirs, where they differ.
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
        parts = [where, self.config, self.data_dir, self.revision and f"@{self.revision}"]
        return " ".join(part for part in parts if part)

    @classmethod
    def parquet(cls, path: str, data_dir: str, **options: Any) -> Source:
        """The hub's own conversion of a repository: no loading script, and folders instead of configurations."""
        return cls(path, revision="refs/convert/parquet", data_dir=data_dir, **options)

    @classmethod
    def also_parquet(cls, path: str, config: str, **options: Any) -> tuple[Source, Source]:
        """A repository, and behind it the hub's conversion under the same name."""
        return cls(path, config, **options), cls.parquet(path, config, **options)

    @classmethod
    def flashrag(cls, config: str, **splits: str) -> Source:
        """A copy in the one shape of FlashRAG's collection: the last resort of several chains."""
        return cls("RUC-NLPIR/FlashRAG_datasets", config, splits=splits)


@dataclass(frozen=True)
class Cut:
    """Rows by their numbers: only as good as the order of the rows.

    Args:
        start (`int`, *optional*, defaults to `0`), stop (`int`, *optional*): From where to where, the latter left out.
        seed (`int`, *optional*): Of a shuffle before; none by default.
        whole (`int`, *optional*): Rows of what it is cut from, exactly, where that is known.
        first (`str`, *optional*): A piece of its first question, by which another order of the rows is noticed.
    """

    start: int = 0
    stop: int | None = None
    seed: int | None = None
    whole: int | None = None
    first: str = ""

    def numbers(self, count: int) -> Sequence[int]:
        """Those of `count` rows, in its order."""
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
        metrics (`tuple[str, ...]`, *optional*): What it is reported in, the one that counts first; see [`METRICS`].
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


def missing(value: Any) -> bool:
    """Whether there is no value: `None`, or the NaN that a column of numbers holds in its place."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def as_text(value: Any) -> str:
    """One accepted answer as text. Texts and numbers only: what else turns up among answers is a broken row.

    Raises:
        `ValueError`: It is something else, a dict or a truth value for example.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"an accepted answer must be a text or a number, got {type(value).__name__}: {value!r:.80}")
    return str(value)


def answers_of(value: Any) -> list[str]:
    """The answers in a column: those of a list, or the one there is, never parsed: `"[1, 2]"` stays the text it is."""
    value = value.tolist() if hasattr(value, "tolist") else value  # a list in a data frame is an array
    items = value if isinstance(value, (list, tuple)) else [value]
    return [as_text(item) for item in items if not missing(item)]


def as_list(value: Any) -> list[str]:
    """The same where a text may be a list in JSON or as a Python literal: `'["a", 1]'` gives `["a", "1"]`."""
    for parse in (json.loads, ast.literal_eval) if isinstance(value, str) else ():
        try:
            parsed = parse(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: brackets by the thousand
            continue
        if isinstance(parsed, list):
            return answers_of(parsed)
    return answers_of(value)


def whole_number(value: Any) -> str:
    """A number without its needless decimals: `145.0`, `"145.0"` and `"145"` are `"145"`; `"1,000"` is `"1000"`."""
    number = float(str(value).replace(",", "").strip())
    return str(int(number)) if number.is_integer() else repr(number)


def wrong_question(question: Any) -> str:
    """What is wrong with a question; empty if nothing."""
    if not isinstance(question, str) or not question.strip():
        return f"`question` must be a text that is not empty, got {question!r:.200}"
    return ""
