"""Engines: the only place where requests of several episodes are batched.

Episodes are coroutines on the background event loop. A model in this process runs on one thread,
which owns it. An [`Engine`] collects the requests of many coroutines and runs them on that thread,
one step after another; a request that arrives meanwhile joins at the next step. Policies that run
elsewhere (on a server) need no engine: they are awaited.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from ..llm.guard import to_ordinary_exception
from ..llm.loop import end, gather, start
from .chat_format import TextFormat
from .environment import Environment, as_environment
from .play import play
from .types import Limits, Policy, Rollout, Sample, Sampler, SampleRequest

Request = TypeVar("Request")
Result = TypeVar("Result")
T = TypeVar("T")

_POLL_SECONDS = 0.5  # seconds between two checks of a waiting thread for failures elsewhere
_EXIT_SECONDS = 10.0

_workers: WeakSet[threading.Thread] = WeakSet()


@atexit.register
def _wait_for_workers() -> None:
    """At interpreter exit: cancel all requests, and wait for the engines' threads.

    They see the cancellation at their next step. A thread that is in torch's code while the
    interpreter is torn down aborts the process, with status 134 and "terminate called without an
    active exception".
    """
    end()
    for worker in list(_workers):
        worker.join(_EXIT_SECONDS)


@dataclass(eq=False)
class PendingRequest(Generic[Request, Result]):
    """One request in an engine, and the future that its coroutine awaits."""

    request: Request
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Result]

    @property
    def cancelled(self) -> bool:
        """Whether the result is no longer wanted."""
        return self.future.cancelled()


class Engine(ABC, Generic[Request, Result]):
    """Computes the requests of many coroutines on one thread.

    Subclasses define one step (`step`) and the context in which the model is available (`ready`).

    Args:
        on_callers_thread (`bool`, *optional*, defaults to `False`): The engine runs on the thread
            that calls `run_until`; until then requests wait. A trainer needs this, because only its
            own thread may use its model. Otherwise the engine starts a thread of its own while
            there are requests.
    """

    def __init__(self, on_callers_thread: bool = False):
        self.on_callers_thread = on_callers_thread
        self._inbox: SimpleQueue[PendingRequest[Request, Result] | None] = SimpleQueue()
        # Requests taken from the inbox and not started, and results that are not delivered yet.
        self._waiting: list[PendingRequest[Request, Result]] = []
        self._finished: list[tuple[PendingRequest[Request, Result], Result | BaseException]] = []
        self._worker: threading.Thread | None = None
        self._worker_lock = threading.Lock()
        self._closed: BaseException | None = None

    async def __call__(self, request: Request) -> Result:
        # The result is delivered on the event loop of the coroutine that waits for it.
        loop = asyncio.get_running_loop()
        pending: PendingRequest[Request, Result]
        pending = PendingRequest(request, loop, loop.create_future())
        self._inbox.put(pending)
        if not self.on_callers_thread:
            self._start_worker()
        return await pending.future

    def _start_worker(self) -> None:
        # Two requests at the same time must not start two threads.
        with self._worker_lock:
            if self._worker is None:
                self._worker = threading.Thread(
                    target=self._run_own_thread, name=type(self).__name__, daemon=True
                )
                _workers.add(self._worker)
                self._worker.start()

    @abstractmethod
    def step(self, arrived: list[PendingRequest[Request, Result]]) -> None:
        """Advance all requests in progress, and `finish` those that are done.

        Args:
            arrived (`list[PendingRequest]`): New requests, which start with this step.
        """

    @property
    @abstractmethod
    def active_count(self) -> int:
        """The number of requests in progress."""

    @abstractmethod
    def drop(self) -> list[PendingRequest[Request, Result]]:
        """Remove all requests in progress from the engine and return them.

        Called after a step failed, or when the requests were cancelled.
        """

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Return a context around steps, in which the model is available."""
        yield

    def select_joining(
        self, waiting: list[PendingRequest[Request, Result]]
    ) -> list[PendingRequest[Request, Result]]:
        """Return the waiting requests that may start now, in order.

        The others are offered again at the next step.
        """
        return waiting

    def run_until(
        self,
        result: Future[Any],
        poll: Callable[[], None] = lambda: None,
        count_unfinished: Callable[[], int] | None = None,
    ) -> None:
        """Run the engine on this thread until a result is there.

        Args:
            result (`Future`): The result that the requests serve.
            poll (`Callable`, *optional*): Called between steps; may raise.
            count_unfinished (`Callable`, *optional*): Returns how many coroutines may still send
                requests. If given, a batch starts when all of them wait for it, and no request
                joins a batch in progress: which requests share a batch then depends on the requests
                alone, not on timing.
        """

        def may_join() -> bool:
            if count_unfinished is None:
                return bool(self._waiting)
            # A batch starts when every unfinished coroutine waits for it.
            return not self.active_count and 0 < count_unfinished() <= len(self._waiting)

        # When the result is there, this thread must not wait for requests any longer.
        result.add_done_callback(lambda _: self.wake())
        with self.ready():
            while not result.done():
                # Without any work, wait a moment for requests.
                has_work = bool(self.active_count) or may_join()
                self._take_requests(block=not has_work)
                poll()
                if count_unfinished is not None:
                    # Order a batch by conversation, not by time of arrival.
                    self._waiting.sort(key=_conversation_number)
                self._run_step(may_join())
                self._deliver_finished()

    def wake(self) -> None:
        """Wake a thread that waits for requests."""
        self._inbox.put(None)

    def close(self, error: BaseException) -> None:
        """Fail every request that waits for the next step or arrives later with `error`."""
        self._closed = error

    def _run_own_thread(self) -> None:
        """Run the engine's own thread until no request is left."""
        while True:
            try:
                self._run_until_idle()
            except BaseException as error:
                # The model is not available: every request gets the error.
                self._take_requests(block=False)
                self._fail_all(error)
            # The last results are delivered after `ready` has released the model, because the
            # caller may start training it at once.
            self._deliver_finished()
            # End if no request has arrived meanwhile. A later one starts another thread.
            with self._worker_lock:
                if self._inbox.empty():
                    self._worker = None
                    return

    def _run_until_idle(self) -> None:
        with self.ready():
            while self._take_requests(block=False) or self.active_count or self._waiting:
                self._run_step(may_join=True)
                # The last results wait until the model is released.
                if self.active_count or self._waiting:
                    self._deliver_finished()

    def _take_requests(self, block: bool) -> bool:
        """Move new requests from the inbox to the waiting ones.

        If no request is in progress, wait for those that are about to arrive at the same moment.

        Returns:
            `bool`: Whether there were any.
        """
        waiting_before = len(self._waiting)
        try:
            pending = self._inbox.get(block, _POLL_SECONDS)
            # `None` only wakes the thread.
            if pending is not None and not self.active_count:
                _settle(pending.loop)
            # Take all requests that have arrived.
            while True:
                if pending is not None:
                    self._waiting.append(pending)
                pending = self._inbox.get_nowait()
        except Empty:
            return len(self._waiting) > waiting_before

    def _run_step(self, may_join: bool) -> None:
        # Choose the requests that start with this step.
        self._waiting = [pending for pending in self._waiting if not pending.cancelled]
        arrived = self.select_joining(self._waiting) if may_join else []
        self._waiting = [pending for pending in self._waiting if pending not in arrived]
        if not arrived and not self.active_count:
            return

        try:
            # A closed engine fails its requests instead of running them.
            if self._closed is not None:
                raise self._closed
            self.step(arrived)
        except BaseException as error:
            # Ctrl-C, or the end of the program, on the caller's own thread.
            if self.on_callers_thread and not isinstance(error, Exception):
                raise
            # Out of memory, for example: the requests in progress get it.
            self.finish((pending, error) for pending in arrived)
            self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        unfinished = [*self.drop(), *self._waiting]
        self._waiting = []
        self.finish((pending, error) for pending in unfinished)

    def finish(
        self, results: Iterable[tuple[PendingRequest[Request, Result], Result | BaseException]]
    ) -> None:
        """Deliver results, or errors, after this step."""
        self._finished += results

    def _deliver_finished(self) -> None:
        finished = self._finished
        self._finished = []
        for pending, result in finished:
            # If the loop is closed, its coroutines are gone too.
            with suppress(RuntimeError):
                pending.loop.call_soon_threadsafe(_deliver, pending.future, result)


