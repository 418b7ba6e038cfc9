"""OpenAI's two formats of a model call, each a class in front of one inner form; [`Refusal`], their form of an error.

A dialect reads a request ([`Asked`]) and writes a [`Completion`], as one JSON body or as server-sent events. Nothing
behind it knows which dialect a client speaks. A new dialect is one more class with `path`, `read`, `body`, `events`
and `failed`.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

Role = Literal["system", "user", "assistant", "tool"]

_ROLES: dict[Any, Role] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "tool",
}  # fmt: skip
_TEXT_PARTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal")
_SAMPLING = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "logit_bias", "seed")


class Refusal(Exception):
    """A request that gets an error instead of a reply.

    Args:
        status (`int`): The HTTP status.
        message (`str`): What is wrong, and what to do about it.
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
        text (`str`, *optional*, defaults to `""`): What it says, without a thought that came in a field of its own.
        thought (`str`, *optional*, defaults to `""`): That thought.
        calls (`tuple[ToolCall, ...]`, *optional*): The tools that an assistant's message calls.
    """

    role: Role
    text: str = ""
    thought: str = ""
    calls: tuple[ToolCall, ...] = ()


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


class Dialect(Protocol):
    """A format of requests and replies."""

    path: str

    def read(self, body: Any) -> Asked:
        """The request. Raises [`Refusal`]."""
        ...

    def body(self, said: Completion) -> dict[str, Any]:
        """The reply as one JSON object."""
        ...

    def events(self, said: Completion, asked: Asked) -> Iterator[bytes]:
        """The reply as server-sent events, all that clients of this dialect wait for."""
        ...

    def failed(self, refusal: Refusal, asked: Asked) -> Iterator[bytes]:
        """The end of a stream whose headers are out, and whose reply does not come."""
        ...


class ChatCompletions:
    """OpenAI's chat completions."""

    path = "/chat/completions"

    def read(self, body: Any) -> Asked:
        messages = body.get("messages") if isinstance(body, dict) else None
        if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
            raise Refusal(400, "`messages` must be a list of messages.", "invalid_value", "messages")
        form = _dict(body.get("response_format"))
        _offered(body, form.get("type", "text") == "text", "response_format")
        _offered(body, not body.get("top_logprobs"), "top_logprobs")
        _offered(body, not body.get("functions"), "functions")
        given = [_dict(one) for one in body.get("tools") or ()]
        tools = tuple(_tool(_dict(one.get("function"))) for one in given if one.get("type", "function") == "function")
        return _asked(
            body,
            [self._entry(one) for one in messages],
            tools,
            _limit(body, "max_tokens", "max_completion_tokens"),
            with_usage=bool(_dict(body.get("stream_options")).get("include_usage")),
        )

    @staticmethod
    def _entry(message: Mapping[str, Any]) -> Entry:
        functions = [(one.get("id"), _dict(one.get("function"))) for one in map(_dict, message.get("tool_calls") or ())]
        calls = [
            ToolCall(str(id or ""), str(one.get("name")), _arguments(one.get("arguments"))) for id, one in functions
        ]
        thought = message.get("reasoning_content") or message.get("reasoning") or ""
        return Entry(_role(message.get("role")), _text(message.get("content")), _text(thought), tuple(calls))

    def body(self, said: Completion) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": said.text or None if said.calls else said.text}
        message["refusal"] = said.refusal
        if said.thought:
            message["reasoning_content"] = said.thought
        if said.calls:
            message["tool_calls"] = [_chat_call(one) for one in said.calls]
        choice = {"index": 0, "message": message, "logprobs": _chat_logprobs(said), "finish_reason": said.finish}
        return {**self._head(said, "chat.completion"), "choices": [choice], "usage": self._usage(said), **said.extra}

    def events(self, said: Completion, asked: Asked, by_word: bool = False) -> Iterator[bytes]:
        """`by_word` sends the text in pieces of about a word."""
        head = self._head(said, "chat.completion.chunk")

        def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
            choice = {"index": 0, "delta": delta, "logprobs": more.pop("logprobs", None), "finish_reason": finish}
            return _event({**head, "choices": [choice], **more})

        yield chunk({"role": "assistant", "content": ""})
        if said.thought:
            yield chunk({"reasoning_content": said.thought})
        if said.refusal is not None:
            yield chunk({"refusal": said.refusal})
        for piece in _words(said.text) if said.text and by_word else [said.text or ""]:
            if piece:
                yield chunk({"content": piece}, logprobs=_chat_logprobs(said))
        if said.calls:
            yield chunk({"tool_calls": [{"index": i, **_chat_call(one)} for i, one in enumerate(said.calls)]})
        yield chunk({}, said.finish, **said.extra)
        if asked.with_usage:
            yield _event({**head, "choices": [], "usage": self._usage(said)})
        yield b"data: [DONE]\n\n"

    def failed(self, refusal: Refusal, asked: Asked) -> Iterator[bytes]:
        yield _event(refusal.body)

    @staticmethod
    def _head(said: Completion, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{said.id}", "object": kind, "created": int(time.time()), "model": said.model}

    @staticmethod
    def _usage(said: Completion) -> dict[str, int]:
        read, written = said.prompt_tokens, said.completion_tokens
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


class Responses:
    """OpenAI's Responses, without state on our side: every request brings its whole conversation."""

    path = "/responses"

    def read(self, body: Any) -> Asked:
        given = body.get("input") if isinstance(body, dict) else None
        if not isinstance(given, str | list) or not given:
            raise Refusal(400, "`input` must be a text or a list of items.", "invalid_value", "input")
        for name in ("previous_response_id", "conversation", "background", "prompt"):
            _offered(body, not body.get(name), name)
        form = _dict(_dict(body.get("text")).get("format"))
        _offered(body, form.get("type", "text") == "text", "text.format")
        _offered(body, not body.get("top_logprobs"), "top_logprobs")
        instructions = body.get("instructions")
        entries = [Entry("system", _text(instructions))] if instructions else []
        entries += [Entry("user", given)] if isinstance(given, str) else _entries(given)
        logprobs = "message.output_text.logprobs" in (body.get("include") or ())
        tools = list(_response_tools(body.get("tools") or ()))
        asked = _asked({**body, "logprobs": logprobs}, entries, tools, _limit(body, "max_output_tokens"))
        return replace(asked, custom=frozenset(tool["function"]["name"] for tool in tools if tool.pop("custom", False)))

    def body(self, said: Completion) -> dict[str, Any]:
        return self._response(said, self._items(said))

    def events(self, said: Completion, asked: Asked) -> Iterator[bytes]:
        items, number = self._items(said), 0

        def event(kind: str, **more: Any) -> bytes:
            nonlocal number
            data, number = {"type": kind, "sequence_number": number, **more}, number + 1
            return f"event: {kind}\n".encode() + _event(data)

        begun = {**self._response(said, []), "status": "in_progress", "usage": None}
        yield event("response.created", response=begun)
        yield event("response.in_progress", response=begun)
        for index, item in enumerate(items):
            yield from (event(kind, output_index=index, **more) for kind, more in _life_of(item))
        whole = self._response(said, items)
        yield event(f"response.{whole['status']}", response=whole)

    def failed(self, refusal: Refusal, asked: Asked) -> Iterator[bytes]:
        error = {"code": refusal.code, "message": refusal.message}
        response = {**self._response(Completion(asked.model), []), "status": "failed", "error": error}
        data = {"type": "response.failed", "sequence_number": 0, "response": response}
        yield b"event: response.failed\n" + _event(data)

    @staticmethod
    def _items(said: Completion) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        if said.thought:
            summary = [{"type": "summary_text", "text": said.thought}]
            items.append({"type": "reasoning", "id": f"rs_{said.id}", "summary": summary, "encrypted_content": said.id})
        if said.text or not said.calls:
            logprobs = [_logprob(text, value) for text, value in said.logprobs or ()]
            part = {"type": "output_text", "text": said.text or "", "annotations": [], "logprobs": logprobs}
            head = {"type": "message", "id": f"msg_{said.id}", "role": "assistant", "status": "completed"}
            items.append({**head, "content": [part]})
        for call in said.calls:
            head = {"call_id": call.id, "name": call.name, "status": "completed"}
            if call.custom:
                text = _dict(_value(call.arguments)).get("input", call.arguments)
                items.append({"type": "custom_tool_call", "id": f"ctc_{call.id}", **head, "input": text})
            else:
                items.append({"type": "function_call", "id": f"fc_{call.id}", **head, "arguments": call.arguments})
        return items

    @staticmethod
    def _response(said: Completion, items: list[dict[str, Any]]) -> dict[str, Any]:
        read, written, cut = said.prompt_tokens, said.completion_tokens, said.finish == "length"
        return {
            "id": f"resp_{said.id}", "object": "response", "created_at": int(time.time()), "model": said.model,
            "status": "incomplete" if cut else "completed", "output": items, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None, "instructions": None,
            "metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "temperature": None,
            "top_p": None,
            "usage": {
                "input_tokens": read, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": written,
                "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": read + written,
            },
        }  # fmt: skip


DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Responses())


