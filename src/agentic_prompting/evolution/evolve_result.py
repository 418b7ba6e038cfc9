"""The result of [`evolve`]: the log of each step, and why a run has nothing new to show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..llm import Usage
from ..llm.numbers import count_in_words
from .operators import FAILURES_IN_WORDS, WITHOUT_ATTEMPT
from .population import Population
from .system_prompt import SystemPrompt


@dataclass
class StepLog:
    """One step, for logs and plots; plain JSON through `dataclasses.asdict`.

    Args:
        step (`int`): From 0.
        prompts (`list[int]`): Ids of the prompts that were played.
        values (`list[float | None]`): V_i of each.
        reward (`float`, *optional*): The mean reward over all rollouts that have one.
        failed (`float`): Share of the rollouts without a reward because the call or the grader
            failed.
        operators (`list[dict]`): Per operator `operator`, `reason`, `child` (its id or `None`),
            `counts`.
        ratings (`dict[str, list[float]]`): μ and σ after the step, of the prompts that were played
            and of the children.
        diversity (`float`): See [`Population.diversity`].
        held_out (`float`, *optional*): The best prompt's mean reward on `eval_rows`, if it was
            evaluated.
        note (`str`): If no problem was worth reflecting on: why, and what to do about it.
        found_no_answer (`bool`): Whether the grammar found no answer in any reply.
    """

    step: int
    prompts: list[int]
    values: list[float | None]
    reward: float | None
    failed: float
    operators: list[dict[str, Any]]
    ratings: dict[str, list[float]]
    diversity: float
    held_out: float | None = None
    note: str = ""
    found_no_answer: bool = False


@dataclass
class EvolveResult:
    """The result of [`evolve`].

    Args:
        best ([`SystemPrompt`]): The best prompt by `config.best_rule`.
        population ([`Population`]): All prompts of the run.
        steps (`list[StepLog]`): One per step.
        usage (`dict[str, Usage]`): Usage of the `policy` and of the `reference`, including failed
            steps.
        stopped (`str`, *optional*): Why the run ended early; `None` if it did not. The other fields
            then describe the last complete step.
    """

    best: SystemPrompt
    population: Population
    steps: list[StepLog]
    usage: dict[str, Usage]
    stopped: str | None = None

    @property
    def attempts(self) -> dict[str, int]:
        """The attempts to write a new prompt by how they ended.

        The keys are those of `Outcome.reason`. Operators without evidence made no attempt.
        """
        reasons: Counter[str] = Counter()
        for log in self.steps:
            reasons.update(operator["reason"] for operator in log.operators)
        for reason in WITHOUT_ATTEMPT:
            del reasons[reason]
        return dict(reasons)

    @property
    def is_without_answers(self) -> bool:
        """Whether the last two steps had no answer in any reply, which ends a run."""
        return ends_without_answers(self.steps)

    @property
    def why_nothing_learned(self) -> str:
        """Why the run has no new prompt to show, and what to change; empty if it has one."""
        operators = []
        for log in self.steps:
            operators += log.operators

        # A child was made, but none is better than an empty first prompt.
        if any(operator["child"] is not None for operator in operators):
            if self.best.text.strip():
                return ""
            return (
                "the best prompt is still the empty one; a child needs matches to be rated above "
                "it: raise steps or problems_per_step"
            )

        # No child was made: for want of evidence, of steps, or of usable edits.
        notes = [log.note for log in self.steps if log.note]
        if notes and len(notes) == len(self.steps):
            return f"no step had evidence; {notes[-1]}"
        if not operators:
            return "no step has rated a prompt; raise steps"
        # The reference LLM may rightly find nothing to change.
        attempts = self.attempts
        no_change = attempts.pop("no_change", 0)
        if no_change and not attempts:
            return (
                f"the reference LLM proposed no change in {count_in_words(no_change, 'attempt')}, "
                "which is a valid reply: the first prompt stays; take harder problems, or another "
                "reference LLM"
            )
        counts = sum((Counter(operator["counts"]) for operator in operators), Counter())
        reason_texts = [
            f"{FAILURES_IN_WORDS.get(name, name)} {count}" for name, count in attempts.items()
        ]
        # The counts of the journal name some reasons again.
        reason_texts += [
            f"{name} {count}" for name, count in counts.items() if name not in FAILURES_IN_WORDS
        ]
        proposed_nothing = f"; {no_change} more proposed no change" if no_change else ""
        return (
            f"{count_in_words(sum(attempts.values()), 'attempt')} of the reference LLM had no "
            f"usable edit ({', '.join(reason_texts)}){proposed_nothing}; take a more capable one, "
            "or raise max_words"
        )


def ends_without_answers(steps: Sequence[StepLog]) -> bool:
    """Return whether the last two steps had no answer in any reply."""
    return [log.found_no_answer for log in steps[-2:]] == [True, True]
