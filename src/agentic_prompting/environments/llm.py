"""The environment of Prompt-R1, a large LLM that answers the agent's requests (eq 1-2), and whatever a user brings.

It sees the interaction history H_{t-1}, that is the agent's earlier requests and its own replies, and the new request.
It does not see the agent's thoughts, the question's template or the answer.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

from ..llm import Budget, ChatModel, LLMError, Message, Reply, RoutedChat, Usage, as_chat, charge, with_system
from ..rollout import Environment, Observation, Rollout, rollout_seed

Sharing = Literal["never", "group", "step"]
History = Literal["full", "last"] | int | Callable[[Sequence[Message]], Sequence[Message]]

# Appended to a reply that was cut, so that the agent can tell a short reply from a shortened one.
CUT_MARK = " [...]"


class LLMEnvironment:
    """A large LLM as the environment.

    Args:
        chat ([`ChatModel`]): The large LLM.
        system_prompt (`str`, *optional*): Sent first in every call.
        history (`str`, `int` or `Callable`, *optional*, defaults to `"full"`): How much of the earlier conversation it
            sees: `"full"` (the paper), `"last"` (nothing but the new request), a number of earlier request-reply pairs,
            or a function from the earlier messages to those that are sent (a summary, for example; it must not block).
        max_reply_chars (`int`, *optional*, defaults to `2048`): Longer replies are cut to this many characters, the
            mark at the end included (the released code's value).
        share_replies (`str`, *optional*): Whether identical conversations of one training step are asked, and paid
            for, once: `"never"`; `"group"`, among the rollouts of one question; `"step"`, among all of a step, on each
            process by itself. Defaults to `"step"` for a large LLM at temperature 0, which says the same each time, and
            to `"never"` for others, whose replies are samples. A failed reply is not shared: the next one asks again.
            Rollouts that are not of a training batch (evaluation, `agent.answer`) share nothing.
        **sampling: `temperature`, `max_tokens`, ...: sent with every call.

    Raises:
        `ValueError`: If `history`, `max_reply_chars` or `share_replies` is none of the above.
    """

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
            raise ValueError(f"history must be 'full', 'last', a number of turns or a function, got {history!r}")
        if max_reply_chars <= len(CUT_MARK):
            raise ValueError(f"max_reply_chars must be more than {len(CUT_MARK)}, got {max_reply_chars}")
        if share_replies not in (None, "never", "group", "step"):
            raise ValueError(f"share_replies must be 'never', 'group' or 'step', got {share_replies!r}")
        self.chat, self.system_prompt, self.history = chat, system_prompt, history
        self.max_reply_chars, self.sampling = max_reply_chars, sampling
        defaults = getattr(chat, "sampling", None)
        temperature = {**(defaults if isinstance(defaults, Mapping) else {}), **sampling}.get("temperature")
        self.share_replies: Sharing = share_replies or ("step" if temperature == 0 else "never")
        self._said = SharedReplies()

    async def step(self, rollout: Rollout) -> Observation:
        """Send the request of the rollout's last turn. Never raises: failure is in the observation."""
        messages, session, sharers = self.messages(rollout), str(rollout.seed), self._sharers(rollout)
        model = None
        if isinstance(self.chat, RoutedChat):  # the choice for the session is by the question, ρ(m | q)
            try:
                model = self.chat.choose(messages, session, rollout.row.get("question"))
            except LLMError as error:
                return Observation(error=error.with_traceback(None))

        def ask(repeat: int) -> Awaitable[Reply]:
            return as_chat(self.chat)(messages, repeat=repeat, session=session, **self.sampling)

        if sharers is None:
            # The rollout's seed is its identity: a recorded run finds its replies again, and N rollouts of one question
            # that ask the same thing get N replies of their own.
            reply = await ask(rollout.seed)
        else:
            said = (sharers, model, *((message["role"], message["content"]) for message in messages))
            reply = await self._said.ask(sharers[0], said, lambda: ask(rollout_seed(*sharers)))
        text = reply.text
        if len(text) > self.max_reply_chars:
            text = text[: self.max_reply_chars - len(CUT_MARK)] + CUT_MARK
        return Observation(text=text, error=reply.error, replies=(reply,), seconds=reply.seconds)

    def messages(self, rollout: Rollout) -> list[Message]:
        """What the large LLM is sent for the rollout's last turn."""
        earlier: list[Message] = []
        for turn, observation in zip(rollout.turns, rollout.observations, strict=False):
            earlier.append({"role": "user", "content": turn.request or ""})
            earlier.append({"role": "assistant", "content": observation.text})
        request: Message = {"role": "user", "content": rollout.turns[-1].request or ""}
        return with_system(self.system_prompt, [*self._kept(earlier), request])

    def _sharers(self, rollout: Rollout) -> tuple[Any, ...] | None:
        """Who may share a reply with `rollout`; `None` for nobody."""
        if self.share_replies == "never" or not rollout.batch:
            return None
        if self.share_replies == "step":
            return (rollout.batch,)
        return None if rollout.group is None else (rollout.batch, rollout.group)

    def check(self) -> None:
        """Raise the [`LLMError`] that a first call would meet, if the model can be checked."""
        if (check := getattr(self.chat, "check", None)) is not None:
            check()

    def charge_to(self, budget: Budget, account: str) -> None:
        """Book what the model spends into `budget`, if it can be told to."""
        charge(budget, **{account: self.chat})

    def _kept(self, earlier: list[Message]) -> Sequence[Message]:
        if callable(self.history):
            return self.history(earlier)
        if self.history == "full":
            return earlier
        turns = 0 if self.history == "last" else int(self.history)
        return earlier[len(earlier) - 2 * turns :] if turns < len(earlier) // 2 else earlier


class SharedReplies:
    """Said once, paid once: calls that are the same and may share their reply, those in flight included.

    What was said in the last two batches is kept. For coroutines of one event loop.
    """

    def __init__(self) -> None:
        self._said: OrderedDict[str, dict[Hashable, asyncio.Future[Reply | None]]] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a copy has heard nothing

    async def ask(self, batch: str, said: Hashable, call: Callable[[], Awaitable[Reply]]) -> Reply:
        """The reply of whoever said the same before, or of `call`.

        Whoever waits for a call that fails or is cancelled makes the next one, or waits for that; after a second
        failure everybody asks alone, or many would wait for as many outages one after another.
        """
        known = self._said.setdefault(batch, {})
        while len(self._said) > 2:
            self._said.popitem(last=False)
        for _ in range(2):
            if said not in known:
                return await self._lead(known, said, call)
            reply = await asyncio.shield(known[said])
            if reply is not None:
                return replace(reply, usage=Usage(), saved=reply.worth, shared=True, attempts=0)
        return await call()

    async def _lead(self, known: dict[Hashable, Any], said: Hashable, call: Callable[[], Awaitable[Reply]]) -> Reply:
        heard = known[said] = asyncio.get_running_loop().create_future()
        given = None
        try:
            reply = await call()
            given = reply if reply.error is None else None
            return reply
        finally:
            if given is None:
                del known[said]
            heard.set_result(given)


def as_environment(given: Any) -> Environment | None:
    """An environment of an object with a `step`, or of a function that is one, with or without `async`: it gets the
    [`Rollout`] and gives an [`Observation`], its text, or `None` if the episode is over. `None` stays `None`.

    Raises:
        `TypeError`: For anything that has no `step(rollout)` to call; says what to pass instead.
    """
    if given is None:
        return None
    if inspect.isclass(given):
        raise TypeError(f"environment is the class {given.__name__}: pass an object of it, {given.__name__}(...)")
    environment = SimpleNamespace(step=given) if inspect.isroutine(given) else given
    step, name = getattr(environment, "step", None), getattr(given, "__name__", type(given).__name__)
    if not callable(step):
        raise TypeError(
            f"environment has no step(rollout) to call: {name}. Pass an object with that method, a function of the "
            "rollout, or LLMEnvironment(chat) around a large LLM"
        )
    try:
        inspect.signature(step).bind(None)
    except TypeError as error:
        raise TypeError(f"environment {name} must take one argument, the rollout: {error}") from None
    except ValueError:  # one in C tells nothing of its arguments
        pass
    return environment
