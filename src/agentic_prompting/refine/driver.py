"""Runs refinements over futures: any number on their way at once, no thread for any of them.

A refinement is a generator that yields calls (`loop.py`). Here each call is submitted, and the arrival of its reply
takes the generator to its next call. Where that happens is the caller's choice: on the caller's own thread
([`run_all`]), so that verifiers and files need no locks, or on whichever thread brings the reply ([`play`] as it is).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Future
from queue import SimpleQueue
from typing import TypeVar

from ..llm import LLMError, Reply, ServerFailed
from .loop import Call

T = TypeVar("T")
Results = Generator[tuple[int, T], None, None]
Submit = Callable[[Call], "Future[Reply]"]
Soon = Callable[[Callable[[], None]], None]


def play(work: Generator[Call, Reply, T], submit: Submit, soon: Soon = lambda run: run()) -> Future[T]:
    """Start a computation that makes calls.

    Args:
        work (`Generator`): Yields calls, is sent their replies, returns its result.
        submit (`Callable`): Makes a call. Must not block.
        soon (`Callable`, *optional*):
            Gets a function for each reply and runs it, now or later, one after another. By default at once, on the
            thread that brought the reply.

    Returns:
        `Future`: Of the result. Raises what `work` raises; a call's failure is in its reply. Cancelling it cancels the
        call in flight.
    """
    result: Future[T] = Future()
    in_flight: Future[Reply] | None = None

    def advance(reply: Reply | None) -> None:
        nonlocal in_flight
        while not result.cancelled():
            try:
                call = next(work) if reply is None else work.send(reply)
            except StopIteration as done:
                if result.set_running_or_notify_cancel():
                    result.set_result(done.value)
                return
            except BaseException as error:
                if result.set_running_or_notify_cancel():
                    result.set_exception(error)
                return
            in_flight = _submitted(submit, call)
            if not in_flight.done():
                in_flight.add_done_callback(lambda done: soon(lambda: advance(_reply(done))))
                return
            reply = _reply(in_flight)  # an instant one: a loop rather than a callback, which would nest ever deeper
        work.close()

    result.add_done_callback(lambda end: end.cancelled() and in_flight is not None and in_flight.cancel())
    advance(None)
    return result


def run_all(works: Iterable[Generator[Call, Reply, T]], submit: Submit, max_in_flight: int) -> Results[T]:
    """Run many, at most `max_in_flight` at a time; yields `(position, result)` as they finish.

    All of their code runs on the thread that iterates. Leaving the iteration early cancels the calls in flight.
    """
    waiting = enumerate(works)
    arrivals: SimpleQueue[Callable[[], None]] = SimpleQueue()
    finished: deque[Future[T]] = deque()
    running: dict[Future[T], int] = {}
    try:
        while True:
            while len(running) < max_in_flight and not finished and (start := next(waiting, None)) is not None:
                position, work = start
                future = play(work, submit, arrivals.put)
                running[future] = position
                future.add_done_callback(finished.append)
            while finished:
                future = finished.popleft()
                yield running.pop(future), future.result()
            if running:
                arrivals.get()()
            elif start is None:
                return
    finally:
        for future in running:
            future.cancel()


def _submitted(submit: Submit, call: Call) -> Future[Reply]:
    try:
        return submit(call)
    except Exception as error:  # a model that breaks the promise of `submit` fails this one call
        failed: Future[Reply] = Future()
        failed.set_exception(error)
        return failed


def _reply(future: Future[Reply]) -> Reply:
    try:
        return future.result()
    except LLMError as error:
        return Reply(error=error)
    except (Exception, CancelledError) as error:
        return Reply(error=ServerFailed(f"the model raised {type(error).__name__}: {str(error)[:200]}"))
