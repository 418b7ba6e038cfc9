"""A time limit for foreign Python code that must not hang a run: chat templates, which come with models.

Jinja's sandbox bounds one `range`, not loops inside of loops nor macros that call themselves. A process for each
rendering would cost more than the rendering, and a thread cannot be killed. But a template is compiled to Python code,
and CPython can raise an exception in another thread between two of its steps. One watching thread does that. It counts
its own ticks and not the time, so that no rendering is ended because the process was suspended or the machine is busy.

A single step in C (a text times a huge number) is not interrupted; memory bounds it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

TEMPLATE_SECONDS = 10.0
"""The limit for a template. Ordinary ones take under a millisecond, those of a megabyte under a second."""

_TICK = 0.1
_T = TypeVar("_T")


class _OutOfTime(BaseException):
    """Raised in a thread that has worked too long; a `BaseException`, so that the code does not catch it."""


class _Watch:
    """The running calls, by thread, each with its remaining ticks."""

    def __init__(self) -> None:
        self.lock, self.at_work = threading.Lock(), threading.Event()
        self.left: dict[int, int] = {}
        threading.Thread(target=self._tick, name="time-limit", daemon=True).start()

    def _tick(self) -> None:
        while True:
            self.at_work.wait()
            time.sleep(_TICK)
            with self.lock:
                if not self.left:
                    self.at_work.clear()
                for thread in self.left:
                    self.left[thread] -= 1
                    if (
                        self.left[thread] <= 0 and self.left[thread] % 10 == 0
                    ):  # again, should something swallow it
                        _raise_in(thread, _OutOfTime)


def _raise_in(thread: int, what: type[BaseException]) -> None:
    """Raise an exception in a thread at its next step; it replaces one that is still to be raised there."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(what))


def _raise_now(thread: int) -> None:
    """Let an exception that is still to be raised in this thread be raised here.

    `PyThreadState_SetAsyncExc(thread, None)` would cancel it, but leaves the interpreter's flag set: in CPython 3.11
    the next traced or profiled function then never ends.
    """
    try:
        _raise_in(thread, _OutOfTime)
        while True:
            time.sleep(0)
    except _OutOfTime:
        pass


_watches: dict[int, _Watch] = {}  # by process: after a fork the thread is gone
_making = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_making.acquire, after_in_child=_making.release, after_in_parent=_making.release
    )


def limited(call: Callable[[], _T], what: str, seconds: float | None = None) -> _T:
    """Run `call` on this thread, for no longer than a limit.

    Args:
        call (`Callable`): Python code.
        what (`str`): The name of the code, for the error message.
        seconds (`float`, *optional*): The limit; [`TEMPLATE_SECONDS`] by default.

    Raises:
        `ValueError`: The call did not end in time.
    """
    seconds, thread = TEMPLATE_SECONDS if seconds is None else seconds, threading.get_ident()
    with _making:
        watch = _watches.get(os.getpid()) or _watches.setdefault(os.getpid(), _Watch())
    outer = None
    try:
        with watch.lock:
            outer, watch.left[thread] = watch.left.get(thread), max(1, round(seconds / _TICK))
            watch.at_work.set()
        try:
            return call()
        finally:
            with watch.lock:  # so that nothing is raised from here on
                _end(watch, thread, outer)
    except _OutOfTime:
        with watch.lock:
            _end(watch, thread, outer)
        raise ValueError(
            f"{what} did not end within {seconds:g} seconds: it loops, or is not made for this"
        ) from None


def _end(watch: _Watch, thread: int, outer: int | None) -> None:
    """Stop watching this thread's call, return to the call around it, and absorb an exception that comes too late."""
    if watch.left.pop(thread, 1) <= 0:
        _raise_now(thread)
    if outer is not None:
        watch.left[thread] = outer