def _conversation_number(pending: PendingRequest[Any, Any]) -> int:
    return getattr(pending.request, "conversation", None) or 0


def _deliver(future: asyncio.Future[T], result: T | BaseException) -> None:
    # The coroutine was cancelled meanwhile.
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(to_ordinary_exception(result))
    else:
        future.set_result(result)


def _settle(loop: asyncio.AbstractEventLoop) -> None:
    """Wait until the loop has run everything that is ready.

    Requests of the same moment then share a batch.
    """
    has_settled = threading.Event()
    try:
        # The event is set one round of the loop later, after everything that is ready now.
        loop.call_soon_threadsafe(loop.call_soon, has_settled.set)
    except RuntimeError:
        # The loop is closed.
        return
    has_settled.wait(_POLL_SECONDS)


class BatchEngine(Engine[SampleRequest, Sample]):
    """A [`Policy`] over a back end that works in batches only.

    All waiting requests form the next batch, and each turn takes as long as the longest of its
    batch.

    Args:
        sampler ([`Sampler`]): Called with the requests of a batch, on one thread.
        max_batch_size (`int`, *optional*): The largest batch.
        on_callers_thread (`bool`, *optional*): As in [`Engine`].
    """

    active_count = 0  # between two steps, each of which is a whole batch

    def __init__(
        self, sampler: Sampler, max_batch_size: int | None = None, on_callers_thread: bool = False
    ):
        super().__init__(on_callers_thread)
        self.sampler = sampler
        self.max_batch_size = max_batch_size

    def drop(self) -> list[PendingRequest[SampleRequest, Sample]]:
        return []

    def select_joining(
        self, waiting: list[PendingRequest[SampleRequest, Sample]]
    ) -> list[PendingRequest[SampleRequest, Sample]]:
        return waiting[: self.max_batch_size]

    def step(self, arrived: list[PendingRequest[SampleRequest, Sample]]) -> None:
        samples = self.sampler([pending.request for pending in arrived])
        self.finish(zip(arrived, samples, strict=True))


