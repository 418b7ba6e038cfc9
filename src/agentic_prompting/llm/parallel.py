"""Many coroutines at once for a synchronous caller."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from .loop import background_loop, on_background_thread

T = TypeVar("T")


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
                future = asyncio.run_coroutine_threadsafe(begun[1], background_loop())
                running[future] = begun[0]
                future.add_done_callback(finished.put)
            if not running:
                return
            done = finished.get()
            yield running.pop(done), done.result()
    finally:
        for future in running:
            future.cancel()
