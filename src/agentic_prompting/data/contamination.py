"""Which evaluation questions were trained on: exact matches after folding case, punctuation and white space, and near
ones that share long runs of words.

Worth a look before any table is believed. The released Prompt-R1 evaluation file of GSM8K, for one, is mostly GSM8K's
*training* set: 111 of its 128 questions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_WORDS = re.compile(r"\w+")


@dataclass(frozen=True)
class Contamination:
    """Evaluation rows that occur in training rows.

    Args:
        rows (`int`): Evaluation rows looked at.
        exact (`tuple[str, ...]`): Ids of those whose question is a training question, case and punctuation aside.
        near (`tuple[str, ...]`): Ids of further ones that share a run of `run_length` words with a training question.
        run_length (`int`): In words.
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
    evaluation: Iterable[Mapping[str, Any]], training: Iterable[Mapping[str, Any]], run_length: int = 13
) -> Contamination:
    """Compare the questions of two data sets.

    Args:
        evaluation (`Iterable[Mapping]`): Rows with `question` and, where they have one, `id`.
        training (`Iterable[Mapping]`): Rows with `question`.
        run_length (`int`, *optional*, defaults to `13`): Words in a row that two questions must share to be near; 13 as
            in GPT-3's appendix C. Shorter questions can only be exact.

    Raises:
        `ValueError`: If `run_length` is below 1 or there is nothing to compare.
    """
    if run_length < 1:
        raise ValueError(f"run_length must be at least 1, got {run_length}")
    rows = list(evaluation)
    trained = [_words(row["question"]) for row in training]
    if not rows or not trained:
        raise ValueError(f"nothing to compare: {len(rows)} evaluation rows and {len(trained)} training rows")
    whole = set(map(tuple, trained))
    runs = {run for words in trained for run in _runs(words, run_length)}
    exact, near = [], []
    for number, row in enumerate(rows):
        words, name = _words(row["question"]), str(row.get("id", number))
        if tuple(words) in whole:
            exact.append(name)
        elif any(run in runs for run in _runs(words, run_length)):
            near.append(name)
    return Contamination(len(rows), tuple(exact), tuple(near), run_length)


def _words(text: str) -> list[str]:
    return _WORDS.findall(text.lower())


def _runs(words: Sequence[str], length: int) -> Iterable[tuple[str, ...]]:
    return (tuple(words[start : start + length]) for start in range(len(words) - length + 1))
