"""Waits for user code (an environment's step, a tool, a reward), with a warning when it takes long.

A thread of its own watches, because an `async` function that blocks stops the event loop and every
timer on it.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from .types import TimedOut

T = TypeVar("T")

logger = logging.getLogger(__name__)

_FIRST_WARNING = 30.0  # seconds; the next warning follows after twice as long, and so on
_TICK = 1.0  # seconds between two looks at the calls
_BLOCKED = 5.0  # seconds without a sign of life after which an event loop counts as blocked
_GRACE = 5.0  # seconds that a cancelled step has for its clean-up


@dataclass
class _PendingCall:
    """A call that has not returned."""

    name: str
    advice: str
    start: float
    task: asyncio.Task[Any] | None = None  # if it runs on an event loop


class _CallMonitor:
    """The calls of this process that have not returned, and the thread that watches them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_calls = threading.Event()
        self._numbers = itertools.count()
        self._calls: dict[int, _PendingCall] = {}
        # By name: the seconds after which the next warning is due.
        self._next_warning: dict[str, float] = {}
        self._signs_of_life: dict[asyncio.AbstractEventLoop, float] = {}
        threading.Thread(target=self._run, name="agentic-prompting-watch", daemon=True).start()

    @contextmanager
    def watching(self, call: _PendingCall) -> Iterator[None]:
        """The context in which a call is watched."""
        number = next(self._numbers)
        with self._lock:
            self._calls[number] = call
        self._has_calls.set()
        try:
            yield
        finally:
            with self._lock:
                del self._calls[number]

    def _run(self) -> None:
        while True:
            # Sleeps without a tick while there is nothing to watch.
            self._has_calls.wait()
            time.sleep(_TICK)
            with self._lock:
                calls = list(self._calls.values())
                if not calls:
                    self._has_calls.clear()
                    self._signs_of_life.clear()
            self._warn(calls)

    def _warn(self, calls: list[_PendingCall]) -> None:
        """Warn about calls that take too long, once for each name."""
        now = time.monotonic()
        blocking_tasks = self._find_blocking_tasks(calls, now)

        # Calls of the same name share one warning.
        overdue_calls: dict[str, list[_PendingCall]] = {}
        for call in calls:
            if now - call.start >= self._next_warning.get(call.name, _FIRST_WARNING):
                overdue_calls.setdefault(call.name, []).append(call)
        blocking_names = {
            name
            for name, named_calls in overdue_calls.items()
            if any(call.task in blocking_tasks for call in named_calls)
        }

        for name, named_calls in overdue_calls.items():
            # Others cannot go on before the call that blocks the loop does.
            if blocking_names and name not in blocking_names:
                continue
            longest = max(now - call.start for call in named_calls)
            # The next warning comes after twice the time.
            self._next_warning[name] = 2 * longest

            text = f"{name} has not returned for {longest:.0f} s"
            if len(named_calls) > 1:
                text += f" ({len(named_calls)} calls)"
            if name in blocking_names:
                text += (
                    " and blocks every rollout: an `async` function must not block, make it a plain "
                    "`def`"
                )
            else:
                text += f"; {named_calls[0].advice}"
            logger.warning(text)

    def _find_blocking_tasks(
        self, calls: list[_PendingCall], now: float
    ) -> list[asyncio.Task[Any]]:
        """Return the tasks that run on event loops without a sign of life.

        Asks every loop for its next sign of life.
        """
        tasks = []
        for loop in {call.task.get_loop() for call in calls if call.task is not None}:
            # A loop that is met for the first time counts as alive.
            last_sign = self._signs_of_life.setdefault(loop, now)
            running_task = asyncio.current_task(loop)
            if now - last_sign >= _BLOCKED and running_task is not None:
                tasks.append(running_task)
            try:
                loop.call_soon_threadsafe(self._note_sign_of_life, loop)
            except RuntimeError:  # the loop has ended
                continue
        return tasks

    def _note_sign_of_life(self, loop: asyncio.AbstractEventLoop) -> None:
        self._signs_of_life[loop] = time.monotonic()


@functools.cache
def _monitor_of(process: int) -> _CallMonitor:
    """Return the monitor of a process: a fork has no thread."""
    return _CallMonitor()


@contextmanager
def watching(name: str, advice: str) -> Iterator[None]:
    """The context of a call that blocks this thread; warns after half a minute.

    Args:
        name (`str`): Names the call in the warning.
        advice (`str`): The end of the warning: what the user can do.
    """
    call = _PendingCall(name, advice, start=time.monotonic())
    with _monitor_of(os.getpid()).watching(call):
        yield


async def wait_for(work: Coroutine[Any, Any, T], name: str, limit: float | None = None) -> T:
    """Await user code, and warn after half a minute that it has not returned.

    It runs in a task of its own, so that code which catches its cancellation can be left behind.

    Args:
        work (`Coroutine`): The call.
        name (`str`): Names it in warnings and in the error: `the environment Shop.step
            (shop.py:12)`.
        limit (`float`, *optional*): Seconds that it may take.

    Raises:
        [`TimedOut`]: It took longer.
    """
    task = asyncio.ensure_future(work)
    if limit is None:
        advice = "it has no time limit, set step_timeout"
    else:
        advice = f"its rollout fails after {limit:g} s (step_timeout)"
    call = _PendingCall(name, advice, start=time.monotonic(), task=task)
    with _monitor_of(os.getpid()).watching(call):
        try:
            # Without a cancellation, which the task may catch, so that it would never return.
            await asyncio.wait({task}, timeout=limit)
        except asyncio.CancelledError:
            _abandon(task)
            await asyncio.wait({task}, timeout=_GRACE)
            raise
    if task.done():
        return task.result()
    _abandon(task)
    raise TimedOut(
        f"{name} did not return within {limit:g} s: set a time limit on what it waits for, or raise "
        "step_timeout"
    )


def _abandon(task: asyncio.Task[Any]) -> None:
    """Cancel a task and ignore its result."""
    task.cancel()
    task.add_done_callback(_retrieve_exception)


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Keep asyncio from logging a task's exception as never retrieved."""
    if not task.cancelled():
        task.exception()
