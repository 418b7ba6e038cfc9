"""What an OpenAI-compatible endpoint sends, read: pure functions from bytes to a [`Reply`], no HTTP.

The rule of this file: a body that holds no text is a failure, never an empty answer.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from .errors import BadReply, LLMError, Refused
from .pricing import Price, priced
from .types import Reply, Usage

_SECRETS = re.compile(r"\bsk-[\w*.\-]{4,}|(?<=Bearer )[^\s'\"]+", re.IGNORECASE)
_LONGEST_QUOTE = 300
_LONGEST_REASON = 40
_MOST_TOKENS = 10**9  # in one call; a count above it, or below 0, is no count, and would upset every sum it got into
_LONGEST_READ = 5000  # far more than is shown: a text is cut only after the key is out, or half a key would stay


@dataclass
class Call:
    """The account of one call over all its attempts, kept by the HTTP half.

    Args:
        timeout (`float`): Seconds for each attempt.
        patience (`float`): Seconds that it may still wait for an endpoint that is down.
        price (`tuple[float, float]`, *optional*): See [`OpenAIChat`].
        attempts (`int`, *optional*, defaults to `0`): Requests sent so far.
        usage ([`Usage`], *optional*): Of all attempts: an answer that was no use is paid for too.
        reply ([`Reply`], *optional*): What the last 2xx response held.
    """

    timeout: float
    patience: float
    price: Price | None = None
    attempts: int = 0
    usage: Usage = field(default_factory=Usage)
    reply: Reply | None = None


def read_completion(body: bytes, price: Price | None = None) -> Reply:
    """The reply in the body of a chat completion.

    Args:
        body (`bytes`): The body of a 2xx response.
        price (`tuple[float, float]`, *optional*): US dollars per million prompt and completion tokens.

    Returns:
        [`Reply`]: With a text, or with a [`BadReply`] or [`Refused`]; with the usage in each case, since an unusable
        answer is paid for as well.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, nested without end
        return _bad(f"the endpoint's answer is not JSON: {_start(body)}")
    if not isinstance(data, dict):
        return _bad(f"the endpoint's answer is not a chat completion: {_start(body)}")
    usage = _usage(data.get("usage"), price)
    if data.get("error"):  # routers report the failure of the model behind them this way, with status 200
        return _bad(f"the endpoint answered with an error: {said_by(data)}", usage)
    try:
        choice = data["choices"][0]
        message, finish_reason = choice["message"], str(choice.get("finish_reason") or "stop")[:_LONGEST_REASON]
        text, refusal = message.get("content"), message.get("refusal")
    except (KeyError, IndexError, TypeError, AttributeError):
        return _bad("the endpoint's answer has no choices", usage)
    if refusal or finish_reason == "content_filter":
        why = f"the model declined: {refusal}" if refusal else "a content filter stopped the reply"
        return Reply(error=Refused(why), finish_reason=finish_reason, usage=usage)
    if not isinstance(text, str) or not text.strip():
        return _bad(_why_empty(finish_reason), usage, finish_reason)
    # A reply cut inside an emoji can hold half a surrogate pair, which neither a tokenizer nor SQLite takes.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return Reply(text=text, finish_reason=finish_reason, usage=usage)


def worth_retrying(reply: Reply) -> bool:
    """Whether the same request may well get a usable body next time.

    A refusal is an answer. A reply that used up its tokens before the first word of text (a reasoning model under a
    small `max_tokens`) would do so again, at full price.
    """
    return isinstance(reply.error, BadReply) and reply.finish_reason != "length"


def said_by(body: Any) -> str:
    """The error message in a decoded response body, wherever this server puts it. Not cleaned of secrets."""
    if isinstance(body, dict):
        inner = body.get("error") or body.get("message") or body.get("detail") or body
        body = inner.get("message", inner) if isinstance(inner, dict) else inner
    return str(body)[:_LONGEST_READ] if body else ""


def clean(text: str, key: str | None = None) -> str:
    """`text` fit to be shown: on one line, short, without the key or anything that looks like one."""
    if key and len(key) > 5:  # shorter ones ("none", "EMPTY") are placeholders and ordinary words
        text = text.replace(key, "[key]")
    text = " ".join(_SECRETS.sub("[key]", text).split())
    return text if len(text) <= _LONGEST_QUOTE else text[: _LONGEST_QUOTE - 3] + "..."


def shown_url(url: str) -> str:
    """`url` fit to be shown: without user, password and query, where keys are put as well."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def with_details(error: LLMError, where: str, attempts: int, key: str | None) -> LLMError:
    """A copy of `error` that says where and how often, free of the key, of its traceback and of its cause."""
    return type(error)(clean(error.what, key), where, attempts, error.status)


def _bad(what: str, usage: Usage | None = None, finish_reason: str = "error") -> Reply:
    return Reply(error=BadReply(what), finish_reason=finish_reason, usage=usage or Usage())


def _start(body: bytes) -> str:
    return repr(body[:_LONGEST_READ].decode("utf-8", "replace"))


def _why_empty(finish_reason: str) -> str:
    if finish_reason == "length":
        return "the token limit was reached before any text: raise max_tokens (reasoning counts against it)"
    return f"the endpoint's answer has no text (finish_reason {finish_reason!r})"


def _usage(usage: Any, price: Price | None) -> Usage:
    counts = usage if isinstance(usage, dict) else {}
    return priced(_count(counts.get("prompt_tokens")), _count(counts.get("completion_tokens")), price)


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value <= _MOST_TOKENS else 0
