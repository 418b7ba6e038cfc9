"""The models of the service: a conversation in, an answer out; a call can be cancelled.

No HTTP here. [`AgentAnswers`] plays the trained agent, [`ChatAnswers`] asks any [`ChatModel`], ProRefine's
[`RefinedChat`] for one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from ..evolution import SystemPrompt
from ..llm import BadRequest, BudgetExceeded, ChatModel, LLMError, Message, Reply, Usage, as_chat
from ..refine import RefinedChat
from ..rollout import (
    RESET_ERROR,
    AgentSpec,
    Environment,
    Limits,
    Observation,
    Rollout,
    Sample,
    SampleRequest,
    fill_template,
    observe,
    play,
    reset_rows,
    rollout_record,
)

if TYPE_CHECKING:
    from ..agent import PromptAgent

_FINISH = {"answered": "stop", "malformed": "stop", "truncated": "length", "out_of_turns": "length"}


class CostLimit(BudgetExceeded):
    """One request came to cost more than a request may. Not fatal: an answer that ProRefine has by then is returned."""

    fatal = False


class PromptTooLong(BadRequest):
    """The conversation leaves the model no room for an answer."""


@dataclass(frozen=True)
class Answer:
    """The outcome of one request.

    Args:
        text (`str`, *optional*): The answer; `None` if there is none.
        why_none (`str`, *optional*): Why the model gave no answer, which is its own failing and no outage.
        error ([`LLMError`], *optional*): What failed behind the model. Then there is neither text nor reason.
        finish_reason (`str`, *optional*, defaults to `"stop"`): As in OpenAI's format.
        usage ([`Usage`], *optional*): The answering model's tokens; what all calls behind it cost.
        trajectory (`dict`, *optional*): How it came about, as [`rollout_record`] describes it.
    """

    text: str | None = None
    why_none: str | None = None
    error: LLMError | None = None
    finish_reason: str = "stop"
    usage: Usage = field(default_factory=Usage)
    trajectory: dict[str, Any] | None = None


class Answers(Protocol):
    """A model of the service. `greedy` asks for the likeliest tokens. Cancelled when the client has gone."""

    async def __call__(
        self, messages: Sequence[Message], seed: int, max_tokens: int | None, greedy: bool = False
    ) -> Answer: ...


@dataclass
class AgentAnswers:
    """A [`PromptAgent`] as a model.

    Args:
        agent ([`PromptAgent`]): Its policy is asked by all requests together.
        max_cost_usd (`float`, *optional*): No further call is made for a request that has cost this much.
    """

    agent: PromptAgent
    max_cost_usd: float | None = None

    def __post_init__(self):
        environment = self.agent.environment
        if self.max_cost_usd is not None and environment is not None and environment.play_episode is not None:
            raise ValueError(
                "max_cost_usd of a request cannot be held to with a program: leave it out, or use a budget"
            )
        if self.agent.spec.environments:
            raise ValueError(
                "a request does not say which of the agent's environments it is for: load the agent for one of them, "
                "PromptAgent.from_pretrained(folder, environment, name=...)"
            )

    async def __call__(
        self, messages: Sequence[Message], seed: int, max_tokens: int | None, greedy: bool = False
    ) -> Answer:
        agent, limits = self.agent, self.agent.limits
        row: dict[str, Any] = {"question": messages[-1]["content"], "prompt": conversation(agent.spec, messages)}
        (row,) = await reset_rows(agent.environment, [row], limits)
        if (error := row.get(RESET_ERROR)) is not None:
            return Answer(error=error)
        ids = await asyncio.to_thread(agent.chat_format.prompt_ids, row["prompt"])  # of a megabyte it takes a second
        if limits.max_context is not None and len(ids) >= limits.max_context:
            most = f"This model's maximum context length is {limits.max_context} tokens"
            return Answer(error=PromptTooLong(f"{most}, and your messages result in {len(ids)} tokens."))
        if max_tokens is not None:
            limits = replace(limits, max_tokens=min(limits.max_tokens, max_tokens))

        asked: set[int | None] = set()

        async def policy(request: SampleRequest) -> Sample:
            asked.add(request.conversation)
            return await agent.policy(replace(request, greedy=greedy))

        environment = agent.environment
        if environment is not None and environment.play_episode is None:
            environment = _MeteredEnvironment(environment, self.max_cost_usd, limits)
        rollout = Rollout(ids, row=row, seed=seed)
        try:
            await play(rollout, policy, environment, agent.chat_format, limits)
        finally:
            if end_conversation := getattr(agent.policy, "end_conversation", None):
                for number in asked:
                    end_conversation(number)
        written = sum(sum(one.mask) for one in rollout.sequences)
        usage, trajectory = Usage(len(ids), written, _cost(rollout)), rollout_record(rollout)
        if rollout.error is not None:
            return Answer(error=rollout.error, usage=usage, trajectory=trajectory)
        no_answer = f"The agent gave no answer: {rollout.status.replace('_', ' ')}."
        why_none = no_answer if rollout.answer is None else None
        return Answer(rollout.answer, why_none, None, _FINISH[rollout.status], usage, trajectory)


@dataclass
class ChatAnswers:
    """Any [`ChatModel`] as a model, ProRefine's [`RefinedChat`] for one.

    Args:
        chat ([`ChatModel`]): The model that answers.
        max_cost_usd (`float`, *optional*): For a [`RefinedChat`], which makes many calls for one answer: no further one
            is made for a request that has cost this much. An answer that exists by then is returned.
    """

    chat: ChatModel
    max_cost_usd: float | None = None

    async def __call__(
        self, messages: Sequence[Message], seed: int, max_tokens: int | None, greedy: bool = False
    ) -> Answer:
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        sampling: dict[str, Any] = {**limit, "temperature": 0.0} if greedy else limit
        chat, spent = self.chat, _Spent(self.max_cost_usd)
        if isinstance(chat, RefinedChat):
            models = chat.refiner.models
            if not isinstance(chat.refiner.verifier, ChatModel):  # a function, which costs nothing, or none
                del models["verifier"]
            roles: dict[str, Any] = {role: _MeteredChat(one, spent) for role, one in models.items()}
            chat = RefinedChat(replace(chat.refiner, **roles), chat.prompt)
        reply = await as_chat(chat)(messages, repeat=seed, **sampling)
        if reply.error is not None:
            return Answer(error=spent.ended or reply.error, usage=reply.usage)
        return Answer(reply.text, finish_reason=reply.finish_reason, usage=reply.usage)


@dataclass
class _MeteredEnvironment(Environment):
    """An [`Environment`] that is asked no more once a rollout has cost what a request may."""

    environment: Environment
    limit: float | None
    limits: Limits

    step_timeout = math.inf  # the environment's step has the limit

    async def step(self, rollout: Rollout) -> Observation | None:
        if error := over_limit(_cost(rollout), self.limit):
            return Observation(error=error)
        return await observe(self.environment, rollout, self.limits.step_timeout)


@dataclass
class _Spent:
    """What one request has cost, and the end of it. Its calls come one after another."""

    limit: float | None
    usd: float = 0.0
    ended: CostLimit | None = None


@dataclass
class _MeteredChat:
    """A [`ChatModel`] whose calls count towards the limit of one request."""

    chat: ChatModel
    spent: _Spent

    async def __call__(self, messages: Sequence[Message], **options: Any) -> Reply:
        self.spent.ended = over_limit(self.spent.usd, self.spent.limit)
        if self.spent.ended:
            return Reply(error=self.spent.ended, attempts=0)
        reply = await as_chat(self.chat)(messages, **options)
        self.spent.usd += reply.usage.cost_usd
        return reply


def over_limit(spent: float, limit: float | None) -> CostLimit | None:
    """The error of a request that has cost what one may."""
    if limit is None or spent < limit:
        return None
    return CostLimit(f"this request has cost ${spent:.4f}, and none may cost more than ${limit:g}")


def _cost(rollout: Rollout) -> float:
    return sum(reply.usage.cost_usd for reply in rollout.replies)


def conversation(spec: AgentSpec, messages: Sequence[Message]) -> list[Message]:
    """The agent's prompt: the last message in the template it was trained with, earlier messages as they are.

    The agent's own system prompt, which training may have evolved, comes first, as in training; the client's follows.
    If a client sends the agent's own system prompt or template, it is not repeated.
    """
    *earlier, last = messages
    # An evolved prompt is in one or the other of these: `prompt_place`.
    own = f"\n\n{spec.system_prompt or ''}\n\n{spec.prompt_template}\n\n"
    system = [message["content"] for message in earlier if message["role"] == "system"]
    system = [text for text in system if f"\n\n{text.strip()}\n\n" not in own]
    head: list[Message] = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    said = [message for message in earlier if message["role"] != "system"]
    question: Message = {"role": "user", "content": _in_template(spec.prompt_template, last["content"])}
    return SystemPrompt(spec.system_prompt or "").messages([*head, *said, question])


def _in_template(template: str, question: str) -> str:
    before, _, after = template.partition("{question}")
    is_there = before.strip() and question.startswith(before) and question.endswith(after)
    return question if is_there else fill_template(template, question)
