"""Where the service listens, who may ask, and how much a request and a connection may take.

Plain ASGI and a bounded HTTP protocol: nothing of a request is read before.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..llm.wire import is_loopback
from .protocol import error_body

KEY_VARIABLE = "AGENTIC_PROMPTING_API_KEY"
_OPEN = ("/health",)  # for load balancers, which have no key and call it what they like; says nothing of the service
_BODY_SECONDS = 30.0
_CLOSE = {"Connection": "close"}  # what is left of a body that nobody reads would keep the connection
_HEAD_SECONDS = 10.0  # for a connection to say what it wants


@dataclass(frozen=True)
class ServeConfig:
    """The settings of the service.

    Args:
        host (`str`, *optional*, defaults to `"127.0.0.1"`): Address to listen on. Any other than this machine's own
            loopback needs a key.
        port (`int`, *optional*, defaults to `8080`): Port to listen on; 0 takes a free one.
        key_variable (`str`, *optional*, defaults to `"AGENTIC_PROMPTING_API_KEY"`): Environment variable that holds the
            key. Where it is set, requests without it get a 401, on loopback too.
        max_concurrency (`int`, *optional*, defaults to `256`): Requests answered at once; further ones get a 429.
        max_body_bytes (`int`, *optional*, defaults to 1 MiB): Larger requests get a 413.
        timeout (`float`, *optional*, defaults to `120.0`): Seconds for a request, its body included, after which it is
            stopped: 504; 408 while the body is still coming, for which there are 30 seconds at most.
        max_cost_usd (`float`, *optional*): Dollars that one request may cost: 402. By default any.
        greedy (`bool`, *optional*, defaults to `False`): Take the likeliest token each time instead of sampling as in
            training, for every request; without it for those with `temperature=0`.

    Raises:
        `ValueError`: If a limit is not positive.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    key_variable: str = KEY_VARIABLE
    max_concurrency: int = 256
    max_body_bytes: int = 2**20
    timeout: float = 120.0
    max_cost_usd: float | None = None
    greedy: bool = False

    def __post_init__(self):
        limits = (self.max_concurrency, self.max_body_bytes, self.timeout)
        if min(limits) <= 0 or (self.max_cost_usd is not None and self.max_cost_usd <= 0):
            raise ValueError(f"every limit of the service must be positive, got {self}")

    def find_key(self) -> str | None:
        """The key, read at start and kept nowhere else.

        Raises:
            `ValueError`: If other machines could ask and there is none.
        """
        key = os.environ.get(self.key_variable, "").strip()
        if not key and not is_loopback(self.host):
            raise ValueError(
                f"listening on {self.host}, where other machines can ask, needs a key: set {self.key_variable}, or "
                "listen on 127.0.0.1"
            )
        return key or None


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


# Connections ----------------------------------------------------------------------------------------------------------


def bounded_protocol(most: int) -> type[H11Protocol]:
    """HTTP over at most so many connections."""
    return type("Bounded", (_Bounded,), {"max_connections": most})


class _Bounded(H11Protocol):
    """uvicorn's HTTP, which waits for ever for a request to be said and takes any number of connections, without both.

    A connection without a request is looked at every few seconds, and closed when it has been one since the last look.
    """

    max_connections: int

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= self.max_connections:
            transport.abort()
            return
        super().connection_made(transport)
        self._quiet_since: Any = self.cycle
        self._look_again()

    def _look_again(self) -> None:
        self._look = self.loop.call_later(_HEAD_SECONDS, self._close_if_quiet)

    def _close_if_quiet(self) -> None:
        is_quiet = self.cycle is None or self.cycle.response_complete
        if is_quiet and self._quiet_since is self.cycle:
            self.transport.close()
            return
        self._quiet_since = self.cycle if is_quiet else asyncio  # anything that is no cycle
        self._look_again()

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self.connections:
            self._look.cancel()
            super().connection_lost(exc)
