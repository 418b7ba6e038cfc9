"""Many small connection pools behind one transport.

httpx's pool goes through all of its connections whenever a request begins or ends. With a thousand calls in flight that
takes longer than everything else that a call needs (measured: half of 6 ms of processor time a call); in pools of 32 it
is next to nothing.

Imports openai, 0.7 s: to be imported inside functions only.
"""

from __future__ import annotations

import asyncio
import importlib
from itertools import cycle
from typing import Any

import openai

# httpx in openai 1 and 2, its successor httpx2 from 3 on: the same classes under another name.
httpx: Any = importlib.import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])

_CONNECTIONS = 32


class Pools(httpx.AsyncBaseTransport):  # type: ignore[misc, name-defined]  # a class only known when running
    """Deals requests out to pools in turn. How many are on their way at once is the caller's affair.

    Args:
        connections (`int`): Requests on their way at once at most.
    """

    def __init__(self, connections: int):
        verify = httpx.create_ssl_context()  # one for all: making one takes longer than a pool
        # A pool may get more than its share for a moment, when the others' requests end early.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=_CONNECTIONS)
        number = -(-connections // _CONNECTIONS)
        self._pools = [httpx.AsyncHTTPTransport(verify=verify, limits=limits) for _ in range(number)]
        self._next = cycle(self._pools)

    async def handle_async_request(self, request: Any) -> Any:
        return await next(self._next).handle_async_request(request)

    async def aclose(self) -> None:
        await asyncio.gather(*(pool.aclose() for pool in self._pools))
