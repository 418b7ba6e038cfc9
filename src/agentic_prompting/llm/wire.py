"""The part that [`OpenAIChat`] and its HTTP client share: a call, the settings of a connection, and pure functions that
parse an endpoint's answers and remove secrets from texts.

A body without text is a failure, never an empty answer.
"""

from __future__ import annotations

import ipaddress
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from .budget import Price
from .cache import CacheKey
from .endpoint_errors import error_from_body, error_from_choice, is_filtered
from .masking import mask_secrets
from .types import BadReply, LLMError, Message, Refused, Reply, Usage
from .usage import TokenCounts, read_token_counts

_KNOWN = {
    "v1",
    "v1beta",
    "api",
    "openai",
    "compatible-mode",
    "inference",
    "chat",
    "completions",
    "models",
}
# Control characters but tab and line feed, marks of direction, invisible tags, halves of surrogate pairs.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]"
)
_LONGEST_QUOTE = 300
_LONGEST_REASON = 40
_LONGEST_READ = (
    5000  # far more than is shown: keys are removed before a text is cut, or half a key could stay
)


class Endpoint(Protocol):
    """The settings of a client that its connections need, as documented in [`OpenAIChat`]."""

    model: str
    base_url: str
    requests_per_minute: float | None


@dataclass
class Call:
    """One call: a copy of its conversation, its limits, and its counts over all attempts. Times in seconds."""

    messages: list[Message]
    sampling: dict[str, Any]
    key: CacheKey | None  # `None` if the cache is not used
    timeout: float  # for each attempt
    max_retries: int
    patience: float  # time left to wait for an endpoint that is down
    attempts: int = 0
    usage: Usage = field(
        default_factory=Usage
    )  # of all attempts: an unusable answer is paid for too
    started: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class Completion:
    """The contents of the body of a chat completion.

    Args:
        reply ([`Reply`]): With a text or an error; its usage is not set.
        counts ([`TokenCounts`]): The tokens that the endpoint reported.
        text (`str`, *optional*, defaults to `""`): The text of the message, also of one that is no usable reply.
        is_billed (`bool`, *optional*, defaults to `True`): Whether the endpoint may charge for it. `False` for an error
            and for a page that is no completion.
    """

    reply: Reply
    counts: TokenCounts = TokenCounts()
    text: str = ""
    is_billed: bool = True


