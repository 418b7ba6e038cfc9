"""Anthropic's Messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..protocol import (
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

# Anthropic's names for OpenAI's finish reasons.
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Messages(Dialect):
    """Anthropic's Messages."""

    path = "/messages"
    count_path = "/messages/count_tokens"

    def read_request(self, body: Any, path: str = "") -> CompletionRequest:
        message_bodies = fields.read_messages(body, "messages")
        # Refuse what needs Anthropic's servers, or constrained decoding.
        for name in ("container", "mcp_servers", "context_management"):
            fields.check_supported(not body.get(name), name)
        fields.check_reply_format(body.get("output_format"), "output_format")
        fields.check_reply_format(
            as_dict(body.get("output_config")).get("format"), "output_config.format"
        )

        # The conversation, with the system prompt as its first message.
        messages: list[ChatMessage] = []
        if body.get("system"):
            messages.append(ChatMessage("system", read_text(body["system"])))
        for message_body in message_bodies:
            messages += _read_message(message_body)
        # A last message of the assistant would be the beginning of the reply.
        if messages[-1].role == "assistant":
            message = (
                "The last message is the assistant's: continuing a given text is not supported."
            )
            raise Refusal(400, message, "unsupported_value", "messages")

        # Tools with a schema are offered. Those that Anthropic runs are dropped, others refused.
        tools: list[dict[str, Any]] = []
        dropped_tools: list[str] = []
        for tool in map(as_dict, body.get("tools") or ()):
            if tool.get("type") in (None, "custom"):
                tools.append(fields.build_tool({**tool, "parameters": tool.get("input_schema")}))
            else:
                dropped_tools.append(fields.read_hosted_tool(tool["type"]))

        # The plain choices have the same names in OpenAI's form.
        tool_choice = as_dict(body.get("tool_choice"))
        is_plain_choice = tool_choice in ({"type": "auto"}, {"type": "none"})
        return fields.build_request(
            {
                **body,
                "stop": body.get("stop_sequences"),
                "tool_choice": tool_choice["type"] if is_plain_choice else tool_choice,
            },
            messages=messages,
            tools=tools,
            max_tokens=fields.read_token_limit(body, "max_tokens"),
            dropped_tools=dropped_tools,
        )

    def write_body(self, completion: Completion) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        # Clients send the signature back unchanged, so it holds the handle of the reply.
        if completion.thought:
            blocks.append(
                {"type": "thinking", "thinking": completion.thought, "signature": completion.id}
            )
        if completion.text:
            blocks.append({"type": "text", "text": completion.text})
        for call in completion.tool_calls:
            arguments = fields.arguments_object(call.arguments)
            blocks.append(
                {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}
            )
        return {
            "id": f"msg_{completion.id}",
            "type": "message",
            "role": "assistant",
            "model": completion.model,
            "content": blocks,
            "stop_reason": _stop_reason(completion),
            "stop_sequence": completion.stop_text,
            "usage": {
                "input_tokens": completion.prompt_tokens,
                "output_tokens": completion.completion_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
            },
        }

    def write_events(self, completion: Completion, request: CompletionRequest) -> Iterator[bytes]:
        # The stream begins with the message, still empty.
        message = self.write_body(completion)
        usage = message["usage"]
        started_usage = {**usage, "output_tokens": 0}
        started_message = {
            **message,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": started_usage,
        }
        yield _format_named_event("message_start", message=started_message)
        yield _format_named_event("ping")

        # Each block begins empty, gets its content, and stops.
        tool_calls = iter(completion.tool_calls)
        for index, block in enumerate(message["content"]):
            empty_block: dict[str, Any]
            if block["type"] == "thinking":
                empty_block = {"type": "thinking", "thinking": "", "signature": ""}
                deltas = [
                    {"type": "thinking_delta", "thinking": block["thinking"]},
                    {"type": "signature_delta", "signature": block["signature"]},
                ]
            elif block["type"] == "text":
                empty_block = {"type": "text", "text": ""}
                deltas = [{"type": "text_delta", "text": block["text"]}]
            else:
                # The arguments as the policy wrote them, even if they are not JSON.
                empty_block = {**block, "input": {}}
                deltas = [{"type": "input_json_delta", "partial_json": next(tool_calls).arguments}]

            yield _format_named_event("content_block_start", index=index, content_block=empty_block)
            for delta in deltas:
                yield _format_named_event("content_block_delta", index=index, delta=delta)
            yield _format_named_event("content_block_stop", index=index)

        # The reason of the end and the token counts come last.
        message_delta = {
            "stop_reason": message["stop_reason"],
            "stop_sequence": message["stop_sequence"],
        }
        yield _format_named_event("message_delta", delta=message_delta, usage=usage)
        yield _format_named_event("message_stop")

    def write_failure(self, refusal: Refusal, request: CompletionRequest) -> Iterator[bytes]:
        error = self.write_error(refusal)
        yield _format_named_event("error", error=error["error"])

    def write_error(self, refusal: Refusal) -> dict[str, Any]:
        error_type = refusal.body["error"]["type"]
        # Anthropic has another name for failures of the server.
        if error_type == "server_error":
            error_type = "api_error"
        error = {"type": error_type, "message": refusal.message, "code": refusal.code}
        return {"type": "error", "error": error}

    def write_token_count(self, tokens: int) -> dict[str, Any]:
        return {"input_tokens": tokens}


def _stop_reason(completion: Completion) -> str:
    if completion.refusal is not None:
        return "refusal"
    if completion.stop_text is not None and completion.finish_reason == "stop":
        return "stop_sequence"
    return _STOP_REASONS[completion.finish_reason]


def _format_named_event(event_type: str, **data: Any) -> bytes:
    return f"event: {event_type}\n".encode() + format_event({"type": event_type, **data})


def _read_message(message: Mapping[str, Any]) -> Iterator[ChatMessage]:
    """Yield the messages in one message: each result of a tool is one of its own."""
    role = fields.read_role(message.get("role"))
    builder = MessageBuilder(role)
    has_results = False
    for block in _read_blocks(message.get("content")):
        block_type = block.get("type")
        if block_type == "tool_result":
            # A result is a message of its own, and ends the one in front of it.
            if builder.has_text:
                yield builder.build()
            yield ChatMessage("tool", _read_result(block))
            builder = MessageBuilder(role)
            has_results = True
        elif block_type == "thinking":
            # The signature is the handle of the reply.
            builder.thoughts.append(str(block.get("thinking") or ""))
            builder.handle = str(block.get("signature") or "") or builder.handle
        elif block_type == "tool_use":
            arguments = fields.arguments_text(block.get("input"))
            call = ToolCall(str(block.get("id") or ""), str(block.get("name")), arguments)
            builder.tool_calls.append(call)
        else:
            builder.texts.append(read_text([block]))

    # The text after the last result. A message may consist of results alone.
    if builder.has_text or not has_results:
        yield builder.build()


def _read_blocks(content: Any) -> Sequence[dict[str, Any]]:
    # A text stands for a single block.
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content or ""}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise Refusal(
            400, f"`content` must be a text or a list of blocks, not {fields.quote(content)}."
        )
    return content


def _read_result(block: Mapping[str, Any]) -> str:
    # A tool that failed may have said nothing.
    if block.get("is_error") and not block.get("content"):
        return "Error"
    return read_text(block.get("content"))
