"""How prompts did on a batch, as the operators read it; and the M×b matrix of mean rewards that comes of it (eq 9).

Plain values, so that a trainer and [`evolve`] can both hand them over:

PromptResult(prompt, (ProblemResult("2+2?", "4", (Attempt("I think 4", 1.0), Attempt("5", 0.0))), ...))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from .system_prompt import SystemPrompt

_ROUNDING = 1e-9

Row = Sequence[float | None]
"""Mean rewards of one prompt, a number per problem; `None` where all attempts failed for outside reasons."""


@dataclass(frozen=True)
class Attempt:
    """One rollout as the reference LLM gets to read it.

    Args:
        text (`str`): Everything the policy wrote and was answered, in order.
        reward (`float`, *optional*): `None` if it failed through no fault of the policy: it is then no evidence.
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
        """Text and reward of the attempts that have one."""
        return [(attempt.text, attempt.reward) for attempt in self.attempts if attempt.reward is not None]

    @property
    def value(self) -> float | None:
        """V_{i,κ}: the mean reward; `None` where every rollout failed."""
        return mean([attempt.reward for attempt in self.attempts])

    def instructive(self, reflect_on: str = "mixed") -> bool:
        """Whether the problem is worth reflecting on.

        `mixed`: the rewards differ, 0 < V < 1 for rewards of 0 and 1 (A.2). `imperfect`: some reward is below 1.0, so
        that problems at which every attempt failed count as well: what the policy does not know at all shows only
        there.
        """
        rewards = [reward for _, reward in self.scored]
        if not rewards:
            return False
        if reflect_on == "mixed":
            return max(rewards) - min(rewards) > _ROUNDING
        return min(rewards) < 1 - _ROUNDING


@dataclass(frozen=True)
class PromptResult:
    """One system prompt and how it did on the batch.

    Args:
        prompt ([`SystemPrompt`]): The prompt, with its id.
        problems (`tuple[ProblemResult, ...]`): One per problem, in the same order for every prompt of the batch.
    """

    prompt: SystemPrompt
    problems: tuple[ProblemResult, ...]

    @property
    def row(self) -> list[float | None]:
        """The prompt's row of the matrix of mean rewards (eq 9)."""
        return [problem.value for problem in self.problems]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; [`PromptResult.from_json`] gives an equal result back."""
        problems = [
            [problem.question, problem.truth, [[attempt.text, attempt.reward] for attempt in problem.attempts]]
            for problem in self.problems
        ]
        return {"prompt": self.prompt.to_json(), "evidence": problems}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> PromptResult:
        """The inverse of [`PromptResult.to_json`]."""
        problems = tuple(
            ProblemResult(question, truth, tuple(Attempt(text, reward) for text, reward in attempts))
            for question, truth, attempts in saved["evidence"]
        )
        return cls(SystemPrompt.from_json(saved["prompt"]), problems)


def merge_results(results: Sequence[PromptResult]) -> list[PromptResult]:
    """One result per prompt: those of a prompt that was drawn twice are put together, problem by problem.

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
            together = (ProblemResult(a.question, a.truth, a.attempts + b.attempts) for a, b in both)
            result = PromptResult(result.prompt, tuple(together))
        merged[result.prompt.id] = result
    return list(merged.values())


def best_result(results: Sequence[PromptResult], values: Row) -> PromptResult | None:
    """The result of the prompt with the highest of the V_i that [`Population.record`] returns; `None` without any."""
    scored = [(value, result) for value, result in zip(values, results, strict=True) if value is not None]
    return max(scored, key=lambda pair: pair[0])[1] if scored else None


def scores_of(results: Iterable[PromptResult]) -> dict[int, list[float | None]]:
    """By prompt id its row of mean rewards; of a prompt that was drawn twice the first."""
    scores: dict[int, list[float | None]] = {}
    for result in results:
        if result.prompt.id is not None:
            scores.setdefault(result.prompt.id, result.row)
    return scores


def question_of(row: Mapping[str, Any]) -> str:
    """The problem of a dataset row as the reference LLM reads it; of a row with a `prompt` only, that, without system
    messages."""
    if row.get("question"):
        return str(row["question"])
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(message["content"] for message in prompt if message["role"] != "system")


def truth_of(row: Mapping[str, Any]) -> str:
    """Its accepted answers in one line."""
    answers = row.get("answers") or ()
    return answers if isinstance(answers, str) else " | ".join(map(str, answers))


# The matrix ----------------------------------------------------------------------------------------------------------


def mean(values: Row) -> float | None:
    """The mean of what there is; `None` if there is nothing."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def cell_means(rows: Sequence[Row]) -> list[float | None]:
    """Several rows of one prompt as one: per problem the mean of those that have a score."""
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"rows of scores differ in length: {[len(row) for row in rows]}")
    return [mean(column) for column in zip(*rows, strict=True)]


def common_means(rows: Sequence[Row]) -> list[float | None]:
    """V_i of each prompt: its mean over the problems on which every prompt that has a score at all has one, so that
    conditions are matched; `None` for a prompt without any.

    Where the prompts have no problem in common, nobody gets a value: there is nothing to compare.
    """
    columns = _complete([row for row in rows if mean(row) is not None])
    return [mean([row[column] for column in columns]) for row in rows]


def sole_wins(rows: Sequence[Row]) -> list[list[int]]:
    """For each prompt the problems on which it alone did best (ρ_i of Algorithm 2).

    Ties are nobody's win, and neither is a problem on which one of the prompts has no score.
    """
    wins: list[list[int]] = [[] for _ in rows]
    for column in _complete(rows):
        values = [row[column] or 0.0 for row in rows]
        top = max(values)
        holders = [index for index, value in enumerate(values) if value >= top - _ROUNDING]
        if len(holders) == 1:
            wins[holders[0]].append(column)
    return wins


def _complete(rows: Sequence[Row]) -> list[int]:
    """The columns in which every row has a score."""
    if not rows:
        return []
    return [column for column in range(len(rows[0])) if all(row[column] is not None for row in rows)]
