"""Types of a large-LLM call: messages, [`ChatModel`], [`Reply`], and errors.

An error is *data*: it is returned inside [`Reply`] and counted, and it never reaches an agent as
text. Errors are exceptions too, so that code which has to stop can `raise reply.error`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypedDict, runtime_checkable

from .masking import mask_secrets
from .numbers import format_usd


class LLMError(Exception):
    """A call to a large LLM that returned no usable reply, after all retries.

    An error with `fatal = True` cannot be waited out; it stops a run at once.

    Args:
        message (`str`): What went wrong and, if the user can fix it, how. One line; secrets in it
            are masked.
        where (`str`, *optional*, defaults to `""`): The model and its address.
        attempts (`int`, *optional*, defaults to `1`): How many times the call was tried.
        status (`int`, *optional*): The last HTTP status, if there was one.
    """

    fatal = False

    def __init__(self, message: str, where: str = "", attempts: int = 1, status: int | None = None):
        # An error may be logged or recorded anywhere: no secret may be in it.
        message = mask_secrets(message)
        # All arguments, because a pickled exception is created again from them.
        super().__init__(message, where, attempts, status)
        self.message = message
        self.where = where
        self.attempts = attempts
        self.status = status

    @property
    def kind(self) -> str:
        """The class name, the short label that logs and metrics use."""
        return type(self).__name__

    def to_json(self) -> dict[str, str | int | None]:
        """Convert to plain JSON types.

        [`LLMError.from_json`] returns an equal error, without the traceback.
        """
        # A user's subclass is saved as the class of this module that it derives from.
        for saved_class in type(self).__mro__:
            if saved_class.__module__ == __name__:
                break
        return {
            "kind": saved_class.__name__,
            "what": self.message,
            "where": self.where,
            "attempts": self.attempts,
            "status": self.status,
        }

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> LLMError:
        """Restore an error from the output of [`LLMError.to_json`].

        Raises:
            `KeyError`, `TypeError`, `ValueError`: `saved` is not a saved error.
        """
        # The name may come from a file: accept no other object of this module.
        error_class = globals()[saved["kind"]]
        if not (isinstance(error_class, type) and issubclass(error_class, LLMError)):
            raise ValueError(f"{saved['kind']!r} is not an error class of a large LLM")
        return error_class(saved["what"], saved["where"], saved["attempts"], saved["status"])

    def __str__(self) -> str:
        details = []
        if self.where:
            details.append(self.where)
        if self.status:
            details.append(f"HTTP {self.status}")
        if self.attempts > 1:
            details.append(f"{self.attempts} attempts")
        if not details:
            return self.message
        return f"{self.message} ({', '.join(details)})"


class RateLimited(LLMError):
    """The endpoint kept answering "too many requests"."""


class TimedOut(LLMError):
    """No complete reply arrived before the deadline."""


class Unreachable(LLMError):
    """No connection: wrong address, refused, or broken off."""


class ServerFailed(LLMError):
    """The endpoint answered with a server error (5xx)."""


class BadRequest(LLMError):
    """The endpoint rejected this one request (too long, for example); another request may pass."""


class BadReply(LLMError):
    """The endpoint's answer is unusable: no choices, no text, not JSON."""


class Refused(LLMError):
    """The model, or a filter in front of it, declined to answer."""


class Closed(LLMError):
    """The client was closed before the call ended."""


class BudgetExceeded(LLMError):
    """The budget of this model, in dollars or tokens, is spent."""

    fatal = True


class BudgetUnavailable(LLMError):
    """There is a budget, and the file that records spending can be neither read nor written."""

    fatal = True


class Misconfigured(LLMError):
    """Wrong key, unknown model, wrong address: no retry can help."""

    fatal = True


