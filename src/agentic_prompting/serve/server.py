"""[`Server`] runs the web application of a service, with limits for its connections;
[`run_service`] until Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

from ..programs.connections import BoundedConnection
from ..programs.gateway import http_logger
from .app import make_app, requests_log
from .service import Service

_GRACE_SECONDS = 10  # seconds for the requests that are open when the service stops
_ERROR_SECONDS = 2.0  # seconds for sending them the error that the service stops
_HEAD_SECONDS = 10.0  # seconds for the head of a request to arrive
_BACKLOG = 128  # asyncio takes as many connections at a time, before any can be turned away
# Beside those of the requests answered at once: to be refused, idle, asked for metrics.
_SPARE_CONNECTIONS = 256


class ConnectionLimits:
    """The open connections of a server. Their number and the time without a request are limited.

    A connection is looked at every few seconds, and closed when it has had no request since the
    last look.

    Args:
        max_connections (`int`): Further ones are refused.

    Attributes:
        make_protocol (`Callable`): Creates the HTTP protocol of a connection. Set by the server.
    """

    make_protocol: Callable[[], asyncio.Protocol]

    def __init__(self, max_connections: int):
        self.max_connections = max_connections
        self._transports: dict[asyncio.Protocol, asyncio.Transport] = {}
        self._timers: dict[asyncio.Protocol, asyncio.TimerHandle] = {}
        self._active: set[asyncio.Protocol] = set()  # have had a request since the last look
        self._busy: set[asyncio.Protocol] = set()  # have a request now

    def has_room(self) -> bool:
        """Return whether one more connection is allowed."""
        return len(self._transports) < self.max_connections

    def add(self, protocol: asyncio.Protocol, transport: asyncio.Transport) -> None:
        """Register an open connection."""
        self._transports[protocol] = transport
        self._look_later(protocol)

    def remove(self, protocol: asyncio.Protocol) -> None:
        """Forget a connection that was closed."""
        del self._transports[protocol]
        self._timers.pop(protocol).cancel()
        self._active.discard(protocol)
        self._busy.discard(protocol)

    def middleware(self) -> Any:
        """Note which connections have a request."""

        @web.middleware
        async def note(request: web.Request, handler: Any) -> web.StreamResponse:
            protocol = request.protocol
            self._busy.add(protocol)
            try:
                response: web.StreamResponse = await handler(request)
                return response
            finally:
                self._busy.discard(protocol)
                # The connection may have been lost while its request was answered.
                if protocol in self._transports:
                    self._active.add(protocol)

        return note

    def _look_later(self, protocol: asyncio.Protocol) -> None:
        loop = asyncio.get_running_loop()
        self._timers[protocol] = loop.call_later(_HEAD_SECONDS, self._look_at, protocol)

    def _look_at(self, protocol: asyncio.Protocol) -> None:
        is_quiet = protocol not in self._busy and protocol not in self._active
        self._active.discard(protocol)
        self._look_later(protocol)
        # Its client is idle, or does not finish the head of a request.
        if is_quiet:
            self._transports[protocol].close()


class Server:
    """A server of a service.

    It runs in the thread that calls `run`, until `stop` is called in any thread.

    Args:
        service ([`Service`]): The service.

    Attributes:
        has_started (`threading.Event`): Set when it accepts connections.
        is_interrupted (`bool`): Whether a signal has stopped it.
    """

    def __init__(self, service: Service):
        self.service = service
        self.app = make_app(service)
        self.has_started = threading.Event()
        self.is_interrupted = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()

    def run(self, listener: socket.socket) -> None:
        """Serve on a socket. Open requests have ten seconds to end, and then get a 503."""
        asyncio.run(self._serve(listener))

    def stop(self) -> None:
        """Stop serving."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._stop.set)

    async def _serve(self, listener: socket.socket) -> None:
        # Accept connections.
        self._loop = asyncio.get_running_loop()
        runner = web.AppRunner(
            self.app,
            access_log=None,  # ours has no address of a client, and what an answer took
            handler_cancellation=True,  # an episode is stopped when its client hangs up
            shutdown_timeout=_ERROR_SECONDS,
            lingering_time=_ERROR_SECONDS,
            auto_decompress=False,
            logger=http_logger,
        )

        # Limit the connections. This middleware comes first, so it sees refused requests too.
        max_connections = self.service.config.max_concurrency + _SPARE_CONNECTIONS
        limits = ConnectionLimits(max_connections)
        self.app.middlewares.insert(0, limits.middleware())
        await runner.setup()
        assert runner.server is not None
        limits.make_protocol = runner.server
        server = await self._loop.create_server(
            lambda: BoundedConnection(limits), sock=listener, backlog=_BACKLOG
        )
        # Only the main thread can handle signals. Elsewhere `stop` is called.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.add_signal_handler(number, self._interrupt)
        self.has_started.set()
        await self._stop.wait()

        # Let the open requests end, and tell those that do not.
        server.close()
        await self._wait_until_idle(_GRACE_SECONDS)
        self.service.shutdown.set()
        await self._wait_until_idle(_ERROR_SECONDS)
        await runner.cleanup()

    def _interrupt(self) -> None:
        self.is_interrupted = True
        self._stop.set()

    async def _wait_until_idle(self, seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while self.service.in_flight and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)


def run_service(service: Service) -> None:
    """Serve until interrupted, with a line per request on standard error; prints the address once
    it listens.

    Open requests have ten seconds to end, and then get a 503.

    Raises:
        `ValueError`: If the address needs a key and there is none.
        `SystemExit`: If the address cannot be listened on, with the reason on standard error.
        `KeyboardInterrupt`: When a signal has stopped it, after the last request.
    """
    # Log the requests, unless the caller has set up this log.
    if not requests_log.handlers:
        lines = logging.StreamHandler()
        lines.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        requests_log.addHandler(lines)
        requests_log.setLevel(logging.INFO)

    # Listen, and print the address with its actual port.
    server = Server(service)
    try:
        listener = service.config.bind()
    except OSError as error:
        sys.exit(f"cannot listen on {service.config.host}, port {service.config.port}: {error}")
    listener.listen(_BACKLOG)
    address = f"{service.config.host}:{listener.getsockname()[1]}"
    print(f"http://{address}/v1  models: {', '.join(service.models)}  (Ctrl-C stops)", flush=True)
    for name, model in service.models.items():
        row_fields = getattr(model, "row_fields", ())
        if row_fields:
            print(f"fields of a row that {name} takes: {', '.join(row_fields)}", flush=True)

    # Serve until it is stopped. After a signal, end as Ctrl-C ends any program.
    server.run(listener)
    if server.is_interrupted:
        raise KeyboardInterrupt
