"""Keeps the calls of a batch from using up their retries while an endpoint is down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from .types import Unreachable

_MAX_FAILURES = 5  # in a row, after which an endpoint counts as down
_FIRST_PAUSE = 0.5  # seconds before an attempt at an endpoint that is down
_MAX_PAUSE = 10.0


class CircuitBreaker:
    """While an endpoint is down, lets one call at a time try it, at growing intervals.

    Without it, every call of a batch would use up its retries against an endpoint that is down, and
    the batch would fail; with it, the calls wait and keep their retries. An endpoint counts as down
    after five attempts in a row that ended in a connection error, a timeout or a server error. Then
    one attempt at a time is made, after a pause of 0.5 s at first, twice as long after each
    failure, at most 10 s. The first answer of any kind ends the outage. For one event loop.

    Attributes:
        answered (`float`): Time of the endpoint's last answer, by `time.perf_counter`.
        pause (`float`): Seconds before the next attempt; 0 while the endpoint is up.
        pauses (`int`): How many outages there were.
    """

    def __init__(self) -> None:
        self.pause = 0.0
        self.pauses = 0
        self.answered = 0.0
        self._failures = 0
        # Served in order of arrival, so that each attempt is made by another call.
        self._turns = asyncio.Lock()

    @asynccontextmanager
    async def attempt(self, patience: float) -> AsyncIterator[bool]:
        """Wait until an attempt may be made, at most `patience` seconds (without the last pause).

        The caller makes the attempt inside the context and then calls `alive` or `dead`. Yields
        whether the attempt probes an endpoint that is down.

        Raises:
            [`Unreachable`]: The endpoint was down for all that time.
        """
        if not self.pause:
            yield False
            return

        # Wait for the calls that are before this one.
        try:
            async with asyncio.timeout(patience):
                await self._turns.acquire()
            if not patience:  # acquiring a free lock never times out
                self._turns.release()
                raise TimeoutError
        except TimeoutError:
            raise Unreachable(
                "the endpoint was down for as long as a call waits for it: is it running?"
            ) from None

        # Probe the endpoint and keep the lock, so that no other call tries meanwhile.
        try:
            await asyncio.sleep(self.pause)
            if self.pause:
                yield True
                return
        finally:
            self._turns.release()

        # The endpoint has answered during the pause.
        yield False

    def alive(self) -> None:
        """Note that the endpoint has answered, even if only with an error status."""
        self._failures = 0
        self.pause = 0.0
        self.answered = time.perf_counter()

    def dead(self, is_probe: bool, is_certain: bool = False) -> None:
        """Note an attempt that ended in a connection error, a timeout or a server error.

        Args:
            is_probe (`bool`): Whether [`CircuitBreaker.attempt`] yielded `True`.
            is_certain (`bool`, *optional*, defaults to `False`): Whether this failure alone shows
                that the endpoint is down.
        """
        self._failures += 1
        if is_probe:
            self.pause = min(2 * self.pause, _MAX_PAUSE)
        elif not self.pause and (is_certain or self._failures >= _MAX_FAILURES):
            self.pause = _FIRST_PAUSE
            self.pauses += 1
