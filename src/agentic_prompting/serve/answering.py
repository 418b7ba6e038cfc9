"""The models of the service: a conversation in, an answer out; a call can be cancelled.

No HTTP here. [`AgentAnswers`] plays the trained agent, [`ChatAnswers`] asks any [`ChatModel`],
ProRefine's [`RefinedChat`] for one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from ..environments.workers import Workers, costs_by_worker
from ..evolution import SystemPrompt
from ..harnesses import SOLUTION_COLUMNS
from ..llm import BadRequest, BudgetExceeded, ChatModel, LLMError, Message, Reply, Usage, as_chat
from ..llm.numbers import format_usd
from ..refine import RefinedChat
from ..rollout import (
    RESET_ERROR,
    RESET_SEED,
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

# OpenAI's finish reason for each status of a rollout that has not failed.
_FINISH_REASONS = {
    "answered": "stop",
    "malformed": "stop",
    "truncated": "length",
    "out_of_turns": "length",
}
# Columns that no request may have: the question and its identity, the truth, and a command's files.
WITHHELD_FIELDS = {
    "id",
    "question",
    "prompt",
    "environment",
    "files",
    "tests",
    RESET_ERROR,
    RESET_SEED,
    *SOLUTION_COLUMNS,
}


class CostLimit(BudgetExceeded):
    """A request exceeded its cost limit. Not fatal: ProRefine returns the best answer that it has."""

    fatal = False


class PromptTooLong(BadRequest):
    """The conversation leaves the model no room for an answer."""


@dataclass(frozen=True)
class ServedAnswer:
    """The outcome of one request.

    Args:
        text (`str`, *optional*): The answer; `None` if there is none.
        why_none (`str`, *optional*): Why the model gave no answer, which is its own failing and no
            outage.
        error ([`LLMError`], *optional*): The call that failed. Then there is neither text nor
            reason.
        finish_reason (`str`, *optional*, defaults to `"stop"`): As in OpenAI's format.
        usage ([`Usage`], *optional*): The answering model's tokens, and the cost of all calls.
        workers (`dict`, *optional*): `calls` and `cost_usd` of each worker, by name, for an agent
            that leads some.
        trajectory (`dict`, *optional*): How it came about, as [`rollout_record`] describes it.
    """

    text: str | None = None
    why_none: str | None = None
    error: LLMError | None = None
    finish_reason: str = "stop"
    usage: Usage = field(default_factory=Usage)
    workers: dict[str, dict[str, float]] = field(default_factory=dict)
    trajectory: dict[str, Any] | None = None


OnProgress = Callable[[Mapping[str, Any]], None]
"""Called with each event of an episode in progress, JSON-able; must return at once."""


class Answers(Protocol):
    """A model of the service, cancelled when the client has gone.

    `greedy` asks for the likeliest tokens. A model that answers in turns calls `on_progress` before
    and after each call of its environment.
    """

    async def __call__(
        self,
        messages: Sequence[Message],
        seed: int,
        max_tokens: int | None,
        greedy: bool = False,
        on_progress: OnProgress | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> ServedAnswer: ...


@dataclass
class AgentAnswers:
    """A [`PromptAgent`] as a model.

    Args:
        agent ([`PromptAgent`]): Its policy is asked by all requests together.
        max_cost_usd (`float`, *optional*): No further call is made for a request that has cost this
            much.
    """

    agent: PromptAgent
    max_cost_usd: float | None = None

    def __post_init__(self):
        environment = self.agent.environment
        # A program makes its calls itself, and nothing here could stop it at the limit.
        is_program = environment is not None and environment.plays_whole_episodes
        if self.max_cost_usd is not None and is_program:
            raise ValueError(
                "max_cost_usd of a request cannot be held to with a program: leave it out, or use "
                "a budget"
            )
        if self.agent.spec.environments:
            raise ValueError(
                "a request does not say which of the agent's environments it is for: load the "
                "agent for one of them, PromptAgent.from_pretrained(folder, environment, name=...)"
            )

    @property
    def row_fields(self) -> list[str]:
        """The fields of a row that a request may have, under both of their names.

        They are the agent's columns beside the question, the truth, and the files of a command: a
        client can send no other one, so that no path reaches a program that trusts its rows.
        """
        names = []
        for name, own_name in self.agent.spec.columns.items():
            if name not in WITHHELD_FIELDS and own_name not in WITHHELD_FIELDS:
                names += [name, own_name]
        return list(dict.fromkeys(names))

    async def __call__(
        self,
        messages: Sequence[Message],
        seed: int,
        max_tokens: int | None,
        greedy: bool = False,
        on_progress: OnProgress | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> ServedAnswer:
        # Begin an episode, as in training.
        agent = self.agent
        row: dict[str, Any] = {
            **(fields or {}),
            "question": messages[-1]["content"],
            "prompt": conversation(agent.spec, messages),
        }
        row = agent.spec.with_both_names(row)
        limits = agent.limits
        (row,) = await reset_rows(agent.environment, [row], limits, seeds=[seed])
        reset_error = row.get(RESET_ERROR)
        if reset_error is not None:
            return ServedAnswer(error=reset_error)

        # Render its prompt. In a thread: a megabyte takes a second.
        prompt_ids = await asyncio.to_thread(agent.chat_format.prompt_ids, row["prompt"])
        if limits.max_context is not None and len(prompt_ids) >= limits.max_context:
            message = (
                f"This model's maximum context length is {limits.max_context} tokens, and your "
                f"messages result in {len(prompt_ids)} tokens."
            )
            return ServedAnswer(error=PromptTooLong(message))
        # A request can lower the agent's limit, and not raise it.
        if max_tokens is not None:
            limits = replace(limits, max_tokens=min(limits.max_tokens, max_tokens))

        # Play it, and let the policy forget its conversations.
        conversations: set[int | None] = set()

        async def policy(request: SampleRequest) -> Sample:
            conversations.add(request.conversation)
            return await agent.policy(replace(request, greedy=greedy))

        # Between two turns, end an episode that has cost too much.
        environment = agent.environment
        if environment is not None and not environment.plays_whole_episodes:
            environment = _MeteredEnvironment(environment, self.max_cost_usd, limits, on_progress)
        rollout = Rollout(prompt_ids, row=row, seed=seed)
        try:
            await play(rollout, policy, environment, agent.chat_format, limits)
        finally:
            end_conversation = getattr(agent.policy, "end_conversation", None)
            if end_conversation is not None:
                for number in conversations:
                    end_conversation(number)

        # Count what it took. The mask of a sequence is 1 for sampled tokens.
        sampled_tokens = sum(sum(sequence.mask) for sequence in rollout.sequences)
        usage = Usage(len(prompt_ids), sampled_tokens, _cost(rollout))
        trajectory = rollout_record(rollout)
        # The operator's program returns more than its answer for rewards and records, not for
        # clients.
        trajectory.pop("returned", None)
        trajectory.pop("not_recorded", None)

        # A failed call is an error; an agent that gives no answer is not.
        if rollout.error is not None:
            return ServedAnswer(error=rollout.error, usage=usage, trajectory=trajectory)
        why_none = None
        if rollout.answer is None:
            why_none = f"The agent gave no answer: {rollout.status.replace('_', ' ')}."
        return ServedAnswer(
            text=rollout.answer,
            why_none=why_none,
            finish_reason=_FINISH_REASONS[rollout.status],
            usage=usage,
            workers=costs_by_worker(rollout),
            trajectory=trajectory,
        )


@dataclass
class ChatAnswers:
    """Any [`ChatModel`] as a model, ProRefine's [`RefinedChat`] for one.

    Args:
        chat ([`ChatModel`]): The model that answers.
        max_cost_usd (`float`, *optional*): For a [`RefinedChat`], which makes many calls for one
            answer: no further one is made for a request that has cost this much. An answer that
            exists by then is returned.
    """

    chat: ChatModel
    max_cost_usd: float | None = None

    async def __call__(
        self,
        messages: Sequence[Message],
        seed: int,
        max_tokens: int | None,
        greedy: bool = False,
        on_progress: OnProgress | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> ServedAnswer:
        # The settings of the request. All others are left to the model.
        sampling: dict[str, Any] = {}
        if max_tokens is not None:
            sampling["max_tokens"] = max_tokens
        if greedy:
            sampling["temperature"] = 0.0

        # Meter each model of a refiner: all of their calls count towards the limit.
        chat = self.chat
        account = _RequestAccount(self.max_cost_usd)
        if isinstance(chat, RefinedChat):
            models = chat.refiner.models
            # A verifier that is a function costs nothing, and there may be none.
            if not isinstance(chat.refiner.verifier, ChatModel):
                del models["verifier"]
            metered: dict[str, Any] = {
                role: _MeteredChat(model, account) for role, model in models.items()
            }
            chat = RefinedChat(replace(chat.refiner, **metered), chat.prompt)

        # Ask it. After the limit was reached, the refiner's own error would hide the reason.
        reply = await as_chat(chat)(messages, repeat=seed, **sampling)
        if reply.error is not None:
            return ServedAnswer(error=account.limit_error or reply.error, usage=reply.usage)
        return ServedAnswer(reply.text, finish_reason=reply.finish_reason, usage=reply.usage)


@dataclass
class _MeteredEnvironment(Environment):
    """An [`Environment`] that reports its progress, and is asked no more at a request's limit."""

    environment: Environment
    limit: float | None
    limits: Limits
    on_progress: OnProgress | None = None

    step_timeout = math.inf  # the environment's step has the limit

    async def step(self, rollout: Rollout) -> Observation | None:
        error = over_limit(_cost(rollout), self.limit)
        if error is not None:
            return Observation(error=error)
        if self.on_progress is None:
            return await observe(self.environment, rollout, self.limits.step_timeout)

        # Report the turn before and after it. A conductor also says whom it asks, and their cost.
        leads_workers = isinstance(self.environment, Workers)
        event: dict[str, Any] = {"turn": len(rollout.turns), "event": "asking"}
        if isinstance(self.environment, Workers):
            event["asked"] = self.environment.list_asked(rollout)
        self.on_progress(event)
        observation = await observe(self.environment, rollout, self.limits.step_timeout)
        event = {"turn": len(rollout.turns), "event": "replied", "cost_usd": _cost(rollout)}
        if observation is not None:
            event["cost_usd"] += sum(reply.usage.cost_usd for reply in observation.replies)
            event["seconds"] = round(observation.seconds, 3)
        if leads_workers:
            event["workers"] = costs_by_worker(rollout)
        self.on_progress(event)
        return observation


