"""What a record of a data set is made of: where it lies, how a row is read, how a split is cut. No data set here."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Row = Mapping[str, Any]

PARQUET_BRANCH = "refs/convert/parquet"
"""The hub's own conversion of a repository: no loading script, and folders instead of configurations."""

FLASHRAG_REPOSITORY = "RUC-NLPIR/FlashRAG_datasets"
"""Copies of many question-answering sets in one shape, the last resort of several chains."""


@dataclass(frozen=True)
class Reader:
    """How to read a row of one shape.

    Args:
        columns (`tuple[str, ...]`): The columns it needs; no others are looked at.
        question (`Callable`): Row to question.
        golds (`Callable`): Row to accepted answers. Stripping and removing duplicates is the loader's work.
        meta (`Callable`, *optional*): Row to whatever else is worth keeping, JSON-able.
        optional (`tuple[str, ...]`, *optional*): Columns that are used where they exist.
    """

    columns: tuple[str, ...]
    question: Callable[[Row], str]
    golds: Callable[[Row], list[str]]
    meta: Callable[[Row], dict[str, Any]] = lambda row: {}
    optional: tuple[str, ...] = ("id",)


@dataclass(frozen=True)
class Source:
    """One place to load a set from.

    Args:
        path (`str`): A hub id, or a builder (`parquet`, `csv`) when `files` are full addresses.
        config (`str`, *optional*): The configuration's name on the hub.
        revision (`str`, *optional*): Branch or commit.
        data_dir (`str`, *optional*): A folder of the repository.
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


@dataclass(frozen=True)
class Cut:
    """A split that its authors cut out of another by row numbers: only as good as the order of the rows.

    Args:
        whole (`int`): Rows of what it is cut from, exactly.
        pick (`Callable[[int], Sequence[int]]`): Number of rows to the numbers of those that belong to it, in its order.
        first (`str`, *optional*): A piece of its first question, by which another order of the rows is noticed.
    """

    whole: int
    pick: Callable[[int], Sequence[int]]
    first: str = ""

    @classmethod
    def rows(cls, whole: int, start: int, stop: int, first: str = "") -> Cut:
        """The rows from `start` to `stop`, the latter left out."""
        return cls(whole, lambda rows: range(start, stop), first)


def shuffled(start: int, stop: int | None = None, seed: int = 0) -> Callable[[int], Sequence[int]]:
    """A picker: rows `start` to `stop` of all, after a shuffle with this seed."""

    def pick(whole: int) -> Sequence[int]:
        numbers = list(range(whole))
        random.Random(seed).shuffle(numbers)
        return numbers[start:stop]

    return pick


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
        metrics (`tuple[str, ...]`, *optional*): Names of the metrics it is reported in, the one that counts first; see
            [`METRICS`].
        unique (`bool`, *optional*, defaults to `False`): Keep each question once: its first place, its last answers.
        order (`Callable`, *optional*): After that, number of rows to the numbers of those that belong to the set, in
            its order.
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
    order: Callable[[int], Sequence[int]] | None = None