# --- reading ---------------------------------------------------------------------------------------------------------


def _asked(body: Any, entries: Sequence[Entry], tools: Any, limit: int | None, with_usage: bool = False) -> Asked:
    """What both dialects call the same."""
    _offered(body, body.get("n") in (None, 1), "n")
    stops = body.get("stop") or ()
    stops = (stops,) if isinstance(stops, str) else stops
    if not isinstance(stops, list | tuple) or not all(isinstance(one, str) for one in stops):
        raise Refusal(400, "`stop` must be a text or a list of texts.", "invalid_value", "stop")
    choice = body.get("tool_choice")
    ignored = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    ignored |= {"tool_choice": choice} if choice not in (None, "auto", "none") else {}
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


def _offered(body: Any, is_offered: bool, name: str) -> None:
    if not is_offered:
        raise Refusal(400, f"`{name}` is not supported here: leave it out.", "unsupported_value", name)


def _limit(body: Mapping[str, Any], *names: str) -> int | None:
    limits = [body[name] for name in names if body.get(name) is not None]
    if any(not isinstance(limit, int) or limit < 1 for limit in limits):
        raise Refusal(400, f"`{names[0]}` must be a whole number above 0.", "invalid_value", names[0])
    return min(limits, default=None)


def _role(role: Any) -> Role:
    if role not in _ROLES:
        raise Refusal(400, f"A message has the role {role!r}; there are {', '.join(_ROLES)}.", "invalid_value")
    return _ROLES[role]


