"""[`check_access`]: who may use the service."""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from aiohttp import web

from ..llm.addresses import is_loopback
from ..programs import Refusal

# For load balancers, which have no key and use any host name. It reveals nothing about the service.
OPEN_PATHS = ("/health",)


def check_access(request: web.Request, key: str | None, host: str) -> None:
    """Refuse a request without the key; if there is no key, one that a web page has caused.

    Without a key, every client that reaches the service may spend. A web page in a browser on this
    machine can reach it: its own name may lead to 127.0.0.1 (DNS rebinding), or it sends a request
    whose answer it may not read. Such requests carry the page's name in `Host` or `Origin`.

    Args:
        request (`web.Request`): The request.
        key (`str`, *optional*): The key; `None` lets every request to this host in.
        host (`str`): The host whose name is allowed besides loopback's.

    Raises:
        [`Refusal`]: 401 or 403.
    """
    if request.path in OPEN_PATHS:
        return
    # With a key, compare it in constant time: the time must not tell how much of it is right.
    if key is not None:
        sent_key = find_key(request).encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(sent_key, key.encode()):
            raise Refusal(401, "Incorrect API key provided.", "invalid_api_key")
        return

    # Without a key, look at the names. Without an `Origin`, only that in `Host` counts.
    host_url = "//" + request.headers.get("Host", "")
    for url in (host_url, request.headers.get("Origin", host_url)):
        name = _host_name(url)
        if not is_loopback(name) and name != host.lower():
            message = (
                "Without a key the service answers to loopback names only, and to no other site's "
                "pages."
            )
            raise Refusal(403, message, "host_not_allowed")


def find_key(request: web.Request) -> str:
    """Return the key of a request, in the header that its vendor's clients use; empty if there is
    none.
    """
    # OpenAI's clients send a bearer token, Anthropic's and Google's a header of their own.
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme == "Bearer" and token:
        return token
    for name in ("x-api-key", "x-goog-api-key"):
        if name in request.headers:
            return request.headers[name]
    return request.query.get("key", "")


def _host_name(url: str) -> str:
    """Return the host in an address, without its port; empty if it has none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
