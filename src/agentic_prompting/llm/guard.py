"""Calls user code: environments, tools, rewards, judges, chat functions, rules. Nothing else does.

Such code may raise anything. `exit()` raises `SystemExit`, which asyncio does not keep in the task
that raised it: it ends the event loop, and everything that waits on that loop waits forever.
`CancelledError` looks like a cancellation of ours, `GeneratorExit` like the end of our coroutine,
and a future cannot hold `StopIteration`. So each of these is replaced by an [`Escaped`], an
ordinary exception, before it leaves the call. Ordinary exceptions are raised unchanged. Two things
pass through: Ctrl-C on the main thread, and the cancellation of the task that makes the call.

Such code may also take forever. [`watching`] and [`wait_for`] log a warning that names a call which
takes long. A thread of its own watches, because an `async` function that blocks stops the event
loop and every timer on it.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import itertools
import logging
import os
import re
import sysconfig
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from .masking import mask_secrets
from .threads import DaemonThreads
from .types import TimedOut

T = TypeVar("T")
E = TypeVar("E", bound=Exception)
F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger(__name__)

_MAX_THREADS = 256  # for plain functions (environments above all); started as they are needed
_MAX_LENGTH = 200  # of an exception's text
_call_depth = contextvars.ContextVar("depth", default=0)

# Calls that take long.
_FIRST_WARNING = 30.0  # seconds of a call; the next warning follows after twice as long, and so on
_TICK = 1.0  # seconds between two looks at the calls
_BLOCKED = 5.0  # seconds of silence after which an event loop counts as blocked
_GRACE = 5.0  # seconds that a cancelled step has for its clean-up

# ` (shop.py:7 in price)` or ` (shop.py:12)`
_PLACE = re.compile(r" \([^()]*:\d+(?: in [^()]+)?\)")

# Where the code of this package and of installed libraries lies.
_package_folders = [str(Path(__file__).parents[1])]
_LIBRARY_FOLDERS = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


class Escaped(RuntimeError):
    """An exception of user code that would have ended more than its call.

    Args:
        original (`BaseException`): `SystemExit`, `KeyboardInterrupt`, `GeneratorExit`,
            `asyncio.CancelledError`, `StopIteration` or another exception that is not an ordinary
            one.
    """

    def __init__(self, original: BaseException):
        super().__init__(original)
        self.original = original

    def __str__(self) -> str:
        return describe(self.original)


def to_ordinary_exception(error: BaseException) -> Exception:
    """Return `error` if it is an ordinary exception, else an [`Escaped`] around it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    return Escaped(error)


def describe(error: BaseException, max_length: int = _MAX_LENGTH) -> str:
    """Return `ValueError: its text`, or the class name alone if there is no text. Never raises.

    Args:
        error (`BaseException`): An exception of user code. Its `__str__` may raise.
        max_length (`int`, *optional*, defaults to `200`): A longer text is cut to this many
            characters.
    """
    if isinstance(error, Escaped):
        error = error.original
    name = type(error).__name__
    text = text_of(error, max_length, _text_of_exception)
    return f"{name}: {text}" if text else name


def _text_of_exception(error: BaseException) -> str:
    """Return the text of an exception.

    Clients of vendors write the body of a refusal as a Python dict, in whose place its message
    stands.
    """
    text = str(error)
    # OpenAI's client keeps the inner object of the body, Anthropic's the whole, Google's as
    # `details`.
    body = getattr(error, "body", None) or getattr(error, "details", None)
    if not isinstance(body, Mapping):
        return text
    inner = body.get("error", body)
    message = inner.get("message") if isinstance(inner, Mapping) else None
    start = text.find("{")
    if not isinstance(message, str) or start < 0:
        return text
    return text[:start] + message


