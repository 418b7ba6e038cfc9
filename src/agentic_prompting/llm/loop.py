"""One asyncio event loop on one daemon thread, shared by every client of this process.

Why one: an HTTP client of asyncio lives and dies with the loop it was first used on. A loop per batch
(`asyncio.run`) fails with "Event loop is closed" at the second batch; a loop of the caller's (a notebook's) is not
ours to block. Made at the first call, so that importing costs nothing and every process of a launch has its own.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

_JOIN_SECONDS = 2.0
_THREADS = 256

T = TypeVar("T")


class Closable(Protocol):
    """What has to be closed before the loop is."""

    def close(self) -> None: ...


class _Background:
    """The loop of one process and what has to be closed before the loop is."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.users: WeakSet[Closable] = WeakSet()
        self.loop = asyncio.new_event_loop()
        # For what blocks, above all environments that are plain functions. asyncio's own would take six at a time here.
        self.loop.set_default_executor(ThreadPoolExecutor(_THREADS, thread_name_prefix="agentic-prompting"))
        self.thread = threading.Thread(target=self.loop.run_forever, name="agentic-prompting-llm", daemon=True)
        self.thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """At interpreter exit: end every call in flight, then the loop. Never waits long, whatever a server does."""
        if self.pid != os.getpid():
            return
        for user in list(self.users):
            user.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(_JOIN_SECONDS)
        if not self.thread.is_alive():
            self.loop.close()


_lock = threading.Lock()
_current: _Background | None = None
# What a fork leaves behind. Letting it be collected would take the parent's sockets out of the epoll set that both
# processes share, so it is kept and never touched.
_left_by_fork: list[_Background] = []


def background_loop(user: Closable | None = None) -> asyncio.AbstractEventLoop:
    """The running loop of this process, started on first use.

    Args:
        user (`Closable`, *optional*): Closed before the loop stops at interpreter exit; held by a weak reference.

    Raises:
        `RuntimeError`: The interpreter is shutting down and the loop is gone.
    """
    global _current
    with _lock:
        if _current is None or _current.pid != os.getpid():
            if _current is not None:
                _left_by_fork.append(_current)
            _current = _Background()
        if _current.loop.is_closed():
            raise RuntimeError("the event loop is closed: the interpreter is shutting down")
        if user is not None:
            _current.users.add(user)
        return _current.loop


def start(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine on the background loop. Cancelling the future cancels it."""
    return asyncio.run_coroutine_threadsafe(coroutine, background_loop())


def on_background_thread() -> bool:
    """Whether the caller runs on the loop's thread, as a callback of a future does: waiting there blocks all calls."""
    return _current is not None and threading.current_thread() is _current.thread


def _reset_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_lock)  # a fork may have copied the lock while it was held
