"""Describes a data set: a [`Task`], its [`Source`]s, the [`Reader`]s of its rows and [`Subset`]s."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..llm.numbers import answer_text, is_missing
from .answer_columns import list_answers
from .validation import MissingQuestion, find_question_problem, quote_names

# A row as its source has it. The values are whatever the source holds.
Row = Mapping[str, Any]


@dataclass(frozen=True)
class ReadRow:
    """The parts that a [`Reader`] reads from one row.

    Args:
        question (`str`): The question, stripped.
        answers (`list[str]`): The accepted answers, stripped and without duplicates.
        meta (`dict`): Further values, fit for JSON.
        context (`str`, *optional*): A text that the question is about, such as one to compare.
    """

    question: str
    answers: list[str]
    meta: dict[str, Any]
    context: str = ""


@dataclass(frozen=True)
class Reader:
    """Reads the rows of a source that has certain columns.

    Args:
        question (`str` or `Callable`): The column of the question, or a function of the row.
        answers (`str` or `Callable`): The column of the accepted answer or answers, used as they
            are, or a function of the row. The reader strips them and drops duplicates.
        function_columns (`tuple[str, ...]`, *optional*): The columns that the functions read.
        meta_columns (`tuple[str, ...]` or `dict[str, str]`, *optional*): The columns to copy to
            `meta` if they exist. A dict maps a name in `meta` to a column.
        build_meta (`Callable`, *optional*): A function of the row that returns further values for
            `meta`, fit for JSON.
        id (`str`, *optional*, defaults to `"id"`): The column of the row's id, if it exists.
        context_columns (`tuple[str, ...]`, *optional*): The columns that are read with the
            question, if they exist: rows that differ in one of them are different questions.
    """

    question: str | Callable[[Row], str]
    answers: str | Callable[[Row], Sequence[object]]
    function_columns: tuple[str, ...] = ()
    meta_columns: tuple[str, ...] | Mapping[str, str] = ()
    build_meta: Callable[[Row], dict[str, Any]] | None = None
    id: str = "id"
    context_columns: tuple[str, ...] = ()

    @property
    def question_column(self) -> str:
        """The column of the question, for messages; `question` if a function returns it."""
        return self.question if isinstance(self.question, str) else "question"

    @property
    def required_columns(self) -> tuple[str, ...]:
        """The columns that a source must have for this reader to be used."""
        # A function's columns cannot be seen in it: the reader declares them.
        columns = [column for column in (self.question, self.answers) if isinstance(column, str)]
        return tuple(dict.fromkeys([*columns, *self.function_columns]))

    @property
    def all_columns(self) -> list[str]:
        """All columns that the reader uses, required and optional."""
        meta_columns = self._meta_names().values()
        optional_columns = (self.id, *meta_columns, *self.context_columns)
        return list(dict.fromkeys([*self.required_columns, *optional_columns]))

    def read(self, row: Row) -> ReadRow:
        """Read one row.

        Raises:
            [`MissingQuestion`]: The row has no question.
            `ValueError`: The question is no text, or an answer is neither a text nor a number.
        """
        # The question and the answers: a column each, or a function of the row.
        question = row[self.question] if isinstance(self.question, str) else self.question(row)
        answers: Sequence[object]
        if isinstance(self.answers, str):
            answers = list_answers(row[self.answers])
        else:
            answers = self.answers(row)

        # A row without a question is an error, and not dropped like one without answers.
        problem = find_question_problem(question)
        if problem:
            is_empty = is_missing(question) or (isinstance(question, str) and not question.strip())
            raise MissingQuestion(problem) if is_empty else ValueError(problem)

        # Drop answers that are missing, empty or duplicates.
        texts = [answer_text(answer).strip() for answer in answers if not is_missing(answer)]
        unique_texts = list(dict.fromkeys(text for text in texts if text))

        # Collect the values for `meta`.
        meta_names = self._meta_names()
        meta = {name: row[column] for name, column in meta_names.items() if column in row}
        if self.build_meta is not None:
            meta.update(self.build_meta(row))
        context = ""
        if self.context_columns:
            values = [row.get(column) for column in self.context_columns]
            context = json.dumps(values, default=str)
        return ReadRow(question=question.strip(), answers=unique_texts, meta=meta, context=context)

    def _meta_names(self) -> Mapping[str, str]:
        if isinstance(self.meta_columns, Mapping):
            return self.meta_columns
        return {column: column for column in self.meta_columns}


@dataclass(frozen=True)
class Source:
    """A place to load a data set from.

    Args:
        path (`str`): A repository id on the Hub, or a builder (`parquet`, `csv`) if `files` are
            full addresses.
        config (`str`, *optional*): The repository's configuration.
        revision (`str`, *optional*): The commit or branch.
        data_dir (`str`, *optional*): The folder in the repository.
        files (`dict[str, str | list[str]]`, *optional*): The files of each split, if the repository
            does not declare them.
        options (`dict`, *optional*): Passed on to the builder.
        splits (`dict[str, str]`, *optional*): Maps our split names to the source's where they
            differ.
        also (`tuple[str, ...]`, *optional*): Further repositories of the same shape, whose rows
            are appended.
    """

    path: str
    config: str | None = None
    revision: str | None = None
    data_dir: str | None = None
    files: Mapping[str, str | list[str]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    splits: Mapping[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()

    def repositories(self) -> list[Source]:
        """Return one source for each repository."""
        return [replace(self, path=path, also=()) for path in (self.path, *self.also)]

    def __str__(self) -> str:
        address = " + ".join((self.path, *self.also))
        # The first file says more than the name of a builder.
        if "/" not in self.path and self.files:
            files = next(iter(self.files.values()))
            address = files if isinstance(files, str) else files[0]
        revision = f"@{self.revision}" if self.revision else ""
        return " ".join(filter(None, [address, self.config, self.data_dir, revision]))


@dataclass(frozen=True)
class Subset:
    """Rows picked by number. Valid only while the order of the source's rows stays the same.

    Args:
        start (`int`, *optional*, defaults to `0`): The number of the first row.
        stop (`int`, *optional*): The number after the last row. By default there is no limit.
        seed (`int`, *optional*): The seed of a shuffle before the rows are picked. By default
            they are not shuffled.
        total_rows (`int`, *optional*): The number of rows to pick from, if it is known.
        first_question (`str`, *optional*): A part of the first picked question, to detect a
            different order of the rows.
    """

    start: int = 0
    stop: int | None = None
    seed: int | None = None
    total_rows: int | None = None
    first_question: str = ""

    def pick_numbers(self, row_count: int) -> Sequence[int]:
        """Return the picked row numbers out of `row_count` rows, in the order of the subset."""
        # Python's own generator, as in the code that the papers released.
        numbers = list(range(row_count))
        # Shuffle first: `start` and `stop` count in the shuffled order.
        if self.seed is not None:
            random.Random(self.seed).shuffle(numbers)
        return numbers[self.start : self.stop]


@dataclass(frozen=True)
class Task:
    """A data set.

    Args:
        sources (`tuple[Source, ...]`): Tried in this order; the first one that loads is used.
        readers (`tuple[Reader, ...]`): The first one whose columns the source has is used.
        expected_rows (`dict[str, int]`): The splits and their sizes at the first source. Splits
            without public answers are left out.
        licence (`str`): As its source states it.
        subsets (`dict[str, Subset]`, *optional*): For each split that is only a part of the
            source's split, the rows that belong to it.
        json_field (`str`, *optional*): The field of a JSON file that holds the list of rows. By
            default the whole file is the list.
        unanswerable (`bool`, *optional*, defaults to `False`): Whether a row without accepted
            answers is a question that has no answer. It is then kept with the accepted answer `""`.
            Otherwise it is taken for a row of a blind test and dropped.
        metrics (`tuple[str, ...]`, *optional*): The metrics to report, the main one first; see
            [`METRICS`].
        unique_questions (`bool`, *optional*, defaults to `False`): Whether to keep each question
            once, at its first position and with its last answers.
        selection (`Subset`, *optional*): The rows that belong to the data set, picked after
            duplicates are dropped. All by default.
    """

    sources: tuple[Source, ...]
    readers: tuple[Reader, ...]
    expected_rows: Mapping[str, int]
    licence: str
    subsets: Mapping[str, Subset] = field(default_factory=dict)
    json_field: str | None = None
    unanswerable: bool = False
    metrics: tuple[str, ...] = ("exact_match", "token_f1")
    unique_questions: bool = False
    selection: Subset | None = None

    @property
    def all_columns(self) -> set[str]:
        """All columns that any of the readers uses."""
        return {column for reader in self.readers for column in reader.all_columns}

    def find_reader(self, name: str, columns: Iterable[str], origin: str) -> Reader:
        """Return the first reader whose required columns exist.

        Args:
            name (`str`): The name of the data set, for the error.
            columns (`Iterable[str]`): The columns of the source.
            origin (`str`): The source, for the error.

        Raises:
            `ValueError`: No reader fits. Names the missing columns and the existing ones.
        """
        # The first reader that lacks no column wins; of the others, note what they lack.
        columns = list(columns)
        missing_by_reader = []
        for reader in self.readers:
            missing = [column for column in reader.required_columns if column not in columns]
            if not missing:
                return reader
            missing_by_reader.append(missing)

        # The first reader is the usual one of a published data set. The user's own data is compared
        # with the reader that it nearly fits.
        if self.sources:
            missing = missing_by_reader[0]
            hint = ""
        else:
            missing = min(missing_by_reader, key=len)
            hint = self._hint_at_columns(columns)
        raise ValueError(
            f"{name}: {origin} has no column {quote_names(missing)}; "
            f"it has: {', '.join(map(str, columns))}{hint}"
        )

    def _hint_at_columns(self, columns: Sequence[str]) -> str:
        """Return how to name the columns of the user's own data, whose names do not fit."""
        # Names that were given the wrong way round are columns, and what they stand for is not.
        swapped = {}
        for name, column in self.readers[0]._meta_names().items():
            if name in columns and column in ("question", "answers", "answer", "id"):
                swapped[column] = name
        if swapped:
            pairs = ",".join(f"{column}={name}" for column, name in swapped.items())
            return f"; the names are the wrong way round: columns={swapped} (--columns {pairs})"
        return (
            "; say which is which with columns={'question': …, 'answers': …} "
            "(--columns question=…,answers=…)"
        )
