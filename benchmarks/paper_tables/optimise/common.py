"""The task of all optimisers: rows to try prompts on, a model that answers, one that writes
prompts, and a budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentic_prompting.evaluation import Answer, PromptedSystem, find_metrics, score_records
from agentic_prompting.evaluation.systems import Row
from agentic_prompting.llm import ChatModel, LLMError, ReplayCache, complete, with_system

from ..chats import CallCount, MeteredChat
from ..templates import CRITIQUE_FEEDBACK


@dataclass(frozen=True)
class Found:
    """The result of an optimiser.

    Args:
        prompt (`str`): The best prompt.
        score (`float`): Its mean score on the rows by which it was chosen, hence too high.
        calls (`int`): The calls of both models.
        note (`str`): How many of the editor's replies could not be used, if any.
    """

    prompt: str
    score: float
    calls: int
    note: str = ""


@dataclass(frozen=True)
class Trial:
    """One answer under a prompt that is being tried.

    Args:
        row (`Mapping`): The question.
        answer ([`Answer`]): The answer.
        score (`float`): Its score.
    """

    row: Row
    answer: Answer
    score: float

    @property
    def feedback(self) -> str:
        """The outcome in words, for a model that improves prompts."""
        accepted = " or ".join(self.row["answers"])
        return CRITIQUE_FEEDBACK.replace("{answers}", accepted).replace(
            "{score:.2f}", f"{self.score:.2f}"
        )


class Objective:
    """The score of a prompt, and the calls spent on it.

    Args:
        chat ([`ChatModel`]): The model that answers.
        editor ([`ChatModel`]): The model that writes prompts.
        rows (`Sequence[Mapping]`): Training rows: `question`, `answers`.
        metric (`str`): One of [`METRICS`].
        max_calls (`int`): The limit for the calls of both models together.
        seed (`int`, *optional*, defaults to `0`): The seed of the optimiser's random choices.
        cache ([`ReplayCache`], *optional*): See [`MeteredChat`].
        validation (`Sequence[Mapping]`, *optional*): Rows to choose by, for optimisers that look at
            others than they learn from; by default they keep half of `rows` for it.
        **sampling: Sent with every call of `chat`.

    Raises:
        `ValueError`: If there are no rows or the metric does not exist.
    """

    def __init__(
        self,
        chat: ChatModel,
        editor: ChatModel,
        rows: Sequence[Row],
        metric: str,
        max_calls: int,
        seed: int = 0,
        cache: ReplayCache | None = None,
        validation: Sequence[Row] | None = None,
        **sampling: Any,
    ):
        if not rows:
            raise ValueError("a prompt is optimised on training rows, and there are none")
        self.rows = list(rows)
        self.metrics = find_metrics([metric])
        self.seed = seed
        self.sampling = sampling
        if validation is None:
            half = len(self.rows) // 2
            self.learned = self.rows[:half]
            self.chosen_by = self.rows[half:]
        else:
            self.learned = self.rows
            self.chosen_by = list(validation)
        self.count = CallCount(max_calls)
        self.chat = MeteredChat(chat, cache, self.count)
        self.editor = MeteredChat(editor, cache, self.count)

    def try_prompt(self, prompt: str, rows: Sequence[Row] | None = None) -> list[Trial]:
        """Answer rows (all by default) under a prompt.

        Raises:
            [`LLMError`]: A call failed; an outage is no score of a prompt.
        """
        rows = self.rows if rows is None else rows
        system = PromptedSystem(self.chat, prompt, **self.sampling)
        return self.judged(rows, system(rows, self.seed))

    def judged(self, rows: Sequence[Row], answers: Sequence[Answer]) -> list[Trial]:
        """Answers with their scores; an answer that the grader cannot decide counts as wrong, only
        here.
        """
        failed = next((answer.error for answer in answers if answer.error is not None), None)
        if failed is not None:
            raise LLMError(failed)
        records = [
            {"answer": answer.text, "whole": answer.whole, "answers": row["answers"]}
            for row, answer in zip(rows, answers, strict=True)
        ]
        (scores,) = score_records(records, self.metrics).values()
        return [
            Trial(row, answer, score or 0.0)
            for row, answer, score in zip(rows, answers, scores, strict=True)
        ]

    def ask_editor(self, request: str, system: str | None = None, repeat: int = 0) -> str:
        """The editor's reply.

        Raises:
            [`LLMError`]: The call failed.
        """
        messages = with_system(system, [{"role": "user", "content": request}])
        reply = complete(self.editor, messages, repeat=repeat)
        if reply.error is not None:
            raise reply.error
        return reply.text

    def found(self, prompt: str, score: float, note: str = "") -> Found:
        """The result, with the calls made so far and a note on the editor's replies.

        Raises:
            [`LLMError`]: The search was ended by a spent budget, a rejected key or another fatal
                failure: what it had found by then is not its result. The optimisers' packages go on
                after errors, so it is raised here.
        """
        if self.count.end is not None:
            raise self.count.end
        return Found(prompt, score, self.count.calls, note)


def mean_score(trials: Sequence[Trial]) -> float:
    """The mean score of some trials."""
    return sum(trial.score for trial in trials) / len(trials)
