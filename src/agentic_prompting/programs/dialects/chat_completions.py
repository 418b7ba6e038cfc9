"""OpenAI's chat completions, for programs and for the service of a trained agent."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from ..protocol import ChatMessage, Completion, CompletionRequest, Dialect, ToolCall, format_event
from . import shared_fields as fields
from .shared_fields import as_dict, read_text


class ChatCompletions(Dialect):
    """OpenAI's chat completions."""

    path = "/chat/completions"

    def read_request(self, body: Any, path: str = "") -> CompletionRequest:
        messages = fields.read_messages(body, "messages")
        # Refuse constrained decoding, other media, and what is not offered.
        fields.check_reply_format(body.get("response_format"), "response_format")
        fields.check_supported(not body.get("top_logprobs"), "top_logprobs")
        fields.check_supported(not body.get("functions"), "functions")
        modalities = body.get("modalities") or ["text"]
        fields.check_supported(set(modalities) <= {"text"}, "modalities")

        # Functions are offered to the policy; tools that a vendor runs are dropped.
        tools: list[dict[str, Any]] = []
        dropped_tools: list[str] = []
        for tool in map(as_dict, body.get("tools") or ()):
            if tool.get("type") in (None, "function"):
                tools.append(fields.build_tool(as_dict(tool.get("function"))))
            else:
                dropped_tools.append(fields.read_hosted_tool(tool.get("type")))

        stream_options = as_dict(body.get("stream_options"))
        return fields.build_request(
            body,
            messages=[_read_message(message) for message in messages],
            tools=tools,
            max_tokens=fields.read_token_limit(body, "max_tokens", "max_completion_tokens"),
            stream_usage=bool(stream_options.get("include_usage")),
            dropped_tools=dropped_tools,
        )

    def write_body(self, completion: Completion) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": completion.text,
            "refusal": completion.refusal,
        }
        # OpenAI's format has no thoughts. vLLM and others send them in this field.
        if completion.thought:
            message["reasoning_content"] = completion.thought
        if completion.tool_calls:
            # In a message with calls an empty text is null.
            message["content"] = completion.text or None
            message["tool_calls"] = [_write_tool_call(call) for call in completion.tool_calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": _write_logprobs(completion),
            "finish_reason": completion.finish_reason,
        }
        return {
            **_write_head(completion, "chat.completion"),
            "choices": [choice],
            "usage": _write_usage(completion),
            **completion.extra_fields,
        }

    def write_extra_fields(self, completion: Completion) -> bytes:
        """An event with the reply's extra fields and no text, for a stream without its text yet."""
        choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}
        head = _write_head(completion, "chat.completion.chunk")
        return format_event({**head, "choices": [choice], **completion.extra_fields})

    def write_events(
        self, completion: Completion, request: CompletionRequest, by_word: bool = False
    ) -> Iterator[bytes]:
        """Yield the reply as events; with `by_word` the text is sent word by word."""
        head = _write_head(completion, "chat.completion.chunk")

        def chunk(delta: dict[str, Any], **choice_fields: Any) -> bytes:
            choice = {
                "index": 0,
                "delta": delta,
                "logprobs": None,
                "finish_reason": None,
                **choice_fields,
            }
            return format_event({**head, "choices": [choice]})

        # The role comes first, then the parts of the message that there are.
        yield chunk({"role": "assistant", "content": ""})
        if completion.thought:
            yield chunk({"reasoning_content": completion.thought})
        if completion.refusal is not None:
            yield chunk({"refusal": completion.refusal})
        if completion.text:
            # Only the service sends single words, and it offers no log-probabilities.
            pieces = _split_words(completion.text) if by_word else [completion.text]
            for piece in pieces:
                yield chunk({"content": piece}, logprobs=_write_logprobs(completion))
        if completion.tool_calls:
            # All calls in one chunk: clients tell them apart by their indices.
            tool_calls = [_write_tool_call(call) for call in completion.tool_calls]
            yield chunk(
                {"tool_calls": [{"index": index, **call} for index, call in enumerate(tool_calls)]}
            )

        # The reason of the end comes last.
        last_choice = {
            "index": 0,
            "delta": {},
            "logprobs": None,
            "finish_reason": completion.finish_reason,
        }
        yield format_event({**head, "choices": [last_choice], **completion.extra_fields})
        # A chunk without choices has the token counts, if the client asks for them.
        if request.stream_usage:
            yield format_event({**head, "choices": [], "usage": _write_usage(completion)})
        yield b"data: [DONE]\n\n"


def _read_message(message: Mapping[str, Any]) -> ChatMessage:
    tool_calls = []
    for call in map(as_dict, message.get("tool_calls") or ()):
        function = as_dict(call.get("function"))
        # Some clients send the arguments as an object instead of its JSON.
        arguments = fields.arguments_text(function.get("arguments"))
        tool_calls.append(ToolCall(str(call.get("id") or ""), str(function.get("name")), arguments))
    # Servers name the field of a thought differently, and clients send back either.
    return ChatMessage(
        role=fields.read_role(message.get("role")),
        text=read_text(message.get("content") or message.get("refusal")),
        thought=read_text(message.get("reasoning_content") or message.get("reasoning")),
        tool_calls=tuple(tool_calls),
    )


def _write_head(completion: Completion, object_type: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{completion.id}",
        "object": object_type,
        "created": int(time.time()),
        "model": completion.model,
    }


def _write_usage(completion: Completion) -> dict[str, int]:
    return {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "total_tokens": completion.total_tokens,
    }


def _write_tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _write_logprobs(completion: Completion) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    items = [fields.logprob_item(token, logprob) for token, logprob in completion.logprobs]
    return {"content": items, "refusal": None}


def _split_words(text: str) -> list[str]:
    """Return the words of a text, each but the first with the space in front of it."""
    first_word, *other_words = text.split(" ")
    words = [first_word, *(f" {word}" for word in other_words)]
    # A text that begins with a space has an empty first word.
    return [word for word in words if word]
