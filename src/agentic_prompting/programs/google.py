"""Google's `generateContent`, and its streamed form. Model and form of the reply are in the path, not in the body."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from . import fields
from .fields import EntryParts, as_dict, text_of
from .protocol import Asked, Completion, Dialect, Entry, Refusal, ToolCall, event

_HOSTED = ("google", "codeExecution", "urlContext", "enterpriseWebSearch", "fileSearch")
_STATUS = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 404: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED"}
_SAMPLING = {
    "temperature": "temperature", "topP": "top_p", "topK": "top_k", "seed": "seed",
    "presencePenalty": "presence_penalty", "frequencyPenalty": "frequency_penalty",
}  # fmt: skip


class Google(Dialect):
    """Google's `generateContent` and `streamGenerateContent`."""

    path = "/models/{model:.+}:{verb:(?:g|streamG)enerateContent}"
    count_path = "/models/{model:.+}:countTokens"

    def read(self, body: Any, path: str = "") -> Asked:
        body = _with_capitals(as_dict(body).get("generateContentRequest", body))
        given, config = fields.list_of(body, "contents"), _with_capitals(body.get("generationConfig"))
        streams = ":streamGenerateContent" in path
        if streams and "alt=sse" not in path:
            raise Refusal(400, "A stream is sent as events alone: add `?alt=sse`.", "unsupported_value", "alt")
        fields.check_offered(body, not body.get("cachedContent"), "cachedContent")
        fields.check_offered(body, config.get("candidateCount") in (None, 1), "candidateCount")
        fields.check_offered(body, set(config.get("responseModalities") or ["TEXT"]) <= {"TEXT"}, "responseModalities")
        fields.check_offered(body, not config.get("responseLogprobs"), "responseLogprobs")
        if config.get("responseMimeType", "text/plain") != "text/plain":
            fields.check_form({"type": config["responseMimeType"]}, "responseMimeType")
        system = body.get("systemInstruction")
        system = _text(_parts(system)) if isinstance(system, dict) else text_of(system)
        entries = [Entry("system", system)] if system else []
        entries += [entry for content in given for entry in _entries(content)]
        tools, left_out = [], []
        for tool in map(_with_capitals, body.get("tools") or ()):
            tools += [_tool(one) for one in map(_with_capitals, tool.pop("functionDeclarations", None) or ())]
            for name in tool:
                fields.check_offered(body, name.startswith(_HOSTED), f"tools.{name}")
            left_out += [*tool]
        calling = _with_capitals(_with_capitals(body.get("toolConfig")).get("functionCallingConfig"))
        mode = str(calling.get("mode") or "AUTO").lower()
        found = re.search(r"/models/([^:?]+)", path)
        shared = {
            "model": found[1] if found else "", "stream": streams, "stop": config.get("stopSequences"),
            "tool_choice": "auto" if mode == "mode_unspecified" else mode,
            **{ours: config[theirs] for theirs, ours in _SAMPLING.items() if theirs in config},
        }  # fmt: skip
        return fields.asked_of(shared, entries, tools, fields.limit_of(config, "maxOutputTokens"), left_out=left_out)

    def body(self, said: Completion) -> dict[str, Any]:
        parts: list[dict[str, Any]] = [{"text": said.thought, "thought": True}] if said.thought else []
        parts += [{"text": said.text or ""}] if said.text or not said.calls else []
        for call in said.calls:
            shown = {"id": call.id, "name": call.name, "args": fields.object_of(call.arguments)}
            parts.append({"functionCall": shown})
        parts[-max(1, len(said.calls))]["thoughtSignature"] = said.id  # twice twelve hex digits are base64, too
        read, written = said.prompt_tokens, said.completion_tokens
        finish = "MAX_TOKENS" if said.finish == "length" else "STOP"
        return {
            "candidates": [{"content": {"role": "model", "parts": parts}, "finishReason": finish, "index": 0}],
            "usageMetadata": {
                "promptTokenCount": read, "candidatesTokenCount": written, "totalTokenCount": read + written,
            },
            "modelVersion": said.model, "responseId": said.id,
        }  # fmt: skip

    def events(self, said: Completion, asked: Asked) -> Iterator[bytes]:
        yield event(self.body(said))

    def error(self, refusal: Refusal) -> dict[str, Any]:
        status = _STATUS.get(refusal.status, "INTERNAL")
        details = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": refusal.code}]
        return {
            "error": {"code": refusal.status, "message": refusal.message, "status": status, "details": details},
        }

    def counted(self, tokens: int) -> dict[str, Any]:
        return {"totalTokens": tokens}


def _with_capitals(given: Any) -> dict[str, Any]:
    """The object with names as `maxOutputTokens`; some clients write `max_output_tokens`."""
    names = {name: re.sub(r"_([a-z])", lambda found: found[1].upper(), name) for name in as_dict(given)}
    return {new: given[name] for name, new in names.items() if given[name] is not None}


def _parts(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    parts = content.get("parts") or []
    return [_with_capitals(part) for part in (parts if isinstance(parts, list) else [parts])]


def _text(parts: list[dict[str, Any]]) -> str:
    for part in parts:
        if named := set(part) - {"text", "thought", "thoughtSignature"}:
            what = f"A message holds {fields.shown(min(named), 80, repr)}, and the policy reads text alone."
            raise Refusal(400, what, "invalid_value", "contents")
    return "".join(str(part.get("text") or "") for part in parts)


def _entries(content: Mapping[str, Any]) -> Iterator[Entry]:
    """A content's parts: each result of a tool is a message of its own."""
    role = content.get("role") or "user"
    if role not in ("user", "model", "function"):
        what = f"A content has the role {fields.shown(role, 80, repr)}; there are user and model."
        raise Refusal(400, what, "invalid_value", "contents")
    parts, is_open = EntryParts("assistant" if role == "model" else "user"), True
    for part in _parts(content):
        handle = str(part.get("thoughtSignature") or parts.handle)
        if (call := part.get("functionCall")) is not None:
            arguments = fields.arguments_of(call.get("args"))
            parts.calls.append(ToolCall(str(call.get("id") or ""), str(call.get("name")), arguments))
            parts.handle = parts.handle or handle
        elif (result := part.get("functionResponse")) is not None:
            if parts.has_text:
                yield parts.entry()
            yield Entry("tool", _result(result))
            parts, is_open = EntryParts("user"), False
        else:
            (parts.thoughts if part.get("thought") else parts.texts).append(_text([part]))
            parts.handle = handle
    if is_open or parts.has_text:
        yield parts.entry()


def _result(result: Mapping[str, Any]) -> str:
    """A tool's result as the text that other dialects send."""
    if result.get("parts"):
        raise Refusal(400, "A tool's result holds 'parts', and the policy reads text alone.", "invalid_value")
    said = result.get("response")
    if isinstance(said, dict):
        keys = set(said) - {"name"}
        if len(keys) == 1 and isinstance(text := said[(key := keys.pop())], str):
            return text if key in ("output", "result", "content") else json.dumps(said, ensure_ascii=False)
    return json.dumps(said, ensure_ascii=False)


def _tool(declared: Mapping[str, Any]) -> dict[str, Any]:
    return fields.tool_of(
        {**declared, "parameters": declared.get("parametersJsonSchema") or _lowered(declared.get("parameters"))}
    )


def _lowered(schema: Any) -> Any:
    """A schema with its types as JSON Schema writes them: `object`, not `OBJECT`."""
    if isinstance(schema, list):
        return [_lowered(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value.lower() if key == "type" and isinstance(value, str) else _lowered(value)
        for key, value in schema.items()
    }
