"""The internal form of a model call. Each dialect is one class that translates to and from it.

A [`Dialect`] (one file each in `dialects/`) reads the body of a request
into a [`CompletionRequest`] and writes a [`Completion`], as one JSON body or as server-sent events.
The rest of the code does not know which dialect a client speaks.
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

# Limits for the parts of a request, in any dialect. Reading and rendering take time for each part.
MAX_JSON_VALUES = 2**18  # objects and lists in the body
MAX_MESSAGES = 2**13
MAX_TOOLS = 2**10
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000  # characters


class Refusal(Exception):
    """A request that gets an error instead of a reply.

    Args:
        status (`int`): The HTTP status.
        message (`str`): The problem, and how to fix it.
        code (`str`, *optional*): OpenAI's short name of the error.
        param (`str`, *optional*): The field of the request that is wrong.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.body = error_body(status, message, code, param)


def error_body(
    status: int, message: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    # OpenAI's type of an error follows from its status.
    if status == 401:
        error_type = "authentication_error"
    elif status == 429:
        error_type = "rate_limit_error"
    elif status >= 500:
        error_type = "server_error"
    else:
        error_type = "invalid_request_error"
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Args:
        id (`str`): The id under which its result comes back. Some clients drop it.
        name (`str`): The tool.
        arguments (`str`): JSON, or the raw text if the policy wrote something else.
        is_custom (`bool`, *optional*, defaults to `False`): Whether the tool takes free text
            instead of JSON (the custom tools of Responses).
    """

    id: str
    name: str
    arguments: str
    is_custom: bool = False


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation.

    Args:
        role (`str`): `system`, `user`, `assistant` or `tool`.
        text (`str`, *optional*, defaults to `""`): The text, without a thought that has its own
            field.
        thought (`str`, *optional*, defaults to `""`): That thought.
        tool_calls (`tuple[ToolCall, ...]`, *optional*): The tool calls of an assistant's message.
        handle (`str`, *optional*, defaults to `""`): The id of the reply, in dialects with a field
            for it.
    """

    role: Role
    text: str = ""
    thought: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    # Equal messages stay equal when a client drops the handle of one.
    handle: str = field(default="", compare=False)


@dataclass(frozen=True)
class CompletionRequest:
    """A request for the next message of a conversation.

    Args:
        model (`str`): The name of the model.
        messages (`tuple[ChatMessage, ...]`): The conversation, at least one message.
        tools (`tuple[dict, ...]`, *optional*): The tools, in the form that chat templates take.
        custom_tools (`frozenset[str]`, *optional*): Names of the tools that take free text.
        allows_tool_calls (`bool`, *optional*, defaults to `True`): Whether tool calls in the reply
            are parsed.
        stops (`tuple[str, ...]`, *optional*): The reply ends before the first of these texts.
        max_tokens (`int`, *optional*): Maximum number of sampled tokens.
        logprobs (`bool`, *optional*, defaults to `False`): Whether the reply has the
            log-probability of each token.
        stream (`bool`, *optional*, defaults to `False`): Whether the reply is sent as events.
        stream_usage (`bool`, *optional*, defaults to `False`): Whether a stream of chat completions
            ends with the token counts.
        other_settings (`dict`, *optional*): Settings that have no effect on a policy in training,
            such as `temperature`. A large LLM gets some of them, and `serve` reads some.
    """

    model: str
    messages: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    custom_tools: frozenset[str] = frozenset()
    allows_tool_calls: bool = True
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    logprobs: bool = False
    stream: bool = False
    stream_usage: bool = False
    other_settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """A reply to a [`CompletionRequest`].

    Args:
        model (`str`): The name of the model in the request.
        text (`str`, *optional*): The text without thought and tool calls; `None` with a `refusal`.
        thought (`str`, *optional*, defaults to `""`): The thought.
        tool_calls (`tuple[ToolCall, ...]`, *optional*): The tool calls.
        finish_reason (`str`, *optional*, defaults to `"stop"`): `stop`, `length` or `tool_calls`.
        prompt_tokens (`int`, *optional*, defaults to `0`): Tokens read.
        completion_tokens (`int`, *optional*, defaults to `0`): Tokens written.
        logprobs (`list[tuple[str, float]]`, *optional*): Text and log-probability of each token.
        refusal (`str`, *optional*): Why there is no text.
        stop_text (`str`, *optional*): The stop text of the request that has ended the reply.
        extra_fields (`dict`, *optional*): More fields for the body, or the last chunk of a stream.
        id (`str`, *optional*): Random by default.
    """

    model: str
    text: str | None = ""
    thought: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    logprobs: Sequence[tuple[str, float]] | None = None
    refusal: str | None = None
    stop_text: str | None = None
    extra_fields: Mapping[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=lambda: secrets.token_hex(12))

    @property
    def total_tokens(self) -> int:
        """Tokens read and written."""
        return self.prompt_tokens + self.completion_tokens


class Dialect(ABC):
    """A format of requests and replies.

    Attributes:
        path (`str`): The path of its requests, below `/v1`.
        count_path (`str`): The path at which it counts tokens; empty if it has none.
    """

    path: str
    count_path: str = ""

    @abstractmethod
    def read_request(self, body: Any, path: str = "") -> CompletionRequest:
        """Read a request.

        Args:
            body (`Any`): The decoded JSON of its body.
            path (`str`, *optional*): Its path and query.

        Raises:
            [`Refusal`]: It is malformed, or asks for something that is not supported.
        """

    @abstractmethod
    def write_body(self, completion: Completion) -> dict[str, Any]:
        """Return the reply as one JSON object."""

    @abstractmethod
    def write_events(self, completion: Completion, request: CompletionRequest) -> Iterator[bytes]:
        """Return the reply as server-sent events: all that clients of this dialect wait for."""

    def write_failure(self, refusal: Refusal, request: CompletionRequest) -> Iterator[bytes]:
        """Yield the events of a stream that has started and gets no reply."""
        # The status has been sent: the error can only be an event.
        yield format_event(self.write_error(refusal))

    def write_error(self, refusal: Refusal) -> dict[str, Any]:
        """Return the body of an error."""
        return refusal.body

    def write_token_count(self, tokens: int) -> dict[str, Any]:
        """Return the reply to a request at `count_path`."""
        raise NotImplementedError


def format_event(data: Mapping[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"
