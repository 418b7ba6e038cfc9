"""The fields of requests that all dialects read in the same way, and that of replies which they write so."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..llm.guard import text_of as shown
from ..rollout import load_json
from .protocol import (
    MAX_MESSAGES,
    MAX_OBJECTS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TOOLS,
    Asked,
    Entry,
    Refusal,
    Role,
    ToolCall,
)

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
    check_count(entries, MAX_MESSAGES, "messages")
    check_count(tools, MAX_TOOLS, "tools")
    choice = body.get("tool_choice")
    ignored = _sampling_of(body)
    ignored |= {"tool_choice": shown(choice, 80, repr)} if choice not in (None, {}, "auto", "none") else {}
    ignored |= {"tools": shown(", ".join(left_out))} if left_out else {}
    ignored |= {"parallel_tool_calls": False} if body.get("parallel_tool_calls") is False and tools else {}
    return Asked(
        model=str(body.get("model") or ""),
        entries=tuple(entries),
        tools=tuple(tools),
        may_call=choice != "none",
        stops=_stops_of(body),
        max_tokens=limit,
        logprobs=bool(body.get("logprobs")),
        stream=bool(body.get("stream")),
        with_usage=with_usage,
        ignored=ignored,
    )


def parse_json(raw: bytes) -> Any:
    """The JSON in a body.

    Raises:
        [`Refusal`]: It is no JSON, or has so many parts that they take long to build.
    """
    if raw.count(b"[") + raw.count(b"{") > MAX_OBJECTS:
        raise Refusal(400, f"The body may have {MAX_OBJECTS} objects and lists.", "too_many_items")
    try:
        return json.loads(raw.decode("utf-8-sig", "replace"))
    except (ValueError, RecursionError):
        raise Refusal(400, "The body is no JSON.", "invalid_json") from None


def _stops_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    """The stop texts of a request, not more than a search through the reply can look for."""
    stops = body.get("stop") or ()
    if isinstance(stops, str):
        stops = (stops,)
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) for stop in stops):
        raise Refusal(400, "`stop` must be a text or a list of texts.", "invalid_value", "stop")
    check_count(stops, MAX_STOPS, "stop")
    if any(len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise Refusal(400, f"A text of `stop` may have {MAX_STOP_LENGTH} characters.", "invalid_value", "stop")
    return tuple(stop for stop in stops if stop)


def _sampling_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling settings of a request: numbers that a model could take, everything else as a short text.

    A large LLM gets `temperature` and `top_p`. A value that it refuses would fail the rollout.
    """
    settings: dict[str, Any] = {}
    for name in _SAMPLING:
        value = body.get(name)
        if value is None:
            continue
        settings[name] = value if isinstance(value, int | float) else shown(value, 80, repr)
        if name in ("temperature", "top_p"):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= 2:
                raise Refusal(400, f"`{name}` must be a number from 0 to 2.", "invalid_value", name)
    return settings


def check_count(items: Sequence[Any], most: int, name: str) -> None:
    """Refuse a request with too many parts of one kind."""
    if len(items) > most:
        raise Refusal(400, f"`{name}` has {len(items)} items and may have {most}.", "too_many_items", name)


def check_offered(body: Any, is_offered: bool, name: str) -> None:
    """Refuse a request that uses a field which is not offered here."""
    if not is_offered:
        raise Refusal(400, f"`{name}` is not supported here: leave it out.", "unsupported_value", name)


def check_form(form: Any, name: str) -> None:
    """Refuse a reply in a form that only constrained decoding could promise.

    The policy's gradient is that of its own distribution. Tokens drawn under a grammar have another one, which the
    trainer's log-probabilities do not know.
    """
    if as_dict(form).get("type") not in (None, "text"):
        what = f"`{name}` is not supported: the policy samples without constraints, as it is trained."
        instead = (
            "Ask for JSON in the prompt or as a tool's arguments, and name what broken JSON raises in `mistakes=`."
        )
        raise Refusal(400, f"{what} {instead}", "unsupported_value", name)


