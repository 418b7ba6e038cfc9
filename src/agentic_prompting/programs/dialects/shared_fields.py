"""Request and reply fields shared by all dialects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...llm.guard import text_of
from ...rollout import load_json
from ..protocol import (
    MAX_JSON_VALUES,
    MAX_MESSAGES,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TOOLS,
    ChatMessage,
    CompletionRequest,
    Refusal,
    Role,
    ToolCall,
)

# The names of roles in OpenAI's formats, former ones included.
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
# Types of the parts of a message that hold text.
_TEXT_PARTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal")
# How the types of tools begin that the vendors themselves run.
_HOSTED_TOOLS = (
    "web_search",
    "web_fetch",
    "file_search",
    "code_interpreter",
    "code_execution",
    "image_generation",
    "mcp",
    "tool_search",
)
# By OpenAI's names, into which other dialects translate their own.
_SAMPLING_SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
)


def parse_json(body: bytes) -> Any:
    """Decode the JSON body of a request.

    Raises:
        [`Refusal`]: It is not JSON, or has too many objects and lists: a million take a second.
    """
    # Counting brackets is faster than parsing. Those inside of texts count as well.
    if body.count(b"[") + body.count(b"{") > MAX_JSON_VALUES:
        raise Refusal(
            400, f"The body may have at most {MAX_JSON_VALUES} objects and lists.", "too_many_items"
        )
    try:
        return json.loads(body.decode("utf-8-sig", "replace"))
    except (ValueError, RecursionError):
        raise Refusal(400, "The body is not JSON.", "invalid_json") from None


# ---- requests ----


def build_request(
    body: Mapping[str, Any],
    messages: Sequence[ChatMessage],
    tools: Sequence[dict[str, Any]],
    max_tokens: int | None,
    stream_usage: bool = False,
    dropped_tools: Sequence[str] = (),
) -> CompletionRequest:
    """Build a request from what a dialect has read, and the fields that all dialects share.

    Args:
        body (`dict`): `model`, `n`, `stop`, `stream`, `logprobs`, `tool_choice`,
            `parallel_tool_calls` and the sampling settings, by OpenAI's names.
        messages (`Sequence[ChatMessage]`): The conversation.
        tools (`Sequence[dict]`): The tools, in the form that chat templates take.
        max_tokens (`int`, *optional*): Maximum number of sampled tokens.
        stream_usage (`bool`, *optional*, defaults to `False`): As in [`CompletionRequest`].
        dropped_tools (`Sequence[str]`, *optional*): The tools that are not offered to the policy.

    Raises:
        [`Refusal`]: A field is malformed, or there are too many messages, tools or stop texts.
    """
    # Refuse several choices, and more parts than can be read in good time.
    check_supported(body.get("n") in (None, 1), "n")
    check_count(messages, MAX_MESSAGES, "messages")
    check_count(tools, MAX_TOOLS, "tools")

    # Settings without an effect on the policy: it samples as it is trained, and no vendor runs
    # tools.
    other_settings = _read_sampling_settings(body)
    tool_choice = body.get("tool_choice")
    if tool_choice not in (None, {}, "auto", "none"):
        other_settings["tool_choice"] = quote(tool_choice)
    if dropped_tools:
        other_settings["tools"] = text_of(", ".join(dropped_tools))
    if tools and body.get("parallel_tool_calls") is False:
        other_settings["parallel_tool_calls"] = False

    return CompletionRequest(
        model=str(body.get("model") or ""),
        messages=tuple(messages),
        tools=tuple(tools),
        allows_tool_calls=tool_choice != "none",
        stops=_read_stops(body),
        max_tokens=max_tokens,
        logprobs=bool(body.get("logprobs")),
        stream=bool(body.get("stream")),
        stream_usage=stream_usage,
        other_settings=other_settings,
    )


def _read_stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stops = body.get("stop") or []
    # A single text need not be in a list.
    if isinstance(stops, str):
        stops = [stops]
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise Refusal(400, "`stop` must be a text or a list of texts.", "invalid_value", "stop")
    check_count(stops, MAX_STOPS, "stop")
    if any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        message = f"A text in `stop` may have at most {MAX_STOP_LENGTH} characters."
        raise Refusal(400, message, "invalid_value", "stop")
    # An empty text would end every reply at its beginning.
    return tuple(stop for stop in stops if stop)


def _read_sampling_settings(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling settings: numbers as they are, anything else as a short text."""
    settings: dict[str, Any] = {}
    # Values that are not numbers are only reported, so a short text is enough.
    for name in _SAMPLING_SETTINGS:
        value = body.get(name)
        if value is not None:
            settings[name] = value if isinstance(value, int | float) else quote(value)

    # A large LLM gets these two. Its own error would fail the rollout.
    for name in ("temperature", "top_p"):
        value = settings.get(name, 1)
        if isinstance(value, str | bool) or not 0 <= value <= 2:
            raise Refusal(400, f"`{name}` must be a number from 0 to 2.", "invalid_value", name)
    return settings


def read_messages(body: Any, name: str) -> list[dict[str, Any]]:
    """Return the list of messages in a field. Refuses anything else."""
    messages = as_dict(body).get(name)
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(item, dict) for item in messages)
    ):
        raise Refusal(400, f"`{name}` must be a list of messages.", "invalid_value", name)
    check_count(messages, MAX_MESSAGES, name)
    return messages


