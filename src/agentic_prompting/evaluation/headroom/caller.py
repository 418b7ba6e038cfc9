"""[`Caller`]: asks chat models and agents, scores their answers, and counts calls and costs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from ...environments import Worker, Workers
from ...llm.loop import gather
from ..metrics import Metric, find_metrics
from ..scoring import score_records
from ..systems import AgentSystem, Answer, PromptedSystem, Row, System


class MeasurementStopped(RuntimeError):
    """A call failed in a way that affects all further calls: a wrong key, a spent budget."""


class Caller:
    """Asks systems, scores their answers, and counts calls and costs.

    Args:
        metric (`str`, ...): The metric that scores an answer, as in [`evaluate_agent`].
        max_in_flight (`int`, *optional*, defaults to `64`): Largest number of calls in flight.
        sampling (`Mapping`, *optional*): Sampling arguments for the calls of chat models.

    Attributes:
        calls (`int`): Calls of large LLMs so far.
        replayed (`int`): How many of them came from a replay cache and were not paid for.
        cost_usd (`float`): Their cost.
        failed (`int`): Answers without a score.
        last_error (`str`, *optional*): Error of the last call that failed.
    """

    def __init__(
        self, metric: Metric, max_in_flight: int = 64, sampling: Mapping[str, Any] | None = None
    ):
        # A single metric; a function has to be given a name.
        self.metrics = find_metrics({"score": metric} if callable(metric) else [metric])
        self.sampling = dict(sampling or {})
        self.calls = 0
        self.replayed = 0
        self.cost_usd = 0.0
        self.failed = 0
        self.last_error: str | None = None
        self._max_in_flight = max_in_flight
        self._in_flight = asyncio.Semaphore(max_in_flight)

    def system_of(self, policy: Any, prompt: str) -> System:
        """Make a system of a chat model or an agent under a system prompt."""
        # The empty prompt stands for no system message.
        if not is_agent(policy):
            return PromptedSystem(
                policy, prompt or None, max_in_flight=self._max_in_flight, **self.sampling
            )
        # A copy, because the agent of the caller keeps its system prompt.
        agent = copy(policy)
        agent.spec = replace(policy.spec, system_prompt=prompt or None)
        return AgentSystem(agent, "agent", batch_size=self._max_in_flight)

    async def score(self, system: System, rows: Sequence[Row], seed: int) -> list[float]:
        """Ask a system and score its answers. The score of a failed answer is NaN.

        Raises:
            [`MeasurementStopped`]: If a call failed in a way that affects all further calls.
        """
        answers = await self._ask(system, rows, seed)
        self.count(answers)
        # In the format of an evaluation, so that the same function scores them.
        records = [record_of(answer, row) for answer, row in zip(answers, rows, strict=True)]
        scores = await self.score_answers(records)
        return [math.nan if score is None else score for score in scores]

    async def score_answers(self, records: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """Score the records of answers ([`record_of`]) with the metric.

        A failed answer has no score.
        """
        # In a thread, because a metric may be slow.
        scores_by_metric = await asyncio.to_thread(score_records, records, self.metrics)
        (scores,) = scores_by_metric.values()
        self.failed += scores.count(None)
        return scores

    async def _ask(self, system: System, rows: Sequence[Row], seed: int) -> list[Answer]:
        # An agent plays its episodes in batches.
        if isinstance(system, AgentSystem):
            answers: list[Answer] = []
            for begin in range(0, len(rows), system.batch_size):
                batch = rows[begin : begin + system.batch_size]
                answers += await asyncio.to_thread(system.answer_batch, batch, seed)
            return answers

        # Other systems answer each question concurrently.
        async def answer(row: Row) -> Answer:
            async with self._in_flight:
                return await system.try_answer(row, seed)

        return await gather(answer(row) for row in rows)

    def count(self, answers: Sequence[Answer]) -> None:
        """Count the calls of answers.

        Raises:
            [`MeasurementStopped`]: If a call failed in a way that affects all further calls.
        """
        # Count first: calls before a fatal error were paid for too.
        self.calls += sum(answer.calls for answer in answers)
        self.replayed += sum(answer.cached for answer in answers)
        self.cost_usd += sum(answer.cost_usd for answer in answers)
        for answer in answers:
            self.last_error = answer.error or self.last_error
            if answer.fatal and answer.error is not None:
                raise MeasurementStopped(answer.error)


def max_calls_per_answer(policy: Any) -> int:
    """The largest number of calls of large LLMs for one answer.

    A chat model makes one call. An agent makes one in each turn but the last, or none if it has no
    environment; with [`Workers`] it makes up to `max_calls` in a turn. Another environment that
    makes several calls in a turn, or a program that calls models itself, may make more.
    """
    if not is_agent(policy):
        return 1
    environment = getattr(policy, "environment", None)
    if environment is None:
        return 0
    turns = max(1, policy.limits.max_turns - 1)
    if isinstance(environment, Workers):
        # A worker may be an agent that makes several calls for one of the conductor's.
        calls_per_request = max(map(max_calls_of_worker, environment.pool.values()))
        return turns * environment.max_calls * calls_per_request
    return turns


def max_calls_of_worker(worker: Worker) -> int:
    """The largest number of calls with which a worker answers a request. A tool counts as one call."""
    return max(1, max_calls_per_answer(worker.model)) if worker.is_agent else 1


def is_agent(policy: object) -> bool:
    """Whether a policy is an agent rather than a chat model."""
    return hasattr(policy, "answer_all")


def record_of(answer: Answer, row: Mapping[str, Any]) -> dict[str, Any]:
    """The record of an answer, in the format that metrics read."""
    return {
        "answer": answer.text,
        "whole": answer.whole,
        "answers": list(row["answers"]),
        "error": answer.error,
        "judged": answer.judged,
    }
