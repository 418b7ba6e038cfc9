"""What the operators read: plain values, so that a trainer and [`evolve`] can both hand them over.

trial = Trial(prompt, (Evidence("2+2?", "4", (Attempt("I think 4", 1.0), Attempt("5", 0.0))), ...))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .matrix import mean
from .system_prompt import SystemPrompt

ReflectOn = Literal["mixed", "imperfect"]

_ROUNDING = 1e-9


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
class Evidence:
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

    def instructive(self, reflect_on: ReflectOn = "mixed", perfect: float = 1.0) -> bool:
        """Whether the problem is worth reflecting on.

        Args:
            reflect_on (`str`, *optional*, defaults to `"mixed"`): `mixed`: the rewards differ, 0 < V < 1 for rewards
                of 0 and 1 (A.2). `imperfect`: some reward is below `perfect`, so that problems at which every attempt
                failed count as well: what the policy does not know at all shows only there.
            perfect (`float`, *optional*, defaults to `1.0`): The reward that leaves nothing to learn.
        """
        rewards = [reward for _, reward in self.scored]
        if not rewards:
            return False
        if reflect_on == "mixed":
            return max(rewards) - min(rewards) > _ROUNDING
        return min(rewards) < perfect - _ROUNDING


@dataclass(frozen=True)
class Trial:
    """One system prompt and how it did on the batch.

    Args:
        prompt ([`SystemPrompt`]): The prompt, with its id.
        evidence (`tuple[Evidence, ...]`): One per problem, in the same order for every prompt of the batch.
    """

    prompt: SystemPrompt
    evidence: tuple[Evidence, ...]

    @property
    def row(self) -> list[float | None]:
        """The prompt's row of the matrix of mean rewards (eq 9)."""
        return [problem.value for problem in self.evidence]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; [`Trial.from_json`] gives an equal trial back."""
        evidence = [
            [problem.question, problem.truth, [[attempt.text, attempt.reward] for attempt in problem.attempts]]
            for problem in self.evidence
        ]
        return {"prompt": self.prompt.to_json(), "evidence": evidence}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Trial:
        """The inverse of [`Trial.to_json`]."""
        evidence = tuple(
            Evidence(question, truth, tuple(Attempt(text, reward) for text, reward in attempts))
            for question, truth, attempts in saved["evidence"]
        )
        return cls(SystemPrompt.from_json(saved["prompt"]), evidence)


def merge_trials(trials: Sequence[Trial]) -> list[Trial]:
    """One trial per prompt: those of a prompt that was drawn twice are put together, problem by problem.

    Raises:
        `ValueError`: The trials are not over the same problems.
    """
    if len({tuple(problem.question for problem in trial.evidence) for trial in trials}) > 1:
        raise ValueError("the trials of a batch must be over the same problems in the same order")
    merged: dict[int | None, Trial] = {}
    for trial in trials:
        first = merged.get(trial.prompt.id)
        if first is not None:
            both = zip(first.evidence, trial.evidence, strict=True)
            trial = Trial(
                trial.prompt,
                tuple(Evidence(one.question, one.truth, one.attempts + other.attempts) for one, other in both),
            )
        merged[trial.prompt.id] = trial
    return list(merged.values())


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
