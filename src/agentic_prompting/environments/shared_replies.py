"""[`SharedReplies`]: sends identical requests once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import replace

from ..llm import Reply, Usage

# With `async_lead`, episodes of several steps are played at the same time.
_MAX_BATCHES = 16


class SharedReplies:
    """Sends identical requests of a batch once; they share the reply, also while the call is in
    flight.

    The replies of the 16 batches used last are kept. For coroutines of one event loop.
    """

    def __init__(self) -> None:
        self._batches: OrderedDict[str, dict[Hashable, asyncio.Future[Reply | None]]] = (
            OrderedDict()
        )

    def __reduce__(self) -> tuple[type[SharedReplies], tuple[()]]:
        # A copy starts empty.
        return type(self), ()

    async def ask(
        self, batch: str, request: Hashable, call: Callable[[], Awaitable[Reply]]
    ) -> Reply:
        """Return the reply to an identical request of the batch, or else the reply of `call`.

        If the shared call fails or is cancelled, one of those who wait makes the next call, and the
        rest wait for that one. After a second failure each makes its own call: otherwise many would
        wait for many outages in turn.

        Args:
            batch (`str`): Identifies the batch.
            request (`Hashable`): Identifies the request in the batch.
            call (`Callable`): Sends the request.
        """
        # Forget the batch that has not been used for the longest time.
        calls = self._batches.setdefault(batch, {})
        self._batches.move_to_end(batch)
        while len(self._batches) > _MAX_BATCHES:
            self._batches.popitem(last=False)

        # The first one calls, the others wait for it.
        for _ in range(2):
            if request not in calls:
                return await self._call(calls, request, call)
            reply = await asyncio.shield(calls[request])
            # `None` means that the shared call failed or was cancelled.
            if reply is not None:
                return replace(reply, usage=Usage(), saved=reply.worth, shared=True, attempts=0)
        return await call()

    async def _call(
        self,
        calls: dict[Hashable, asyncio.Future[Reply | None]],
        request: Hashable,
        call: Callable[[], Awaitable[Reply]],
    ) -> Reply:
        # The others find this future while the call is in flight.
        future: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        calls[request] = future
        shared_reply = None
        try:
            reply = await call()
            # A failed reply is not shared.
            if reply.error is None:
                shared_reply = reply
            return reply
        # Wake the others. After a failure the next of them calls.
        finally:
            if shared_reply is None:
                del calls[request]
            future.set_result(shared_reply)