def read_completion(
    body: bytes, model: str = "", estimate_prompt: Callable[[], int] = lambda: 0
) -> Completion:
    """The contents of the body of a chat completion.

    Args:
        body (`bytes`): The body of a 2xx response.
        model (`str`, *optional*): The model's name, for error messages.
        estimate_prompt (`Callable[[], int]`, *optional*): As in [`read_token_counts`].

    Returns:
        [`Completion`]: Its reply has a text or an error: [`BadReply`], [`Refused`], or the error that the body reports.
            The token counts are read in either case, because an unusable answer is paid for too.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested too deeply
        problem = BadReply(f"the endpoint's answer is not JSON: {_shown(body)}")
        return Completion(
            _failed(problem), is_billed=body.lstrip().startswith(b"{")
        )  # a completion that was cut
    if not isinstance(data, dict):
        problem = BadReply(f"the endpoint's answer is not a chat completion: {_shown(body)}")
        return Completion(_failed(problem), is_billed=False)

    counts = read_token_counts(data, estimate_prompt)
    error = error_from_body(data, model)
    if error is not None:
        return Completion(_failed(error), counts, is_billed=False)
    try:
        choice = data["choices"][0]
        message = choice["message"]
        finish_reason = str(choice.get("finish_reason") or "stop")[:_LONGEST_REASON]
        text = _text_of(message.get("content"))
        refusal = message.get("refusal")
    except (KeyError, IndexError, TypeError, AttributeError):
        problem = BadReply("the endpoint's answer has no choices")
        return Completion(_failed(problem), counts, is_billed="choices" in data)

    error = _error_of_choice(choice, finish_reason, text, refusal, model)
    if error is not None:
        return Completion(_failed(error, finish_reason), counts, text)
    return Completion(Reply(text=text, finish_reason=finish_reason), counts, text)


def _error_of_choice(
    choice: dict[str, Any], finish_reason: str, text: str, refusal: Any, model: str
) -> LLMError | None:
    """The reason why a choice is no reply; `None` if it is one."""
    if refusal:
        return Refused(f"the model declined: {refusal}")
    if is_filtered(finish_reason):
        return Refused("a content filter stopped the reply")
    error = error_from_choice(choice, finish_reason, model)
    if error is not None:
        return error
    if text.strip():
        return None
    if finish_reason == "length":
        hint = "raise max_tokens (reasoning counts against it)"
        return BadReply(f"the token limit was reached before any text: {hint}")
    return BadReply(f"the endpoint's answer has no text (finish_reason {finish_reason!r})")


def _text_of(content: Any) -> str:
    """The text of a message's content. Some servers send a list of parts, which may include thoughts."""
    if isinstance(content, list):
        parts = [
            part
            for part in content
            if isinstance(part, dict) and part.get("type") in ("text", "output_text")
        ]
        content = "".join(part["text"] for part in parts if isinstance(part.get("text"), str))
    if not isinstance(content, str):
        return ""
    # A reply cut inside an emoji can hold half a surrogate pair, which tokenizers and SQLite reject.
    return content.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _failed(error: LLMError, finish_reason: str = "error") -> Reply:
    return Reply(error=error, finish_reason=finish_reason)


def _shown(body: bytes) -> str:
    return repr(body[:_LONGEST_READ].decode("utf-8", "replace"))


def priced(read: int, written: int, price: Price | None) -> Usage:
    """The usage of a call: tokens read and written, and their cost by US dollars per million; 0 without a price."""
    per_read, per_written = price or (0.0, 0.0)
    return Usage(read, written, (read * per_read + written * per_written) / 1e6)


def clean(text: str, *secrets: str | None) -> str:
    """`text` for a message: on one line, short, without `secrets`, other keys and terminal control characters."""
    text = visible(" ".join(mask_secrets(text, *secrets).split()))
    return text if len(text) <= _LONGEST_QUOTE else text[: _LONGEST_QUOTE - 3] + "..."


def visible(text: str) -> str:
    """`text` with terminal control characters escaped: `\\u001b` for ESC, and so on.

    Escape sequences can set the clipboard or clear the screen, and marks of direction reverse a text. Line feeds and
    tabs stay. The escapes are those of JSON, so a line of JSON stays the same JSON.
    """
    return _STEERING.sub(_written_out, text.replace("\r\n", "\n"))


def _written_out(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


def shown_url(url: str) -> str:
    """`url` for a message: its scheme, host and port, and the end of its path if that is a common one.

    Every other part may contain a key: user and password, the query, with some gateways the path.
    """
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
    except ValueError:
        return "an address that cannot be read"
    path = [piece for piece in parts.path.split("/") if piece]
    known = list(takewhile(_KNOWN.__contains__, reversed(path)))[::-1]
    shown = ["..."] * (len(known) < len(path)) + known
    return "/".join(
        [f"{parts.scheme}://" * bool(parts.scheme) + parts.netloc.rpartition("@")[2], *shown]
    )


def secrets_in(url: str) -> list[str]:
    """The parts of `url` that [`shown_url`] omits, as they are and decoded: a server may quote them."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return []
    fields = parts.query.split("&")
    pieces = [*parts.path.split("/"), parts.username, parts.password, *fields]
    pieces += [one.partition("=")[2] for one in fields]
    return [
        shown
        for piece in pieces
        if piece and piece not in _KNOWN
        for shown in (piece, unquote(piece))
    ]


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own loopback. Asks no name server."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
