"""Bounds the connections to the network of one rollout, and ties them to the key of that
rollout.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Protocol, cast

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 128  # of one rollout at a time


class RolloutNetwork:
    """Serves HTTP on a socket that only one rollout can reach.

    Args:
        key (`str`): The key of the rollout.
        make_protocol (`Callable`): Creates the HTTP protocol of a connection.
        connection_keys (`dict[asyncio.Protocol, str]`): Filled with the key for each open
            connection, by its HTTP protocol.

    Attributes:
        transports (`dict[asyncio.Protocol, asyncio.Transport]`): The open connections.
    """

    def __init__(
        self,
        key: str,
        make_protocol: Callable[[], asyncio.Protocol],
        connection_keys: dict[asyncio.Protocol, str],
    ):
        self.key = key
        self.make_protocol = make_protocol
        self.connection_keys = connection_keys
        self.transports: dict[asyncio.Protocol, asyncio.Transport] = {}
        self._server: asyncio.Server | None = None
        self._has_warned = False

    async def listen(self, listener: socket.socket) -> None:
        """Accept connections on a socket."""
        # Not the HTTP protocol itself: each connection has to count towards the limit first.
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: BoundedConnection(self), sock=listener)

    def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._server is not None:
            self._server.close()
        # Open connections outlive their server.
        for transport in list(self.transports.values()):
            transport.abort()

    def has_room(self) -> bool:
        """Return whether one more connection is allowed. The first refusal is logged."""
        if len(self.transports) < MAX_CONNECTIONS:
            return True
        # A program that leaks connections would fill the log.
        if not self._has_warned:
            logger.warning(
                "a rollout has %d open connections: further ones are refused", MAX_CONNECTIONS
            )
            self._has_warned = True
        return False

    def add(self, protocol: asyncio.Protocol, transport: asyncio.Transport) -> None:
        """Register an open connection."""
        # The gateway finds the key by the protocol, which each of its requests has.
        self.transports[protocol] = transport
        self.connection_keys[protocol] = self.key

    def remove(self, protocol: asyncio.Protocol) -> None:
        """Forget a connection that was closed."""
        del self.transports[protocol]
        del self.connection_keys[protocol]


class ConnectionLimit(Protocol):
    """Decides which connections are made: a [`RolloutNetwork`] for one."""

    make_protocol: Callable[[], asyncio.Protocol]

    def has_room(self) -> bool: ...

    def add(self, protocol: asyncio.Protocol, transport: asyncio.Transport) -> None: ...

    def remove(self, protocol: asyncio.Protocol) -> None: ...


class BoundedConnection(asyncio.Protocol):
    """A connection that counts towards a limit. Passes everything on to an HTTP protocol.

    It counts from the moment it is made until it is lost. asyncio creates the protocols of several
    connections before any of them is made, so their number says nothing.

    Args:
        limit ([`ConnectionLimit`]): The limit.
    """

    def __init__(self, limit: ConnectionLimit):
        self._limit = limit
        self._http: asyncio.Protocol | None = None  # None if the connection was refused

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        # The HTTP server never hears of a refused connection.
        if not self._limit.has_room():
            transport.abort()
            return
        self._http = self._limit.make_protocol()
        self._limit.add(self._http, transport)
        self._http.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        # A refused connection was never counted.
        if self._http is not None:
            self._limit.remove(self._http)
            self._http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._http is not None:
            self._http.data_received(data)

    def eof_received(self) -> bool | None:
        return self._http.eof_received() if self._http is not None else None

    def pause_writing(self) -> None:
        if self._http is not None:
            self._http.pause_writing()

    def resume_writing(self) -> None:
        if self._http is not None:
            self._http.resume_writing()
