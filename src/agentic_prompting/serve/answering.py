"""What stands behind a model's name at the service: a conversation in, an answer out, stoppable in between.

No HTTP here. [`AgentAnswers`] plays the trained agent, [`ChatAnswers`] asks any [`ChatModel`], ProRefine's
[`RefinedChat`] for one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..agent import PromptAgent
from ..evolution import SystemPrompt
from ..llm import BadRequest, BudgetExceeded, ChatModel, Closed, LLMError, Message, Reply, Usage
from ..llm.futures import then
from ..refine import RefinedChat
from ..rollout import AgentSpec, Observation, Rollout, Sample, SampleRequest, rollout_record, run_rollouts
from ..rollout.templates import fill_template
from .shared_sampler import SharedSampler

_FINISH = {"answered": "stop", "malformed": "stop", "truncated": "length", "out_of_turns": "length"}


class CostLimit(BudgetExceeded):
    """One request came to cost more than a request may."""


class PromptTooLong(BadRequest):
    """The conversation leaves the model no room for an answer."""


@dataclass(frozen=True)
class Answer:
    """What came of one request.

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


class Work(Protocol):
    """A request on its way. After `cancel` nobody reads `future` any more, and it ends soon."""

    future: Future[Answer]

    def cancel(self) -> object: ...


class Answers(Protocol):
    """A model of the service. `start` does not block; `greedy` asks for the likeliest tokens."""

    def start(self, messages: Sequence[Message], seed: int, max_tokens: int | None, greedy: bool = False) -> Work: ...

    def close(self) -> None: ...


class AgentAnswers:
    """A [`PromptAgent`] as a model.

    Args:
        agent ([`PromptAgent`]): Its sampler is used from one thread, for all requests together.
        max_cost_usd (`float`, *optional*): No further call is made for a request that has cost this much.
        max_concurrency (`int`, *optional*, defaults to `256`): Requests that are played at once.
        on_batch (`Callable[[int], None]`, *optional*): See [`SharedSampler`].
    """

    def __init__(
        self, agent: PromptAgent, max_cost_usd: float | None = None, max_concurrency: int = 256, on_batch: Any = None
    ):
        self.agent, self.max_cost_usd = agent, max_cost_usd
        self.sampler = SharedSampler(agent.sampler, on_batch=on_batch)
        self._threads = ThreadPoolExecutor(max_concurrency, thread_name_prefix="agentic-prompting-episode")

    def start(self, messages: Sequence[Message], seed: int, max_tokens: int | None, greedy: bool = False) -> Work:
        episode = _Episode(self.agent, self.sampler, self.max_cost_usd, greedy)
        episode.future = self._threads.submit(episode.play, messages, seed, max_tokens)
        return episode

    def close(self) -> None:
        self.sampler.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Episode:
    """One request: what its rollout takes for sampler and environment, and the way to stop it in either."""

    future: Future[Answer]

    def __init__(self, agent: PromptAgent, sampler: SharedSampler, max_cost_usd: float | None, greedy: bool):
        self.agent, self.sampler, self.max_cost_usd, self.greedy = agent, sampler, max_cost_usd, greedy
        self._cancelled = threading.Event()
        self._pending: Future[Any] | None = None

    def play(self, messages: Sequence[Message], seed: int, max_tokens: int | None) -> Answer:
        """The whole episode. Runs on a thread of its own."""
        agent = self.agent
        prompt = conversation(agent.spec, messages)
        rollout = Rollout(agent.chat_format.prompt_ids(prompt), row={"question": messages[-1]["content"]}, seed=seed)
        limits = agent.limits
        if limits.max_context is not None and len(rollout.prompt_ids) >= limits.max_context:
            has = f"your messages result in {len(rollout.prompt_ids)} tokens"
            return Answer(
                error=PromptTooLong(f"This model's maximum context length is {limits.max_context} tokens, and {has}.")
            )
        if max_tokens is not None:
            limits = replace(limits, max_tokens=min(limits.max_tokens, max_tokens))
        environment = self if agent.environment is not None else None
        run_rollouts([rollout], self._sample, environment, agent.chat_format, limits, linger=0)
        return _answer(rollout)

    def cancel(self) -> None:
        """Stop it wherever it is: in the sampler or its queue, or in a call to the large LLM. Nothing new is begun."""
        self._cancelled.set()
        self.future.cancel()
        if self._pending is not None:
            self._pending.cancel()

    def step(self, rollout: Rollout) -> Future[Observation] | None:
        """As in [`Environment`], up to the cost that a request may have."""
        self._go_on()
        check_cost(sum(reply.usage.cost_usd for reply in rollout.replies), self.max_cost_usd)
        assert self.agent.environment is not None
        return self._follow(self.agent.environment.step(rollout))

    def _sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        self._go_on()
        asked = [replace(request, greedy=self.greedy, left=self._cancelled.is_set) for request in requests]
        return [self._follow(self.sampler.submit(request)).result() for request in asked]

    def _go_on(self) -> None:
        if self._cancelled.is_set():
            raise Closed("the request was cancelled")

    def _follow(self, future: Any) -> Any:
        """Remember what is waited for. A cancellation that came since `_go_on` is not lost either."""
        self._pending = future
        if self._cancelled.is_set() and future is not None:
            future.cancel()
        return future


