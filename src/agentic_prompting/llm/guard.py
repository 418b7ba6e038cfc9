"""The one place where code of the user's is called: environments, tools, rewards, judges, chat functions, rules.

Such code may raise anything. `exit()` raises `SystemExit`, which asyncio does not keep in the task that raised it: it
ends the event loop, and everything that waits on that loop waits for ever. `CancelledError` looks like a cancellation
of ours, `GeneratorExit` like the end of our coroutine, and a future cannot hold `StopIteration`. So each of these is
replaced by an [`Escaped`], an ordinary exception, before it leaves the call. Ordinary exceptions are raised as they
are. Two things pass: Ctrl-C on the main thread, and the cancellation of the task that makes the call.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import os
import sysconfig
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar

from .masking import mask_secrets
from .threads import DaemonThreads
from .waiting import watching

T = TypeVar("T")
E = TypeVar("E", bound=Exception)
_OURS = str(Path(__file__).parents[1])
_THREADS = 256  # for plain functions (environments above all); started as they are needed
_depth = contextvars.ContextVar("depth", default=0)
_INSTALLED = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


class Escaped(RuntimeError):
    """An exception of user code that would have ended more than its call.

    Args:
        original (`BaseException`): `SystemExit`, `KeyboardInterrupt`, `GeneratorExit`, `asyncio.CancelledError`,
            `StopIteration` or another exception that is no ordinary one.
    """

    def __init__(self, original: BaseException):
        super().__init__(original)
        self.original = original

    def __str__(self) -> str:
        return describe(self.original)


def contained(error: BaseException) -> Exception:
    """An ordinary exception: `error` itself where it is one, else an [`Escaped`] around it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    return Escaped(error)


def describe(error: BaseException, most: int = 200) -> str:
    """`ValueError: its text`, or the class name alone where there is no text. Never raises.

    Args:
        error (`BaseException`): An exception of user code. Its `__str__` may raise.
        most (`int`, *optional*, defaults to `200`): A longer text is cut to this many characters.
    """
    if isinstance(error, Escaped):
        error = error.original
    name, text = type(error).__name__, text_of(error, most)
    return f"{name}: {text}" if text else name


def text_of(value: object, most: int = 200, to_text: Callable[[Any], str] = str) -> str:
    """The text of a value that came from user code, with secrets masked, cut to `most` characters. Never raises: a
    `__str__` that does is named in place of the text."""
    try:
        return mask_secrets(str(to_text(value)))[:most]
    except BaseException as error:
        _raise_interrupt(error)
        return f"(its text cannot be shown: {type(error).__name__})"


def failure_of(kind: Callable[[str], E], what: str, error: BaseException) -> E:
    """An error of ours about an exception of user code: `WHAT raised KeyError: 'x' (shop.py:7 in price)`, where the
    place is the last frame of the user's own code. The whole traceback is its note ([`traceback_of`]).

    Args:
        kind (`Callable`): Makes the error of a text, for example [`ServerFailed`].
        what (`str`): A name for the user's code, such as `the environment`.
        error (`BaseException`): The exception.
    """
    original = error.original if isinstance(error, Escaped) else error
    frames = [
        one
        for one in traceback.extract_tb(original.__traceback__)
        if not one.filename.startswith(_OURS)
    ]
    failure = kind(f"{what} raised {describe(error)}{raised_in(original)}")
    lines = [
        "Traceback (most recent call last):\n",
        *traceback.format_list(frames),
        describe(error, 1000),
    ]
    failure.add_note(mask_secrets("".join(lines)))
    return failure