def text_of(
    value: object, max_length: int = _MAX_LENGTH, to_text: Callable[[Any], str] = str
) -> str:
    """Return the text of a value that came from user code, with secrets masked. Never raises.

    If the value's `__str__` raises, its exception is named in place of the text.

    Args:
        value (`object`): The value.
        max_length (`int`, *optional*, defaults to `200`): A longer text is cut to this many
            characters.
        to_text (`Callable`, *optional*, defaults to `str`): Converts the value.
    """
    try:
        return mask_secrets(str(to_text(value)))[:max_length]
    except BaseException as error:
        _raise_interrupt(error)
        return f"(its text cannot be shown: {type(error).__name__})"


def failure_of(error_class: Callable[[str], E], name: str, error: BaseException) -> E:
    """Create an error of ours about an exception of user code.

    Its message is `NAME raised KeyError: 'x' (shop.py:7 in price)`, with the last frame of the
    user's own code. The whole traceback is its note ([`traceback_of`]).

    Args:
        error_class (`Callable`): Creates the error from a message, for example [`ServerFailed`].
        name (`str`): A name for the user's code, such as `the environment`.
        error (`BaseException`): The exception.
    """
    # The message names the place in the user's code that raised the exception.
    original = error.original if isinstance(error, Escaped) else error
    failure = error_class(f"{name} raised {describe(error)}{raised_in(original)}")

    # The traceback without the frames of this package.
    frames = [
        frame
        for frame in traceback.extract_tb(original.__traceback__)
        if not frame.filename.startswith(tuple(_package_folders))
    ]
    lines = [
        "Traceback (most recent call last):\n",
        *traceback.format_list(frames),
        describe(error, 1000),
    ]
    failure.add_note(mask_secrets("".join(lines)))
    return failure


def count_as_package(folder: Path) -> None:
    """Take the code in a folder for that of this package: an error that it raises is no user's.

    Args:
        folder (`Path`): The folder, with code that is imported from outside of the package.
    """
    if str(folder) not in _package_folders:
        _package_folders.append(str(folder))


def raised_in(error: BaseException) -> str:
    """Return ` (shop.py:7 in price)`: where in the user's code an exception comes from.

    An exception of a library that this code called counts too. Empty if it comes from this package.
    """
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        # Skip the libraries that the user's code has called.
        if frame.filename.startswith((*_LIBRARY_FOLDERS, "<frozen")):
            continue
        if frame.filename.startswith(tuple(_package_folders)):
            return ""
        return f" ({frame.filename}:{frame.lineno} in {frame.name})"
    return ""


def without_places(text: str) -> str:
    """Return a message without the places in code that [`raised_in`] and [`place_of`] write."""
    return _PLACE.sub("", text)


def traceback_of(error: BaseException | None) -> str:
    """Return the traceback that [`failure_of`] has noted, or an empty text."""
    notes = getattr(error, "__notes__", None)
    return notes[0] if notes else ""


class SourceNote(str):
    """The note of an exception that names the user's function that raised it, in one line."""


def note_source(error: Exception, name: str) -> None:
    """Add a [`SourceNote`] to an exception of user code that is raised unchanged.

    Args:
        error (`Exception`): The exception.
        name (`str`): A name for the user's function, such as `the reward function f (shop.py:3)`.
    """
    note = f"{name} raised {describe(error)}{raised_in(error)}"
    error.add_note(SourceNote(mask_secrets(note)))


def source_of(error: BaseException) -> str:
    """Return the [`SourceNote`] of an exception, or an empty text."""
    notes = getattr(error, "__notes__", ())
    return next((note for note in notes if isinstance(note, SourceNote)), "")


def place_of(function: object) -> str:
    """Return the name of a user's function and where it is defined: `Shop.step (shop.py:12)`."""
    # The function inside a partial or a wrapper.
    inner = inspect.unwrap(cast(Callable[..., Any], getattr(function, "func", function)))
    name = getattr(inner, "__qualname__", type(inner).__name__)
    # An object that can be called is placed at its class's `__call__`.
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    if code is None:
        return name
    return f"{name} ({code.co_filename}:{code.co_firstlineno})"


