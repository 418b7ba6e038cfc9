"""The life of one call to an endpoint, on the event loop's thread: recorded? a place free? ask, count, answer.

The other half of [`OpenAIChat`], which is what callers see on their own threads. One [`Calls`] belongs to one client in
one process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from .cache import CacheKey, ReplayCache
from .endpoint import Endpoint
from .errors import BadRequest, Closed, LLMError, Misconfigured
from .ledger import Ledger
from .types import Message, Reply
from .wire import Call, secrets_in, with_details

if TYPE_CHECKING:
    from .openai_http import Http

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """One `submit`, as the conversation was when it was made. `key` is `None` where the cache has no part in it."""

    messages: list[Message]
    sampling: dict[str, Any]
    key: CacheKey | None
    max_retries: int
    timeout: float
    started: float = field(default_factory=time.perf_counter)


class Calls:
    """The calls of one client in one process. All but the constructor runs on the event loop's thread."""

    def __init__(self, endpoint: Endpoint, ledger: Ledger, cache: ReplayCache | None):
        self.endpoint, self.ledger, self.cache = endpoint, ledger, cache
        self.pid = os.getpid()
        self.closed = False
        self._slots = asyncio.Semaphore(endpoint.max_concurrency)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._asking: WeakValueDictionary[tuple[bytes, int], asyncio.Lock] = WeakValueDictionary()
        self._http: Http | None = None

    async def answer(self, request: Request) -> Reply:
        """The reply to one request. Raises nothing but the cancellation of the caller's own future."""
        call, reply = (
            Call(request.timeout, request.max_retries, self.endpoint.patience, self.endpoint.price),
            Reply(error=Closed("cancelled")),
        )
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            reply = await self._recorded_or_asked(request, call)
        except asyncio.CancelledError:
            if not self.closed:
                raise  # the caller cancelled its future
            reply = Reply(error=Closed("the client was closed"))
        except LLMError as error:
            reply = Reply(error=error)
        except Exception as error:  # a fault in here fails one call, not the thread all calls share
            logger.debug("a call to %s failed in an unforeseen way", self.endpoint.where, exc_info=True)
            reply = Reply(error=BadRequest(f"{type(error).__name__}: {error}"))
        finally:
            self._tasks.discard(task)
            reply = self._complete(reply, call, request.started)
            self.ledger.add(reply)
        return reply

    async def shut_down(self) -> None:
        """End all calls with [`Closed`] and close the connections."""
        self.closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def _recorded_or_asked(self, request: Request, call: Call) -> Reply:
        if self.cache is None or request.key is None:
            return await self._ask(request, call)
        # Who wants the same sample meanwhile waits here, then finds it recorded. A lock, not a shared task: when the
        # first one is cancelled or fails, the next one asks for itself.
        lock = self._asking.setdefault(request.key[:2], asyncio.Lock())
        async with lock:
            reply = await asyncio.to_thread(self.cache.get, request.key)
            if reply is None:
                reply = await self._ask(request, call)
            return reply

    async def _ask(self, request: Request, call: Call) -> Reply:
        async with self._slots:
            if self.closed:
                raise Closed("the client is closed")
            await self._in_thread(self.ledger.stop_when_spent)
            from . import openai_http  # 0.7 s, at the first call only

            self._http = self._http or openai_http.Http(self.endpoint, self._key())
            try:
                reply = await self._http.ask(request.messages, request.sampling, call)
            finally:
                self.ledger.pay(call.usage)
            await self._in_thread(self._keep, request.key, replace(reply, usage=call.usage))
            return reply

    async def _in_thread(self, function: Callable[..., None], *args: Any) -> None:
        """What may wait for a disk, off the loop: there it would hold up every call of every client."""
        if self.cache is None and self.ledger.budget.path is None:
            function(*args)  # nothing that waits
        else:
            await asyncio.to_thread(function, *args)

    def _keep(self, key: CacheKey | None, reply: Reply) -> None:
        if self.cache is not None and key is not None:
            try:
                self.cache.put(key, reply)
            except Exception:  # a reply that is here and paid for is not taken away
                logger.exception("a reply could not be recorded in %r", self.cache)
        self.ledger.budget.settle()

    def _key(self) -> str:
        key = self.endpoint.find_key()
        if key is None and self.endpoint.needs_key:
            raise Misconfigured(
                "no key: set OPENAI_API_KEY or pass api_key= (a literal key is not carried into other processes), "
                "or base_url= for a server of your own"
            )
        return key or "none"

    def _complete(self, reply: Reply, call: Call, started: float) -> Reply:
        error = reply.error
        if error is not None:
            secrets = [self.endpoint.find_key(), *secrets_in(self.endpoint.base_url)]
            error = with_details(error, self.endpoint.where, call.attempts, *secrets)
        seconds = time.perf_counter() - started
        return replace(reply, error=error, usage=call.usage, attempts=call.attempts, seconds=seconds)