def raised_in(error: BaseException) -> str:
    """` (shop.py:7 in price)` where an exception comes from the user's code, or from a library that this code called;
    an empty text where it comes from ours."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next(
        (one for one in reversed(frames) if not one.filename.startswith((*_INSTALLED, "<frozen"))),
        None,
    )
    if last is None or last.filename.startswith(_OURS):
        return ""
    return f" ({last.filename}:{last.lineno} in {last.name})"


def traceback_of(error: BaseException | None) -> str:
    """The traceback that [`failure_of`] has noted, or an empty text."""
    return next(iter(getattr(error, "__notes__", ())), "")


def place_of(function: Any) -> str:
    """The name and the place of a function of the user's: `Shop.step (shop.py:12)`."""
    called = inspect.unwrap(getattr(function, "func", function))  # of a partial the function in it
    name = getattr(called, "__qualname__", type(called).__name__)
    code = getattr(called, "__code__", None) or getattr(type(called).__call__, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name


async def call_guarded(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call code of the user's and return what it returns.

    Args:
        function (`Callable`): An `async` function is awaited. A plain one runs in a thread, so that it may block; an
            awaitable that it returns is awaited.
        *args, **kwargs: Its arguments.

    Raises:
        `Exception`: Whatever the function raises; an [`Escaped`] for what is no ordinary exception.
        `asyncio.CancelledError`: The task that made this call was cancelled.
    """
    return await call_guarded_on(None, function, *args, **kwargs)


async def call_guarded_on(
    executor: Executor | None, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """As [`call_guarded`]; a plain function runs on a thread of `executor` (`None`: on one for plain functions)."""
    # `_awaited` and `_outcome` return what was raised instead of raising it: neither a thread's future nor a coroutine
    # then holds an exception that asyncio treats in a way of its own. When this coroutine is closed in the middle,
    # `GeneratorExit` is raised at the caller's `await` all the same.
    call = functools.partial(function, *args, **kwargs)
    if is_async(function):
        value, error = await _awaited(call)
    else:
        context, depth = contextvars.copy_context(), _depth.get()
        context.run(_depth.set, depth + 1)
        work = functools.partial(context.run, _outcome, call)
        value, error = await asyncio.get_running_loop().run_in_executor(
            executor or _threads(os.getpid(), depth), work
        )
        if error is None and inspect.isawaitable(value):
            value, error = await _awaited(functools.partial(_itself, value))
    try:
        if error is not None:
            raise contained(error)
        return value
    finally:
        del error  # whose traceback holds this frame


def call_guarded_now(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Call a plain function of the user's on this thread. Raises as [`call_guarded`] does."""
    value, error = _outcome(functools.partial(function, *args, **kwargs))
    try:
        if error is not None:
            raise contained(error)
        return value
    finally:
        del error


def guarded(
    function: Callable[..., Any],
    on_failure: Callable[..., Any] | None = None,
    on_return: Callable[..., Any] | None = None,
    kind: str = "function",
) -> Callable[..., Any]:
    """A function of the user's, plain or `async`, that raises ordinary exceptions only, or none. Where it takes long, a
    warning names it.

    The result is `async` exactly if `function` is, and has its name and attributes.

    Args:
        function (`Callable`): For example a reward function.
        on_failure (`Callable`, *optional*): Called with the exception and the arguments of the failed call; what it
            returns is returned in the function's place. Without it the exception is raised: an [`Escaped`] for what is
            no ordinary exception.
        on_return (`Callable`, *optional*): Called with what the function returned and the arguments of the call; what
            it returns is returned, and what it raises is raised.
        kind (`str`, *optional*, defaults to `"function"`): What it is, for the warning.

    Example:

    ```python
    def reward(completions, **columns):
        exit()

    safe = guarded(reward, lambda error, completions, **columns: [None] * len(completions))
    assert safe(completions=["a", "b"]) == [None, None]
    ```
    """

    name = f"the {kind} {place_of(function)}"
    advice = f"a {kind} has no time limit, give one to what it waits for"

    def ended(error: Exception, *args: Any, **kwargs: Any) -> Any:
        if on_failure is None:
            raise error
        return on_failure(error, *args, **kwargs)

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        try:
            with watching(name, advice):
                value = await call_guarded(function, *args, **kwargs)
        except Exception as error:
            return ended(error, *args, **kwargs)
        return value if on_return is None else on_return(value, *args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with watching(name, advice):
                value = call_guarded_now(function, *args, **kwargs)
        except Exception as error:
            return ended(error, *args, **kwargs)
        return value if on_return is None else on_return(value, *args, **kwargs)

    wrapper: Any = functools.update_wrapper(call_async if is_async(function) else call, function)
    wrapper.__name__ = getattr(function, "__name__", type(function).__name__)
    return wrapper


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` gives a coroutine: an `async def`, or an object with such a `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


async def contain(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine of our own. An exception that would end the event loop is raised as an [`Escaped`].

    The second line of defence, around every task on the background loop: for user code that no guard was put around.
    """
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        _raise_interrupt(error)
        raise Escaped(error) from None


@functools.cache
def _threads(process: int, depth: int) -> DaemonThreads:
    """The threads of plain functions: not the event loop's, which its calls need for disks and names, and for each
    depth others: a function may wait for a call that runs one of the user's functions again."""
    return DaemonThreads(_THREADS, f"agentic-prompting-{depth}")


def _itself(value: T) -> T:
    return value


async def _awaited(begin: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return await begin(), None
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
        if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
            error = error.__cause__  # what a coroutine raised before Python replaced it
        return None, error


def _outcome(function: Callable[[], T]) -> tuple[Any, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:
        _raise_interrupt(error)
        return None, error


def _raise_interrupt(error: BaseException) -> None:
    """Raise a Ctrl-C: Python delivers it on the main thread and on no other."""
    if (
        isinstance(error, KeyboardInterrupt)
        and threading.current_thread() is threading.main_thread()
    ):
        raise error