class ChatAnswers:
    """Any [`ChatModel`] as a model, ProRefine's [`RefinedChat`] for one.

    Args:
        chat ([`ChatModel`]): Who answers.
        max_cost_usd (`float`, *optional*): For a [`RefinedChat`], which makes many calls for one answer: no further one
            is made for a request that has cost this much. Where there is an answer by then, that is given.
    """

    def __init__(self, chat: ChatModel, max_cost_usd: float | None = None):
        self.chat, self.max_cost_usd = chat, max_cost_usd

    def start(self, messages: Sequence[Message], seed: int, max_tokens: int | None, greedy: bool = False) -> Work:
        sampling: dict[str, Any] = {} if max_tokens is None else {"max_tokens": max_tokens}
        if greedy:
            sampling["temperature"] = 0.0
        chat, spent = self._for_one_request()
        return _Asked(then(chat.submit(messages, repeat=seed, **sampling), lambda reply: _of_reply(reply, spent.ended)))

    def close(self) -> None:
        """Whoever made the chat model closes it."""

    def _for_one_request(self) -> tuple[ChatModel, _Spent]:
        """The model, its calls counted together where it makes several."""
        spent = _Spent(self.max_cost_usd)
        if not isinstance(self.chat, RefinedChat):
            return self.chat, spent
        refiner = copy(self.chat.refiner)
        refiner.models = {role: _Metered(model, spent) for role, model in refiner.models.items()}
        return RefinedChat(refiner, self.chat.prompt), spent


@dataclass
class _Spent:
    """What one request has cost, and the end of it. Its calls come one after another."""

    limit: float | None
    usd: float = 0.0
    ended: CostLimit | None = None


@dataclass
class _Metered:
    """A [`ChatModel`] whose calls count towards the limit of one request."""

    chat: ChatModel
    spent: _Spent

    def submit(self, messages: Sequence[Message], **options: Any) -> Future[Reply]:
        try:
            check_cost(self.spent.usd, self.spent.limit)
        except CostLimit as error:
            self.spent.ended = error
            ended: Future[Reply] = Future()
            ended.set_result(Reply(error=error, attempts=0))
            return ended
        return then(self.chat.submit(messages, **options), self._count)

    def _count(self, reply: Reply) -> Reply:
        self.spent.usd += reply.usage.cost_usd
        return reply


def check_cost(spent: float, limit: float | None) -> None:
    """Raise [`CostLimit`] where a request has cost what one may."""
    if limit is not None and spent >= limit:
        raise CostLimit(f"this request has cost ${spent:.4f}, and none may cost more than ${limit:g}")


@dataclass
class _Asked:
    future: Future[Answer]

    def cancel(self) -> object:
        return self.future.cancel()


def conversation(spec: AgentSpec, messages: Sequence[Message]) -> list[Message]:
    """What the agent is shown: the last message in the template it was trained with, what came before as it is.

    The agent's own system prompt, which training may have evolved, comes first, as in training; the client's is put
    under it. What a client sends of either by itself is not said twice.
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


def _answer(rollout: Rollout) -> Answer:
    usage = Usage(len(rollout.prompt_ids), sum(rollout.mask), sum(reply.usage.cost_usd for reply in rollout.replies))
    trajectory = rollout_record(rollout)
    if rollout.error is not None:
        return Answer(error=rollout.error, usage=usage, trajectory=trajectory)
    why_none = None
    if rollout.answer is None:
        why_none = f"The agent gave no answer: {rollout.status.replace('_', ' ')}."
    return Answer(rollout.answer, why_none, None, _FINISH[rollout.status], usage, trajectory)


def _of_reply(reply: Reply, limited: CostLimit | None = None) -> Answer:
    if reply.error is not None:
        return Answer(error=limited or reply.error, usage=reply.usage)
    return Answer(reply.text, finish_reason=reply.finish_reason, usage=reply.usage)


def as_error(error: BaseException) -> LLMError:
    """An exception of a request's thread as what it means to the client."""
    return error if isinstance(error, LLMError) else Closed(f"the request ended with {type(error).__name__}")
