"""The background event loop of this process, on a daemon thread, and functions that use it.

There is one loop for everything, because an asyncio HTTP client works only on the loop that first
used it. A loop per batch (`asyncio.run`) fails with "Event loop is closed" at the second batch, and
the caller's own loop (a notebook's) must not be blocked. The loop is created at the first call, so
importing costs nothing and every process of a launch has its own.

If the loop ends while something waits on it, every waiting future fails with a [`LoopEnded`] that
names the cause, and so does every later call: no coroutine that was running on the loop can finish
any more.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
from collections.abc import Coroutine, Generator, Iterable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from .guard import await_contained, describe

T = TypeVar("T")

logger = logging.getLogger(__name__)

_END_SECONDS = 2.0
_HOLD_SECONDS = 3600.0
_SHUTTING_DOWN = "the event loop of the models' calls has ended: the interpreter is shutting down"
_MAX_THREADS = 256  # for disks and host names; started as they are needed


class Closable(Protocol):
    """An object that is closed before the background loop stops."""

    def close(self) -> None: ...


class LoopEnded(RuntimeError):
    """The background event loop of this process has ended; the message names the cause.

    Restart the process.
    """


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run `coroutine` on the background loop, wait, and return its result or raise its exception.

    May be called from any thread, also from one whose own event loop is running (a notebook's),
    which is blocked meanwhile. Ctrl-C cancels the coroutine.

    Raises:
        [`LoopEnded`]: The background loop has ended, before or during the call.
        `RuntimeError`: The caller is on the background loop's own thread, which would wait for
            itself: use `await` there. Or the interpreter is shutting down.
    """
    if on_background_thread():
        coroutine.close()
        raise RuntimeError(
            "this waits for the event loop on the event loop's own thread: use `await` there"
        )

    # Remember the task, so that Ctrl-C on this thread can cancel it on the loop.
    tasks: list[asyncio.Task[Any]] = []

    async def run_in_task() -> T:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        return await await_contained(coroutine)

    def cancel_tasks() -> None:
        for task in tasks:
            task.cancel()

    try:
        return _schedule(run_in_task(), coroutine).result()
    except BaseException:
        # Ctrl-C may come at any moment, even before there is a future.
        with suppress(RuntimeError):
            background_loop().call_soon_threadsafe(cancel_tasks)
        raise


