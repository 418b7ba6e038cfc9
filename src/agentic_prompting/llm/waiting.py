"""Waiting for code of the user's (an environment's step, a tool, a reward) and naming who is waited for.

A thread of its own watches, because an `async` function that blocks stops the event loop and every timer on it.
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

_FIRST_WARNING = (
    30.0  # seconds until it is said who is waited for; then after twice as many, and so on
)
_TICK = 1.0  # seconds between two looks at those who are waited for
_BLOCKED = 5.0  # seconds without a sign of life after which an event loop counts as blocked
_GRACE = 5.0  # seconds that a cancelled step has for its clean-up


@dataclass
class _Wait:
    """A call that has not returned."""

    name: str
    advice: str
    began: float
    task: asyncio.Task[Any] | None = None  # where it runs on an event loop


class _Watch:
    """The calls of this process that have not returned, and the thread that looks at them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_work = threading.Event()
        self._numbers = itertools.count()
        self._waits: dict[int, _Wait] = {}
        self._next_warning: dict[
            str, float
        ] = {}  # by name: the seconds after which the next warning is due
        self._signs_of_life: dict[asyncio.AbstractEventLoop, float] = {}
        threading.Thread(target=self._run, name="agentic-prompting-watch", daemon=True).start()

    @contextmanager
    def watching(self, wait: _Wait) -> Iterator[None]:
        """The context in which a call is waited for."""
        number = next(self._numbers)
        with self._lock:
            self._waits[number] = wait
        self._has_work.set()
        try:
            yield
        finally:
            with self._lock:
                del self._waits[number]

    def _run(self) -> None:
        while True:
            self._has_work.wait()
            time.sleep(_TICK)
            with self._lock:
                waits = list(self._waits.values())
                if not waits:
                    self._has_work.clear()
                    self._signs_of_life.clear()
            self._warn(waits)

    def _warn(self, waits: list[_Wait]) -> None:
        """Warn of those who have been waited for too long, each by name."""
        now = time.monotonic()
        blocking = self._find_blocking_tasks(waits, now)
        overdue: dict[str, list[_Wait]] = {}
        for wait in waits:
            if now - wait.began >= self._next_warning.get(wait.name, _FIRST_WARNING):
                overdue.setdefault(wait.name, []).append(wait)
        is_blocker_known = any(wait.task in blocking for name in overdue for wait in overdue[name])
        for name, calls in overdue.items():
            longest = max(now - wait.began for wait in calls)
            is_blocking = any(wait.task in blocking for wait in calls)
            if is_blocker_known and not is_blocking:
                continue  # it cannot go on before the one that blocks the loop does
            self._next_warning[name] = 2 * longest
            logger.warning(_warning(name, longest, len(calls), calls[0].advice, is_blocking))

    def _find_blocking_tasks(self, waits: list[_Wait], now: float) -> list[asyncio.Task[Any]]:
        """The tasks that run on event loops that have given no sign of life; asks every loop for the next one."""
        tasks = []
        for loop in {wait.task.get_loop() for wait in waits if wait.task is not None}:
            last = self._signs_of_life.setdefault(loop, now)
            running = asyncio.current_task(loop)
            if now - last >= _BLOCKED and running is not None:
                tasks.append(running)
            try:
                loop.call_soon_threadsafe(self._note_sign_of_life, loop)
            except RuntimeError:  # the loop has ended
                continue
        return tasks

    def _note_sign_of_life(self, loop: asyncio.AbstractEventLoop) -> None:
        self._signs_of_life[loop] = time.monotonic()


def _warning(name: str, seconds: float, calls: int, advice: str, is_blocking: bool) -> str:
    text = f"{name} has not returned for {seconds:.0f} s"
    if calls > 1:
        text += f" ({calls} calls)"
    if is_blocking:
        return f"{text} and blocks every rollout: an `async` function must not block, make it a plain `def`"
    return f"{text}; {advice}"


@functools.cache
def _watch_of(process: int) -> _Watch:
    """The watch of a process: a fork has no thread."""
    return _Watch()


@contextmanager
def watching(name: str, advice: str) -> Iterator[None]:
    """The context of a call that blocks this thread; warns after half a minute that it is waited for.

    Args:
        name (`str`): Names it in the warning.
        advice (`str`): The end of the warning: what can be done.
    """
    with _watch_of(os.getpid()).watching(_Wait(name, advice, time.monotonic())):
        yield


async def wait_for(work: Coroutine[Any, Any, T], name: str, limit: float | None = None) -> T:
    """Await code of the user's, and warn after half a minute that it is waited for.

    It runs in a task of its own, so that code which catches its cancellation can be left behind.

    Args:
        work (`Coroutine`): The call.
        name (`str`): Names it in warnings and in the error: `the environment Shop.step (shop.py:12)`.
        limit (`float`, *optional*): Seconds that it may take.

    Raises:
        [`TimedOut`]: It took longer.
    """
    task = asyncio.ensure_future(work)
    if limit is None:
        advice = "it has no time limit, set step_timeout"
    else:
        advice = f"its rollout fails after {limit:g} s (step_timeout)"
    with _watch_of(os.getpid()).watching(_Wait(name, advice, time.monotonic(), task)):
        try:
            await asyncio.wait({task}, timeout=limit)
        except asyncio.CancelledError:
            _abandon(task)
            await asyncio.wait({task}, timeout=_GRACE)
            raise
    if task.done():
        return task.result()
    _abandon(task)
    raise TimedOut(
        f"{name} did not return within {limit:g} s: give what it waits for a limit, or raise step_timeout"
    )


def _abandon(task: asyncio.Task[Any]) -> None:
    task.cancel()
    task.add_done_callback(
        lambda ended: ended.cancelled() or ended.exception()
    )  # else asyncio logs its exception
