"""What every large-LLM call is made of: message in, reply out, one awaitable between them.

No HTTP here, no vendor: [`OpenAIChat`] speaks to endpoints, [`ScriptedChat`] is the fake we ship, and [`as_chat`] makes
one of any function of the messages.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypedDict, runtime_checkable

from .errors import BadReply, LLMError, ServerFailed
from .loop import run


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


_PACKAGE = __name__.partition(".")[0] + "."


class _Asked(type(Protocol)):  # type: ignore[misc]  # typing keeps the metaclass to itself
    """What `isinstance(x, ChatModel)` looks at: whether `x` is called with `messages`. Any verifier can be called."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if cls is not ChatModel:
            return super().__instancecheck__(instance)
        try:
            return callable(instance) and "messages" in inspect.signature(instance).parameters
        except (TypeError, ValueError):  # a built-in function without a signature
            return False


@runtime_checkable
class ChatModel(Protocol, metaclass=_Asked):
    """A large LLM, asked one conversation at a time.

    A call never raises: whatever happens to it ends up in the [`Reply`]. Cancellation alone passes through.
    """

    async def __call__(
        self, messages: Sequence[Message], *, repeat: int | None = None, session: str | None = None, **sampling: Any
    ) -> Reply:
        """Ask, and wait for the reply.

        Args:
            messages (`Sequence[Message]`): The conversation, oldest first.
            repeat (`int`, *optional*): Which of several samples of the *same* conversation this is. A replay cache
                keys on it, so that N samples stay N different replies. `None`: the n-th time this conversation is
                asked.
            session (`str`, *optional*): Calls with the same session belong together (a router keeps their model).
            **sampling: `temperature`, `max_tokens`, `top_p`, `stop`, ...: passed on to the endpoint.
        """
        ...


def complete(model: Any, messages: Sequence[Message] | str, **kwargs: Any) -> Reply:
    """Ask once and wait, from any thread, also in a notebook.

    Args:
        model ([`ChatModel`] or `Callable`): Whom to ask; see [`as_chat`].
        messages (`Sequence[Message]` or `str`): The conversation; a plain string is one user message.
        **kwargs: Of [`ChatModel`].
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return run(as_chat(model)(messages, **kwargs))


def as_chat(model: Any) -> ChatModel:
    """A [`ChatModel`] out of whatever can be called with messages.

    Args:
        model ([`ChatModel`] or `Callable`): A chat model; or a function, or an object with a `__call__`, of the
            messages that returns a text or a [`Reply`]. A plain one runs in a thread, an `async` one on the event
            loop. `repeat`, `session` and sampling arguments are passed where its signature has a place for them. What
            it raises becomes the reply's error.

    Raises:
        `TypeError`: It cannot be called.
    """
    if isinstance(model, _Adapted) or type(model).__module__.startswith(_PACKAGE):
        return model  # those of this package keep the promise by themselves
    if not callable(model):
        raise TypeError(f"not a chat model, and not a function of the messages: {model!r}")
    return _Adapted(model)


class _Adapted:
    """Keeps the promise of [`ChatModel`] for a model that does not; else it is that model, attributes and all."""

    def __init__(self, model: Any):
        self._model = model
        self._async = inspect.iscoroutinefunction(model) or inspect.iscoroutinefunction(type(model).__call__)
        try:
            parameters = inspect.signature(model).parameters.values()
            open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters)
            self._names = None if open_ended else {one.name for one in list(parameters)[1:]}
        except (TypeError, ValueError):  # a builtin
            self._names = set()

    async def __call__(
        self, messages: Sequence[Message], *, repeat: int | None = None, session: str | None = None, **sampling: Any
    ) -> Reply:
        started = time.perf_counter()
        keywords = {"repeat": repeat, "session": session, **sampling}
        if self._names is not None:
            keywords = {name: value for name, value in keywords.items() if name in self._names}
        try:
            said = await self._said(messages, keywords)
        except LLMError as error:
            return Reply(error=error.with_traceback(None), seconds=time.perf_counter() - started)
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # whoever asks is cancelled, not something in the model
            # A model with a bug is a failed call, as a broken server would be.
            what = f"the model raised {type(error).__name__}: {str(error)[:200]}"
            return Reply(error=ServerFailed(what), seconds=time.perf_counter() - started)
        if isinstance(said, Reply):
            return said
        if not isinstance(said, str) or not said.strip():
            return Reply(error=BadReply(f"neither a text nor a Reply came back, but {said!r:.80}"))
        return Reply(text=said, seconds=time.perf_counter() - started)

    async def _said(self, messages: Sequence[Message], keywords: dict[str, Any]) -> Any:
        if self._async:
            return await self._model(messages, **keywords)
        said = await asyncio.to_thread(self._model, messages, **keywords)
        return await said if inspect.isawaitable(said) else said

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_model" not in vars(self):  # while a copy is being made
            raise AttributeError(name)
        return getattr(self._model, name)


def with_system(system_prompt: str | None, messages: Sequence[Message], join: bool = False) -> list[Message]:
    """The conversation with `system_prompt` in front. Where it already begins with a system message, that one stands
    alone, or with `join` behind the prompt, in one message with it."""
    if not system_prompt:
        return list(messages)
    if messages and messages[0]["role"] == "system":
        if not join:
            return list(messages)
        system_prompt, messages = f"{system_prompt}\n\n{messages[0]['content']}", messages[1:]
    return [{"role": "system", "content": system_prompt}, *messages]
