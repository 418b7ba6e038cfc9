"""What a record of a data set is made of: where it lies, how a row is read, how a split is cut. No data set here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]


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
    """

    path: str
    config: str | None = None
    revision: str | None = None
    data_dir: str | None = None
    files: Mapping[str, str | list[str]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    splits: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [self.path, self.config, self.data_dir, self.revision and f"@{self.revision}"]
        return " ".join(part for part in parts if part)


@dataclass(frozen=True)
class Cut:
    """A split that its authors cut out of another by row numbers: only as good as the order of the rows.

    Args:
        whole (`int`): Rows of what it is cut from, exactly.
        pick (`Callable[[int], Sequence[int]]`): Number of rows to the numbers of those that belong to it, in its order.
        first (`str`): A piece of its first question, by which another order of the rows is noticed.
    """

    whole: int
    pick: Callable[[int], Sequence[int]]
    first: str


@dataclass(frozen=True)
class Task:
    """One data set.

    Args:
        sources (`tuple[Source, ...]`): Tried in this order; the first that loads wins.
        readers (`tuple[Reader, ...]`): The shapes its rows come in; the first whose columns are there is used.
        expected_rows (`dict[str, int]`): The splits there are and their sizes at the first source. Splits without
            public answers are left out.
        licence (`str`): As its source states it.
        cuts (`dict[str, Cut]`, *optional*): For splits that are a part of what the source calls one.
        json_field (`str`, *optional*): Where a JSON file holds the list of rows, if it is not the whole file.
        unanswerable (`bool`, *optional*, defaults to `False`): Whether a row without golds is a question without an
            answer, kept with the one gold `""`, rather than a blind test's row, dropped.
    """

    sources: tuple[Source, ...]
    readers: tuple[Reader, ...]
    expected_rows: Mapping[str, int]
    licence: str
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    json_field: str | None = None
    unanswerable: bool = False
