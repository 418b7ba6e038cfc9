"""What stands before every request: key, host, the size of its body and the time that has. Plain ASGI: nothing is read
before."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ..llm.wire import is_loopback
from .config import ServeConfig
from .protocol import error_body

_OPEN = ("/health",)  # for load balancers, which have no key and call it what they like; says nothing of the service
_BODY_SECONDS = 30.0
_CLOSE = {"Connection": "close"}  # what is left of a body that nobody reads would keep the connection


class Guards:
    """ASGI middleware: 401 without the key, 403 for a web page's requests, 408 and 413 for a body too slow or large.

    Where there is no key, whoever reaches the service may spend, and a web page in a browser on this machine does: its
    own name may lead to 127.0.0.1 (DNS rebinding), or it sends what it may not read the answer to. Such requests carry
    the page's name in `Host` or `Origin`.

    A request that is cut off when the service stops gets a 503.

    Args:
        app (ASGI application): What is guarded.
        config ([`ServeConfig`]): Limits, and the host whose name is allowed besides loopback's.
        key (`str`, *optional*): `None` lets every request to this host in.
    """

    def __init__(self, app: Any, config: ServeConfig, key: str | None):
        self.app, self.config, self._expected = app, config, None if key is None else f"Bearer {key}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def sending(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        now = asyncio.get_running_loop().time()
        scope.setdefault("state", {})["deadline"] = now + self.config.timeout
        refused = self._refused(scope["path"], dict(scope["headers"]))
        try:
            if refused is not None:
                await JSONResponse(*refused, headers=_CLOSE)(scope, receive, send)
            else:
                body = self._counted(receive, now + min(self.config.timeout, _BODY_SECONDS))
                await self.app(scope, body, sending)
        except asyncio.CancelledError:
            # The server's last word to requests that are still there when it stops; it does not send another.
            if not started:
                gone = error_body(503, "The service is shutting down.", "shutting_down")
                await JSONResponse(gone, 503, _CLOSE)(scope, receive, send)

    def _refused(self, path: str, headers: dict[bytes, bytes]) -> tuple[Any, int] | None:
        """The body and the status for a request that may not enter."""
        if path not in _OPEN:
            sent = headers.get(b"authorization", b"")
            if self._expected is not None and not hmac.compare_digest(sent, self._expected.encode()):
                return error_body(401, "Incorrect API key provided.", "invalid_api_key"), 401
            if self._expected is None and not self._is_for_us(headers):
                what = "Without a key the service answers to loopback names only, and to no other site's pages."
                return error_body(403, what, "host_not_allowed"), 403
        if _length(headers) > self.config.max_body_bytes:
            return error_body(413, self._too_large, "request_too_large"), 413
        return None

    def _is_for_us(self, headers: dict[bytes, bytes]) -> bool:
        host = b"//" + headers.get(b"host", b"")
        hosts = [_host(url) for url in (host, headers.get(b"origin", host))]
        return all(is_loopback(host) or host == self.config.host.lower() for host in hosts)

    @property
    def _too_large(self) -> str:
        return f"The request is larger than {self.config.max_body_bytes} bytes."

    def _counted(self, receive: Any, deadline: float) -> Any:
        """`receive`, up to the size and, while the body is coming, up to the deadline."""
        received, coming = 0, True

        async def counting() -> Any:
            nonlocal received, coming
            try:
                async with asyncio.timeout_at(deadline if coming else None):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "The request's body did not arrive in time.", _CLOSE) from None
            coming = coming and message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > self.config.max_body_bytes:
                raise HTTPException(413, self._too_large, _CLOSE)
            return message

        return counting


def _host(url: bytes) -> str:
    """The host in an address, without its port; empty if it has none."""
    try:
        return urlsplit(url.decode("latin-1")).hostname or ""
    except ValueError:
        return ""


def _length(headers: dict[bytes, bytes]) -> int:
    length = headers.get(b"content-length", b"0")
    return int(length) if length.isdigit() else 0
