"""Threads for plain user functions, which may never return."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _FunctionCall(Future[T], Generic[T]):
    """The future of one function call. Cancelling it while the function runs abandons the call."""

    def __init__(self, pool: DaemonThreads, function: Callable[[], T]):
        super().__init__()
        self.pool = pool
        self.function = function
        self.is_abandoned = False
        self.has_ended = False

    def cancel(self) -> bool:
        is_cancelled = super().cancel()
        if not is_cancelled and self.running():
            self.pool.abandon(self)
        return is_cancelled


class DaemonThreads(Executor):
    """A pool of threads that run plain functions, started as they are needed.

    A `ThreadPoolExecutor` is not made for functions that hang: each one occupies a thread for good,
    and the interpreter waits for it at exit. Here the thread of an abandoned call is replaced by a
    new one, and no thread keeps the interpreter from exiting.

    Args:
        max_threads (`int`): How many functions may run at once, not counting abandoned calls.
        name (`str`): The prefix of the threads' names.
    """

    def __init__(self, max_threads: int, name: str):
        self._max_threads = max_threads
        self._name = name
        self._changed = threading.Condition()
        self._waiting_calls: deque[_FunctionCall[object]] = deque()
        self._idle_threads = 0
        self._threads = 0  # without those whose call was abandoned
        self._started_threads = 0

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        call = _FunctionCall(self, lambda: function(*args, **kwargs))
        with self._changed:
            self._waiting_calls.append(call)  # type: ignore[arg-type]  # Future is invariant
            self._start_threads()
            self._changed.notify()
        return call

    def abandon(self, call: _FunctionCall[T]) -> None:
        """Replace the thread of a running call that its caller has given up."""
        with self._changed:
            if call.is_abandoned or call.has_ended:
                return
            call.is_abandoned = True
            self._threads -= 1
            self._start_threads()

    def _start_threads(self) -> None:
        while self._threads < self._max_threads and len(self._waiting_calls) > self._idle_threads:
            self._threads += 1
            self._started_threads += 1
            self._idle_threads += 1  # until it takes a call
            name = f"{self._name}_{self._started_threads}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        """Run one waiting call after the other, until a call of this thread is abandoned."""
        while True:
            # Take the oldest call.
            with self._changed:
                while not self._waiting_calls:
                    self._changed.wait()
                call = self._waiting_calls.popleft()
                self._idle_threads -= 1

            # Run it, unless it was cancelled before.
            if call.set_running_or_notify_cancel():
                try:
                    result = call.function()
                except BaseException as error:
                    call.set_exception(error)
                else:
                    call.set_result(result)
                    del result

            # An abandoned call has been replaced by another thread.
            with self._changed:
                call.has_ended = True
                if call.is_abandoned:
                    return
                self._idle_threads += 1
            del call  # an idle thread must not keep a result alive