def _text(content: Any) -> str:
    """The text of a message's content, which may be a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type", "text") not in _TEXT_PARTS:
            raise Refusal(
                400, "A message holds something other than text, which the policy cannot read.", "invalid_value"
            )
        texts.append(str(part.get("text") or part.get("refusal") or ""))
    return "".join(texts)


def _arguments(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps({} if given is None else given, ensure_ascii=False)


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    name, described = function.get("name"), function.get("description") or ""
    if not isinstance(name, str) or not name:
        raise Refusal(400, "A tool has no name.", "invalid_value", "tools")
    shown = {"name": name, "description": described, "parameters": function.get("parameters") or {}}
    return {"type": "function", "function": shown}


def _response_tools(tools: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Functions and custom tools, those inside of namespaces as well. Tools that OpenAI itself runs are left out."""
    for tool in map(_dict, tools):
        if tool.get("type") == "function":
            yield _tool(tool)
        elif tool.get("type") == "custom":
            text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
            yield {**_tool({**tool, "parameters": text}), "custom": True}
        elif tool.get("type") == "namespace":
            yield from _response_tools(tool.get("tools") or ())


def _entries(items: Sequence[Any]) -> list[Entry]:
    """Input items as messages: reasoning, text and calls of one reply are one message."""
    entries: list[Entry] = []
    for item in items:
        if not isinstance(item, dict):
            raise Refusal(400, "An item of `input` is no object.", "invalid_value", "input")
        kind, last = item.get("type", "message"), entries[-1] if entries else Entry("user")
        open_reply = last if last.role == "assistant" else None
        if kind == "message" and item.get("role") != "assistant":
            entries.append(Entry(_role(item.get("role")), _text(item.get("content"))))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = item.get("output")
            entries.append(Entry("tool", _text(output) if isinstance(output, str | list) else json.dumps(output)))
        elif kind == "reasoning":
            thought = _text(item.get("content")) or _text(item.get("summary"))
            entries.append(Entry("assistant", thought=thought))
        elif kind == "message":
            if open_reply is None or open_reply.calls:
                open_reply = Entry("assistant")
                entries.append(open_reply)
            entries[-1] = Entry("assistant", open_reply.text + _text(item.get("content")), open_reply.thought)
        elif kind in ("function_call", "custom_tool_call"):
            custom = kind == "custom_tool_call"
            arguments = json.dumps({"input": item.get("input")}) if custom else _arguments(item.get("arguments"))
            call = ToolCall(str(item.get("call_id") or ""), str(item.get("name")), arguments, custom)
            if open_reply is None:
                open_reply = Entry("assistant")
                entries.append(open_reply)
            entries[-1] = Entry("assistant", open_reply.text, open_reply.thought, (*open_reply.calls, call))
        else:
            raise Refusal(400, f"`input` holds an item {kind!r}, which is not supported here.", "unsupported_value")
    return entries


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# --- writing ---------------------------------------------------------------------------------------------------------


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _words(text: str) -> list[str]:
    first, *rest = text.split(" ")
    return [first, *(f" {word}" for word in rest)]


