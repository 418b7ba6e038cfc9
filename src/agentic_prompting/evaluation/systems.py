"""Systems to compare: prompted models, agents, ProRefine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ..llm import ChatModel, Message, Reply, as_chat, with_system
from ..llm.loop import in_parallel
from ..refine import ProRefiner, RefinementResult
from ..refine.types import read_query
from ..rollout import Rollout, rollout_seed
from ..rollout.recording import rollout_record
from .answers import Answer, Row, System, answer_of_replies, read_answer


class ChatSystem(System):
    """A system that asks one model, for each question a conversation of its own; questions run concurrently.

    Args:
        chat ([`ChatModel`]): The model.
        prompt (`str`, *optional*): Its system message.
        max_in_flight (`int`, *optional*, defaults to `64`): Questions on their way at once.
        **sampling: Sent with every call.
    """

    def __init__(self, chat: ChatModel, prompt: str | None = None, max_in_flight: int = 64, **sampling: Any):
        self.chat, self.prompt, self.max_in_flight, self.sampling = chat, prompt, max_in_flight, sampling

    @property
    def settings(self) -> Mapping[str, Any]:
        return {
            "class": type(self).__name__,
            "model": str(getattr(self.chat, "model", type(self.chat).__name__)),
            "prompt": self.prompt,
            "sampling": self.sampling,
        }

    async def answer(self, row: Row, seed: int) -> Answer:
        started = time.perf_counter()
        reply = await self.call(with_system(self.prompt, [{"role": "user", "content": row["question"]}]), seed)
        return answer_of_replies([reply], time.perf_counter() - started)

    async def call(self, messages: Sequence[Message], seed: int) -> Reply:
        """One call of this system; another seed is another sample."""
        return await as_chat(self.chat)(messages, repeat=seed, **self.sampling)


class PromptedSystem(ChatSystem):
    """A model under a prompt, asked once: direct, chain of thought, or the prompt that an optimiser found.

    Args:
        fit_calls (`int`, *optional*, defaults to `0`): What finding the prompt took.
        **options: The others are those of `ChatSystem`.
    """

    def __init__(self, chat: ChatModel, prompt: str | None, fit_calls: int = 0, **options: Any):
        super().__init__(chat, prompt, **options)
        self.fit_calls = fit_calls


class Agent(Protocol):
    """What [`AgentSystem`] asks: [`PromptAgent`] is one."""

    def answer_all(self, questions: Sequence[Row], seed: int = 0, progress: bool = True) -> list[Rollout]: ...


class AgentSystem(System):
    """A trained agent, with its environment or without.

    Args:
        agent ([`PromptAgent`]): The agent.
        name (`str`): What tells its results from others': the folder it was loaded from, and its environment.
        batch_size (`int`, *optional*, defaults to `64`): Episodes played together; what is finished is saved.
    """

    def __init__(self, agent: Agent, name: str, batch_size: int = 64):
        self.agent, self.name, self.batch_size = agent, name, batch_size

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"agent": self.name}

    def answer_each(self, rows: Sequence[Row], seed: int = 0) -> Iterator[tuple[int, Answer]]:
        for start in range(0, len(rows), self.batch_size):
            started = time.perf_counter()
            batch = rows[start : start + self.batch_size]
            # Of the batch's own first question: what is left of a resumed run is played as it would have been.
            own_seed = rollout_seed(seed, batch[0]["question"])
            rollouts = self.agent.answer_all(batch, seed=own_seed, progress=False)
            seconds = (time.perf_counter() - started) / len(rollouts)
            yield from enumerate((answer_of_rollout(rollout, seconds) for rollout in rollouts), start)


def answer_of_rollout(rollout: Rollout, seconds: float) -> Answer:
    """An episode as an answer. `seconds`: its share of the batch's time."""
    error = rollout.error
    return Answer(
        text=rollout.answer,
        error=None if error is None else f"{error.kind}: {error}",
        fatal=error is not None and error.fatal,
        calls=len(rollout.replies),
        cached=sum(reply.cached for reply in rollout.replies),
        tokens=sum(reply.usage.tokens for reply in rollout.replies) + sum(rollout.mask),
        cost_usd=sum(reply.usage.cost_usd for reply in rollout.replies),
        seconds=seconds,
        trajectory=rollout_record(rollout),
    )


class ProRefineSystem(System):
    """ProRefine: the prompt is refined for each question.

    Args:
        refiner ([`ProRefiner`]): In one of the paper's three verifier settings ([`ProRefiner.from_paper`]).
        prompt (`str`): The prompt to begin with.
        max_in_flight (`int`, *optional*, defaults to `64`): Questions on their way at once.
    """

    def __init__(self, refiner: ProRefiner, prompt: str, max_in_flight: int = 64):
        self.refiner, self.prompt, self.max_in_flight = refiner, prompt, max_in_flight

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"refiner": self.refiner.digest(), "prompt": self.prompt}

    def answer_each(self, rows: Sequence[Row], seed: int = 0) -> Iterator[tuple[int, Answer]]:
        queries = (replace(read_query(row), repeat=seed) for row in rows)
        works = (self.refiner.arefine(self.prompt, query) for query in queries)
        for position, result in in_parallel(works, self.max_in_flight):
            yield position, answer_of_refinement(result)


def answer_of_refinement(result: RefinementResult) -> Answer:
    """A refined question as an answer; the best there is, if a failure ended it early but left one."""
    usage = list(result.usage.values())
    failed = result.error is not None and not result.finish_reason
    return Answer(
        text=None if failed else read_answer(result.answer),
        whole=None if failed else result.answer,
        error=str(result.error) if failed else None,
        fatal=result.error is not None and result.error.fatal,
        calls=sum(role.calls for role in usage),
        cached=sum(role.cached for role in usage),
        tokens=sum(role.prompt_tokens + role.completion_tokens for role in usage),
        cost_usd=sum(role.cost_usd for role in usage),
        seconds=result.seconds,
        trajectory={
            "prompt": result.prompt,
            "stop_reason": result.stop_reason,
            "verdict": result.verdict,
            "steps": len(result.steps),
        },
    )
