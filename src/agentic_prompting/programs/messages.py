"""Anthropic's Messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import fields
from .fields import EntryParts, as_dict, text_of
from .protocol import Asked, Completion, Dialect, Entry, Refusal, ToolCall, event

_FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Messages(Dialect):
    """Anthropic's Messages."""

    path = "/messages"
    count_path = "/messages/count_tokens"

    def read(self, body: Any, path: str = "") -> Asked:
        given = fields.list_of(body, "messages")
        for name in ("container", "mcp_servers", "context_management"):
            fields.check_offered(body, not body.get(name), name)
        fields.check_form(body.get("output_format"), "output_format")
        fields.check_form(as_dict(body.get("output_config")).get("format"), "output_config.format")
        entries = [Entry("system", text_of(body["system"]))] if body.get("system") else []
        entries += [entry for message in given for entry in _entries(message)]
        if entries[-1].role == "assistant":
            what = "The last message is the assistant's: replies that go on from a given text are not supported here."
            raise Refusal(400, what, "unsupported_value", "messages")
        tools, left_out = [], []
        for tool in map(as_dict, body.get("tools") or ()):
            if tool.get("type") in (None, "custom"):
                tools.append(fields.tool_of({**tool, "parameters": tool.get("input_schema")}))
            else:
                left_out.append(fields.hosted(tool["type"]))
        choice = as_dict(body.get("tool_choice"))
        shared = {
            **body,
            "stop": body.get("stop_sequences"),
            "tool_choice": choice["type"] if [*choice] == ["type"] and choice["type"] in ("auto", "none") else choice,
        }
        return fields.asked_of(shared, entries, tools, fields.limit_of(body, "max_tokens"), left_out=left_out)

    def body(self, said: Completion) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if said.thought:
            content.append({"type": "thinking", "thinking": said.thought, "signature": said.id})
        if said.text:
            content.append({"type": "text", "text": said.text})
        for call in said.calls:
            content.append(
                {"type": "tool_use", "id": call.id, "name": call.name, "input": fields.object_of(call.arguments)}
            )
        return {
            "id": f"msg_{said.id}", "type": "message", "role": "assistant", "model": said.model, "content": content,
            "stop_reason": _FINISH[said.finish], "stop_sequence": None,
            "usage": {
                "input_tokens": said.prompt_tokens, "output_tokens": said.completion_tokens,
                "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
            },
        }  # fmt: skip

    def events(self, said: Completion, asked: Asked) -> Iterator[bytes]:
        whole = self.body(said)
        blocks, ended = whole["content"], {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        begun = {**whole, "content": [], "stop_reason": None, "usage": {**whole["usage"], "output_tokens": 0}}
        yield _named("message_start", message=begun)
        yield _named("ping")
        arguments = iter(said.calls)
        for index, block in enumerate(blocks):
            empty: dict[str, Any]
            if block["type"] == "thinking":
                empty = {"thinking": "", "signature": ""}
                deltas = [{"type": f"{kind}_delta", kind: block[kind]} for kind in ("thinking", "signature")]
            elif block["type"] == "text":
                empty, deltas = {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
            else:  # as the policy wrote them, also where that is no JSON
                empty = {"input": {}}
                deltas = [{"type": "input_json_delta", "partial_json": next(arguments).arguments}]
            yield _named("content_block_start", index=index, content_block={**block, **empty})
            yield from (_named("content_block_delta", index=index, delta=delta) for delta in deltas)
            yield _named("content_block_stop", index=index)
        yield _named("message_delta", delta=ended, usage=whole["usage"])
        yield _named("message_stop")

    def failed(self, refusal: Refusal, asked: Asked) -> Iterator[bytes]:
        yield _named(**self.error(refusal))

    def error(self, refusal: Refusal) -> dict[str, Any]:
        error = refusal.body["error"]
        kind = "api_error" if error["type"] == "server_error" else error["type"]
        return {"type": "error", "error": {"type": kind, "message": refusal.message, "code": refusal.code}}

    def counted(self, tokens: int) -> dict[str, Any]:
        return {"input_tokens": tokens}


def _named(type: str, **more: Any) -> bytes:
    return f"event: {type}\n".encode() + event({"type": type, **more})


def _entries(message: Mapping[str, Any]) -> Iterator[Entry]:
    """A message's blocks: each result of a tool is a message of its own."""
    role, content = fields.role_of(message.get("role")), message.get("content")
    parts, is_open = EntryParts(role), True
    for block in _blocks(content):
        kind = block.get("type")
        if kind == "tool_result":
            if parts.has_text:
                yield parts.entry()
            is_error = bool(block.get("is_error")) and not block.get("content")
            yield Entry("tool", "Error" if is_error else text_of(block.get("content")))
            parts, is_open = EntryParts(role), False
        elif kind == "thinking":
            parts.thoughts.append(str(block.get("thinking") or ""))
            parts.handle = str(block.get("signature") or "") or parts.handle
        elif kind == "tool_use":
            arguments = fields.arguments_of(block.get("input"))
            parts.calls.append(ToolCall(str(block.get("id") or ""), str(block.get("name")), arguments))
        else:
            parts.texts.append(text_of([block]))
    if is_open or parts.has_text:
        yield parts.entry()


def _blocks(content: Any) -> Sequence[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content or ""}]
    if not isinstance(content, list) or not all(isinstance(one, dict) for one in content):
        raise Refusal(400, f"`content` must be a text or a list of blocks, not {fields.shown(content, 80, repr)}.")
    return content
