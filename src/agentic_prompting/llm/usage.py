"""Token counts of a reply: read in every form that endpoints use, and estimated where an endpoint reports none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_COUNT = 10**9
"""A larger count is invalid: it would spoil every sum."""

BYTES_PER_TOKEN = 3
"""Of UTF-8 text, for estimates. English has about four, Chinese about three."""

TOKENS_PER_MESSAGE = 4
"""The role and the separators of a chat template, for estimates."""

TOKENS_PER_ATTACHMENT = 1024
"""A part of a message that is no text (an image), for estimates."""

UNREPORTED_COMPLETION = 1024
"""The least that a reply without a reported count is estimated at, unless `max_tokens` is lower: its text may be short,
but a reasoning model bills thoughts that the reply does not show."""

_PROMPT_NAMES = (
    "prompt_tokens",
    "input_tokens",
    "prompt_token_count",
    "promptTokenCount",
    "prompt_eval_count",
)
_COMPLETION_NAMES = (
    "completion_tokens",
    "output_tokens",
    "candidates_token_count",
    "candidatesTokenCount",
    "generated_tokens",
    "eval_count",
)
_TOTAL_NAMES = ("total_tokens", "total_token_count", "totalTokenCount")
# Anthropic counts these beside `input_tokens`; OpenAI's `prompt_tokens` includes them.
_CACHE_NAMES = ("cache_creation_input_tokens", "cache_read_input_tokens")
_REASONING_DETAILS = ("completion_tokens_details", "output_tokens_details")
_MAX_DIGITS = 32


@dataclass(frozen=True)
class TokenCounts:
    """Token counts as an endpoint reported them; `None` for a count that is missing or invalid."""

    prompt: int | None = None
    completion: int | None = None

    @property
    def is_complete(self) -> bool:
        return self.prompt is not None and self.completion is not None


def read_token_counts(
    body: Mapping[str, Any], estimate_prompt: Callable[[], int] = lambda: 0
) -> TokenCounts:
    """The token counts in the body of a completion.

    Args:
        body (`Mapping`): The decoded body.
        estimate_prompt (`Callable[[], int]`, *optional*): Estimates the prompt's part of a total that is reported
            alone. By default all of it counts as output.
    """
    for usage in _usage_objects(body):
        counts = _read_usage(usage, estimate_prompt)
        if counts != TokenCounts():
            return counts
    return TokenCounts()


def estimate_prompt_tokens(messages: Sequence[Mapping[str, Any]]) -> int:
    """An estimate of the tokens of a conversation, rather too high than too low."""
    tokens = 0
    for message in messages:
        tokens += TOKENS_PER_MESSAGE
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        for part in parts:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                tokens += estimate_text_tokens(text)
            elif part is not None:
                tokens += TOKENS_PER_ATTACHMENT
    return tokens


def estimate_text_tokens(text: str) -> int:
    """An estimate of the tokens of a text, rather too high than too low."""
    return math.ceil(len(text.encode("utf-8", "replace")) / BYTES_PER_TOKEN)


def _usage_objects(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The objects of a body that may hold its usage: OpenAI's, those of other servers, the body itself."""
    places = [body.get("usage"), body.get("usage_metadata"), body.get("usageMetadata")]
    choices = body.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        places.append(choices[0].get("usage"))
    for extension in ("x_groq", "meta"):
        holder = body.get(extension)
        if isinstance(holder, Mapping):
            places.append(holder.get("usage"))
    places.append(body)  # Ollama's own form
    for place in places:
        if isinstance(place, Mapping):
            yield place


def _read_usage(usage: Mapping[str, Any], estimate_prompt: Callable[[], int]) -> TokenCounts:
    prompt = _first_count(usage, _PROMPT_NAMES)
    completion = _first_count(usage, _COMPLETION_NAMES)
    total = _first_count(usage, _TOTAL_NAMES)

    if prompt is not None and "prompt_tokens" not in usage:
        prompt += sum(read_count(usage.get(name)) or 0 for name in _CACHE_NAMES)
    if completion is not None:
        completion = max(completion, _with_hidden_reasoning(usage, completion))

    # A missing count follows from the total. A total that is above the sum of both holds tokens that are billed as
    # output and reported elsewhere: thoughts.
    if total:
        if prompt is None:
            if completion is None:
                prompt = min(estimate_prompt(), total)
            else:
                prompt = max(0, total - completion)
        completion = max(completion or 0, total - prompt)

    # No prompt has 0 tokens: such a count is a placeholder.
    return TokenCounts(prompt or None, completion)


def _with_hidden_reasoning(usage: Mapping[str, Any], completion: int) -> int:
    """The completion's tokens, with reasoning tokens that cannot be among them because there are more."""
    reasoning = (
        read_count(usage.get("thoughtsTokenCount"))
        or read_count(usage.get("thoughts_token_count"))
        or 0
    )
    if reasoning:
        return completion + reasoning  # Google's form counts them separately
    for name in _REASONING_DETAILS:
        details = usage.get(name)
        if isinstance(details, Mapping):
            reasoning = max(reasoning, read_count(details.get("reasoning_tokens")) or 0)
    return completion + reasoning if reasoning > completion else completion


def _first_count(usage: Mapping[str, Any], names: Sequence[str]) -> int | None:
    counts = (read_count(usage.get(name)) for name in names)
    return next((count for count in counts if count is not None), None)


def read_count(value: Any) -> int | None:
    """A token count: a whole number, a float or the text of one. `None` for anything else, and outside 0 to 10⁹."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and len(value) <= _MAX_DIGITS:
        try:
            value = float(value)
        except ValueError:
            return None
    if (
        not isinstance(value, (int, float)) or not 0 <= value <= MAX_COUNT
    ):  # NaN is not between them either
        return None
    return math.ceil(value)
