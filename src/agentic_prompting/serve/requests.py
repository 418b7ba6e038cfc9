"""Reading of requests: a body in any of the vendors' formats as an [`AnswerRequest`].

The formats are those of the addresses of programs ([`Dialect`]). One rule says what becomes of a
field: what would change the form of the answer, and is not offered here (tools, several choices,
log-probabilities, JSON by a schema, images, state that the server keeps), is refused. Every other
field that has no effect is ignored and named in the reply's header `X-Ignored-Parameters`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..llm import Message
from ..programs import (
    ChatCompletions,
    CompletionRequest,
    Dialect,
    Google,
    Messages,
    Refusal,
    Responses,
)
from ..programs.dialects.shared_fields import as_dict, check_supported, parse_json
from ..programs.gateway import SHAPE_ERRORS

_ROW = "row"  # the field with those of a row, in every format
_MAX_IGNORED = 20  # ignored fields that the header names

# The fields that have an effect, or that a dialect refuses if they ask for what is not offered.
_USED_FIELDS: dict[type[Dialect], set[str]] = {
    ChatCompletions: {
        "model",
        "messages",
        "stream",
        "stream_options",
        "seed",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "tools",
        "functions",
        "logprobs",
        "top_logprobs",
        "response_format",
        "modalities",
        "trajectory",
        "progress",
    },
    Responses: {
        "model",
        "input",
        "instructions",
        "stream",
        "max_output_tokens",
        "tools",
        "text",
        "include",
        "seed",
        "top_logprobs",
        "previous_response_id",
        "conversation",
        "background",
        "prompt",
    },
    Messages: {
        "model",
        "messages",
        "system",
        "stream",
        "max_tokens",
        "tools",
        "output_format",
        "output_config",
        "container",
        "mcp_servers",
        "context_management",
    },
    Google: {
        "contents",
        "systemInstruction",
        "system_instruction",
        "tools",
        "cachedContent",
        "maxOutputTokens",
        "max_output_tokens",
        "seed",
        "candidateCount",
        "responseModalities",
        "responseLogprobs",
        "responseMimeType",
    },
}
# Google's clients put their settings into an object with one of these names.
_GOOGLE_CONFIG = ("generationConfig", "generation_config")

# JSON can say half of a surrogate pair, which is not a character: no tokenizer takes it.
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class AnswerRequest:
    """A request for an answer.

    Args:
        completion_request ([`CompletionRequest`]): As its dialect has read it.
        messages (`list[Message]`): The conversation; the last message is the question.
        seed (`int`, *optional*): The same seed gives the same answer.
        is_greedy (`bool`): Whether the likeliest token is taken each time.
        wants_trajectory (`bool`): Whether the reply has the field `trajectory`.
        wants_progress (`bool`): Whether the stream also has the events of the episode.
        ignored (`list[str]`): Names of the fields that have no effect.
        row_fields (`dict[str, Any]`): The fields of the row, which an agent program reads beside
            the question.
    """

    completion_request: CompletionRequest
    messages: list[Message]
    seed: int | None
    is_greedy: bool
    wants_trajectory: bool
    wants_progress: bool
    ignored: list[str]
    row_fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """The name of the model that is asked."""
        return self.completion_request.model


def read_answer_request(body: bytes, dialect: Dialect, path: str) -> AnswerRequest:
    """Read the body of a request.

    Args:
        body (`bytes`): The body.
        dialect ([`Dialect`]): Its format.
        path (`str`): The path and query of the request.

    Raises:
        [`Refusal`]: It is malformed, or asks for something that is not offered.
    """
    # Read it in its format. A body of an unknown shape can raise any of `SHAPE_ERRORS`.
    content = parse_json(body)
    try:
        request = dialect.read_request(content, path)
        ignored = _find_ignored(as_dict(content), dialect)
    except SHAPE_ERRORS as error:
        message = f"The request cannot be read ({type(error).__name__})."
        raise Refusal(400, message, "invalid_value") from None

    # These features are not in any answer of this service.
    check_supported(not request.tools and "tools" not in request.other_settings, "tools")
    check_supported(not request.logprobs, "logprobs")

    # Only a stream can have events before its answer.
    wants_progress = bool(content.get("progress")) and isinstance(dialect, ChatCompletions)
    if wants_progress and not request.stream:
        wants_progress = False
        ignored = sorted([*ignored, "progress"])

    # The settings that have an effect here and none on a policy in training.
    # At temperature 0 the likeliest tokens are taken. Others are ignored, and listed as such.
    temperature = request.other_settings.get("temperature")
    is_greedy = temperature == 0
    if is_greedy and "temperature" in ignored:
        ignored.remove("temperature")
    # The type is compared, because a bool is an int too.
    seed = request.other_settings.get("seed")
    if seed is not None and not (type(seed) is int and -(2**63) <= seed < 2**63):
        raise Refusal(400, "`seed` must be an integer of 64 bits.", "invalid_value", "seed")
    return AnswerRequest(
        completion_request=request,
        messages=_read_conversation(request),
        seed=seed,
        is_greedy=is_greedy,
        wants_trajectory=bool(content.get("trajectory")),
        wants_progress=wants_progress,
        ignored=ignored[:_MAX_IGNORED],
        row_fields=_read_row(content),
    )


def _read_row(content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the row, which are the same in all formats."""
    row = content.get(_ROW)
    if row is None:
        return {}
    if not isinstance(row, dict):
        text = f"`{_ROW}` must be an object with the fields of a row."
        raise Refusal(400, text, "invalid_value", _ROW)
    if _HALF_A_PAIR.search(json.dumps(row, ensure_ascii=False)):
        text = f"`{_ROW}` must be Unicode: there is half of a surrogate pair in it."
        raise Refusal(400, text, "invalid_value", _ROW)
    return row


def _read_conversation(request: CompletionRequest) -> list[Message]:
    """The messages, which must be text and end with a question."""
    messages: list[Message] = []
    for message in request.messages:
        if message.role == "tool" or message.tool_calls:
            text = "`messages` must be text: calls of tools and their results are not supported."
            raise Refusal(400, text, "unsupported_value", "messages")
        if _HALF_A_PAIR.search(message.text):
            text = "`messages` must be Unicode: there is half of a surrogate pair in it."
            raise Refusal(400, text, "invalid_value", "messages")
        messages.append({"role": message.role, "content": message.text})

    # The last message is the question.
    if messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        text = "`messages` must end with a user message that is not empty."
        raise Refusal(400, text, "invalid_value", "messages")
    return messages


def _find_ignored(content: Mapping[str, Any], dialect: Dialect) -> list[str]:
    """The fields without an effect, those with a name that a header can hold."""
    fields = dict(content)
    # Look at Google's settings one by one, and not at the object that holds them.
    for name in _GOOGLE_CONFIG:
        if isinstance(dialect, Google):
            fields |= as_dict(fields.pop(name, None))
    names = []
    for name, value in fields.items():
        # A null asks for nothing. Odd names are left out, because they could forge a header.
        is_used = value is None or name == _ROW or name in _USED_FIELDS[type(dialect)]
        if not is_used and re.fullmatch(r"\w{1,40}", name, re.ASCII):
            names.append(name)
    # Sorted, so that the header does not depend on the order of the fields.
    return sorted(names)
