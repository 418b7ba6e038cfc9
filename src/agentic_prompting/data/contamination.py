"""Finds evaluation questions that occur in training data.

Worth a look before any table is believed: of the 128 questions in Prompt-R1's released evaluation
file of GSM8K, 111 are from GSM8K's *training* set.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .task import Row

_WORDS = re.compile(r"\w+")


@dataclass(frozen=True)
class Contamination:
    """Evaluation rows that occur in training rows.

    Args:
        rows (`int`): The number of evaluation rows.
        exact (`tuple[str, ...]`): Ids of the rows whose question is a training question; case and
            punctuation are ignored.
        near (`tuple[str, ...]`): Ids of further rows that share a run of `run_length` words with a
            training question.
        run_length (`int`): The length of a run in words.
    """

    rows: int
    exact: tuple[str, ...]
    near: tuple[str, ...]
    run_length: int

    def __str__(self) -> str:
        return (
            f"{len(self.exact)} of {self.rows} evaluation questions are training questions, "
            f"{len(self.near)} more share {self.run_length} words in a row with one"
        )


def contamination_report(
    evaluation: Iterable[Row], training: Iterable[Row], run_length: int = 13
) -> Contamination:
    """Compare the questions of two data sets.

    Args:
        evaluation (`Iterable[Mapping]`): Rows with `question` and, optionally, `id`.
        training (`Iterable[Mapping]`): Rows with `question`.
        run_length (`int`, *optional*, defaults to `13`): How many words in a row two questions must
            share to be near; 13 as in appendix C of GPT-3. Shorter questions can only be exact.

    Raises:
        `ValueError`: `run_length` is below 1, or one of the data sets is empty.
    """
    if run_length < 1:
        raise ValueError(f"run_length must be at least 1, got {run_length}")
    # Both data sets may be iterators.
    evaluation_rows = list(evaluation)
    training_questions = [_split_words(row["question"]) for row in training]
    if not evaluation_rows or not training_questions:
        raise ValueError(
            f"nothing to compare: {len(evaluation_rows)} evaluation rows and "
            f"{len(training_questions)} training rows"
        )

    # Index the training questions, whole and by their runs of words.
    exact_questions = {tuple(words) for words in training_questions}
    training_runs: set[tuple[str, ...]] = set()
    for words in training_questions:
        training_runs.update(_word_runs(words, run_length))

    # Look up each evaluation question, first as a whole.
    exact = []
    near = []
    for number, row in enumerate(evaluation_rows):
        words = _split_words(row["question"])
        row_id = str(row.get("id", number))
        if tuple(words) in exact_questions:
            exact.append(row_id)
        # Else by any run of words that it shares with a training question.
        elif not training_runs.isdisjoint(_word_runs(words, run_length)):
            near.append(row_id)
    return Contamination(
        rows=len(evaluation_rows), exact=tuple(exact), near=tuple(near), run_length=run_length
    )


def _split_words(text: str) -> list[str]:
    return _WORDS.findall(text.lower())


def _word_runs(words: Sequence[str], length: int) -> Iterable[tuple[str, ...]]:
    """Yield every run of `length` consecutive words."""
    for start in range(len(words) - length + 1):
        yield tuple(words[start : start + length])
