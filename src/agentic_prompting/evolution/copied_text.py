"""Refuses children that copy a training problem instead of stating what helps with others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .operators import MAX_TRACE_CHARS, Outcome
from .results import ProblemResult
from .system_prompt import SystemPrompt
from .templates import shorten

RUN_LENGTH = 8
"""Words in a run. A problem with fewer words is one run."""
SHORTEST = 4
"""A problem with fewer words is not looked for: any text may have them."""

_WORDS = re.compile(r"\w+")

Run = tuple[str, ...]


@dataclass(frozen=True)
class CopiedProblem:
    """The problem that a child copies most of.

    Args:
        question (`str`): The problem.
        share (`float`): The larger one of two shares of runs of [`RUN_LENGTH`] words: of the
            problem's runs that are in the child, and of the runs of one line of the child that are
            in the problem.
    """

    question: str
    share: float


def refuse_copy(
    outcome: Outcome,
    parents: Iterable[SystemPrompt],
    problems: Sequence[ProblemResult],
    max_copied_share: float,
) -> Outcome:
    """Mark how much of a training problem the child of an outcome copies, and drop it above a
    limit.

    Args:
        outcome ([`Outcome`]): The outcome of a mutation or crossover; changed in place and
            returned.
        parents (`Iterable[SystemPrompt]`): The prompts that the operator saw.
        problems (`Sequence[ProblemResult]`): The problems that it saw.
        max_copied_share (`float`): See [`ESPLSettings`].
    """
    if outcome.child is None:
        return outcome
    copied = find_copied_problem(outcome.child, parents, problems)
    if copied is None:
        return outcome
    question = shorten(copied.question, MAX_TRACE_CHARS)
    outcome.trace.copied = {"question": question, "share": round(copied.share, 4)}
    if copied.share <= max_copied_share:
        return outcome
    outcome.counts["copied"] += 1
    return outcome.finish("copied")


def find_copied_problem(
    child: SystemPrompt, parents: Iterable[SystemPrompt], problems: Sequence[ProblemResult]
) -> CopiedProblem | None:
    """Return the problem that a child copies most of, `None` if it shares no run of words with one.

    Only lines that no parent has count. Runs that several problems have are not copied: they are
    instructions that come with every problem. Case and punctuation are ignored.

    Args:
        child ([`SystemPrompt`]): The child.
        parents (`Iterable[SystemPrompt]`): The prompts that it was made from.
        problems (`Sequence[ProblemResult]`): The problems that its operator may have seen.
    """
    parent_lines: set[tuple[str, ...]] = set()
    for parent in parents:
        parent_lines.update(map(tuple, _lines_of(parent)))
    lines = [line for line in _lines_of(child) if tuple(line) not in parent_lines]
    if not lines:
        return None

    # Each problem once, and how many of them have each run.
    questions = list(dict.fromkeys(problem.question for problem in problems))
    runs_by_question = {question: _runs(_split_words(question)) for question in questions}
    counts: Counter[Run] = Counter()
    for runs in runs_by_question.values():
        counts.update(runs)

    copied: CopiedProblem | None = None
    for question, all_runs in runs_by_question.items():
        runs = {run for run in all_runs if counts[run] == 1}
        if not runs:
            continue
        share = _copied_share(lines, runs)
        if share > 0 and (copied is None or share > copied.share):
            copied = CopiedProblem(question, share)
    return copied


def _copied_share(lines: Sequence[Sequence[str]], runs: set[Run]) -> float:
    """Return the larger share: of the problem's runs in all lines, or of a line's runs in the
    problem.
    """
    length = len(next(iter(runs)))
    copied_runs: set[Run] = set()
    largest = 0.0
    for line in lines:
        line_runs = set(_windows(line, length))
        shared = line_runs & runs
        copied_runs |= shared
        # A short line, or a short problem, says nothing about what share of the line is copied.
        if line_runs and length == RUN_LENGTH:
            largest = max(largest, len(shared) / len(line_runs))
    return max(largest, len(copied_runs) / len(runs))


def _lines_of(prompt: SystemPrompt) -> list[list[str]]:
    """The words of each principle and of each line of the preamble or free text."""
    lines = [*prompt.preamble.splitlines(), *(prompt.principles or ())]
    return [_split_words(line) for line in lines]


def _runs(words: Sequence[str]) -> set[Run]:
    """The runs of words of a problem; a short one is a single run, a very short one has none."""
    if len(words) < SHORTEST:
        return set()
    return set(_windows(words, min(RUN_LENGTH, len(words))))


def _windows(words: Sequence[str], length: int) -> list[Run]:
    return [tuple(words[start : start + length]) for start in range(len(words) - length + 1)]


def _split_words(text: str) -> list[str]:
    return _WORDS.findall(text.lower())
