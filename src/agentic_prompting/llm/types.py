"""The types that every large-LLM call is made of: message in, reply out.

No HTTP here, no vendor: [`OpenAIChat`] speaks to endpoints, [`ScriptedChat`] is the fake we ship, anything else with a
`submit` method of this shape will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypedDict, runtime_checkable

from .errors import LLMError


class Message(TypedDict):
    """One chat message, in OpenAI's and transformers' format."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True)
class Usage:
    """What a call used.

    Args:
        prompt_tokens (`int`, *optional*, defaults to `0`): Tokens read.
        completion_tokens (`int`, *optional*, defaults to `0`): Tokens written.
        cost_usd (`float`, *optional*, defaults to `0.0`): US dollars; 0 where the price is not known.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cost_usd + other.cost_usd,
        )


@dataclass(frozen=True)
class Reply:
    """The outcome of one call: a text or an error, never both.

    Args:
        text (`str`, *optional*, defaults to `""`): What the model wrote. Empty when `error` is set.
        error ([`LLMError`], *optional*): Why there is no text.
        finish_reason (`str`, *optional*, defaults to `"stop"`): As the endpoint gave it: `stop`, `length`, ...
        usage ([`Usage`], *optional*): Tokens and cost of this call; zero for a cached reply.
        cached (`bool`, *optional*, defaults to `False`): Whether it came from a [`ReplayCache`], unpaid.
        attempts (`int`, *optional*, defaults to `1`): Requests sent for it, retries included; 0 when cached.
        seconds (`float`, *optional*, defaults to `0.0`): From submission to reply, waiting for a free slot included.
    """

    text: str = ""
    error: LLMError | None = None
    finish_reason: str = "stop"
    usage: Usage = field(default_factory=Usage)
    cached: bool = False
    attempts: int = 1
    seconds: float = 0.0


@runtime_checkable
class ChatModel(Protocol):
    """A large LLM, asked one conversation at a time.

    `submit` returns at once and never raises for one call: whatever happens to the call ends up in the [`Reply`].
    """

    def submit(
        self, messages: Sequence[Message], *, repeat: int | None = None, session: str | None = None, **sampling: Any
    ) -> Future[Reply]:
        """Ask; the reply comes later.

        Args:
            messages (`Sequence[Message]`): The conversation, oldest first.
            repeat (`int`, *optional*): Which of several samples of the *same* conversation this is. A replay cache
                keys on it, so that N samples stay N different replies. `None`: the n-th time this conversation is
                asked.
            session (`str`, *optional*): Calls with the same session belong together (a router keeps their model).
            **sampling: `temperature`, `max_tokens`, `top_p`, `stop`, ...: passed on to the endpoint.
        """
        ...


def complete(model: ChatModel, messages: Sequence[Message] | str, **kwargs: Any) -> Reply:
    """Ask once and wait. `messages` may be a plain string, which is sent as one user message."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return model.submit(messages, **kwargs).result()


def with_system(system_prompt: str | None, messages: Sequence[Message]) -> list[Message]:
    """The conversation with `system_prompt` in front, unless it already begins with a system message."""
    if not system_prompt or (messages and messages[0]["role"] == "system"):
        return list(messages)
    return [{"role": "system", "content": system_prompt}, *messages]