class Message(TypedDict):
    """One chat message, in OpenAI's and transformers' format."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True)
class Usage:
    """The tokens and the cost of a call.

    Args:
        prompt_tokens (`int`, *optional*, defaults to `0`): Tokens of the prompt.
        completion_tokens (`int`, *optional*, defaults to `0`): Tokens of the completion.
        cost_usd (`float`, *optional*, defaults to `0.0`): US dollars; 0 if the price is not known.
        estimated_tokens (`int`, *optional*, defaults to `0`): How many of these tokens are an
            estimate, because the endpoint did not report them.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    estimated_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            cost_usd=self.cost_usd + other.cost_usd,
            estimated_tokens=self.estimated_tokens + other.estimated_tokens,
        )


def cost_in_words(cost_usd: float, was_used: bool) -> str:
    """Return a cost in dollars as text. Use without a cost means a price of 0, or an unknown one."""
    if was_used and not cost_usd:
        return "$0 or no price known"
    return f"${format_usd(cost_usd)}"


@dataclass(frozen=True)
class Reply:
    """The outcome of one call: a text or an error, never both.

    Args:
        text (`str`, *optional*, defaults to `""`): The text that the model wrote. Empty if `error`
            is set.
        error ([`LLMError`], *optional*): The reason why there is no text.
        finish_reason (`str`, *optional*, defaults to `"stop"`): As the endpoint returned it:
            `stop`, `length`, ...
        usage ([`Usage`], *optional*): Tokens and cost of this call; zero for a cached reply.
        cached (`bool`, *optional*, defaults to `False`): Whether it came from a [`ReplayCache`], at
            no cost.
        shared (`bool`, *optional*, defaults to `False`): Whether it is a copy of the reply of
            another call, which paid for it.
        saved ([`Usage`], *optional*): For a cached or shared reply: the tokens and cost of the
            original call.
        attempts (`int`, *optional*, defaults to `1`): Requests sent for it, retries included; 0 if
            cached.
        seconds (`float`, *optional*, defaults to `0.0`): From the call to the reply, waiting for a
            free slot included.
    """

    text: str = ""
    error: LLMError | None = None
    finish_reason: str = "stop"
    usage: Usage = field(default_factory=Usage)
    cached: bool = False
    shared: bool = False
    saved: Usage = field(default_factory=Usage, compare=False)
    attempts: int = 1
    seconds: float = 0.0

    @property
    def worth(self) -> Usage:
        """The full tokens and cost of this reply: `usage` plus `saved`."""
        return self.usage + self.saved


class _ChatModelMeta(type(Protocol)):  # type: ignore[misc]  # typing does not export the metaclass
    """Makes `isinstance(x, ChatModel)` check the signature of a callable.

    It is a chat model if it has an argument `messages`, or exactly one required positional argument
    of any name besides `repeat` and `session`. A verifier is callable too, with a question and an
    answer.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        # Classes that derive from `ChatModel` have this metaclass, too: checked as usual.
        if cls is not ChatModel:
            return super().__instancecheck__(instance)
        if not callable(instance):
            return False
        try:
            parameters = inspect.signature(instance).parameters
        except (TypeError, ValueError):  # a built-in function without a signature
            return False
        if "messages" in parameters:
            return True

        # A function of the messages, whatever it calls them.
        required_names = {
            parameter.name
            for parameter in parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and parameter.default is parameter.empty
        }
        return len(required_names - {"repeat", "session"}) == 1


@runtime_checkable
class ChatModel(Protocol, metaclass=_ChatModelMeta):
    """A large LLM: one call per conversation.

    A call never raises: its error is in the [`Reply`]. Only a cancellation passes through.
    """

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        repeat: int | None = None,
        session: str | None = None,
        **sampling: Any,
    ) -> Reply:
        """Send a conversation and return the reply.

        Args:
            messages (`Sequence[Message]`): The conversation, oldest message first.
            repeat (`int`, *optional*): The number of this sample among several of the *same*
                conversation. It is part of a replay cache's key, so that N samples stay N different
                replies. `None`: counted by the cache.
            session (`str`, *optional*): Calls with the same session belong together (a router keeps
                their model).
            **sampling: `temperature`, `max_tokens`, `top_p`, `stop`, ...: sent to the endpoint.
        """
        ...
