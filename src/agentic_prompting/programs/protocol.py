"""The inner form of a model call, in front of which each dialect is one class (`chat.py`, `responses.py`,
`messages.py`, `google.py`).

A [`Dialect`] reads a request ([`Asked`]) and writes a [`Completion`], as one JSON body or as server-sent events. Code
behind it does not know which dialect a client speaks. Here are also the parts that all dialects read in the same way,
and OpenAI's form of an error ([`Refusal`]).
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]

_ROLES: dict[Any, Role] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "tool",
}  # fmt: skip
_TEXT_PARTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal")
_HOSTED = (
    "web_search", "web_fetch", "file_search", "code_interpreter", "code_execution", "image_generation", "mcp",
    "tool_search",
)  # fmt: skip
_SAMPLING = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "logit_bias", "seed")


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


# --- reading ---------------------------------------------------------------------------------------------------------


def asked_of(
    body: Any,
    entries: Sequence[Entry],
    tools: Any,
    limit: int | None,
    with_usage: bool = False,
    left_out: Sequence[str] = (),
) -> Asked:
    """What the dialects call the same. `left_out` are the tools that are not offered to the policy."""
    check_offered(body, body.get("n") in (None, 1), "n")
    stops = body.get("stop") or ()
    stops = (stops,) if isinstance(stops, str) else stops
    if not isinstance(stops, list | tuple) or not all(isinstance(one, str) for one in stops):
        raise Refusal(400, "`stop` must be a text or a list of texts.", "invalid_value", "stop")
    choice = body.get("tool_choice")
    ignored = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    ignored |= {"tool_choice": choice} if choice not in (None, {}, "auto", "none") else {}
    ignored |= {"tools": ", ".join(left_out)} if left_out else {}
    return Asked(
        model=str(body.get("model") or ""),
        entries=tuple(entries),
        tools=tuple(tools),
        may_call=choice != "none",
        stops=tuple(filter(None, stops)),
        max_tokens=limit,
        logprobs=bool(body.get("logprobs")),
        stream=bool(body.get("stream")),
        with_usage=with_usage,
        ignored=ignored,
    )


def check_offered(body: Any, is_offered: bool, name: str) -> None:
    if not is_offered:
        raise Refusal(400, f"`{name}` is not supported here: leave it out.", "unsupported_value", name)


def check_form(form: Any, name: str) -> None:
    """Refuse a reply in a form that only constrained decoding could promise.

    The policy's gradient is that of its own distribution. Tokens drawn under a grammar have another one, which the
    trainer's log-probabilities do not know.
    """
    if as_dict(form).get("type", "text") != "text":
        what = f"`{name}` is not supported: the policy samples without constraints, as it is trained."
        instead = (
            "Ask for JSON in the prompt or as a tool's arguments, and name what broken JSON raises in `mistakes=`."
        )
        raise Refusal(400, f"{what} {instead}", "unsupported_value", name)


def limit_of(body: Mapping[str, Any], *names: str) -> int | None:
    limits = [body[name] for name in names if body.get(name) is not None]
    if any(not isinstance(limit, int) or limit < 1 for limit in limits):
        raise Refusal(400, f"`{names[0]}` must be a whole number above 0.", "invalid_value", names[0])
    return min(limits, default=None)


def role_of(role: Any) -> Role:
    if role not in _ROLES:
        raise Refusal(400, f"A message has the role {role!r}; there are {', '.join(_ROLES)}.", "invalid_value")
    return _ROLES[role]


def text_of(content: Any) -> str:
    """The text of a message's content, which may be a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type", "text") not in _TEXT_PARTS:
            raise Refusal(
                400, f"A message holds {as_dict(part).get('type')!r}, and the policy reads text alone.", "invalid_value"
            )
        texts.append(str(part.get("text") or part.get("refusal") or ""))
    return "".join(texts)


def arguments_of(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps({} if given is None else given, ensure_ascii=False)


def object_of(arguments: str) -> dict[str, Any]:
    """Arguments where a dialect takes an object only: an empty one if the policy wrote none."""
    try:
        return as_dict(json.loads(arguments or "{}"))
    except (ValueError, RecursionError):
        return {}


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def list_of(body: Any, name: str) -> list[dict[str, Any]]:
    """The messages of a request."""
    given = as_dict(body).get(name)
    if not isinstance(given, list) or not given or not all(isinstance(one, dict) for one in given):
        raise Refusal(400, f"`{name}` must be a list of messages.", "invalid_value", name)
    return given


def hosted(kind: Any) -> str:
    """The type of a tool that its vendor would run. No vendor is here, so it is not offered to the policy.

    Raises:
        [`Refusal`]: The client itself runs tools of that type, and the request does not say how they are called.
    """
    if not str(kind).startswith(_HOSTED):
        what = f"Tools of the type {kind!r} are not supported here: give the agent a function in its place."
        raise Refusal(400, what, "unsupported_value", "tools")
    return str(kind)


def tool_of(function: Mapping[str, Any]) -> dict[str, Any]:
    name, described = function.get("name"), function.get("description") or ""
    if not isinstance(name, str) or not name:
        raise Refusal(400, "A tool has no name.", "invalid_value", "tools")
    shown = {"name": name, "description": described, "parameters": function.get("parameters") or {}}
    return {"type": "function", "function": shown}


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# --- writing ---------------------------------------------------------------------------------------------------------


def event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def logprob_of(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