def read_token_limit(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the smallest of several limits of sampled tokens; `None` if there is none."""
    # The same limit can have several names, such as `max_completion_tokens`.
    limits = [body[name] for name in names if body.get(name) is not None]
    if any(not isinstance(limit, int) or limit < 1 for limit in limits):
        raise Refusal(400, f"`{names[0]}` must be a positive integer.", "invalid_value", names[0])
    return min(limits, default=None)


def read_role(role: Any) -> Role:
    """Return the role of a message. Refuses unknown roles."""
    if role not in _ROLES:
        message = f"A message has the role {quote(role)}; the roles are {', '.join(_ROLES)}."
        raise Refusal(400, message, "invalid_value")
    return _ROLES[role]


def read_text(content: Any) -> str:
    """Return the text of a message's content: a text, or a list of parts with texts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    # A single part need not be in a list.
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise Refusal(
            400,
            f"`content` must be a text or a list of parts, not {quote(content)}.",
            "invalid_value",
        )

    # Only text can be shown to the policy: without its image a question would be another one.
    texts = []
    for part in content:
        if not isinstance(part, dict):
            raise Refusal(
                400, f"A part of a message is not an object: {quote(part)}.", "invalid_value"
            )
        part_type = part.get("type") or "text"
        if part_type not in _TEXT_PARTS:
            message = f"A message contains {quote(part_type)}: this model reads only text."
            raise Refusal(400, message, "invalid_value")
        texts.append(str(part.get("text") or part.get("refusal") or ""))
    return "".join(texts)


def build_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function as a tool in the form that chat templates take.

    Refuses one without a name.
    """
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise Refusal(400, "A tool has no name.", "invalid_value", "tools")
    # Only what chat templates show: fields such as `strict` have no effect.
    shown_function = {
        "name": name,
        "description": function.get("description") or "",
        "parameters": function.get("parameters") or {},
    }
    return {"type": "function", "function": shown_function}


def read_hosted_tool(tool_type: Any) -> str:
    """Return the type of a tool that its vendor would run. It is not offered to the policy.

    Raises:
        [`Refusal`]: The client itself runs tools of this type, and only the vendor's models know
            how to call them.
    """
    # Versions of a tool differ in how its type ends, such as `web_search_20250305`.
    if not str(tool_type).startswith(_HOSTED_TOOLS):
        message = (
            f"Tools of type {quote(tool_type)} are not supported: give the agent a function "
            "instead."
        )
        raise Refusal(400, message, "unsupported_value", "tools")
    return str(tool_type)


def check_count(items: Sequence[Any], max_count: int, name: str) -> None:
    """Refuse a request with too many items of one kind."""
    if len(items) > max_count:
        message = f"`{name}` has {len(items)} items; the maximum is {max_count}."
        raise Refusal(400, message, "too_many_items", name)


def check_supported(is_supported: bool, name: str) -> None:
    """Refuse a request with a field that is not supported."""
    if not is_supported:
        raise Refusal(400, f"`{name}` is not supported: leave it out.", "unsupported_value", name)


def check_reply_format(reply_format: object, name: str) -> None:
    """Refuse a reply format that only constrained decoding could guarantee.

    The policy's gradient is that of its own distribution. Tokens sampled under a grammar have
    another one, which the trainer's log-probabilities do not know.
    """
    if as_dict(reply_format).get("type") not in (None, "text"):
        message = (
            f"`{name}` is not supported: the policy samples without constraints, as it is trained. "
            "Ask for JSON in the prompt or as a tool's arguments, and list the errors of malformed "
            "JSON in `mistakes=`."
        )
        raise Refusal(400, message, "unsupported_value", name)


class MessageBuilder:
    """Collects the parts of one message. Its time is linear in their number.

    Args:
        role (`str`): The role of the message.
        thought (`str`, *optional*, defaults to `""`): The beginning of its thought.
        handle (`str`, *optional*, defaults to `""`): Its handle.
    """

    def __init__(self, role: Role, thought: str = "", handle: str = ""):
        self.role = role
        self.texts: list[str] = []
        self.thoughts = [thought]
        self.tool_calls: list[ToolCall] = []
        self.handle = handle

    @property
    def has_text(self) -> bool:
        return any(self.texts)

    def build(self) -> ChatMessage:
        return ChatMessage(
            role=self.role,
            text="".join(self.texts),
            thought="".join(self.thoughts),
            tool_calls=tuple(self.tool_calls),
            handle=self.handle,
        )


# ---- values ----


def quote(value: object) -> str:
    """Return a value of a request for an error message: short, and without secrets."""
    return text_of(value, 80, repr)


def as_dict(value: object) -> dict[str, Any]:
    """Return the value if it is a dict, else an empty dict."""
    return value if isinstance(value, dict) else {}


def is_json(text: str) -> bool:
    """Return whether a text is JSON."""
    try:
        load_json(text)
    except (ValueError, RecursionError):
        return False
    return True


def arguments_text(arguments: object) -> str:
    """Return the arguments of a tool call as text: unchanged if they are text, else as JSON."""
    if isinstance(arguments, str):
        return arguments
    # A tool without parameters may be called without arguments.
    if arguments is None:
        return "{}"
    return json.dumps(arguments, ensure_ascii=False)


def arguments_object(arguments: str) -> dict[str, Any]:
    """Return a tool call's arguments as an object: empty if the policy wrote something else."""
    try:
        return as_dict(load_json(arguments or "{}"))
    except (ValueError, RecursionError):
        return {}


def logprob_item(token: str, logprob: float) -> dict[str, Any]:
    """Return a token's log-probability in OpenAI's format."""
    return {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