async def call_guarded(function: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
    """Call user code and return its result.

    Args:
        function (`Callable`): An `async` function is awaited. A plain one runs in a thread, so that
            it may block; an awaitable that it returns is awaited.
        *args, **kwargs: Its arguments.

    Raises:
        `Exception`: Whatever the function raises; an [`Escaped`] in place of an exception that is
            not an ordinary one.
        `asyncio.CancelledError`: The task that made this call was cancelled.
    """
    return await call_guarded_on(None, function, *args, **kwargs)


async def call_guarded_on(
    executor: Executor | None, function: Callable[..., Any], /, *args: object, **kwargs: object
) -> Any:
    """Like [`call_guarded`], but a plain function runs on a thread of `executor`.

    `None` is the pool of threads for plain functions.
    """
    # The outcome is returned instead of raised, so that neither a thread's future nor a coroutine
    # holds an exception that asyncio treats specially. If this coroutine is closed in the middle,
    # `GeneratorExit` is still raised at the caller's `await`.
    call = functools.partial(function, *args, **kwargs)
    if is_async(function):
        return _unwrap(*await _await_outcome(call))

    # A plain function may return an awaitable, which the event loop has to await.
    value, error = await _call_in_thread(executor, call)
    if error is None and inspect.isawaitable(value):
        awaitable = value
        return _unwrap(*await _await_outcome(lambda: awaitable))
    try:
        return _unwrap(value, error)
    finally:
        del error  # its traceback holds this frame


def call_guarded_now(function: Callable[..., T], /, *args: object, **kwargs: object) -> T:
    """Call a plain user function on this thread. Raises like [`call_guarded`]."""
    result: T = _unwrap(*_call_outcome(functools.partial(function, *args, **kwargs)))
    return result


def guard_function(
    function: F,
    on_failure: Callable[..., Any] | None = None,
    on_return: Callable[..., Any] | None = None,
    kind: str = "function",
) -> F:
    """Wrap a user function, plain or `async`, so that it raises ordinary exceptions only, or none.

    If it takes long, a warning names it. The result is `async` exactly if `function` is, and has
    its name and attributes.

    Args:
        function (`Callable`): For example a reward function.
        on_failure (`Callable`, *optional*): Called with the exception and the arguments of the
            failed call; its result is returned in the function's place. By default the exception is
            raised: an [`Escaped`] if it is not an ordinary one.
        on_return (`Callable`, *optional*): Called with the function's result and the arguments of
            the call; its result is returned, and its exceptions are raised.
        kind (`str`, *optional*, defaults to `"function"`): What the warning calls it: `reward
            function`.

    Example:

    ```python
    def reward(completions, **columns):
        exit()

    safe = guard_function(reward, lambda error, completions, **columns: [None] * len(completions))
    assert safe(completions=["a", "b"]) == [None, None]
    ```
    """

    name = f"the {kind} {place_of(function)}"
    advice = f"a {kind} has no time limit, give one to what it waits for"

    def handle_failure(error: Exception, *args: object, **kwargs: object) -> Any:
        if on_failure is None:
            raise error
        return on_failure(error, *args, **kwargs)

    def handle_return(result: object, *args: object, **kwargs: object) -> Any:
        if on_return is None:
            return result
        return on_return(result, *args, **kwargs)

    async def call_async(*args: object, **kwargs: object) -> Any:
        try:
            with watching(name, advice):
                result = await call_guarded(function, *args, **kwargs)
        except Exception as error:
            return handle_failure(error, *args, **kwargs)
        return handle_return(result, *args, **kwargs)

    def call(*args: object, **kwargs: object) -> Any:
        try:
            with watching(name, advice):
                result = call_guarded_now(function, *args, **kwargs)
        except Exception as error:
            return handle_failure(error, *args, **kwargs)
        return handle_return(result, *args, **kwargs)

    # An object has no `__name__`, which trainers read from a reward function.
    wrapper = functools.update_wrapper(call_async if is_async(function) else call, function)
    wrapper.__name__ = getattr(function, "__name__", type(function).__name__)
    return cast(F, wrapper)


def is_async(function: object) -> bool:
    """Whether calling `function` returns a coroutine.

    It is an `async def`, or an object with such a `__call__`.
    """
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


async def await_contained(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine, and raise an [`Escaped`] for an exception that would end the event loop.

    The second line of defence, around every task on the background loop: for user code without a
    guard.
    """
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        _raise_interrupt(error)
        raise Escaped(error) from None


_Outcome = tuple[Any, BaseException | None]
"""The result of a call of user code, or the exception that it raised."""


def _unwrap(value: object, error: BaseException | None) -> Any:
    """Return the result of a call, or raise its exception as an ordinary one."""
    if error is None:
        return value
    try:
        raise to_ordinary_exception(error)
    finally:
        del error  # its traceback holds this frame


def _call_outcome(function: Callable[[], Any]) -> _Outcome:
    """Call a plain function on this thread."""
    try:
        return function(), None
    except BaseException as error:
        _raise_interrupt(error)
        return None, error


async def _call_in_thread(executor: Executor | None, function: Callable[[], Any]) -> _Outcome:
    """Call a plain function on a thread, in a copy of this task's context."""
    # In the copy the call is one deeper, so that calls within it get other threads.
    context = contextvars.copy_context()
    depth = _call_depth.get()
    context.run(_call_depth.set, depth + 1)
    work = functools.partial(context.run, _call_outcome, function)
    threads = executor or _threads(os.getpid(), depth)
    return await asyncio.get_running_loop().run_in_executor(threads, work)


async def _await_outcome(begin: Callable[[], Awaitable[Any]]) -> _Outcome:
    """Await the result of `begin()`."""
    try:
        return await begin(), None
    except BaseException as error:
        # A cancellation of this task passes through.
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
        # Python replaces a `StopIteration` that a coroutine raises: take the original.
        if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
            return None, error.__cause__
        return None, error


@functools.cache
def _threads(process: int, depth: int) -> DaemonThreads:
    """Return the threads of plain functions.

    They are not the event loop's, whose threads its calls need for disks and host names. Each depth
    has its own: a function may wait for a call that runs another user function.
    """
    return DaemonThreads(_MAX_THREADS, f"agentic-prompting-{depth}")


def _raise_interrupt(error: BaseException) -> None:
    """Raise a Ctrl-C: Python delivers it on the main thread only."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    if isinstance(error, KeyboardInterrupt) and is_main_thread:
        raise error


# Calls that take long -----------------------------------------------------------------------------


@dataclass
class _PendingCall:
    """A call that has not returned."""

    name: str
    advice: str
    start: float
    task: asyncio.Task[Any] | None = None  # if it runs on an event loop


class _CallMonitor:
    """The calls of this process that have not returned, and the thread that watches them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_calls = threading.Event()
        self._numbers = itertools.count()
        self._calls: dict[int, _PendingCall] = {}
        # By name: the seconds after which the next warning is due.
        self._next_warning: dict[str, float] = {}
        self._signs_of_life: dict[asyncio.AbstractEventLoop, float] = {}
        threading.Thread(target=self._run, name="agentic-prompting-watch", daemon=True).start()

    @contextmanager
    def watching(self, call: _PendingCall) -> Iterator[None]:
        """The context in which a call is watched."""
        number = next(self._numbers)
        with self._lock:
            self._calls[number] = call
        self._has_calls.set()
        try:
            yield
        finally:
            with self._lock:
                del self._calls[number]

    def _run(self) -> None:
        while True:
            # Sleeps without a tick while there is nothing to watch.
            self._has_calls.wait()
            time.sleep(_TICK)
            with self._lock:
                calls = list(self._calls.values())
                if not calls:
                    self._has_calls.clear()
                    self._signs_of_life.clear()
            self._warn(calls)

    def _warn(self, calls: list[_PendingCall]) -> None:
        """Warn about calls that take too long, once for each name."""
        now = time.monotonic()
        blocking_tasks = self._find_blocking_tasks(calls, now)

        # Calls of the same name share one warning.
        overdue_calls: dict[str, list[_PendingCall]] = {}
        for call in calls:
            if now - call.start >= self._next_warning.get(call.name, _FIRST_WARNING):
                overdue_calls.setdefault(call.name, []).append(call)
        blocking_names = {
            name
            for name, named_calls in overdue_calls.items()
            if any(call.task in blocking_tasks for call in named_calls)
        }

        for name, named_calls in overdue_calls.items():
            # Others cannot go on before the call that blocks the loop does.
            if blocking_names and name not in blocking_names:
                continue
            longest = max(now - call.start for call in named_calls)
            # The next warning comes after twice the time.
            self._next_warning[name] = 2 * longest

            text = f"{name} has not returned for {longest:.0f} s"
            if len(named_calls) > 1:
                text += f" ({len(named_calls)} calls)"
            if name in blocking_names:
                text += (
                    " and blocks every rollout: an `async` function must not block, make it a "
                    "plain `def`"
                )
            else:
                text += f"; {named_calls[0].advice}"
            logger.warning(text)

    def _find_blocking_tasks(
        self, calls: list[_PendingCall], now: float
    ) -> list[asyncio.Task[Any]]:
        """Return the tasks that run on event loops without a sign of life.

        Asks every loop for its next sign of life.
        """
        tasks = []
        for loop in {call.task.get_loop() for call in calls if call.task is not None}:
            # A loop that is met for the first time counts as alive.
            last_sign = self._signs_of_life.setdefault(loop, now)
            running_task = asyncio.current_task(loop)
            if now - last_sign >= _BLOCKED and running_task is not None:
                tasks.append(running_task)
            try:
                loop.call_soon_threadsafe(self._note_sign_of_life, loop)
            except RuntimeError:  # the loop has ended
                continue
        return tasks

    def _note_sign_of_life(self, loop: asyncio.AbstractEventLoop) -> None:
        self._signs_of_life[loop] = time.monotonic()


@functools.cache
def _monitor_of(process: int) -> _CallMonitor:
    """Return the monitor of a process: a fork has no thread."""
    return _CallMonitor()


@contextmanager
def watching(name: str, advice: str) -> Iterator[None]:
    """The context of a call that blocks this thread; warns after half a minute.

    Args:
        name (`str`): Names the call in the warning.
        advice (`str`): The end of the warning: what the user can do.
    """
    call = _PendingCall(name, advice, start=time.monotonic())
    with _monitor_of(os.getpid()).watching(call):
        yield


async def wait_for(work: Coroutine[Any, Any, T], name: str, limit: float | None = None) -> T:
    """Await user code, and warn after half a minute that it has not returned.

    It runs in a task of its own, so that code which catches its cancellation can be left behind.

    Args:
        work (`Coroutine`): The call.
        name (`str`): Names it in warnings and in the error: `the environment Shop.step
            (shop.py:12)`.
        limit (`float`, *optional*): Seconds that it may take.

    Raises:
        [`TimedOut`]: It took longer.
    """
    task = asyncio.ensure_future(work)
    if limit is None:
        advice = "it has no time limit, set step_timeout"
    else:
        advice = f"its rollout fails after {limit:g} s (step_timeout)"
    call = _PendingCall(name, advice, start=time.monotonic(), task=task)
    with _monitor_of(os.getpid()).watching(call):
        try:
            # Without a cancellation: the task may catch it, and would then never return.
            await asyncio.wait({task}, timeout=limit)
        except asyncio.CancelledError:
            abandon(task)
            await asyncio.wait({task}, timeout=_GRACE)
            raise
    if task.done():
        return task.result()
    abandon(task)
    raise TimedOut(
        f"{name} did not return within {limit:g} s: set a time limit on what it waits for, or "
        "raise step_timeout"
    )


def abandon(task: asyncio.Future[Any]) -> None:
    """Cancel a task and ignore its result."""
    # Whoever cancelled it before, such as the end of the loop, has begun its clean-up, which a
    # second cancellation would interrupt.
    if not (isinstance(task, asyncio.Task) and task.cancelling()):
        task.cancel()
    task.add_done_callback(_retrieve_exception)


def _retrieve_exception(task: asyncio.Future[Any]) -> None:
    """Keep asyncio from logging a task's exception as never retrieved."""
    if not task.cancelled():
        task.exception()