def start(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run `coroutine` on the background loop and return a future of its result.

    Cancelling the future cancels the coroutine.

    Raises:
        [`LoopEnded`]: The background loop has ended. If it ends later, the future fails with this
            error.
        `RuntimeError`: The interpreter is shutting down.
    """
    return _schedule(await_contained(coroutine), coroutine)


def _schedule(outer: Coroutine[Any, Any, T], inner: Coroutine[Any, Any, Any]) -> Future[T]:
    """Return a future of `outer`, which awaits `inner`.

    Closes both if there is no loop to run them.
    """
    try:
        background_loop()
        assert _current is not None
        return _current.submit(outer)
    except RuntimeError:
        outer.close()
        inner.close()
        raise


def in_parallel(
    coroutines: Iterable[Coroutine[Any, Any, T]], max_in_flight: int
) -> Generator[tuple[int, T], None, None]:
    """Run many coroutines on the background loop for a synchronous caller.

    Yields `(position, result)` as each finishes. At most `max_in_flight` run at a time. The next
    one is taken from `coroutines`, on the caller's thread, after the caller has consumed the
    results that are available. Leaving the iteration early cancels the running coroutines. May be
    used in a notebook.

    Raises:
        [`LoopEnded`]: The background loop has ended.
        `RuntimeError`: The caller is on the background loop's own thread, which would wait for
            itself: await the coroutines there.
    """
    if on_background_thread():
        raise RuntimeError(
            "this runs on the event loop of the models' calls and would wait for itself: use "
            "`await`"
        )
    pending = enumerate(coroutines)
    finished: SimpleQueue[Future[T]] = SimpleQueue()
    running: dict[Future[T], int] = {}  # with their positions
    started = 0
    try:
        while True:
            # Start more; after the first batch only when no result is waiting to be consumed.
            while len(running) < max_in_flight and (started < max_in_flight or finished.empty()):
                position, coroutine = next(pending, (-1, None))
                if coroutine is None:
                    break
                future = start(coroutine)
                started += 1
                running[future] = position
                future.add_done_callback(finished.put)
            if not running:
                return
            # Block until any of them has finished, in whatever order.
            done = finished.get()
            yield running.pop(done), done.result()
    finally:
        for future in running:
            future.cancel()


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order.

    The first that fails cancels the others, and its exception is raised.
    """
    tasks = [asyncio.create_task(await_contained(coroutine)) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        # Tasks that are done ignore this; wait for the end of the others.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Background:
    """The loop of one process, its thread, and the futures that wait on it.

    Its users are closed before it ends.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.users: WeakSet[Closable] = WeakSet()
        self.error: LoopEnded | None = None  # set when the loop has ended
        self.is_ending = False  # the interpreter is shutting down: no new coroutine is taken
        self._waiting: set[Future[Any]] = set()
        # Guards the three attributes above. Reentrant, because a client that is garbage-collected
        # while a coroutine is submitted closes its connections on this loop, too.
        self._lock = threading.RLock()
        self._is_stopping = False
        self._has_ended = threading.Event()
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(ThreadPoolExecutor(_MAX_THREADS, "agentic-prompting"))
        # A daemon thread, so that a loop that hangs does not keep the process alive.
        self.thread = threading.Thread(target=self._run, name="agentic-prompting-llm", daemon=True)
        self.thread.start()
        atexit.register(self.stop)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine, and return its future.

        The future fails with a [`LoopEnded`] if the loop ends first.

        Raises:
            [`LoopEnded`]: The loop has ended.
            `RuntimeError`: The interpreter is shutting down.
        """
        # Under the lock, so that the end of the loop cannot come in between.
        with self._lock:
            if self.is_ending:
                raise RuntimeError(_SHUTTING_DOWN)
            if self.error is not None:
                raise LoopEnded(*self.error.args)
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
            self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    def stop(self) -> None:
        """End every wait, then the loop. Called at interpreter exit.

        Takes two seconds at most, whatever a server does.
        """
        if self.pid != os.getpid() or self.is_ending:
            return
        self._is_stopping = True
        # Clients end their calls with an error of their own before the loop ends.
        for user in list(self.users):
            with suppress(LoopEnded):
                user.close()
        with self._lock:
            self.is_ending = True

        # A loop that has ended before, by an error, has nothing left to be done.
        if self.error is None:
            asyncio.run_coroutine_threadsafe(self._end(), self.loop)
            self._has_ended.wait(_END_SECONDS)

    def _run(self) -> None:
        """Run the loop on its thread, and fail everything that waits on it when it ends."""
        cause = "it was stopped from outside"
        try:
            self.loop.run_forever()
        except BaseException as error:
            # For example `exit()` in a task that user code has put on this loop.
            cause = describe(error)
        message = (
            f"the event loop of the models' calls has ended ({cause}): nothing that waits on it "
            "can finish"
        )
        # From here on, a new future fails at once; those before it fail below.
        with self._lock:
            self.error = LoopEnded(message)
            waiting = list(self._waiting)
        if not self._is_stopping:
            logger.critical(message)
        for future in waiting:
            _fail(future, self.error)

        # The loop can be closed if no task is left in it.
        if asyncio.all_tasks(self.loop):
            self._hold_tasks()
        self.loop.close()
        self._has_ended.set()

    async def _end(self) -> None:
        """Cancel every other task of the loop, wait until they have ended, then stop it."""
        this_task = asyncio.current_task()
        for task in asyncio.all_tasks() - {this_task}:
            task.cancel()

        # Wait for the tasks that they start to clean up, too.
        deadline = self.loop.time() + _END_SECONDS / 2
        while tasks := asyncio.all_tasks() - {this_task}:
            seconds_left = deadline - self.loop.time()
            if seconds_left <= 0:
                self._hold_tasks()
            await asyncio.wait(tasks, timeout=seconds_left)
        self.loop.stop()

    def _hold_tasks(self) -> None:
        """Keep this thread, and with it the tasks that have not ended, until the process is gone.

        If such a task were collected, asyncio would print an error, and the task's coroutine would
        run its `finally` clauses without a loop.
        """
        tasks = asyncio.all_tasks(self.loop)
        self._has_ended.set()
        while tasks:
            time.sleep(_HOLD_SECONDS)


def _fail(future: Future[Any], error: LoopEnded) -> None:
    with suppress(InvalidStateError):  # it was done, or cancelled, at the same moment
        future.set_exception(LoopEnded(*error.args))


_lock = threading.RLock()
_current: _Background | None = None
# The loops that this process inherited by forks. They are kept and never used: collecting one would
# remove the parent's sockets from the epoll set that both processes share.
_left_by_fork: list[_Background] = []


def background_loop(user: Closable | None = None) -> asyncio.AbstractEventLoop:
    """Return the running loop of this process, started on first use.

    Args:
        user (*optional*): Its `close()` is called before the loop stops at interpreter exit; kept
            by a weak reference.

    Raises:
        [`LoopEnded`]: The loop has ended.
        `RuntimeError`: The interpreter is shutting down and the loop is closed.
    """
    global _current
    with _lock:
        # A forked process starts a loop of its own: threads do not survive a fork.
        if _current is None or _current.pid != os.getpid():
            if _current is not None:
                _left_by_fork.append(_current)
            _current = _Background()
        if _current.is_ending:
            raise RuntimeError(_SHUTTING_DOWN)
        if _current.error is not None:
            raise LoopEnded(*_current.error.args)
        if user is not None:
            _current.users.add(user)
        return _current.loop


def end() -> None:
    """End the background loop of this process, as interpreter exit does.

    Only for code that runs at interpreter exit.
    """
    if _current is not None:
        _current.stop()


def loop_error() -> LoopEnded | None:
    """The background loop's fatal error; `None` while it runs or has not started."""
    if _current is None or _current.pid != os.getpid():
        return None
    return _current.error


def on_background_thread() -> bool:
    """Whether the caller is on the loop's thread, where waiting would block every call."""
    return _current is not None and threading.current_thread() is _current.thread


def _reset_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    # A fork may have copied the lock while it was held.
    os.register_at_fork(after_in_child=_reset_lock)
