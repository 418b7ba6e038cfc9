"""[`Caller`]: asks chat models and agents, scores their answers, and counts what that took."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from ...llm.loop import gather
from ..metrics import Metric, find_metrics
from ..scoring import score_records
from ..systems import AgentSystem, Answer, PromptedSystem, Row, System


class MeasurementStopped(RuntimeError):
    """A call failed in a way that no other call can escape: a wrong key, a spent budget."""


class Caller:
    """Asks systems, scores their answers, and counts what that took.

    Args:
        metric (`str`, ...): The score of an answer, as in [`evaluate_agent`].
        max_in_flight (`int`, *optional*, defaults to `64`): Calls on their way at once.
        sampling (`Mapping`, *optional*): Sampling arguments of chat models' calls.

    Attributes:
        calls (`int`): Calls of large LLMs so far.
        cost_usd (`float`): What they cost.
        failed (`int`): Answers that got no score.
        last_error (`str`, *optional*): Of the last call that failed.
    """

    def __init__(
        self, metric: Metric, max_in_flight: int = 64, sampling: Mapping[str, Any] | None = None
    ):
        self.metrics = find_metrics({"score": metric} if callable(metric) else [metric])
        self.sampling = dict(sampling or {})
        self.calls = 0
        self.cost_usd = 0.0
        self.failed = 0
        self.last_error: str | None = None
        self._max_in_flight = max_in_flight
        self._in_flight = asyncio.Semaphore(max_in_flight)

    def system_of(self, policy: Any, prompt: str) -> System:
        """A chat model or an agent under a system prompt."""
        if not is_agent(policy):
            return PromptedSystem(
                policy, prompt or None, max_in_flight=self._max_in_flight, **self.sampling
            )
        agent = copy(policy)
        agent.spec = replace(policy.spec, system_prompt=prompt or None)
        return AgentSystem(agent, "agent", batch_size=self._max_in_flight)

    async def score(self, system: System, rows: Sequence[Row], seed: int) -> list[float]:
        """The scores of a system's answers; NaN where one has none.

        Raises:
            [`MeasurementStopped`]: A call failed for good.
        """
        answers = await self._ask(system, rows, seed)
        self.count(answers)
        records = [record_of(answer, row) for answer, row in zip(answers, rows, strict=True)]
        (scores,) = (await asyncio.to_thread(score_records, records, self.metrics)).values()
        self.failed += scores.count(None)
        return [math.nan if score is None else score for score in scores]

    async def _ask(self, system: System, rows: Sequence[Row], seed: int) -> list[Answer]:
        if isinstance(system, AgentSystem):
            answers: list[Answer] = []
            for begin in range(0, len(rows), system.batch_size):
                batch = rows[begin : begin + system.batch_size]
                answers += await asyncio.to_thread(system.answer_batch, batch, seed)
            return answers

        async def answer(row: Row) -> Answer:
            async with self._in_flight:
                return await system.try_answer(row, seed)

        return await gather(answer(row) for row in rows)

    def count(self, answers: Sequence[Answer]) -> None:
        """Count the calls behind answers. Raises [`MeasurementStopped`] if one of them failed for good."""
        self.calls += sum(answer.calls for answer in answers)
        self.cost_usd += sum(answer.cost_usd for answer in answers)
        for answer in answers:
            self.last_error = answer.error or self.last_error
            if answer.fatal and answer.error is not None:
                raise MeasurementStopped(answer.error)


def most_calls(policy: Any) -> int:
    """Calls of large LLMs that one answer may take.

    One of a chat model; of an agent one for each turn but the last, or none if it has nobody to ask. An environment
    that makes several calls a turn, or a program that asks models of its own, may make more.
    """
    if not is_agent(policy):
        return 1
    if getattr(policy, "environment", None) is None:
        return 0
    return max(1, policy.limits.max_turns - 1)


def is_agent(policy: Any) -> bool:
    return hasattr(policy, "answer_all")


def record_of(answer: Answer, row: Mapping[str, Any]) -> dict[str, Any]:
    """An answer in the form that metrics read."""
    return {
        "answer": answer.text,
        "whole": answer.whole,
        "answers": list(row["answers"]),
        "error": answer.error,
        "judged": answer.judged,
    }
