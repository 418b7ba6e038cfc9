"""One helper for futures that depend on each other. # temporary: goes with the last caller"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def then(future: Future[S], function: Callable[[S], T]) -> Future[T]:
    """The future of `function(future.result())`. Exceptions go through it forwards, cancellation backwards.

    `function` runs on the thread that completes `future`, so it must be quick.
    """
    result: Future[T] = Future()

    def finish(done: Future[S]) -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(function(done.result()))
        except BaseException as error:
            # CancelledError is one: a future that is never settled would leave its waiter hanging.
            result.set_exception(error)

    future.add_done_callback(finish)
    result.add_done_callback(lambda dropped: dropped.cancelled() and future.cancel())
    return result
