"""Reads the token counts of a reply in all formats of endpoints, and estimates missing counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_COUNT = 10**9
"""A larger count is invalid: it would spoil every sum."""

BYTES_PER_TOKEN = 3
"""Bytes of UTF-8 text per token, for estimates. English has about four, Chinese about three."""

TOKENS_PER_MESSAGE = 4
"""Tokens of the role and of the chat template's separators, for estimates."""

TOKENS_PER_ATTACHMENT = 1024
"""Tokens of a message part that is not text (an image), for estimates."""

UNREPORTED_COMPLETION = 1024
"""Lower bound of the estimate for a reply without a reported count, unless `max_tokens` is lower.

The text may be short, but a reasoning model bills thoughts that the reply does not show."""

_PROMPT_NAMES = (
    "prompt_tokens",
    "input_tokens",
    "prompt_token_count",
    "promptTokenCount",
    "prompt_eval_count",
    "promptTokens",
    "inputTokens",
)
_COMPLETION_NAMES = (
    "completion_tokens",
    "output_tokens",
    "candidates_token_count",
    "candidatesTokenCount",
    "generated_tokens",
    "eval_count",
    "completionTokens",
    "outputTokens",
)
_TOTAL_NAMES = ("total_tokens", "total_token_count", "totalTokenCount", "totalTokens")
# Anthropic counts these beside `input_tokens`; OpenAI's `prompt_tokens` includes them.
_CACHE_NAMES = ("cache_creation_input_tokens", "cache_read_input_tokens")
_GOOGLE_REASONING_NAMES = ("thoughtsTokenCount", "thoughts_token_count")
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
    """Read the token counts in the body of a completion.

    Args:
        body (`Mapping`): The decoded body.
        estimate_prompt (`Callable[[], int]`, *optional*): Estimates the prompt's share if the
            endpoint reports only a total. By default the whole total counts as output.
    """
    for usage in _usage_objects(body):
        counts = _read_usage(usage, estimate_prompt)
        if counts != TokenCounts():
            return counts
    return TokenCounts()


def estimate_prompt_tokens(messages: Sequence[Mapping[str, Any]]) -> int:
    """Estimate the tokens of a conversation, rather too high than too low."""
    tokens = 0
    for message in messages:
        tokens += TOKENS_PER_MESSAGE
        # The content is a text or a list of parts, some of which may be images.
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
    """Estimate the tokens of a text, rather too high than too low."""
    return math.ceil(len(text.encode("utf-8", "replace")) / BYTES_PER_TOKEN)


def _usage_objects(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a body that may contain its usage, OpenAI's first."""
    candidates = [body.get("usage"), body.get("usage_metadata"), body.get("usageMetadata")]

    # Cohere's objects in its usage, the billed tokens first.
    for outer in (body.get("usage"), body.get("meta")):
        if isinstance(outer, Mapping):
            candidates += [outer.get("billed_units"), outer.get("tokens")]

    # Other places: the first choice, and extensions such as Groq's.
    choices = body.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        candidates.append(choices[0].get("usage"))
    for extension in ("x_groq", "meta"):
        holder = body.get(extension)
        if isinstance(holder, Mapping):
            candidates.append(holder.get("usage"))
    candidates.append(body)  # Ollama puts its counts there
    for candidate in candidates:
        if isinstance(candidate, Mapping):
            yield candidate


def _read_usage(usage: Mapping[str, Any], estimate_prompt: Callable[[], int]) -> TokenCounts:
    """Read the counts of one usage object and complete them from its total."""
    prompt = _first_count(usage, _PROMPT_NAMES)
    completion = _first_count(usage, _COMPLETION_NAMES)
    total = _first_count(usage, _TOTAL_NAMES)

    # Add tokens that some endpoints count separately.
    if prompt is not None and "prompt_tokens" not in usage:
        prompt += sum(read_count(usage.get(name)) or 0 for name in _CACHE_NAMES)
    if completion is not None:
        completion = max(completion, _with_hidden_reasoning(usage, completion))

    # A missing count follows from the total. A total above the sum of both contains tokens that are
    # billed as output and reported elsewhere: thoughts.
    if total:
        if prompt is not None:
            completion = max(completion or 0, total - prompt)
        elif completion is not None:
            prompt = max(0, total - completion)
        else:
            prompt = min(estimate_prompt(), total)
            completion = total - prompt

    # No prompt has 0 tokens: such a count is a placeholder.
    return TokenCounts(prompt or None, completion)


def _with_hidden_reasoning(usage: Mapping[str, Any], completion: int) -> int:
    """Return the tokens of a completion, including reasoning tokens that its count leaves out."""
    # Google counts them separately.
    for name in _GOOGLE_REASONING_NAMES:
        google_reasoning = read_count(usage.get(name))
        if google_reasoning:
            return completion + google_reasoning

    # Others include them in the count; if there are more of them, they were left out.
    reasoning = 0
    for name in _REASONING_DETAILS:
        details = usage.get(name)
        if isinstance(details, Mapping):
            reasoning = max(reasoning, read_count(details.get("reasoning_tokens")) or 0)
    if reasoning > completion:
        return completion + reasoning
    return completion


def _first_count(usage: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """Return the first valid count under one of the names."""
    for name in names:
        count = read_count(usage.get(name))
        if count is not None:
            return count
    return None


def read_count(value: object) -> int | None:
    """Read a token count: an integer, a float, or the text of either.

    `None` for anything else, and for a number that is not between 0 and 10⁹.
    """
    # In Python `True` is an integer.
    if isinstance(value, bool):
        return None
    # Longer texts are no counts, and slow to read.
    if isinstance(value, str) and len(value) <= _MAX_DIGITS:
        try:
            value = float(value)
        except ValueError:
            return None
    if not isinstance(value, (int, float)):
        return None
    if not 0 <= value <= MAX_COUNT:  # also true for NaN
        return None
    return math.ceil(value)
