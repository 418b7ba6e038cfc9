"""The environment of Prompt-R1, a large LLM that answers the agent's requests (eq 1-2), and whatever a user brings.

It sees the interaction history H_{t-1}, that is the agent's earlier requests and its own replies, and the new request.
It does not see the agent's thoughts, the question's template or the answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal

from ..llm import Budget, ChatModel, Message, as_chat, charge, with_system
from ..rollout import Environment, Observation, Rollout

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
        **sampling: `temperature`, `max_tokens`, ...: sent with every call.

    Raises:
        `ValueError`: If `history` or `max_reply_chars` is none of the above.
    """

    def __init__(
        self,
        chat: ChatModel,
        system_prompt: str | None = None,
        history: History = "full",
        max_reply_chars: int = 2048,
        **sampling: Any,
    ):
        turns = isinstance(history, int) and history >= 0
        if not callable(history) and history not in ("full", "last") and not turns:
            raise ValueError(f"history must be 'full', 'last', a number of turns or a function, got {history!r}")
        if max_reply_chars <= len(CUT_MARK):
            raise ValueError(f"max_reply_chars must be more than {len(CUT_MARK)}, got {max_reply_chars}")
        self.chat, self.system_prompt, self.history = chat, system_prompt, history
        self.max_reply_chars, self.sampling = max_reply_chars, sampling

    async def step(self, rollout: Rollout) -> Observation:
        """Send the request of the rollout's last turn. Never raises: failure is in the observation."""
        # The rollout's seed is its identity: a recorded run finds its replies again, and N rollouts of one question
        # that ask the same thing get N replies of their own.
        seed = rollout.seed
        reply = await as_chat(self.chat)(self.messages(rollout), repeat=seed, session=str(seed), **self.sampling)
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
