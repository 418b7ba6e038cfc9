"""OpenAI's chat format as the service reads and writes it: requests, completions, stream events, errors."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..llm import Message
from .answering import Answer

# JSON can say half of a surrogate pair, which is no character: no tokenizer takes it.
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")


class TextPart(BaseModel):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message of a conversation. Text only."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def as_message(self) -> Message:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool = Field(False, description="Send the token counts in a last chunk.")


class ChatRequest(BaseModel):
    """A request for a completion. The agent samples as it was trained to: other fields are ignored, and named in the
    reply's header `X-Ignored-Parameters`."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(description="A name from /v1/models.")
    messages: list[ChatMessage] = Field(min_length=1, description="Must end with a user's message: the question.")
    stream: bool | None = Field(False, description="Send the answer in pieces, once it is there.")
    stream_options: StreamOptions | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="The same seed gives the same answer.")
    max_tokens: int | None = Field(None, ge=1, lt=2**31, description="Of all turns of the agent and replies together.")
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="The same.")
    n: Literal[1] | None = Field(1, description="Only one choice a request is offered.")
    temperature: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="0 takes the likeliest token each time. Others are ignored."
    )
    tools: list[Any] | None = Field(None, description="None is offered: a 400 unless empty.")
    functions: list[Any] | None = Field(None, description="As `tools`.")
    response_format: dict[str, Any] | None = Field(None, description="A 400 unless its type is `text`.")
    logprobs: bool | None = Field(None, description="A 400 if true.")
    trajectory: bool = Field(False, description="Send `trajectory`, how the answer came about, as well.")

    @property
    def token_limit(self) -> int | None:
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)

    def conversation(self) -> list[Message]:
        """The messages, checked to end with a question.

        Raises:
            `Refusal`: If they do not, or the request wants what no answer here has.
        """
        for name, wanted in {
            "tools": self.tools,
            "functions": self.functions,
            "logprobs": self.logprobs,
            "response_format": self.response_format and self.response_format.get("type") != "text",
        }.items():
            if wanted:
                raise Refusal(400, f"`{name}` is not supported: leave it out.", "unsupported_parameter", name)
        messages = [message.as_message() for message in self.messages]
        if messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
            raise Refusal(400, "`messages` must end with a user message that is not empty.", param="messages")
        if any(_HALF_A_PAIR.search(message["content"]) for message in messages):
            raise Refusal(400, "`messages` must be Unicode: there is half of a surrogate pair in it.", param="messages")
        return messages

    def ignored(self) -> list[str]:
        """Fields that make no difference, those with a name that a header can hold."""
        names = [name for name, value in (self.model_extra or {}).items() if value is not None]
        names += ["temperature"] if self.temperature else []
        return sorted(name for name in names if re.fullmatch(r"\w{1,40}", name, re.ASCII))[:20]


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """OpenAI's form of an error."""

    error: ErrorDetail


class Refusal(Exception):
    """A request that gets an error instead of an answer."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.body = error_body(status, message, code, param)


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status)
    kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def completion(answer: Answer, model: str, with_trajectory: bool) -> dict[str, Any]:
    """The body of a reply that is sent whole. An agent that gave no answer has a `refusal` and no `content`."""
    message = {"role": "assistant", "content": answer.text, "refusal": answer.why_none}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason}
    body = {**_head("chat.completion", model), "choices": [choice], "usage": _usage(answer)}
    return {**body, "trajectory": answer.trajectory} if with_trajectory else body


def events(answer: Answer, model: str, with_usage: bool, with_trajectory: bool) -> Iterator[bytes]:
    """The same as server-sent events, about a word each."""
    head = _head("chat.completion.chunk", model)

    def chunk(delta: dict[str, Any], finish_reason: str | None = None, **extra: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _event({**head, "choices": [choice], **extra})

    yield chunk({"role": "assistant", "content": ""})
    if answer.text is None:
        yield chunk({"refusal": answer.why_none})
    else:
        for word in _words(answer.text):
            yield chunk({"content": word})
    yield chunk({}, answer.finish_reason, **({"trajectory": answer.trajectory} if with_trajectory else {}))
    if with_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def _words(text: str) -> list[str]:
    first, *rest = text.split(" ")
    return [first, *(f" {word}" for word in rest)]


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _head(kind: str, model: str) -> dict[str, Any]:
    now = time.time_ns()
    return {"id": f"chatcmpl-{now:x}", "object": kind, "created": now // 10**9, "model": model}


def _usage(answer: Answer) -> dict[str, int]:
    usage = answer.usage
    counts = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
    return {**counts, "total_tokens": usage.tokens}
