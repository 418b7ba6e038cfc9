"""The results of a batch: attempts per problem, problems per prompt, and the mean rewards computed from them (eq 9).

Pure data and functions. An attempt without a reward failed for outside reasons: it is no evidence for or against its
prompt, and no mean includes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ..llm.numbers import value_text
from .system_prompt import SystemPrompt

ROUNDING = 1e-9  # .52 - .51 is a little more than .01 in floating point

Row = Sequence[float | None]
"""Mean rewards of one prompt, a number per problem; `None` where all attempts failed for outside reasons."""


@dataclass(frozen=True)
class Attempt:
    """One rollout as the reference LLM reads it.

    Args:
        text (`str`): The policy's turns and the observations between them, in order.
        reward (`float`, *optional*): `None` if the rollout failed through no fault of the policy: it is no evidence.
    """

    text: str
    reward: float | None


@dataclass(frozen=True)
class ProblemResult:
    """The rollouts of one problem under one system prompt.

    Args:
        question (`str`): The problem.
        truth (`str`): The accepted answer(s), for the reference LLM only.
        attempts (`tuple[Attempt, ...]`): The N rollouts.
    """

    question: str
    truth: str
    attempts: tuple[Attempt, ...] = ()

    @property
    def scored(self) -> list[tuple[str, float]]:
        """Text and reward of the attempts that have a reward."""
        return [
            (attempt.text, attempt.reward)
            for attempt in self.attempts
            if attempt.reward is not None
        ]

    @property
    def value(self) -> float | None:
        """V_{i,κ}: the mean reward; `None` where every rollout failed."""
        return mean([attempt.reward for attempt in self.attempts])

    def failed(self, reflect_on: str = "mixed") -> list[tuple[str, float]]:
        """Text and reward of the attempts below the best one (`mixed`), or below 1.0 (`imperfect`)."""
        top = (
            max((reward for _, reward in self.scored), default=0.0)
            if reflect_on == "mixed"
            else 1.0
        )
        return [(text, reward) for text, reward in self.scored if reward < top - ROUNDING]

    def instructive(self, reflect_on: str = "mixed") -> bool:
        """Whether the problem is worth reflecting on.

        `mixed`: the rewards differ; for rewards of 0 and 1 this is 0 < V < 1 (A.2). `imperfect`: some reward is below
        1.0. A problem that the policy cannot solve at all is reflected on only under `imperfect`.
        """
        return bool(self.failed(reflect_on))


@dataclass(frozen=True)
class PromptResult:
    """The results of one system prompt on the batch.

    Args:
        prompt ([`SystemPrompt`]): The prompt, with its id.
        problems (`tuple[ProblemResult, ...]`): One per problem, in the same order for every prompt of the batch.
    """

    prompt: SystemPrompt
    problems: tuple[ProblemResult, ...]

    @property
    def attempts(self) -> list[Attempt]:
        """All its rollouts, problem by problem."""
        return [attempt for problem in self.problems for attempt in problem.attempts]

    @property
    def row(self) -> list[float | None]:
        """The prompt's row of the matrix of mean rewards (eq 9)."""
        return [problem.value for problem in self.problems]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; [`PromptResult.from_json`] gives an equal result back."""
        problems = [
            [
                problem.question,
                problem.truth,
                [[attempt.text, attempt.reward] for attempt in problem.attempts],
            ]
            for problem in self.problems
        ]
        return {"prompt": self.prompt.to_json(), "evidence": problems}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> PromptResult:
        """The inverse of [`PromptResult.to_json`]."""
        problems = tuple(
            ProblemResult(
                question, truth, tuple(Attempt(text, reward) for text, reward in attempts)
            )
            for question, truth, attempts in saved["evidence"]
        )
        return cls(SystemPrompt.from_json(saved["prompt"]), problems)


def merge_results(results: Sequence[PromptResult]) -> list[PromptResult]:
    """One result per prompt. The results of a prompt that was drawn twice are joined, problem by problem.

    Raises:
        `ValueError`: The results are not over the same problems.
    """
    if len({tuple(problem.question for problem in result.problems) for result in results}) > 1:
        raise ValueError("the results of a batch must be over the same problems in the same order")
    merged: dict[int | None, PromptResult] = {}
    for result in results:
        first = merged.get(result.prompt.id)
        if first is not None:
            both = zip(first.problems, result.problems, strict=True)
            together = (
                ProblemResult(a.question, a.truth, a.attempts + b.attempts) for a, b in both
            )
            result = PromptResult(result.prompt, tuple(together))
        merged[result.prompt.id] = result
    return list(merged.values())


def best_result(results: Sequence[PromptResult], values: Row) -> PromptResult | None:
    """The result with the highest of the V_i that [`Population.record`] returns, of equal ones the first (eq 4); `None`
    without any."""
    scored = [
        (value, result) for value, result in zip(values, results, strict=True) if value is not None
    ]
    return max(scored, key=lambda pair: pair[0])[1] if scored else None


def scores_of(results: Iterable[PromptResult]) -> dict[int, list[float | None]]:
    """By prompt id its row of mean rewards; for a prompt that was drawn twice, the first row."""
    scores: dict[int, list[float | None]] = {}
    for result in results:
        if result.prompt.id is not None:
            scores.setdefault(result.prompt.id, result.row)
    return scores


def question_of(row: Mapping[str, Any]) -> str:
    """The problem of a dataset row as the reference LLM reads it: its `question`, else its `prompt` without system
    messages."""
    if row.get("question"):
        return str(row["question"])
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(message["content"] for message in prompt if message["role"] != "system")


def truth_of(row: Mapping[str, Any]) -> str:
    """The accepted answers of a dataset row in one line."""
    answers = row.get("answers") or ()
    return answers if isinstance(answers, str) else " | ".join(map(value_text, answers))


# The matrix of mean rewards -------------------------------------------------------------------------------------------


def mean(values: Row) -> float | None:
    """The mean of the known values; `None` if there is none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def cell_means(rows: Sequence[Row]) -> list[float | None]:
    """Several rows of one prompt as one: per problem the mean of the known values."""
    return [mean(column) for column in zip(*rows, strict=True)]


def common_means(rows: Sequence[Row]) -> list[float | None]:
    """V_i of each prompt: its mean over the problems on which every prompt that has any score has one, so that the
    prompts are compared on the same problems. `None` for a prompt without scores, and for all if there is no such
    problem."""
    columns = _complete([row for row in rows if mean(row) is not None])
    return [mean([row[column] for column in columns]) for row in rows]


def sole_wins(rows: Sequence[Row]) -> list[list[int]]:
    """For each prompt the problems on which it alone did best (ρ_i of Algorithm 2).

    A problem with a tie counts for no prompt, and neither does one on which some prompt has no score.
    """
    wins: list[list[int]] = [[] for _ in rows]
    for column in _complete(rows):
        values = [row[column] or 0.0 for row in rows]
        winners = [index for index, value in enumerate(values) if value >= max(values) - ROUNDING]
        if len(winners) == 1:
            wins[winners[0]].append(column)
    return wins


def _complete(rows: Sequence[Row]) -> list[int]:
    """The columns in which every row has a score."""
    return [number for number, column in enumerate(zip(*rows, strict=True)) if None not in column]
