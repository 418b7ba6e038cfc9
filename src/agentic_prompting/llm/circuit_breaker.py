"""Keeps the calls of a batch from using up their retries while an endpoint is down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from .types import Unreachable

_MAX_FAILURES = 5  # in a row, after which an endpoint counts as down
_FIRST_PAUSE = 0.5  # seconds before an attempt at an endpoint that is down
_MAX_PAUSE = 10.0
# Seconds between attempts at an endpoint that was down for a whole patience.
_GIVEN_UP_PAUSE = 2.0
# Addresses without a connection for a whole patience, with the time of giving up: their other
# clients need not wait as long again.
_given_up_addresses: dict[str, float] = {}
_GIVEN_UP = (
    "the endpoint was down for as long as a call waits, and has not answered since: is it running?"
)
# How many `wait_out_outages` are entered: each is a training run of this process.
_patient_runs = 0


@contextmanager
def wait_out_outages() -> Iterator[None]:
    """Let every call wait its whole patience, also after others have done so in vain.

    For training, which must not use up the batches of its failure window within seconds.
    """
    global _patient_runs
    _patient_runs += 1
    try:
        yield
    finally:
        _patient_runs -= 1


class CircuitBreaker:
    """While an endpoint is down, lets one call at a time try it, at growing intervals.

    Without it, every call of a batch would use up its retries against an endpoint that is down, and
    the batch would fail; with it, the calls wait and keep their retries. An endpoint counts as down
    after five attempts in a row that ended in a connection error, a timeout or a server error. Then
    one attempt at a time is made, after a pause of 0.5 s at first, twice as long after each
    failure, at most 10 s. The first answer of any kind ends the outage. For one event loop.

    An endpoint that was down for a whole patience is given up: until it answers, later calls make
    one attempt, at most every 2 s, or fail at once. So a dead server costs the patience once.
    [`wait_out_outages`] turns this off.

    Args:
        address (`str`, *optional*): The endpoint's address. If there was no connection, all clients
            of the address give it up together.
        patience (`float`, *optional*, defaults to `120`): Seconds after which it is given up.

    Attributes:
        answered (`float`): Time of the endpoint's last answer, by `time.perf_counter`.
        pause (`float`): Seconds before the next attempt; 0 while the endpoint is up.
        pauses (`int`): How many outages there were.
    """

    def __init__(self, address: str = "", patience: float = 120) -> None:
        self.address = address
        self.patience = patience
        self.pause = 0.0
        self.pauses = 0
        self.answered = 0.0
        self._failures = 0
        self._failed_at = 0.0  # by `time.perf_counter`, as all times here
        self._down_since = 0.0
        self._has_connection = True  # whether the last failure was an answer or a late one
        self._given_up_at: float | None = None
        # Served in order of arrival, so that each attempt is made by another call.
        self._turns = asyncio.Lock()

    def was_given_up_before(self, start: float) -> bool:
        """Whether a call that was sent at `start` must not wait for the endpoint."""
        if _patient_runs:
            return False
        given_up_at = self._given_up_at
        if given_up_at is None:
            given_up_at = _given_up_addresses.get(self.address)
        return given_up_at is not None and given_up_at <= start

    @asynccontextmanager
    async def attempt(self, patience: float, is_given_up: bool = False) -> AsyncIterator[bool]:
        """Wait until an attempt may be made, at most `patience` seconds (without the last pause).

        The caller makes the attempt inside the context and then calls `alive` or `dead`. Yields
        whether the attempt probes an endpoint that is down. With `is_given_up` the attempt is made
        without a pause, or refused if another one has just failed.

        Raises:
            [`Unreachable`]: The endpoint was down for all that time.
        """
        if not self.pause:
            yield False
            return

        # Wait for the calls that are before this one.
        if is_given_up and self._has_just_failed():
            raise Unreachable(_GIVEN_UP)
        try:
            async with asyncio.timeout(patience):
                await self._turns.acquire()
            if not patience:  # acquiring a free lock never times out
                self._turns.release()
                raise TimeoutError
        except TimeoutError:
            self._give_up()
            raise Unreachable(
                "the endpoint was down for as long as a call waits for it: is it running?"
            ) from None

        # Probe the endpoint and keep the lock, so that no other call tries meanwhile.
        try:
            if is_given_up and self._has_just_failed():
                raise Unreachable(_GIVEN_UP)
            if not is_given_up:
                await asyncio.sleep(self.pause)
            if self.pause:
                yield True
                return
        finally:
            self._turns.release()

        # The endpoint has answered during the pause.
        yield False

    def _has_just_failed(self) -> bool:
        return bool(self.pause) and time.perf_counter() - self._failed_at < _GIVEN_UP_PAUSE

    def _give_up(self) -> None:
        """Note that a call has waited in vain, if the endpoint was down for a whole patience."""
        now = time.perf_counter()
        if now - self._down_since < self.patience or self._given_up_at is not None:
            return
        self._given_up_at = now
        if self.address and not self._has_connection:
            _given_up_addresses[self.address] = now

    def alive(self) -> None:
        """Note that the endpoint has answered, even if only with an error status."""
        self._failures = 0
        self._given_up_at = None
        _given_up_addresses.pop(self.address, None)
        self.pause = 0.0
        self.answered = time.perf_counter()

    def dead(self, is_probe: bool, is_certain: bool = False, has_connection: bool = True) -> None:
        """Note an attempt that ended in a connection error, a timeout or a server error.

        Args:
            is_probe (`bool`): Whether [`CircuitBreaker.attempt`] yielded `True`.
            is_certain (`bool`, *optional*, defaults to `False`): Whether this failure alone shows
                that the endpoint is down.
            has_connection (`bool`, *optional*, defaults to `True`): Whether the address could be
                connected to.
        """
        self._failures += 1
        self._failed_at = time.perf_counter()
        self._has_connection = has_connection
        if is_probe:
            self.pause = min(2 * self.pause, _MAX_PAUSE)
        elif not self.pause and (is_certain or self._failures >= _MAX_FAILURES):
            self.pause = _FIRST_PAUSE
            self.pauses += 1
            self._down_since = self._failed_at
