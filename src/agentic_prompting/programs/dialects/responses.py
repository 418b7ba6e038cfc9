"""OpenAI's Responses. No state is kept: every request brings its whole conversation."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..protocol import (
    MAX_MESSAGES,
    ChatMessage,
    Completion,
    CompletionRequest,
    Dialect,
    Refusal,
    ToolCall,
    format_event,
)
from . import shared_fields as fields
from .shared_fields import MessageBuilder, as_dict, read_text

# Fields for which the server would have to keep state.
_STATEFUL_FIELDS = ("previous_response_id", "conversation", "background", "prompt")


class Responses(Dialect):
    """OpenAI's Responses."""

    path = "/responses"

    def read_request(self, body: Any, path: str = "") -> CompletionRequest:
        items = as_dict(body).get("input")
        if not isinstance(items, str | list) or not items:
            raise Refusal(
                400, "`input` must be a text or a list of items.", "invalid_value", "input"
            )

        # Refuse what needs state, constrained decoding, or log-probabilities of other tokens.
        for name in _STATEFUL_FIELDS:
            fields.check_supported(not body.get(name), name)
        fields.check_reply_format(as_dict(body.get("text")).get("format"), "text.format")
        fields.check_supported(not body.get("top_logprobs"), "top_logprobs")

        # The conversation, with the instructions as its system message.
        messages = [ChatMessage("user", items)] if isinstance(items, str) else _read_messages(items)
        instructions = read_text(body.get("instructions"))
        if instructions:
            messages.insert(0, ChatMessage("system", instructions))

        # The tools. Log-probabilities are not a field of their own, but an item of `include`.
        tools = _Tools()
        tools.add(body.get("tools") or ())
        includes_logprobs = "message.output_text.logprobs" in (body.get("include") or ())
        request = fields.build_request(
            {**body, "logprobs": includes_logprobs},
            messages=messages,
            tools=tools.functions,
            max_tokens=fields.read_token_limit(body, "max_output_tokens"),
            dropped_tools=tools.dropped,
        )
        return replace(request, custom_tools=frozenset(tools.custom_names))

    def write_body(self, completion: Completion) -> dict[str, Any]:
        return _write_response(completion, _write_items(completion))

    def write_events(self, completion: Completion, request: CompletionRequest) -> Iterator[bytes]:
        # The stream begins with an empty response, and ends with the whole one.
        items = _write_items(completion)
        started_response = {
            **_write_response(completion, []),
            "status": "in_progress",
            "usage": None,
        }
        finished_response = _write_response(completion, items)

        events: list[tuple[str, dict[str, Any]]] = [
            ("response.created", {"response": started_response}),
            ("response.in_progress", {"response": started_response}),
        ]

        # In between come the events of each item, with its index in the output.
        for index, item in enumerate(items):
            for event_type, data in _item_events(item):
                events.append((event_type, {"output_index": index, **data}))
        events.append((f"response.{finished_response['status']}", {"response": finished_response}))

        # Number the events.
        for number, (event_type, data) in enumerate(events):
            yield _format_named_event(event_type, number, data)

    def write_failure(self, refusal: Refusal, request: CompletionRequest) -> Iterator[bytes]:
        response = _write_response(Completion(request.model), [])
        response["status"] = "failed"
        response["error"] = {"code": refusal.code, "message": refusal.message}
        yield _format_named_event("response.failed", 0, {"response": response})