def play_all(
    rollouts: Sequence[Rollout],
    policy: Policy,
    environment: Environment | None,
    chat_format: TextFormat,
    limits: Limits = Limits(),
    on_done: Callable[[Rollout], None] = lambda rollout: None,
    poll: Callable[[], None] = lambda: None,
    full_determinism: bool = False,
) -> None:
    """Play rollouts to their ends, in place and concurrently.

    Arguments that are not described here are those of `play`.

    Args:
        rollouts (`Sequence[Rollout]`): Fresh rollouts with their rendered prompts.
        policy ([`Policy`]): The agent's weights. An engine that is `on_callers_thread` runs on this
            thread.
        on_done (`Callable`, *optional*): Called with each rollout as it ends, for progress bars.
        poll (`Callable`, *optional*): Called at intervals while waiting; an exception that it
            raises ends the batch.
        full_determinism (`bool`, *optional*, defaults to `False`): Sample when every unfinished
            episode waits for a sample, all together: then even the last bits of sums do not depend
            on the order in which replies arrive.

    Raises:
        `Exception`: Any error of the policy; all episodes are cancelled first.
    """
    environment = as_environment(environment)
    unfinished = len(rollouts)

    async def play_one(rollout: Rollout) -> None:
        nonlocal unfinished
        await play(rollout, policy, environment, chat_format, limits)
        unfinished -= 1
        on_done(rollout)
        if full_determinism and isinstance(policy, Engine):
            policy.wake()  # one episode fewer to wait for

    def count_unfinished() -> int:
        return unfinished

    run_with_engine(
        policy,
        gather(map(play_one, rollouts)),
        poll,
        count_unfinished=count_unfinished if full_determinism else None,
    )


def run_with_engine(
    policy: Policy,
    coroutine: Coroutine[Any, Any, T],
    poll: Callable[[], None] = lambda: None,
    count_unfinished: Callable[[], int] | None = None,
) -> T:
    """Run a coroutine that awaits `policy` on the background loop and wait for its result.

    Meanwhile an engine that is `on_callers_thread` runs on this thread. The other arguments are
    those of [`Engine.run_until`].
    """
    # The coroutine runs on the background loop, an engine on this thread.
    future = start(coroutine)
    try:
        if isinstance(policy, Engine) and policy.on_callers_thread:
            policy.run_until(future, poll, count_unfinished)
        # Wait for a policy that runs elsewhere.
        while not wait([future], _POLL_SECONDS).done:
            poll()
        return future.result()
    finally:
        # Has no effect unless an error ended the wait.
        future.cancel()
