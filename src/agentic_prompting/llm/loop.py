"""One asyncio event loop on one daemon thread, shared by every wait of this process, and the doors to it.

Why one: an HTTP client of asyncio lives and dies with the loop it was first used on. A loop per batch
(`asyncio.run`) fails with "Event loop is closed" at the second batch; a loop of the caller's (a notebook's) is not
ours to block. Made at the first call, so that importing costs nothing and every process of a launch has its own.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet

T = TypeVar("T")

_END_SECONDS = 2.0
_THREADS = 256  # for plain functions (environments above all) and disks; made as they are needed


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run `coroutine` on the background loop and wait for what it returns or raises.

    Works from any thread, also one whose own event loop is running (a notebook's), which it holds up meanwhile. On
    Ctrl-C the coroutine is cancelled.

    Raises:
        `RuntimeError`: Called on the background loop's own thread, which would wait for itself: `await` there. Or the
            interpreter is shutting down.
    """
    if on_background_thread():
        coroutine.close()
        raise RuntimeError("this waits for the event loop on the event loop's own thread: await it instead")
    tasks: list[asyncio.Task[Any] | None] = []

    async def held() -> T:
        tasks.append(asyncio.current_task())
        return await coroutine

    try:
        return start(held()).result()
    except BaseException:  # Ctrl-C may come at any moment, also before `start` has given its future back
        with suppress(RuntimeError):
            background_loop().call_soon_threadsafe(lambda: [task.cancel() for task in tasks if task])
        raise


def start(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run `coroutine` on the background loop; what it returns comes later. Cancelling the future cancels it.

    Raises:
        `RuntimeError`: The interpreter is shutting down and the loop is gone.
    """
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, background_loop())
    except RuntimeError:
        coroutine.close()
        raise


def in_parallel(works: Iterable[Coroutine[Any, Any, T]], max_in_flight: int) -> Generator[tuple[int, T], None, None]:
    """Run many coroutines on the background loop; yields `(position, result)` to a synchronous caller as they finish.

    At most `max_in_flight` run at a time. The next is taken from `works`, on the caller's thread, when the caller has
    dealt with what is there. Leaving the iteration early cancels what is running. Also works in a notebook.

    Raises:
        `RuntimeError`: On the background loop's own thread, which would wait for itself: await the coroutines there.
    """
    if on_background_thread():
        raise RuntimeError("this runs on the event loop of the models' calls and would wait for itself: use `await`")
    waiting, finished = enumerate(works), SimpleQueue[Future[T]]()
    running: dict[Future[T], int] = {}
    began = 0
    try:
        while True:
            while (
                len(running) < max_in_flight
                and (began < max_in_flight or finished.empty())
                and (begun := next(waiting, None)) is not None
            ):
                began += 1
                future = start(begun[1])
                running[future] = begun[0]
                future.add_done_callback(finished.put)
            if not running:
                return
            done = finished.get()
            yield running.pop(done), done.result()
    finally:
        for future in running:
            future.cancel()


class _Background:
    """The loop of one process, and who has to be closed (`close()`) before it ends."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.users: WeakSet[Any] = WeakSet()
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(ThreadPoolExecutor(_THREADS, "agentic-prompting"))
        self.thread = threading.Thread(target=self.loop.run_forever, name="agentic-prompting-llm", daemon=True)
        self.thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """At interpreter exit: end every wait, then the loop. Never takes long, whatever a server does."""
        if self.pid != os.getpid() or self.loop.is_closed():
            return
        for user in list(self.users):
            user.close()
        asyncio.run_coroutine_threadsafe(self._end(), self.loop)
        self.thread.join(_END_SECONDS)
        if not self.thread.is_alive():
            self.loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=_END_SECONDS / 2)
        self.loop.stop()


_lock = threading.Lock()
_current: _Background | None = None
# What a fork leaves behind. Letting it be collected would take the parent's sockets out of the epoll set that both
# processes share, so it is kept and never touched.
_left_by_fork: list[_Background] = []


def background_loop(user: Any = None) -> asyncio.AbstractEventLoop:
    """The running loop of this process, started on first use.

    Args:
        user (*optional*): Its `close()` is called before the loop stops at interpreter exit; held by a weak reference.

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


def on_background_thread() -> bool:
    """Whether the caller runs on the loop's thread, where waiting would hold up everything."""
    return _current is not None and threading.current_thread() is _current.thread


def _reset_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_lock)  # a fork may have copied the lock while it was held
