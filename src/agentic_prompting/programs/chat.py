"""OpenAI's chat completions, for programs and for the service of a trained agent."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from . import fields
from .fields import as_dict, text_of
from .protocol import Asked, Completion, Dialect, Entry, ToolCall, event


class ChatCompletions(Dialect):
    """OpenAI's chat completions."""

    path = "/chat/completions"

    def read(self, body: Any, path: str = "") -> Asked:
        messages = fields.list_of(body, "messages")
        fields.check_form(body.get("response_format"), "response_format")
        fields.check_offered(body, not body.get("top_logprobs"), "top_logprobs")
        fields.check_offered(body, not body.get("functions"), "functions")
        fields.check_offered(body, set(body.get("modalities") or ["text"]) <= {"text"}, "modalities")
        tools: list[dict[str, Any]] = []
        left_out: list[str] = []
        for tool in map(as_dict, body.get("tools") or ()):
            if tool.get("type") in (None, "function"):
                tools.append(fields.tool_of(as_dict(tool.get("function"))))
            else:
                left_out.append(fields.hosted(tool.get("type")))
        return fields.asked_of(
            body,
            [self._entry(one) for one in messages],
            tools,
            fields.limit_of(body, "max_tokens", "max_completion_tokens"),
            with_usage=bool(as_dict(body.get("stream_options")).get("include_usage")),
            left_out=left_out,
        )

    @staticmethod
    def _entry(message: Mapping[str, Any]) -> Entry:
        calls = []
        for call in map(as_dict, message.get("tool_calls") or ()):
            one = as_dict(call.get("function"))
            arguments = fields.arguments_of(one.get("arguments"))
            calls.append(ToolCall(str(call.get("id") or ""), str(one.get("name")), arguments))
        thought = message.get("reasoning_content") or message.get("reasoning") or ""
        role, text = fields.role_of(message.get("role")), text_of(message.get("content"))
        return Entry(role, text, text_of(thought), tuple(calls))

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
            return event({**head, "choices": [choice], **more})

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
            yield event({**head, "choices": [], "usage": self._usage(said)})
        yield b"data: [DONE]\n\n"

    @staticmethod
    def _head(said: Completion, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{said.id}", "object": kind, "created": int(time.time()), "model": said.model}

    @staticmethod
    def _usage(said: Completion) -> dict[str, int]:
        read, written = said.prompt_tokens, said.completion_tokens
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _words(text: str) -> list[str]:
    first, *rest = text.split(" ")
    return [first, *(f" {word}" for word in rest)]


def _chat_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_logprobs(said: Completion) -> dict[str, Any] | None:
    if said.logprobs is None:
        return None
    return {"content": [fields.logprob_of(text, value) for text, value in said.logprobs], "refusal": None}
