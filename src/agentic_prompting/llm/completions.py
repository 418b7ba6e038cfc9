"""Reads the body of a chat completion. A body without text is a failure, never an empty answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .endpoint_errors import MAX_READ_LENGTH, error_from_body, error_from_choice, is_filtered
from .surrogates import replace_surrogates
from .types import BadReply, LLMError, Refused, Reply
from .usage import TokenCounts, read_token_counts

_MAX_FINISH_REASON_LENGTH = 40


@dataclass(frozen=True)
class ParsedCompletion:
    """The contents of the body of a chat completion.

    Args:
        reply ([`Reply`]): With a text or an error; its usage is not set.
        counts ([`TokenCounts`], *optional*): The token counts that the endpoint reported.
        text (`str`, *optional*, defaults to `""`): The text of the message, even if the reply is
            unusable.
        is_billed (`bool`, *optional*, defaults to `True`): Whether the endpoint may charge for it.
            `False` for an error and for a body that is not a completion.
    """

    reply: Reply
    counts: TokenCounts = TokenCounts()
    text: str = ""
    is_billed: bool = True

    @classmethod
    def of_error(
        cls,
        error: LLMError,
        *,
        finish_reason: str = "error",
        counts: TokenCounts = TokenCounts(),
        text: str = "",
        is_billed: bool = False,
    ) -> ParsedCompletion:
        """Create the completion of a body that is not a usable reply."""
        reply = Reply(error=error, finish_reason=finish_reason)
        return cls(reply, counts=counts, text=text, is_billed=is_billed)


def read_completion(
    body: bytes, model: str = "", estimate_prompt: Callable[[], int] = lambda: 0
) -> ParsedCompletion:
    """Read the body of a chat completion.

    Args:
        body (`bytes`): The body of a 2xx response.
        model (`str`, *optional*): The model's name, for error messages.
        estimate_prompt (`Callable[[], int]`, *optional*): As in [`read_token_counts`].

    Returns:
        [`ParsedCompletion`]: Its reply has a text or an error: [`BadReply`], [`Refused`], or the
            error that the body reports. The token counts are read in either case, because an
            unusable answer is paid for too.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested too deeply
        not_json = BadReply(f"the endpoint's answer is not JSON: {_quote(body)}")
        # A body that begins like an object is a completion that was cut off: it may be billed.
        is_cut_completion = body.lstrip().startswith(b"{")
        return ParsedCompletion.of_error(not_json, is_billed=is_cut_completion)
    if not isinstance(data, dict):
        return ParsedCompletion.of_error(
            BadReply(f"the endpoint's answer is not a chat completion: {_quote(body)}")
        )

    # An unusable answer is paid for, too, so its tokens are read first.
    counts = read_token_counts(data, estimate_prompt)
    error = error_from_body(data, model)
    if error is not None:
        return ParsedCompletion.of_error(error, counts=counts)

    # The first choice; a body of another shape has none.
    try:
        choice = data["choices"][0]
        message = choice["message"]
        finish_reason = str(choice.get("finish_reason") or "stop")[:_MAX_FINISH_REASON_LENGTH]
        text = _read_content(message.get("content"))
        refusal = message.get("refusal")
    except (KeyError, IndexError, TypeError, AttributeError):
        error = BadReply("the endpoint's answer has no choices")
        return ParsedCompletion.of_error(error, counts=counts, is_billed="choices" in data)

    error = _find_error(choice, finish_reason, text, refusal, model)
    if error is not None:
        return ParsedCompletion.of_error(
            error, finish_reason=finish_reason, counts=counts, text=text, is_billed=True
        )
    return ParsedCompletion(Reply(text=text, finish_reason=finish_reason), counts, text)


def _find_error(
    choice: Mapping[str, Any], finish_reason: str, text: str, refusal: object, model: str
) -> LLMError | None:
    """Return why a choice is not a usable reply; `None` if it is one."""
    # A refusal is an answer: no retry changes it.
    if refusal:
        return Refused(f"the model declined: {refusal}")
    if is_filtered(finish_reason):
        return Refused("a content filter stopped the reply")
    error = error_from_choice(choice, finish_reason, model)
    if error is not None:
        return error

    # No text: a reasoning model may have used up its tokens for its thought.
    if text.strip():
        return None
    if finish_reason == "length":
        return BadReply(
            "the token limit was reached before any text: raise max_tokens (reasoning counts "
            "against it)"
        )
    return BadReply(f"the endpoint's answer has no text (finish_reason {finish_reason!r})")


def _read_content(content: object) -> str:
    """Return the text of a message's content.

    Some servers send a list of parts, which may include thoughts.
    """
    # Join the parts that are text, and leave out thoughts and images.
    if isinstance(content, list):
        texts = []
        for part in content:
            is_text_part = isinstance(part, dict) and part.get("type") in ("text", "output_text")
            if is_text_part and isinstance(part.get("text"), str):
                texts.append(part["text"])
        content = "".join(texts)
    if not isinstance(content, str):
        return ""
    return replace_surrogates(content)


def _quote(body: bytes) -> str:
    return repr(body[:MAX_READ_LENGTH].decode("utf-8", "replace"))
