"""From coroutines to models, and from a synchronous caller to many coroutines at once."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine, Generator, Iterable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from .errors import LLMError, ServerFailed
from .loop import background_loop, on_background_thread
from .types import Message, Reply

T = TypeVar("T")


async def ask(model: Any, messages: Sequence[Message], **options: Any) -> Reply:
    """A chat model's reply. One that breaks its promise and raises fails this one call."""
    try:
        if hasattr(model, "submit"):  # temporary: until every chat model is awaited
            return await asyncio.wrap_future(model.submit(messages, **options))
        return await model(messages, **options)
    except LLMError as error:
        return Reply(error=error)
    except (Exception, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # it is the caller that is cancelled, not the model's own future
        if isinstance(error, asyncio.CancelledError):
            return Reply(error=ServerFailed("the model raised CancelledError: the call was cancelled"))
        return Reply(error=ServerFailed(f"the model raised {type(error).__name__}: {str(error)[:200]}"))


def is_chat_model(thing: Any) -> bool:
    """Whether something is asked with `messages`; other callables are not chat models."""
    if hasattr(thing, "submit"):  # temporary, as above
        return True
    try:
        return callable(thing) and "messages" in inspect.signature(thing).parameters
    except ValueError:  # a built-in function without a signature
        return False


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
