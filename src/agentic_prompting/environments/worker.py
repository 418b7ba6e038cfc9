"""A worker of a pool, whatever it is: a chat model, an environment, an agent or a tool.

See [`Workers`].
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..llm import (
    Budget,
    LLMError,
    Message,
    Reply,
    ServerFailed,
    TimedOut,
    Unreachable,
    Usage,
    as_chat,
    charge,
    without_thoughts,
)
from ..llm.guard import call_guarded, describe, failure_of
from ..rollout import Environment, Observation, Rollout, Turn, observe
from .search import SearchEnvironment

SendOnce = Callable[[str, Callable[[int], Awaitable[Reply]]], Awaitable[Reply]]
"""Sends a request, given its text and the call, unless another rollout sends the same one."""


@dataclass(frozen=True)
class WorkerReply:
    """The outcome of one call.

    Args:
        text (`str`, *optional*, defaults to `""`): The text that the agent reads.
        quotable_text (`str`, *optional*, defaults to `""`): The text that a reference hands on;
            empty if there is none.
        replies (`tuple[Reply, ...]`, *optional*): The model calls that it took.
        error ([`LLMError`], *optional*): Why there is no reply, if the worker failed.
    """

    text: str = ""
    quotable_text: str = ""
    replies: tuple[Reply, ...] = ()
    error: LLMError | None = None


@dataclass(frozen=True)
class Worker:
    """A member of a pool.

    Args:
        model: Answers requests: a [`ChatModel`] or function of the messages, an [`Environment`]
            such as [`SearchEnvironment`], a [`PromptAgent`], or with `takes="text"` a function of
            the request's text (a tool).
        description (`str`, *optional*): Its strengths, in one line that the agent reads.
        usd (`float`, *optional*, defaults to `0.0`): Price of a call in US dollars, for models that
            state none.
        takes (`str`, *optional*, defaults to `"messages"`): `messages` or `text`: the argument of a
            function.

    Raises:
        `TypeError`: If the model is none of these.
        `ValueError`: If another argument has a wrong value.
    """

    model: Any
    description: str = ""
    usd: float = 0.0
    takes: Literal["messages", "text"] = "messages"

    def __post_init__(self) -> None:
        # Refuse invalid options.
        if not (callable(self.model) or self.is_environment or self.is_agent):
            raise TypeError(
                f"worker {self.model!r:.100} is no chat model, environment, agent or function"
            )
        if self.takes not in ("messages", "text"):
            raise ValueError(f"takes must be messages or text, got {self.takes!r}")
        if not 0 <= self.usd < math.inf:
            raise ValueError(f"usd must be finite and at least 0, got {self.usd}")
        if len(self.description.splitlines()) > 1:
            raise ValueError(f"a worker's description must be one line, got {self.description!r}")
        if self.is_chat:
            as_chat(self.model)  # raises now, not at the first episode

    @property
    def is_environment(self) -> bool:
        return isinstance(self.model, Environment)

    @property
    def is_agent(self) -> bool:
        return hasattr(self.model, "aanswer")

    @property
    def is_chat(self) -> bool:
        return self.takes == "messages" and not self.is_environment and not self.is_agent

    @property
    def identity(self) -> dict[str, Any]:
        """What tells this worker from others, JSON-able.

        A model is identified by its name, anything else by its function or class.
        """
        model = getattr(self.model, "model", None)
        if not isinstance(model, str):
            model = getattr(self.model, "__qualname__", type(self.model).__qualname__)
        return {"model": model, "description": self.description, "usd": self.usd}

    @property
    def substitutes_references(self) -> bool:
        """Whether references are replaced by the replies they mean, instead of being quoted in
        front of the request: a tool or a search engine cannot read a quotation.
        """
        return self.takes == "text" or isinstance(self.model, SearchEnvironment)

    async def answer(
        self, text: str, seed: int, rollout: Rollout, session: str, send_once: SendOnce | None
    ) -> WorkerReply:
        """Send a request. Never raises.

        Args:
            text (`str`): The request.
            seed (`int`): Identifies this call for replay; two equal calls of an episode are two
                samples.
            rollout ([`Rollout`]): The conductor's episode.
            session (`str`): Calls with the same session belong together.
            send_once (`Callable`, *optional*): Shares replies among the rollouts of a step.
        """
        try:
            # Hand the request to the model in the form that it takes.
            if self.is_agent:
                episode = await self.model.aanswer(text, seed=seed)
                return self._reply(episode.answer or "no answer", episode.replies, episode.error)
            if self.is_environment:
                observation = await self._observe(text, seed, rollout)
                if observation is None:
                    return self._reply("no reply")
                return self._reply(observation.text, observation.replies, observation.error)
            if self.takes == "text":
                return self._reply(await _call_tool(self.model, text))
            return await self._chat(text, seed, session, send_once)
        except LLMError as error:
            return self._reply("", error=error)
        except Exception as error:
            return self._reply("", error=failure_of(ServerFailed, "a worker", error))

    def charge_to(self, budget: Budget, account: str) -> None:
        """Charge what the worker spends to `account`."""
        model = self.model
        # An agent spends what its environment spends.
        if self.is_agent and isinstance(getattr(model, "environment", None), Environment):
            model = model.environment
        if isinstance(model, Environment):
            model.charge_to(budget, account)
        else:
            charge(budget, **{account: model})

    async def _chat(
        self, text: str, seed: int, session: str, send_once: SendOnce | None
    ) -> WorkerReply:
        async def send(repeat: int) -> Reply:
            messages = [Message(role="user", content=text)]
            return await as_chat(self.model)(messages, repeat=repeat, session=session)

        # Send the request, unless another rollout has sent the same one.
        reply = await (send(seed) if send_once is None else send_once(text, send))
        # Some servers leave the thought in the text.
        shown_reply = without_thoughts(reply)
        return self._reply(shown_reply.text.strip(), (reply,), shown_reply.error)

    async def _observe(self, text: str, seed: int, rollout: Rollout) -> Observation | None:
        """Let an environment answer the request, as the only turn of an episode."""
        # A search environment reads its queries from JSON.
        if isinstance(self.model, SearchEnvironment):
            text = json.dumps({"query_list": [text]}, ensure_ascii=False)
        turn = Turn(text, "act", True, request=text)
        return await observe(self.model, Rollout([], row=rollout.row, seed=seed, turns=[turn]))

    def _reply(
        self, text: str, replies: Sequence[Reply] = (), error: LLMError | None = None
    ) -> WorkerReply:
        """The outcome of the worker's work: at least one [`Reply`], with the price of the call in
        the last one.
        """
        # Work without a model call counts as one reply.
        *others, last = replies or [Reply(text, error=error)]
        if error is not None:
            return WorkerReply(replies=(*others, last), error=error)
        # Add the price of the call if no reply states a price.
        if self.usd and not sum(reply.worth.cost_usd for reply in replies):
            price = Usage(cost_usd=self.usd)
            # This reply was not paid for again, so its price counts as saved.
            if last.cached or last.shared:
                last = replace(last, saved=last.saved + price)
            else:
                last = replace(last, usage=last.usage + price)
        return WorkerReply(text, text, (*others, last))


async def _call_tool(function: Callable[[str], Any], text: str) -> str:
    """The result of a tool, or its exception as text for the agent. Raises an outage."""
    try:
        return str(await call_guarded(function, text))
    # An outage of a model that the tool calls is an outage of the worker.
    except LLMError:
        raise
    except (ConnectionError, TimeoutError) as error:
        outage = TimedOut if isinstance(error, TimeoutError) else Unreachable
        raise outage(f"the tool raised {describe(error)}") from None
    except Exception as error:
        return f"Error: {describe(error, 500)}"


def as_worker(worker: Any) -> Worker:
    """A [`Worker`] as it is, or a model made one."""
    return worker if isinstance(worker, Worker) else Worker(worker)
