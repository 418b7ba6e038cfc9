"""The part that [`OpenAIChat`] and its HTTP client share: a call, the settings of a connection, and pure functions that
parse an endpoint's answers and remove secrets from texts.

A body without text is a failure, never an empty answer.
"""

from __future__ import annotations

import ipaddress
import json
import re
import time
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from .budget import Price
from .cache import CacheKey
from .masking import mask_secrets
from .types import BadReply, Message, Refused, Reply, Usage

_KNOWN = {"v1", "v1beta", "api", "openai", "compatible-mode", "inference", "chat", "completions", "models"}
# Control characters but tab and line feed, marks of direction, invisible tags, halves of surrogate pairs.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]"
)
_LONGEST_QUOTE = 300
_LONGEST_REASON = 40
_MOST_TOKENS = 10**9  # in one call; a count above it, or below 0, is invalid and would spoil every sum
_LONGEST_READ = 5000  # far more than is shown: keys are removed before a text is cut, or half a key could stay


class Endpoint(Protocol):
    """The settings of a client that its connections need, as documented in [`OpenAIChat`]."""

    model: str
    base_url: str
    price: Price | None
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
    usage: Usage = field(default_factory=Usage)  # of all attempts: an unusable answer is paid for too
    started: float = field(default_factory=time.perf_counter)


def read_completion(body: bytes, price: Price | None = None) -> Reply:
    """The reply in the body of a chat completion.

    Args:
        body (`bytes`): The body of a 2xx response.
        price (`tuple[float, float]`, *optional*): US dollars per million prompt and completion tokens.

    Returns:
        [`Reply`]: With a text, or with a [`BadReply`] or [`Refused`]; always with the usage, because an unusable answer
        is paid for too.
    """
    usage, reason = Usage(), "error"

    def bad(what: str) -> Reply:
        return Reply(error=BadReply(what), finish_reason=reason, usage=usage)

    start = repr(body[:_LONGEST_READ].decode("utf-8", "replace"))
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested too deeply
        return bad(f"the endpoint's answer is not JSON: {start}")
    if not isinstance(data, dict):
        return bad(f"the endpoint's answer is not a chat completion: {start}")
    counts = data.get("usage")
    usage = priced(_count(counts, "prompt_tokens"), _count(counts, "completion_tokens"), price)
    if data.get("error"):  # routers report the failure of the model behind them this way, with status 200
        return bad(f"the endpoint answered with an error: {said_by(data)}")
    try:
        choice = data["choices"][0]
        message, reason = choice["message"], str(choice.get("finish_reason") or "stop")[:_LONGEST_REASON]
        text, refusal = message.get("content"), message.get("refusal")
    except (KeyError, IndexError, TypeError, AttributeError):
        return bad("the endpoint's answer has no choices")
    if refusal or reason == "content_filter":
        why = f"the model declined: {refusal}" if refusal else "a content filter stopped the reply"
        return Reply(error=Refused(why), finish_reason=reason, usage=usage)
    if isinstance(text, list):  # some servers send a reply as a list of parts, which may include thoughts
        kinds = ("text", "output_text")
        parts = [part.get("text") for part in text if isinstance(part, dict) and part.get("type") in kinds]
        text = "".join(part for part in parts if isinstance(part, str))
    if isinstance(text, str) and text.strip():
        # A reply cut inside an emoji can hold half a surrogate pair, which tokenizers and SQLite reject.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return Reply(text=text, finish_reason=reason, usage=usage)
    if reason == "length":
        return bad("the token limit was reached before any text: raise max_tokens (reasoning counts against it)")
    return bad(f"the endpoint's answer has no text (finish_reason {reason!r})")


def _count(counts: Any, name: str) -> int:
    value = counts.get(name) if isinstance(counts, dict) else 0
    return value if type(value) is int and 0 <= value <= _MOST_TOKENS else 0


def priced(read: int, written: int, price: Price | None) -> Usage:
    """The usage of a call: tokens read and written, and their cost by US dollars per million; 0 without a price."""
    per_read, per_written = price or (0.0, 0.0)
    return Usage(read, written, (read * per_read + written * per_written) / 1e6)


def said_by(body: Any) -> str:
    """The error message in a decoded response body, in whichever field a server puts it. It may contain secrets."""
    if isinstance(body, dict):
        inner = body.get("error") or body.get("message") or body.get("detail") or body
        body = inner.get("message", inner) if isinstance(inner, dict) else inner
    return str(body)[:_LONGEST_READ] if body else ""


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
    return "/".join([f"{parts.scheme}://" * bool(parts.scheme) + parts.netloc.rpartition("@")[2], *shown])


def secrets_in(url: str) -> list[str]:
    """The parts of `url` that [`shown_url`] omits, as they are and decoded: a server may quote them."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return []
    fields = parts.query.split("&")
    pieces = [*parts.path.split("/"), parts.username, parts.password, *fields]
    pieces += [one.partition("=")[2] for one in fields]
    return [shown for piece in pieces if piece and piece not in _KNOWN for shown in (piece, unquote(piece))]


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own loopback. Asks no name server."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
