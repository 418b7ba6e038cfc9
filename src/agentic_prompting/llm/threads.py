"""Threads for plain functions of the user's, which may never return."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class _Call(Future[Any]):
    """A call of a function. A caller that cancels it while it runs gives it up."""

    def __init__(self, pool: DaemonThreads, function: Callable[[], Any]):
        super().__init__()
        self.pool = pool
        self.function = function
        self.is_given_up = False
        self.has_ended = False

    def cancel(self) -> bool:
        is_cancelled = super().cancel()
        if not is_cancelled and self.running():
            self.pool.give_up(self)
        return is_cancelled


class DaemonThreads(Executor):
    """Threads that run plain functions, started as they are needed.

    A `ThreadPoolExecutor` is not made for functions that hang: each takes a thread from the others for good, and the
    interpreter waits for it at exit. Here a call that its caller has given up is replaced by a further thread, and no
    thread keeps the interpreter from exiting.

    Args:
        max_threads (`int`): Functions that run at once, without those that were given up.
        name (`str`): The beginning of the threads' names.
    """

    def __init__(self, max_threads: int, name: str):
        self._max_threads = max_threads
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[_Call] = deque()
        self._idle = 0
        self._threads = 0  # without those whose call was given up
        self._started = 0

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        call = _Call(self, lambda: function(*args, **kwargs))
        with self._changed:
            self._waiting.append(call)
            self._start_threads()
            self._changed.notify()
        return call

    def give_up(self, call: _Call) -> None:
        """Note that nobody waits for a running call any more."""
        with self._changed:
            if not call.is_given_up and not call.has_ended:
                call.is_given_up = True
                self._threads -= 1
                self._start_threads()

    def _start_threads(self) -> None:
        while self._threads < self._max_threads and len(self._waiting) > self._idle:
            self._threads += 1
            self._started += 1
            self._idle += 1  # until it takes a call
            threading.Thread(
                target=self._work, name=f"{self._name}_{self._started}", daemon=True
            ).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                call = self._waiting.popleft()
                self._idle -= 1
            if call.set_running_or_notify_cancel():
                try:
                    result = call.function()
                except BaseException as error:
                    call.set_exception(error)
                else:
                    call.set_result(result)
                    del result
            with self._changed:
                call.has_ended = True
                if call.is_given_up:
                    return
                self._idle += 1
            del call