@dataclass
class _Tools:
    """The tools of a request.

    Args:
        functions (`list[dict]`, *optional*): Tools that the policy can call, for the chat template.
        custom_names (`set[str]`, *optional*): Names of those that take free text.
        dropped (`list[str]`, *optional*): Tools that the policy is not offered, and what else is
            lost.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    custom_names: set[str] = field(default_factory=set)
    dropped: list[str] = field(default_factory=list)

    def add(self, tools: Sequence[Any]) -> None:
        """Add functions and custom tools, also those inside of namespaces."""
        for tool in map(as_dict, tools):
            tool_type = tool.get("type")
            if tool_type == "function":
                self.functions.append(fields.build_tool(tool))
            elif tool_type == "custom":
                # The policy sees a function with a single argument, which is the free text.
                schema = {
                    "type": "object",
                    "properties": {"input": {"type": "string"}},
                    "required": ["input"],
                }
                self.functions.append(fields.build_tool({**tool, "parameters": schema}))
                self.custom_names.add(tool["name"])
            elif tool_type == "namespace":
                # Its tools are offered by their names alone.
                self.dropped.append(f"namespace {tool.get('name')}, without its name")
                self.add(tool.get("tools") or ())
            else:
                # One that the vendor runs is dropped, any other is refused.
                self.dropped.append(fields.read_hosted_tool(tool_type))


# ---- input items ----


def _read_messages(items: Sequence[Any]) -> list[ChatMessage]:
    """Input items as messages. Reasoning, text and calls of one reply are one message."""
    fields.check_count(items, MAX_MESSAGES, "input")
    builders: list[MessageBuilder] = []
    for item in items:
        if not isinstance(item, dict):
            raise Refusal(400, "An item of `input` is not an object.", "invalid_value", "input")
        part = _read_item(item)
        # An item that is no part of the message before it begins a new one.
        if not builders or not _belongs_to(builders[-1], item, part):
            builders.append(MessageBuilder(part.role, part.thought, part.handle))
        builders[-1].texts.append(part.text)
        builders[-1].tool_calls += part.tool_calls
    return [builder.build() for builder in builders]


def _belongs_to(builder: MessageBuilder, item: dict[str, Any], part: ChatMessage) -> bool:
    """Return whether an item is a part of the reply before it.

    A reply has reasoning, then text, then calls.
    """
    is_same_reply = builder.role == part.role == "assistant" and item.get("type") != "reasoning"
    is_text_after_calls = bool(builder.tool_calls) and not part.tool_calls
    return is_same_reply and not is_text_after_calls


def _read_item(item: dict[str, Any]) -> ChatMessage:
    """Return one item as a message, or as a part of one."""
    item_type = item.get("type") or "message"
    if item_type == "message":
        return ChatMessage(fields.read_role(item.get("role")), read_text(item.get("content")))
    if item_type == "reasoning":
        # `encrypted_content` holds the handle, because clients send it back unchanged.
        thought = read_text(item.get("content")) or read_text(item.get("summary"))
        handle = str(item.get("encrypted_content") or "")
        return ChatMessage("assistant", thought=thought, handle=handle)

    # The result of a tool: a text, or JSON of any other value.
    if item_type in ("function_call_output", "custom_tool_call_output"):
        output = item.get("output")
        text = read_text(output) if isinstance(output, str | list) else json.dumps(output)
        return ChatMessage("tool", text)

    # A call of a tool. The text of a custom tool is the argument `input` of its function.
    if item_type == "function_call":
        arguments = fields.arguments_text(item.get("arguments"))
    elif item_type == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input")})
    else:
        message = f"`input` contains an item {fields.quote(item_type)}, which is not supported."
        raise Refusal(400, message, "unsupported_value")
    call = ToolCall(
        id=str(item.get("call_id") or ""),
        name=str(item.get("name")),
        arguments=arguments,
        is_custom=item_type == "custom_tool_call",
    )
    return ChatMessage("assistant", tool_calls=(call,))


# ---- output items ----


def _write_response(completion: Completion, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    is_cut = completion.finish_reason == "length"
    return {
        "id": f"resp_{completion.id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": completion.model,
        "status": "incomplete" if is_cut else "completed",
        "output": list(items),
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        # OpenAI's client expects these fields; what the request set is not repeated in them.
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": None,
        "top_p": None,
        "usage": {
            "input_tokens": completion.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": completion.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": completion.total_tokens,
        },
    }


def _write_items(completion: Completion) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if completion.thought:
        reasoning = {
            "type": "reasoning",
            "id": f"rs_{completion.id}",
            "summary": [{"type": "summary_text", "text": completion.thought}],
            "encrypted_content": completion.id,
        }
        items.append(reasoning)
    # A reply without text and calls is an empty message.
    if completion.text or not completion.tool_calls:
        items.append(_write_message(completion))
    items += [_write_tool_call(call) for call in completion.tool_calls]
    return items


def _write_message(completion: Completion) -> dict[str, Any]:
    logprobs = [fields.logprob_item(token, logprob) for token, logprob in completion.logprobs or ()]
    part: dict[str, Any] = {
        "type": "output_text",
        "text": completion.text or "",
        "annotations": [],
        "logprobs": logprobs,
    }
    # A reply without an answer has the refusal in place of its text.
    if completion.refusal is not None:
        part = {"type": "refusal", "refusal": completion.refusal}
    return {
        "type": "message",
        "id": f"msg_{completion.id}",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def _write_tool_call(call: ToolCall) -> dict[str, Any]:
    item = {"call_id": call.id, "name": call.name, "status": "completed"}
    if call.is_custom:
        # Unwrap the text. If the policy wrote no such object, send what it wrote.
        text = fields.arguments_object(call.arguments).get("input", call.arguments)
        return {"type": "custom_tool_call", "id": f"ctc_{call.id}", **item, "input": text}
    return {"type": "function_call", "id": f"fc_{call.id}", **item, "arguments": call.arguments}


# ---- events ----


def _format_named_event(event_type: str, number: int, data: dict[str, Any]) -> bytes:
    event = format_event({"type": event_type, "sequence_number": number, **data})
    return f"event: {event_type}\n".encode() + event


def _item_events(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of one output item: it is added, its text follows, it is done."""
    item_id = {"item_id": item["id"]}
    # Each item is announced empty, and its whole text follows as a single delta.
    if item["type"] == "message":
        part = item["content"][0]
        location = {**item_id, "content_index": 0}
        yield (
            "response.output_item.added",
            {"item": {**item, "status": "in_progress", "content": []}},
        )
        if part["type"] == "refusal":
            refusal = part["refusal"]
            yield "response.content_part.added", {**location, "part": {**part, "refusal": ""}}
            yield "response.refusal.delta", {**location, "delta": refusal}
            yield "response.refusal.done", {**location, "refusal": refusal}
        else:
            text = part["text"]
            logprobs = part["logprobs"]
            yield "response.content_part.added", {**location, "part": {**part, "text": ""}}
            yield (
                "response.output_text.delta",
                {**location, "delta": text, "logprobs": logprobs},
            )
            yield "response.output_text.done", {**location, "text": text, "logprobs": logprobs}
        yield "response.content_part.done", {**location, "part": part}
    elif item["type"] == "reasoning":
        # Clients show a thought from its summary.
        part = item["summary"][0]
        location = {**item_id, "summary_index": 0}
        yield "response.output_item.added", {"item": {**item, "summary": []}}
        yield "response.reasoning_summary_part.added", {**location, "part": {**part, "text": ""}}
        yield "response.reasoning_summary_text.delta", {**location, "delta": part["text"]}
        yield "response.reasoning_summary_text.done", {**location, "text": part["text"]}
        yield "response.reasoning_summary_part.done", {**location, "part": part}
    else:
        # A call: the JSON of a function's arguments, or the text of a custom tool.
        is_custom = item["type"] == "custom_tool_call"
        field_name = "input" if is_custom else "arguments"
        event_type = "custom_tool_call_input" if is_custom else "function_call_arguments"
        text = item[field_name]
        yield (
            "response.output_item.added",
            {"item": {**item, "status": "in_progress", field_name: ""}},
        )
        yield f"response.{event_type}.delta", {**item_id, "delta": text}
        yield f"response.{event_type}.done", {**item_id, field_name: text, "name": item["name"]}
    yield "response.output_item.done", {"item": item}
