"""The circuit breaker: a dead endpoint is asked by one call at a time, at growing intervals, until it answers again.

Without it every call of a batch burns its retries against an endpoint that is down, and the batch is lost; with it the
calls wait, their retries unspent, and go on when the endpoint is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from .errors import Unreachable

_FAILURES = 5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0


class Breaker:
    """Lets attempts through while the endpoint lives. To be used on one event loop.

    Down: five attempts in a row found nobody, no answer in time or a server error. Then one attempt after another is
    let through, with a pause before it of 0.5 s at first, twice as long after each failure, 10 s at most. The first
    answer of any kind ends it. A false alarm (five unlucky attempts in a row) costs the first pause.

    Attributes:
        pause (`float`): Before the next attempt, in seconds; 0 while the endpoint lives.
        pauses (`int`): How often the endpoint was found to be down.
    """

    def __init__(self) -> None:
        self.pause = 0.0
        self.pauses = 0
        self._failures = 0
        self._turns = asyncio.Lock()  # served in the order of arrival: each failed attempt is another call's

    @asynccontextmanager
    async def attempt(self, patience: float) -> AsyncIterator[bool]:
        """Wait until an attempt makes sense, and make it inside. How it went is told to `alive` or `dead`.

        Args:
            patience (`float`): Wait for so many seconds at most, a last pause not counted.

        Yields:
            `bool`: Whether it is the one attempt that finds out if the endpoint is back.

        Raises:
            [`Unreachable`]: The endpoint was down for all that time.
        """
        if self.pause:
            await self._wait_for_turn(patience)
            try:
                await asyncio.sleep(self.pause)
                if self.pause:
                    yield True  # holding the lock: nobody else meanwhile
                    return
            finally:
                self._turns.release()
        yield False

    def alive(self) -> None:
        """The endpoint has answered, be it with a refusal."""
        self._failures, self.pause = 0, 0.0

    def dead(self, probing: bool) -> None:
        """An attempt found nobody, no answer in time, or a server error."""
        self._failures += 1
        if probing:
            self.pause = min(2 * self.pause, _LONGEST_PAUSE)
        elif not self.pause and self._failures >= _FAILURES:
            self.pause, self.pauses = _FIRST_PAUSE, self.pauses + 1

    async def _wait_for_turn(self, patience: float) -> None:
        try:
            async with asyncio.timeout(patience):
                await self._turns.acquire()
        except TimeoutError:
            raise Unreachable("the endpoint was down for as long as a call waits for it: is it running?") from None
