"""The results of a batch: attempts per problem, problems per prompt, and their mean rewards (eq 9).

Pure data and functions. An attempt without a reward failed for outside reasons: it is no evidence
for or against its prompt, and no mean includes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any

from ..llm.numbers import value_text
from .system_prompt import SystemPrompt

ROUNDING = 1e-9  # .52 - .51 is a little more than .01 in floating point

Row = Sequence[float | None]
"""Mean rewards of one prompt, a number per problem; `None` where all attempts failed for outside
reasons."""


TRUTH_SEPARATOR = " | "
"""Between the accepted answers of a problem, as the reference LLM reads them."""


@dataclass(frozen=True)
class Attempt:
    """One rollout as the reference LLM reads it.

    Args:
        text (`str`): The policy's turns and the observations between them, in order.
        reward (`float`, *optional*): `None` if the rollout failed through no fault of the policy:
            it is no evidence.
        feedback (`str`, *optional*, defaults to `""`): The reward's own words on the rollout.
    """

    text: str
    reward: float | None
    feedback: str = ""

    @property
    def report(self) -> str:
        """The text, followed by the feedback if there is any."""
        if not self.feedback:
            return self.text
        return f"{self.text}\n\nFeedback on this attempt: {self.feedback}"


@dataclass(frozen=True)
class AttemptText:
    """A rollout as the reference LLM reads it, with its problem."""

    question: str
    accepted_answers: str
    transcript: str


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
        """Report and reward of the attempts that have a reward."""
        return [
            (attempt.report, attempt.reward)
            for attempt in self.attempts
            if attempt.reward is not None
        ]

    @property
    def value(self) -> float | None:
        """V_{i,κ}: the mean reward; `None` where every rollout failed."""
        return mean([attempt.reward for attempt in self.attempts])

    def failed(self, reflect_on: str = "mixed") -> list[tuple[str, float]]:
        """Return report and reward of the attempts below the best one, or below 1.0 (`imperfect`)."""
        # The reward to reach: the full one, or that of the best attempt at this problem.
        target = 1.0
        if reflect_on == "mixed":
            target = max((reward for _, reward in self.scored), default=0.0)
        return [(text, reward) for text, reward in self.scored if reward < target - ROUNDING]

    def is_instructive(self, reflect_on: str = "mixed") -> bool:
        """Return whether the problem is worth reflecting on.

        `mixed`: the rewards differ; for rewards of 0 and 1 this is 0 < V < 1 (A.2). `imperfect`:
        some reward is below 1.0. A problem that the policy cannot solve at all is reflected on only
        under `imperfect`.
        """
        return bool(self.failed(reflect_on))


@dataclass(frozen=True)
class PromptResult:
    """The results of one system prompt on the batch.

    Args:
        prompt ([`SystemPrompt`]): The prompt, with its id.
        problems (`tuple[ProblemResult, ...]`): One per problem, in the same order for every prompt
            of the batch.
    """

    prompt: SystemPrompt
    problems: tuple[ProblemResult, ...]

    @property
    def questions(self) -> tuple[str, ...]:
        """The problems of the batch."""
        return tuple(problem.question for problem in self.problems)

    @property
    def attempts(self) -> list[Attempt]:
        """All rollouts under the prompt, problem by problem."""
        return list(chain.from_iterable(problem.attempts for problem in self.problems))

    @property
    def row(self) -> list[float | None]:
        """The prompt's row of the matrix of mean rewards (eq 9)."""
        return [problem.value for problem in self.problems]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types; [`PromptResult.from_json`] gives an equal result back."""
        # Each problem with its attempts as plain lists.
        evidence = []
        for problem in self.problems:
            attempts = []
            for attempt in problem.attempts:
                feedback = [attempt.feedback] if attempt.feedback else []
                attempts.append([attempt.text, attempt.reward, *feedback])
            evidence.append([problem.question, problem.truth, attempts])
        return {"prompt": self.prompt.to_json(), "evidence": evidence}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> PromptResult:
        """Return the result of a [`PromptResult.to_json`]."""
        problems = []
        for question, truth, saved_attempts in saved["evidence"]:
            attempts = tuple(Attempt(*saved_attempt) for saved_attempt in saved_attempts)
            problems.append(ProblemResult(question, truth, attempts))
        return cls(SystemPrompt.from_json(saved["prompt"]), tuple(problems))


def merge_results(results: Sequence[PromptResult]) -> list[PromptResult]:
    """Return one result per prompt.

    The results of a prompt that was drawn twice are joined, problem by problem.

    Raises:
        `ValueError`: The results are not over the same problems.
    """
    if len({result.questions for result in results}) > 1:
        raise ValueError("the results of a batch must be over the same problems in the same order")

    # Join the attempts of a prompt that was drawn before.
    merged: dict[int | None, PromptResult] = {}
    for result in results:
        first = merged.get(result.prompt.id)
        if first is None:
            merged[result.prompt.id] = result
            continue
        # The problems are the same: join their attempts.
        problems = [
            ProblemResult(problem.question, problem.truth, problem.attempts + again.attempts)
            for problem, again in zip(first.problems, result.problems, strict=True)
        ]
        merged[result.prompt.id] = PromptResult(result.prompt, tuple(problems))
    return list(merged.values())


def collect_matches(
    rewards: Sequence[float | None],
    texts: Sequence[AttemptText],
    prompts: Sequence[SystemPrompt],
    *,
    prompts_per_problem: int,
    attempts_per_prompt: int,
) -> list[list[PromptResult]]:
    """Return the rollouts of a batch in the form that [`PopulationEvolution.record`] takes.

    Problems that were played under other prompts, because their rollouts started earlier, are a
    match of their own. The prompts that were drawn last come last.

    Args:
        rewards (`Sequence[float | None]`): The reward of each rollout, problem by problem, and of
            a problem prompt by prompt.
        texts (`Sequence[AttemptText]`): The texts of each.
        prompts (`Sequence[SystemPrompt]`): The system prompt of each.
        prompts_per_problem (`int`): M.
        attempts_per_prompt (`int`): N.
    """
    # By the ids of the prompts of a problem: the prompts, and for each its results on these
    # problems.
    match_prompts: dict[tuple[int | None, ...], list[SystemPrompt]] = {}
    match_results: dict[tuple[int | None, ...], list[list[ProblemResult]]] = {}
    rollouts_per_problem = prompts_per_problem * attempts_per_prompt
    for problem_start in range(0, len(rewards), rollouts_per_problem):
        problem_end = problem_start + rollouts_per_problem
        slot_starts = range(problem_start, problem_end, attempts_per_prompt)
        problem_prompts = [prompts[slot_start] for slot_start in slot_starts]
        prompt_ids = tuple(prompt.id for prompt in problem_prompts)
        match_prompts.setdefault(prompt_ids, problem_prompts)
        slots = match_results.setdefault(prompt_ids, [[] for _ in slot_starts])

        # The question as in the first slot stands for all: a row's own `prompt` is rendered
        # differently in each slot.
        problem = texts[problem_start]
        for slot, slot_start in zip(slots, slot_starts, strict=True):
            attempts = []
            for index in range(slot_start, slot_start + attempts_per_prompt):
                attempts.append(Attempt(texts[index].transcript, rewards[index]))
            slot.append(ProblemResult(problem.question, problem.accepted_answers, tuple(attempts)))

    # Each combination of prompts is a match.
    matches = []
    for prompt_ids, slots in match_results.items():
        match = []
        for prompt, problem_results in zip(match_prompts[prompt_ids], slots, strict=True):
            match.append(PromptResult(prompt, tuple(problem_results)))
        matches.append(match)
    return matches


def best_result(results: Sequence[PromptResult], values: Row) -> PromptResult | None:
    """Return the result with the highest V_i, the first of equal ones (eq 4).

    Args:
        results (`Sequence[PromptResult]`): The results of a batch.
        values (`Row`): V_i of each, as [`Population.record`] returns it.

    Returns:
        [`PromptResult`]: `None` if no result has a value.
    """
    best: PromptResult | None = None
    best_value = 0.0
    for value, result in zip(values, results, strict=True):
        # Among equal values the first one is kept.
        if value is not None and (best is None or value > best_value):
            best = result
            best_value = value
    return best


def scores_of(results: Iterable[PromptResult]) -> dict[int, list[float | None]]:
    """Return each prompt's row of mean rewards by its id.

    For a prompt that was drawn twice it is the first row.
    """
    scores: dict[int, list[float | None]] = {}
    for result in results:
        if result.prompt.id is not None:
            scores.setdefault(result.prompt.id, result.row)
    return scores


def question_of(row: Mapping[str, Any]) -> str:
    """Return the problem of a dataset row as the reference LLM reads it.

    It is the row's `question`, else its `prompt` without system messages.
    """
    if row.get("question"):
        return str(row["question"])
    # TRL's `prompt` is a text or a list of messages.
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(message["content"] for message in prompt if message["role"] != "system")


def truth_of(row: Mapping[str, Any]) -> str:
    """Return the accepted answers of a dataset row in one line.

    A reward may read other columns: a row without answers says so to the reference LLM.
    """
    answers = row.get("answers") or ()
    text = answers if isinstance(answers, str) else TRUTH_SEPARATOR.join(map(value_text, answers))
    return text or "not given"


# The matrix of mean rewards -----------------------------------------------------------------------


def mean(values: Row) -> float | None:
    """Return the mean of the values that are not `None`; `None` if there is none."""
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def cell_means(rows: Sequence[Row]) -> list[float | None]:
    """Return several rows of one prompt as one: the mean per problem."""
    return [mean(column) for column in zip(*rows, strict=True)]


def common_means(rows: Sequence[Row]) -> list[float | None]:
    """Return V_i of each prompt, compared on the same problems.

    V_i is the mean over the problems that every prompt with any score has a score for. It is `None`
    for a prompt without scores, and for all prompts if there is no such problem.
    """
    # A prompt without any score must not leave the others without a common problem.
    scored_rows = [row for row in rows if mean(row) is not None]
    columns = _complete_columns(scored_rows)
    # A prompt without scores has `None` in all of these columns, and so no mean.
    values = []
    for row in rows:
        values.append(mean([row[column] for column in columns]))
    return values


def sole_wins(rows: Sequence[Row]) -> list[list[int]]:
    """Return for each prompt the problems that it alone did best on (ρ_i of Algorithm 2).

    A problem with a tie counts for no prompt, and neither does one on which some prompt has no
    score.
    """
    wins: list[list[int]] = [[] for _ in rows]
    for column in _complete_columns(rows):
        # The prompts within rounding of the best score; two of them are a tie.
        values = [row[column] or 0.0 for row in rows]
        threshold = max(values) - ROUNDING
        winners = [index for index, value in enumerate(values) if value >= threshold]
        if len(winners) == 1:
            wins[winners[0]].append(column)
    return wins


def _complete_columns(rows: Sequence[Row]) -> list[int]:
    """Return the columns in which every row has a score."""
    columns = zip(*rows, strict=True)
    return [number for number, column in enumerate(columns) if None not in column]
