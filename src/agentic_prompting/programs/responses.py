"""OpenAI's Responses, without state on our side: every request brings its whole conversation."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from . import fields
from .fields import EntryParts, as_dict, text_of
from .protocol import MAX_MESSAGES, Asked, Completion, Dialect, Entry, Refusal, ToolCall, event


class Responses(Dialect):
    """OpenAI's Responses."""

    path = "/responses"

    def read(self, body: Any, path: str = "") -> Asked:
        given = body.get("input") if isinstance(body, dict) else None
        if not isinstance(given, str | list) or not given:
            raise Refusal(400, "`input` must be a text or a list of items.", "invalid_value", "input")
        for name in ("previous_response_id", "conversation", "background", "prompt"):
            fields.check_offered(body, not body.get(name), name)
        fields.check_form(as_dict(body.get("text")).get("format"), "text.format")
        fields.check_offered(body, not body.get("top_logprobs"), "top_logprobs")
        instructions = body.get("instructions")
        entries = [Entry("system", text_of(instructions))] if instructions else []
        entries += [Entry("user", given)] if isinstance(given, str) else _entries(given)
        logprobs = "message.output_text.logprobs" in (body.get("include") or ())
        left_out: list[str] = []
        tools = list(_response_tools(body.get("tools") or (), left_out))
        limit = fields.limit_of(body, "max_output_tokens")
        asked = fields.asked_of({**body, "logprobs": logprobs}, entries, tools, limit, left_out=left_out)
        return replace(asked, custom=frozenset(tool["function"]["name"] for tool in tools if tool.pop("custom", False)))

    def body(self, said: Completion) -> dict[str, Any]:
        return self._response(said, self._items(said))

    def events(self, said: Completion, asked: Asked) -> Iterator[bytes]:
        items, number = self._items(said), 0

        def named(kind: str, **more: Any) -> bytes:
            nonlocal number
            data, number = {"type": kind, "sequence_number": number, **more}, number + 1
            return f"event: {kind}\n".encode() + event(data)

        begun = {**self._response(said, []), "status": "in_progress", "usage": None}
        yield named("response.created", response=begun)
        yield named("response.in_progress", response=begun)
        for index, item in enumerate(items):
            yield from (named(kind, output_index=index, **more) for kind, more in _life_of(item))
        whole = self._response(said, items)
        yield named(f"response.{whole['status']}", response=whole)

    def failed(self, refusal: Refusal, asked: Asked) -> Iterator[bytes]:
        error = {"code": refusal.code, "message": refusal.message}
        response = {**self._response(Completion(asked.model), []), "status": "failed", "error": error}
        data = {"type": "response.failed", "sequence_number": 0, "response": response}
        yield b"event: response.failed\n" + event(data)

    @staticmethod
    def _items(said: Completion) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        if said.thought:
            summary = [{"type": "summary_text", "text": said.thought}]
            items.append({"type": "reasoning", "id": f"rs_{said.id}", "summary": summary, "encrypted_content": said.id})
        if said.text or not said.calls:
            logprobs = [fields.logprob_of(text, value) for text, value in said.logprobs or ()]
            part = {"type": "output_text", "text": said.text or "", "annotations": [], "logprobs": logprobs}
            head = {"type": "message", "id": f"msg_{said.id}", "role": "assistant", "status": "completed"}
            items.append({**head, "content": [part]})
        for call in said.calls:
            head = {"call_id": call.id, "name": call.name, "status": "completed"}
            if call.custom:
                text = as_dict(_value(call.arguments)).get("input", call.arguments)
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


def _response_tools(tools: Sequence[Any], left_out: list[str]) -> Iterator[dict[str, Any]]:
    """Functions and custom tools, those inside of namespaces as well. Tools that OpenAI itself runs are left out."""
    for tool in map(as_dict, tools):
        if tool.get("type") == "function":
            yield fields.tool_of(tool)
        elif tool.get("type") == "custom":
            text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
            yield {**fields.tool_of({**tool, "parameters": text}), "custom": True}
        elif tool.get("type") == "namespace":
            left_out.append(f"namespace {tool.get('name')}, without its name")
            yield from _response_tools(tool.get("tools") or (), left_out)
        else:
            left_out.append(fields.hosted(tool.get("type")))


def _entries(items: Sequence[Any]) -> list[Entry]:
    """Input items as messages: reasoning, text and calls of one reply are one message."""
    fields.check_count(items, MAX_MESSAGES, "input")
    messages: list[EntryParts] = []
    for item in items:
        if not isinstance(item, dict):
            raise Refusal(400, "An item of `input` is no object.", "invalid_value", "input")
        new, last = _entry(item), messages[-1] if messages else EntryParts("user")
        begins = item.get("type") == "reasoning" or (last.calls and not new.calls)
        if begins or not new.role == last.role == "assistant":
            messages.append(EntryParts(new.role, new.thought, new.handle))
        messages[-1].add(new)
    return [message.entry() for message in messages]


def _entry(item: dict[str, Any]) -> Entry:
    """One item as a message, or as a part of one."""
    kind = item.get("type") or "message"
    if kind == "message":
        return Entry(fields.role_of(item.get("role")), text_of(item.get("content")))
    if kind == "reasoning":
        thought = text_of(item.get("content")) or text_of(item.get("summary"))
        return Entry("assistant", thought=thought, handle=str(item.get("encrypted_content") or ""))
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = item.get("output")
        return Entry("tool", text_of(output) if isinstance(output, str | list) else json.dumps(output))
    if kind in ("function_call", "custom_tool_call"):
        custom = kind == "custom_tool_call"
        arguments = json.dumps({"input": item.get("input")}) if custom else fields.arguments_of(item.get("arguments"))
        call = ToolCall(str(item.get("call_id") or ""), str(item.get("name")), arguments, custom)
        return Entry("assistant", calls=(call,))
    what = f"`input` holds an item {fields.shown(kind, 80, repr)}, which is not supported here."
    raise Refusal(400, what, "unsupported_value")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


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
