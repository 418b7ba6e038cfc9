"""The environment of Prompt-R1: a large LLM that answers the agent's requests (eq 1-2).

The large LLM sees the interaction history H_{t-1}, that is the agent's earlier requests and its own replies, and the
new request. It does not see the agent's thoughts, the question's template or the answer.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ..llm import (
    Budget,
    ChatModel,
    LLMError,
    Message,
    OpenAIChat,
    Reply,
    RoutedChat,
    Usage,
    as_chat,
    charge,
    split_thoughts,
    with_system,
)
from ..rollout import PROMPT_R1_TEMPLATE, Environment, Observation, Rollout, rollout_seed

Sharing = Literal["never", "group", "step"]
History = Literal["full", "last"] | int | Callable[[Sequence[Message]], Sequence[Message]]

# Appended to a reply that was cut, so that the agent can tell a short reply from a shortened one.
CUT_MARK = " [...]"
_BATCHES = 16  # whose replies are kept: with `async_lead` episodes of several steps are played at the same time


class LLMEnvironment(Environment):
    """A large LLM as the environment.

    Args:
        chat ([`ChatModel`] or `Callable`): The large LLM, or a function of the messages; see [`as_chat`].
        system_prompt (`str`, *optional*): Sent first in every call.
        history (`str`, `int` or `Callable`, *optional*, defaults to `"full"`): How much of the earlier conversation the
            large LLM sees: `"full"` (the paper), `"last"` (only the new request), a number of earlier request-reply
            pairs, or a function from the earlier messages to those that are sent (a summary, for example; it must not
            block).
        max_reply_chars (`int`, *optional*, defaults to `2048`): Longer replies are cut to this many characters, the
            mark at the end included (the released code's value).
        share_replies (`str`, *optional*): Whether identical requests of one training step are sent, and paid for, once:
            `"never"`; `"group"`, among the rollouts of one question; `"step"`, among all rollouts of a step, on each
            process by itself. Defaults to `"step"` for a large LLM at temperature 0, whose replies are the same each
            time, and to `"never"` for others, whose replies are samples. A failed reply is not shared: the next rollout
            sends its own request. Rollouts outside of a training batch (evaluation, `agent.answer`) share nothing.
        **sampling: `temperature`, `max_tokens`, ...: sent with every call.

    Raises:
        `TypeError`: If `chat` is neither.
        `ValueError`: If `history`, `max_reply_chars` or `share_replies` has another value.
    """

    prompt_template = PROMPT_R1_TEMPLATE

    def __init__(
        self,
        chat: ChatModel,
        system_prompt: str | None = None,
        history: History = "full",
        max_reply_chars: int = 2048,
        share_replies: Sharing | None = None,
        **sampling: Any,
    ):
        turns = isinstance(history, int) and history >= 0
        if not callable(history) and history not in ("full", "last") and not turns:
            raise ValueError(
                f"history must be 'full', 'last', a number of turns or a function, got {history!r}"
            )
        if max_reply_chars <= len(CUT_MARK):
            raise ValueError(
                f"max_reply_chars must be more than {len(CUT_MARK)}, got {max_reply_chars}"
            )
        if share_replies not in (None, "never", "group", "step"):
            raise ValueError(
                f"share_replies must be 'never', 'group' or 'step', got {share_replies!r}"
            )
        as_chat(chat)  # raises now, not at the first episode
        self.chat, self.system_prompt, self.history = chat, system_prompt, history
        self.max_reply_chars, self.sampling = max_reply_chars, sampling
        defaults = getattr(chat, "sampling", None)
        temperature = {**(defaults if isinstance(defaults, Mapping) else {}), **sampling}.get(
            "temperature"
        )
        self.share_replies: Sharing = share_replies or ("step" if temperature == 0 else "never")
        # A call of such a model may wait long for its turn, and ends by its own limits.
        self.step_timeout = math.inf if _limits_its_calls(chat) else None
        self._shared = SharedReplies()

    async def step(self, rollout: Rollout) -> Observation:
        """Send the request of the rollout's last turn. Never raises: an error is in the observation."""
        messages, session, sharers = (
            self.messages(rollout),
            str(rollout.seed),
            self._sharers(rollout),
        )
        model = None
        if isinstance(
            self.chat, RoutedChat
        ):  # the question chooses the model of the session, ρ(m | q)
            try:
                model = self.chat.choose(messages, session, rollout.row.get("question"))
            except LLMError as error:
                return Observation(error=error.with_traceback(None))

        def ask(repeat: int) -> Awaitable[Reply]:
            return as_chat(self.chat)(messages, repeat=repeat, session=session, **self.sampling)

        if sharers is None:
            # The seed identifies the rollout: a recorded run finds its replies again, and N rollouts of one question
            # with the same request get N different replies.
            reply = await ask(rollout.seed)
        else:
            request = (
                sharers,
                model,
                *((message["role"], message["content"]) for message in messages),
            )
            reply = await self._shared.ask(sharers[0], request, lambda: ask(rollout_seed(*sharers)))
        # Some servers leave the thought in the text; the agent gets what follows it.
        thought, visible = split_thoughts(reply.text)
        text = visible.strip() if thought and visible.strip() else reply.text
        if len(text) > self.max_reply_chars:
            text = text[: self.max_reply_chars - len(CUT_MARK)] + CUT_MARK
        return Observation(text=text, error=reply.error, replies=(reply,), seconds=reply.seconds)

    def messages(self, rollout: Rollout) -> list[Message]:
        """The messages that are sent for the rollout's last turn."""
        earlier: list[Message] = []
        for turn, observation in zip(rollout.turns, rollout.observations, strict=False):
            earlier.append({"role": "user", "content": turn.request or ""})
            earlier.append({"role": "assistant", "content": observation.text})
        request: Message = {"role": "user", "content": rollout.turns[-1].request or ""}
        return with_system(self.system_prompt, [*self._kept(earlier), request])

    def _sharers(self, rollout: Rollout) -> tuple[Any, ...] | None:
        """The key of the rollouts that share replies with `rollout`; `None` if it shares none."""
        if self.share_replies == "never" or not rollout.batch:
            return None
        if self.share_replies == "step":
            return (rollout.batch,)
        return None if rollout.group is None else (rollout.batch, rollout.group)

    def check(self) -> None:
        """Raise the [`LLMError`] that a first call would get, if the model has a `check`."""
        if (check := getattr(self.chat, "check", None)) is not None:
            check()

    def charge_to(self, budget: Budget, account: str) -> None:
        """Book what the model spends into `budget`, if it has a `charge_to`."""
        charge(budget, **{account: self.chat})

    def _kept(self, earlier: list[Message]) -> Sequence[Message]:
        if callable(self.history):
            return self.history(earlier)
        if self.history == "full":
            return earlier
        turns = 0 if self.history == "last" else int(self.history)
        return earlier[len(earlier) - 2 * turns :] if turns < len(earlier) // 2 else earlier


def _limits_its_calls(chat: Any) -> bool:
    """Whether no call of a model can take for ever: the package's own clients have time limits."""
    if isinstance(chat, RoutedChat):
        return all(map(_limits_its_calls, chat.models.values()))
    return isinstance(chat, OpenAIChat)


class SharedReplies:
    """Identical requests of a batch are sent once and share their reply, also while the call is in flight.

    The replies of the batches that were asked last are kept. For coroutines of one event loop.
    """

    def __init__(self) -> None:
        self._batches: OrderedDict[str, dict[Hashable, asyncio.Future[Reply | None]]] = (
            OrderedDict()
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a copy begins empty

    async def ask(
        self, batch: str, request: Hashable, call: Callable[[], Awaitable[Reply]]
    ) -> Reply:
        """The reply to an identical request of the batch, or else the reply of `call`.

        If the call that others wait for fails or is cancelled, one of them makes the next call and the rest wait for
        that. After a second failure each makes its own call: otherwise many would wait for many outages in turn.
        """
        calls = self._batches.setdefault(batch, {})
        self._batches.move_to_end(batch)
        while len(self._batches) > _BATCHES:
            self._batches.popitem(last=False)
        for _ in range(2):
            if request not in calls:
                return await self._call(calls, request, call)
            reply = await asyncio.shield(calls[request])
            if reply is not None:
                return replace(reply, usage=Usage(), saved=reply.worth, shared=True, attempts=0)
        return await call()

    async def _call(
        self, calls: dict[Hashable, Any], request: Hashable, call: Callable[[], Awaitable[Reply]]
    ) -> Reply:
        future = calls[request] = asyncio.get_running_loop().create_future()
        shared = None
        try:
            reply = await call()
            shared = reply if reply.error is None else None
            return reply
        finally:
            if shared is None:
                del calls[request]
            future.set_result(shared)
