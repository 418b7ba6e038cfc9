"""Google's `generateContent` and its streamed form. The path, not the body, names the model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..protocol import (
    ChatMessage,
    Completion,
    CompletionRequest,
    Dialect,
    Refusal,
    Role,
    ToolCall,
    format_event,
)
from . import shared_fields as fields
from .shared_fields import MessageBuilder, as_dict, read_text

# How the names of the tools begin that Google itself runs.
_HOSTED_TOOLS = ("google", "codeExecution", "urlContext", "enterpriseWebSearch", "fileSearch")
# The names of HTTP statuses in Google's errors.
_ERROR_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
}
# Results of tools come with the user's role too: their parts tell them apart.
_ROLES: dict[str, Role] = {"user": "user", "model": "assistant", "function": "user"}
# Google's names, and OpenAI's.
_SAMPLING_SETTINGS = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}


class Google(Dialect):
    """Google's `generateContent` and `streamGenerateContent`."""

    path = "/models/{model:.+}:{verb:(?:g|streamG)enerateContent}"
    count_path = "/models/{model:.+}:countTokens"

    def read_request(self, body: Any, path: str = "") -> CompletionRequest:
        # `countTokens` wraps the request.
        body = _camel_case(as_dict(body).get("generateContentRequest", body))
        contents = fields.read_messages(body, "contents")
        config = _camel_case(body.get("generationConfig"))

        # The path says whether to stream. Google's other form of a stream is not offered.
        is_stream = ":streamGenerateContent" in path
        if is_stream and "alt=sse" not in path:
            message = "A stream is sent as events only: add `?alt=sse`."
            raise Refusal(400, message, "unsupported_value", "alt")
        _check_config(body, config)

        # The conversation, with the system instruction as its first message.
        messages: list[ChatMessage] = []
        system_text = _read_system_text(body.get("systemInstruction"))
        if system_text:
            messages.append(ChatMessage("system", system_text))
        for content in contents:
            messages += _read_content(content)

        # A tool holds declarations of functions, and the names of tools that Google runs.
        tools: list[dict[str, Any]] = []
        dropped_tools: list[str] = []
        for tool in map(_camel_case, body.get("tools") or ()):
            declarations = tool.pop("functionDeclarations", None) or ()
            tools += [_build_tool(_camel_case(declaration)) for declaration in declarations]
            for name in tool:
                fields.check_supported(name.startswith(_HOSTED_TOOLS), f"tools.{name}")
                dropped_tools.append(name)

        # The other fields, by OpenAI's names.
        shared_fields: dict[str, Any] = {
            "model": _read_model(path),
            "stream": is_stream,
            "stop": config.get("stopSequences"),
            "tool_choice": _read_tool_choice(body),
        }
        for google_name, name in _SAMPLING_SETTINGS.items():
            shared_fields[name] = config.get(google_name)
        return fields.build_request(
            shared_fields,
            messages=messages,
            tools=tools,
            max_tokens=fields.read_token_limit(config, "maxOutputTokens"),
            dropped_tools=dropped_tools,
        )

    def write_body(self, completion: Completion) -> dict[str, Any]:
        # Thought, text and calls are parts. Without text and calls there is an empty text.
        parts: list[dict[str, Any]] = []
        if completion.thought:
            parts.append({"text": completion.thought, "thought": True})
        if completion.text or not completion.tool_calls:
            parts.append({"text": completion.text or ""})
        call_parts = [_write_tool_call(call) for call in completion.tool_calls]
        parts += call_parts

        # The signature is the handle of the reply. Hexadecimal digits are also valid base64.
        signed_part = call_parts[0] if call_parts else parts[-1]
        signed_part["thoughtSignature"] = completion.id

        candidate: dict[str, Any] = {
            "content": {"role": "model", "parts": parts},
            "finishReason": "MAX_TOKENS" if completion.finish_reason == "length" else "STOP",
            "index": 0,
        }
        # A reply without an answer states the reason instead of parts.
        if completion.refusal is not None:
            candidate["content"]["parts"] = []
            candidate["finishReason"] = "OTHER"
            candidate["finishMessage"] = completion.refusal
        return {
            "candidates": [candidate],
            "usageMetadata": {
                "promptTokenCount": completion.prompt_tokens,
                "candidatesTokenCount": completion.completion_tokens,
                "totalTokenCount": completion.total_tokens,
            },
            "modelVersion": completion.model,
            "responseId": completion.id,
        }

    def write_events(self, completion: Completion, request: CompletionRequest) -> Iterator[bytes]:
        yield format_event(self.write_body(completion))

    def write_error(self, refusal: Refusal) -> dict[str, Any]:
        detail = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": refusal.code}
        error = {
            "code": refusal.status,
            "message": refusal.message,
            "status": _ERROR_STATUSES.get(refusal.status, "INTERNAL"),
            "details": [detail],
        }
        return {"error": error}

    def write_token_count(self, tokens: int) -> dict[str, Any]:
        return {"totalTokens": tokens}


def _write_tool_call(call: ToolCall) -> dict[str, Any]:
    arguments = fields.arguments_object(call.arguments)
    return {"functionCall": {"id": call.id, "name": call.name, "args": arguments}}


# ---- requests ----


