"""The inner form of a model call, in front of which each dialect is one class (`chat.py`, `responses.py`,
`messages.py`, `google.py`).

A [`Dialect`] reads a request ([`Asked`]) and writes a [`Completion`], as one JSON body or as server-sent events. Code
behind it does not know which dialect a client speaks. Here is also OpenAI's form of an error ([`Refusal`]).
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]

MAX_BODY_BYTES = 2**22
"""The default limit for the body of a request."""
MAX_OBJECTS = 2**18  # in the JSON of a body: a million of them take a second to build
MAX_MESSAGES = 2**13
MAX_TOOLS = 2**10
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000  # characters


class Refusal(Exception):
    """A request that gets an error instead of a reply.

    Args:
        status (`int`): The HTTP status.
        message (`str`): The mistake, and what to do about it.
        code (`str`, *optional*): OpenAI's short name of the error.
        param (`str`, *optional*): The field of the request that is wrong.
    """

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.body = error_body(status, message, code, param)


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status)
    kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Args:
        id (`str`): The id under which the result comes back; some clients drop it.
        name (`str`): The tool.
        arguments (`str`): JSON; the raw text where the policy wrote none.
        custom (`bool`, *optional*, defaults to `False`): The tool takes free text (Responses' custom tools).
    """

    id: str
    name: str
    arguments: str
    custom: bool = False


@dataclass(frozen=True)
class Entry:
    """One message of a conversation.

    Args:
        role (`str`): `system`, `user`, `assistant` or `tool`.
        text (`str`, *optional*, defaults to `""`): Its text, without a thought that came in a field of its own.
        thought (`str`, *optional*, defaults to `""`): That thought.
        calls (`tuple[ToolCall, ...]`, *optional*): The tools that an assistant's message calls.
        handle (`str`, *optional*, defaults to `""`): The id of the reply, where its dialect has a field for that.
    """

    role: Role
    text: str = ""
    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    handle: str = field(default="", compare=False)


@dataclass(frozen=True)
class Asked:
    """A request, whatever dialect it came in.

    Args:
        model (`str`): The model's name.
        entries (`tuple[Entry, ...]`): The conversation, at least one message.
        tools (`tuple[dict, ...]`, *optional*): The tools, in the form that chat templates take.
        custom (`frozenset[str]`, *optional*): Those of the tools that take free text, not JSON.
        may_call (`bool`, *optional*, defaults to `True`): Whether calls of tools in the reply are read as such.
        stops (`tuple[str, ...]`, *optional*): Texts at which the reply ends; they are not part of it.
        max_tokens (`int`, *optional*): At most this many new tokens.
        logprobs (`bool`, *optional*, defaults to `False`): Whether the reply has the log-probability of each token.
        stream (`bool`, *optional*, defaults to `False`): Whether the reply is sent as events.
        with_usage (`bool`, *optional*, defaults to `False`): Whether a stream of chat completions ends with the counts.
        ignored (`dict`, *optional*): Sampling settings and other wishes that make no difference here.
    """

    model: str
    entries: tuple[Entry, ...]
    tools: tuple[dict[str, Any], ...] = ()
    custom: frozenset[str] = frozenset()
    may_call: bool = True
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    logprobs: bool = False
    stream: bool = False
    with_usage: bool = False
    ignored: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """A reply, before a dialect writes it.

    Args:
        model (`str`): The name that the client used.
        text (`str`, *optional*): What the model wrote beside thought and calls; `None` with a `refusal`.
        thought (`str`, *optional*, defaults to `""`): Its thought.
        calls (`tuple[ToolCall, ...]`, *optional*): The tools that it calls.
        finish (`str`, *optional*, defaults to `"stop"`): `stop`, `length` or `tool_calls`.
        prompt_tokens (`int`, *optional*, defaults to `0`): Tokens read.
        completion_tokens (`int`, *optional*, defaults to `0`): Tokens written.
        logprobs (`list[tuple[str, float]]`, *optional*): Text and log-probability of each token written.
        refusal (`str`, *optional*): Why there is no text.
        extra (`dict`, *optional*): Further fields of the body, and of a stream's last chunk.
        id (`str`, *optional*): Made up by default.
    """

    model: str
    text: str | None = ""
    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: str = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    logprobs: Sequence[tuple[str, float]] | None = None
    refusal: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=lambda: secrets.token_hex(12))


class Dialect(ABC):
    """A format of requests and replies.

    Attributes:
        path (`str`): The path of its requests, below `/v1`.
        count_path (`str`): The path at which it counts the tokens of a request; empty if it has none.
    """

    path: str
    count_path: str = ""

    @abstractmethod
    def read(self, body: Any, path: str = "") -> Asked:
        """The request. Raises [`Refusal`].

        Args:
            body (`Any`): The JSON of its body.
            path (`str`, *optional*): The path and query that it came to.
        """

    @abstractmethod
    def body(self, said: Completion) -> dict[str, Any]:
        """The reply as one JSON object."""

    @abstractmethod
    def events(self, said: Completion, asked: Asked) -> Iterator[bytes]:
        """The reply as server-sent events, all that clients of this dialect wait for."""

    def failed(self, refusal: Refusal, asked: Asked) -> Iterator[bytes]:
        """The end of a stream whose headers are out, and whose reply does not come."""
        yield event(self.error(refusal))

    def error(self, refusal: Refusal) -> dict[str, Any]:
        """The body of an error."""
        return refusal.body

    def counted(self, tokens: int) -> dict[str, Any]:
        """The reply to a request at `count_path`."""
        raise NotImplementedError


def event(data: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"