def _chat_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_logprobs(said: Completion) -> dict[str, Any] | None:
    if said.logprobs is None:
        return None
    return {"content": [_logprob(text, value) for text, value in said.logprobs], "refusal": None}


def _logprob(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}


def _life_of(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of one output item: added, its text, done."""
    at: dict[str, Any] = {"item_id": item["id"]}
    if item["type"] == "message":
        part = item["content"][0]
        yield "response.output_item.added", {"item": {**item, "status": "in_progress", "content": []}}
        at["content_index"] = 0
        yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
        yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": part["logprobs"]}
        yield "response.output_text.done", {**at, "text": part["text"], "logprobs": part["logprobs"]}
        yield "response.content_part.done", {**at, "part": part}
    elif item["type"] == "reasoning":
        part = item["summary"][0]
        yield "response.output_item.added", {"item": {**item, "summary": []}}
        at["summary_index"] = 0
        yield "response.reasoning_summary_part.added", {**at, "part": {**part, "text": ""}}
        yield "response.reasoning_summary_text.delta", {**at, "delta": part["text"]}
        yield "response.reasoning_summary_text.done", {**at, "text": part["text"]}
        yield "response.reasoning_summary_part.done", {**at, "part": part}
    else:
        custom = item["type"] == "custom_tool_call"
        name, kind = ("input", "custom_tool_call_input") if custom else ("arguments", "function_call_arguments")
        yield "response.output_item.added", {"item": {**item, "status": "in_progress", name: ""}}
        yield f"response.{kind}.delta", {**at, "delta": item[name]}
        yield f"response.{kind}.done", {**at, name: item[name], "name": item["name"]}
    yield "response.output_item.done", {"item": item}