def _camel_case(value: Any) -> dict[str, Any]:
    """Return an object with names like `maxOutputTokens`, without nulls.

    Some clients write `max_output_tokens`.
    """
    renamed: dict[str, Any] = {}
    for name, item in as_dict(value).items():
        if item is not None:
            camel_name = re.sub(r"_([a-z])", lambda match: match[1].upper(), name)
            renamed[camel_name] = item
    return renamed


def _read_model(path: str) -> str:
    # As in `/v1beta/models/NAME:generateContent?alt=sse`.
    _, _, model = path.partition("/models/")
    return re.split("[:?]", model, maxsplit=1)[0]


def _check_config(body: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse what is not supported."""
    fields.check_supported(not body.get("cachedContent"), "cachedContent")
    fields.check_supported(config.get("candidateCount") in (None, 1), "candidateCount")
    modalities = config.get("responseModalities") or ["TEXT"]
    fields.check_supported(set(modalities) <= {"TEXT"}, "responseModalities")
    fields.check_supported(not config.get("responseLogprobs"), "responseLogprobs")

    # JSON and enumerations need constrained decoding.
    reply_type = config.get("responseMimeType")
    if reply_type not in (None, "text/plain"):
        fields.check_reply_format({"type": reply_type}, "responseMimeType")


def _read_system_text(instruction: Any) -> str:
    if isinstance(instruction, dict):
        return _read_text_parts(_read_parts(instruction))
    return read_text(instruction)


def _read_tool_choice(body: Mapping[str, Any]) -> str:
    calling_config = _camel_case(_camel_case(body.get("toolConfig")).get("functionCallingConfig"))
    # In lower case Google's AUTO and NONE are OpenAI's choices.
    mode = str(calling_config.get("mode") or "MODE_UNSPECIFIED").lower()
    return mode.replace("mode_unspecified", "auto")


def _read_content(content: Mapping[str, Any]) -> Iterator[ChatMessage]:
    """Yield the messages in one content: each result of a tool is one of its own."""
    role_name = content.get("role") or "user"
    if role_name not in _ROLES:
        message = f"A content has the role {fields.quote(role_name)}; the roles are user and model."
        raise Refusal(400, message, "invalid_value", "contents")

    builder = MessageBuilder(_ROLES[role_name])
    has_results = False
    for part in _read_parts(content):
        signature = str(part.get("thoughtSignature") or "")
        if "functionCall" in part:
            # A call. Its signature is the handle, unless an earlier part has given one.
            call = part["functionCall"]
            arguments = fields.arguments_text(call.get("args"))
            builder.tool_calls.append(
                ToolCall(str(call.get("id") or ""), str(call.get("name")), arguments)
            )
            builder.handle = builder.handle or signature
        elif "functionResponse" in part:
            # A result is a message of its own, and ends the one in front of it.
            if builder.has_text:
                yield builder.build()
            yield ChatMessage("tool", _read_result(part["functionResponse"]))
            builder = MessageBuilder("user")
            has_results = True
        else:
            # Text, or a part of the thought.
            texts = builder.thoughts if part.get("thought") else builder.texts
            texts.append(_read_text_parts([part]))
            builder.handle = signature or builder.handle

    # The text after the last result. A content may consist of results alone.
    if builder.has_text or not has_results:
        yield builder.build()


def _read_parts(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    parts = content.get("parts") or []
    # A single part need not be in a list.
    if not isinstance(parts, list):
        parts = [parts]
    return [_camel_case(part) for part in parts]


def _read_text_parts(parts: Sequence[dict[str, Any]]) -> str:
    for part in parts:
        # Other fields hold images, files or code.
        other_fields = part.keys() - {"text", "thought", "thoughtSignature"}
        if other_fields:
            message = (
                f"A message contains {fields.quote(min(other_fields))}: this model reads only text."
            )
            raise Refusal(400, message, "invalid_value", "contents")
    return "".join(str(part.get("text") or "") for part in parts)


def _read_result(result: Mapping[str, Any]) -> str:
    """Return a tool's result as the text that other dialects send."""
    if result.get("parts"):
        message = "A tool's result contains 'parts': this model reads only text."
        raise Refusal(400, message, "invalid_value")

    # Many clients wrap a text: {"output": "..."}.
    response = result.get("response")
    if isinstance(response, dict):
        names = response.keys() - {"name"}
        if len(names) == 1:
            name = names.pop()
            text = response[name]
            if name in ("output", "result", "content") and isinstance(text, str):
                return text
    return json.dumps(response, ensure_ascii=False)


def _build_tool(declaration: Mapping[str, Any]) -> dict[str, Any]:
    # Declarations have a JSON Schema, or Google's form of one with types in capitals.
    schema = declaration.get("parametersJsonSchema") or _lower_case_types(
        declaration.get("parameters")
    )
    return fields.build_tool({**declaration, "parameters": schema})


def _lower_case_types(schema: Any) -> Any:
    """Return a schema with types as JSON Schema writes them: `object` instead of `OBJECT`."""
    if isinstance(schema, list):
        return [_lower_case_types(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    lowered: dict[str, Any] = {}
    for name, value in schema.items():
        # A property that is called `type` holds a schema, not the name of a type.
        is_type = name == "type" and isinstance(value, str)
        lowered[name] = value.lower() if is_type else _lower_case_types(value)
    return lowered