def limit_of(body: Mapping[str, Any], *names: str) -> int | None:
    """The smallest limit of tokens that a request gives under one of these names."""
    limits = [body[name] for name in names if body.get(name) is not None]
    if any(not isinstance(limit, int) or limit < 1 for limit in limits):
        raise Refusal(400, f"`{names[0]}` must be a whole number above 0.", "invalid_value", names[0])
    return min(limits, default=None)


def role_of(role: Any) -> Role:
    """The role of a message in the inner form. Refuses a role that there is not."""
    if role not in _ROLES:
        what = f"A message has the role {shown(role, 80, repr)}; there are {', '.join(_ROLES)}."
        raise Refusal(400, what, "invalid_value")
    return _ROLES[role]


def text_of(content: Any) -> str:
    """The text of a message's content, which may be a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or (part.get("type") or "text") not in _TEXT_PARTS:
            kind = shown(as_dict(part).get("type"), 80, repr)
            raise Refusal(400, f"A message holds {kind}, and the policy reads text alone.", "invalid_value")
        texts.append(str(part.get("text") or part.get("refusal") or ""))
    return "".join(texts)


def arguments_of(given: Any) -> str:
    """A call's arguments as text: as given, or as JSON."""
    return given if isinstance(given, str) else json.dumps({} if given is None else given, ensure_ascii=False)


def object_of(arguments: str) -> dict[str, Any]:
    """Arguments where a dialect takes an object only: an empty one if the policy wrote none."""
    try:
        return as_dict(load_json(arguments or "{}"))
    except (ValueError, RecursionError):
        return {}


def is_json(text: str) -> bool:
    """Whether a text is JSON."""
    try:
        load_json(text)
    except (ValueError, RecursionError):
        return False
    return True


def list_of(body: Any, name: str) -> list[dict[str, Any]]:
    """The messages of a request."""
    given = as_dict(body).get(name)
    if not isinstance(given, list) or not given or not all(isinstance(one, dict) for one in given):
        raise Refusal(400, f"`{name}` must be a list of messages.", "invalid_value", name)
    check_count(given, MAX_MESSAGES, name)
    return given


def hosted(kind: Any) -> str:
    """The type of a tool that its vendor would run. No vendor is here, so it is not offered to the policy.

    Raises:
        [`Refusal`]: The client itself runs tools of that type, and the request does not say how they are called.
    """
    if not str(kind).startswith(_HOSTED):
        what = (
            f"Tools of the type {shown(kind, 80, repr)} are not supported here: give the agent a function in its place."
        )
        raise Refusal(400, what, "unsupported_value", "tools")
    return str(kind)


def tool_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function as a tool in the form of chat templates. Refuses one without a name."""
    name, described = function.get("name"), function.get("description") or ""
    if not isinstance(name, str) or not name:
        raise Refusal(400, "A tool has no name.", "invalid_value", "tools")
    shown = {"name": name, "description": described, "parameters": function.get("parameters") or {}}
    return {"type": "function", "function": shown}


def as_dict(value: Any) -> dict[str, Any]:
    """The value if it is a dict, else an empty one."""
    return value if isinstance(value, dict) else {}


def logprob_of(text: str, value: float) -> dict[str, Any]:
    """A token's log-probability in OpenAI's form."""
    return {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}


class EntryParts:
    """Collects the parts of one message.

    Args:
        role (`str`): The role of the message.
        thought (`str`, *optional*): Its thought so far.
        handle (`str`, *optional*): Its handle so far.
    """

    def __init__(self, role: Role, thought: str = "", handle: str = ""):
        self.role = role
        self.texts: list[str] = []
        self.thoughts = [thought]
        self.calls: list[ToolCall] = []
        self.handle = handle

    @property
    def has_text(self) -> bool:
        return any(self.texts)

    def add(self, entry: Entry) -> None:
        """Take over the text and the calls of a message that is a part of this one."""
        self.texts.append(entry.text)
        self.calls += entry.calls

    def entry(self) -> Entry:
        """The whole message."""
        text, thought = "".join(self.texts), "".join(self.thoughts)
        return Entry(self.role, text, thought, tuple(self.calls), self.handle)