@dataclass
class _RequestAccount:
    """The cost of one request so far. Its calls come one after another."""

    limit: float | None
    usd: float = 0.0
    limit_error: CostLimit | None = None


@dataclass
class _MeteredChat:
    """A [`ChatModel`] whose calls count towards the limit of one request."""

    chat: ChatModel
    account: _RequestAccount

    async def __call__(self, messages: Sequence[Message], **options: Any) -> Reply:
        # Look before a call, because its cost is known only after it.
        self.account.limit_error = over_limit(self.account.usd, self.account.limit)
        if self.account.limit_error is not None:
            return Reply(error=self.account.limit_error, attempts=0)
        reply = await as_chat(self.chat)(messages, **options)
        self.account.usd += reply.usage.cost_usd
        return reply


def over_limit(spent: float, limit: float | None) -> CostLimit | None:
    """The error of a request that has cost what one may."""
    if limit is None or spent < limit:
        return None
    return CostLimit(
        f"this request has cost ${format_usd(spent)}, and none may cost more than "
        f"${format_usd(limit)}"
    )


def _cost(rollout: Rollout) -> float:
    return sum(reply.usage.cost_usd for reply in rollout.replies)


def conversation(spec: AgentSpec, messages: Sequence[Message]) -> list[Message]:
    """The agent's prompt: the last message in the template it was trained with, earlier messages as
    they are.

    The agent's own system prompt, which training may have evolved, comes first, as in training; the
    client's follows. If a client sends the agent's own system prompt or template, it is not
    repeated.
    """
    *earlier_messages, last_message = messages

    # Drop the agent's own prompts, which come back. An evolved one is in either of them.
    agent_prompts = f"\n\n{spec.system_prompt or ''}\n\n{spec.prompt_template}\n\n"
    system_texts = []
    other_messages: list[Message] = []
    for message in earlier_messages:
        if message["role"] != "system":
            other_messages.append(message)
        elif f"\n\n{message['content'].strip()}\n\n" not in agent_prompts:
            system_texts.append(message["content"])

    # The client's system messages become one, after the agent's own system prompt.
    system_messages: list[Message] = []
    if system_texts:
        system_messages.append({"role": "system", "content": "\n\n".join(system_texts)})
    question: Message = {
        "role": "user",
        "content": _in_template(spec.prompt_template, last_message["content"]),
    }
    return SystemPrompt(spec.system_prompt or "").messages(
        [*system_messages, *other_messages, question]
    )


def _in_template(template: str, question: str) -> str:
    # A client may have filled in the template itself.
    before, _, after = template.partition("{question}")
    is_there = before.strip() and question.startswith(before) and question.endswith(after)
    return question if is_there else fill_template(template, question)
