"""Who samples together: the only place where anything is batched.

Episodes are coroutines on the background event loop; a model in this process is worked on one thread, which owns it. An
[`Engine`] takes requests in on the one side and works them off on the other, a piece at a time, so that what has come
in since joins at the next piece. Policies that live elsewhere (a server) need none of this: they are awaited.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from ..llm.loop import background_loop
from .play import Environment, Limits, Policy, Rollout, Sample, Sampler, SampleRequest, play
from .text_format import TextFormat

Request = TypeVar("Request")
Result = TypeVar("Result")
T = TypeVar("T")

_LISTEN_SECONDS = 0.5  # how often whoever waits looks whether something else has failed


@dataclass(eq=False)
class Job(Generic[Request, Result]):
    """One request on its way through an engine."""

    request: Request
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Result]

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.future.cancelled()


class Engine(ABC, Generic[Request, Result]):
    """Awaited by many coroutines, worked by one thread. Subclasses say what a piece of work is (`step`) and what has to
    be at hand for it (`ready`).

    Args:
        on_callers_thread (`bool`, *optional*, defaults to `False`): The engine runs on the thread that calls
            `work`; until then requests wait. A trainer needs this, because only its own thread may use its model.
            Otherwise the engine starts a thread while there are requests.
    """

    def __init__(self, on_callers_thread: bool = False):
        self.on_callers_thread = on_callers_thread
        self._inbox: SimpleQueue[Job[Request, Result] | None] = SimpleQueue()
        self._waiting: list[Job[Request, Result]] = []  # taken from the inbox, not at work yet
        self._finished: list[tuple[Job[Request, Result], Result | BaseException]] = []  # not handed over yet
        self._worker: threading.Thread | None = None
        self._hiring = threading.Lock()
        self._closed: BaseException | None = None

    async def __call__(self, request: Request) -> Result:
        loop = asyncio.get_running_loop()
        job: Job[Request, Result] = Job(request, loop, loop.create_future())
        self._inbox.put(job)
        if not self.on_callers_thread:
            with self._hiring:
                if self._worker is None:
                    self._worker = threading.Thread(target=self._work_off, name=type(self).__name__, daemon=True)
                    self._worker.start()
        return await job.future

    @abstractmethod
    def step(self, arrived: list[Job[Request, Result]]) -> None:
        """Do a piece of work for all that are at work, those that have just arrived included; `finish` what is done."""

    @property
    @abstractmethod
    def at_work(self) -> int:
        """How many requests are at work."""

    @property
    def busy(self) -> bool:
        return self.at_work > 0

    @abstractmethod
    def drop(self) -> list[Job[Request, Result]]:
        """Let go of all that is at work, and return it: the engine has failed, or nobody wants it any more."""

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Around pieces of work."""
        yield

    def joins(self, waiting: list[Job[Request, Result]]) -> list[Job[Request, Result]]:
        """Those of the waiting that may start now, in order; the others are offered again at the next piece."""
        return waiting

    def work(
        self, until: Future[Any], listen: Callable[[], None] = lambda: None, together: Callable[[], int] | None = None
    ) -> None:
        """Lend this thread until `until` is done.

        Args:
            until (`Future`): What the requests are for.
            listen (`Callable`, *optional*): Called between pieces of work; may raise.
            together (`Callable`, *optional*): How many coroutines there are that may still ask. Then a batch begins
                when each of them waits for it, and nobody joins one that has begun: who shares a batch depends on the
                requests alone, not on the clock.
        """

        def may_join() -> bool:
            if together is None:
                return bool(self._waiting)
            return not self.busy and 0 < together() <= len(self._waiting)

        until.add_done_callback(lambda _: self.wake())
        with self.ready():
            while not until.done():
                self._take(block=not (self.busy or may_join()))
                listen()
                if together is not None:  # in the order of the conversations, whoever was asked first
                    self._waiting.sort(key=lambda job: getattr(job.request, "conversation", None) or 0)
                self._piece(may_join())
                self._hand_over()

    def wake(self) -> None:
        """Make a thread that waits for requests look again."""
        self._inbox.put(None)

    def close(self, error: BaseException) -> None:
        """Whoever asks from now on, or waits for the next piece of work, gets `error`."""
        self._closed = error

    def _work_off(self) -> None:
        """The own thread: until nothing is left to do. The last results are handed over when the model has been let go
        of: whoever gets them may go on to train it."""
        while True:
            try:
                with self.ready():
                    while self._take(block=False) or self.busy or self._waiting:
                        self._piece(may_join=True)
                        if self.busy or self._waiting:
                            self._hand_over()
            except Exception as error:  # the model cannot be had, by nobody who has asked
                self._take(block=False)
                self._fail(error)
            self._hand_over()
            with self._hiring:
                if self._inbox.empty():
                    self._worker = None
                    return

    def _take(self, block: bool) -> bool:
        """Move what has come in to those who wait; whether there was any. Where nothing was at work, whoever is about
        to ask at the same moment comes along."""
        before = len(self._waiting)
        try:
            job = self._inbox.get(block, _LISTEN_SECONDS)
            if job is not None and not self.busy:
                _settle(job.loop)
            while True:
                if job is not None:
                    self._waiting.append(job)
                job = self._inbox.get_nowait()
        except Empty:
            return len(self._waiting) > before

    def _piece(self, may_join: bool) -> None:
        self._waiting = [job for job in self._waiting if not job.cancelled]
        arrived = self.joins(self._waiting) if may_join else []
        self._waiting = [job for job in self._waiting if job not in arrived]
        if not arrived and not self.busy:
            return
        try:
            if self._closed is not None:
                raise self._closed
            self.step(arrived)
        except Exception as error:  # out of memory, say: it belongs to those who asked
            self.finish((job, error) for job in arrived)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        left = [*self.drop(), *self._waiting]
        self._waiting = []
        self.finish((job, error) for job in left)

    def finish(self, results: Iterable[tuple[Job[Request, Result], Result | BaseException]]) -> None:
        """After this piece of work, give those who wait what they asked for, or raise it there."""
        self._finished += results

    def _hand_over(self) -> None:
        finished, self._finished = self._finished, []
        for job, result in finished:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                job.loop.call_soon_threadsafe(_deliver, job.future, result)


def _deliver(given: asyncio.Future[Any], result: Any) -> None:
    if given.done():
        return
    if isinstance(result, BaseException):
        given.set_exception(result)
    else:
        given.set_result(result)


def _settle(loop: asyncio.AbstractEventLoop) -> None:
    """Wait until the loop has run all that could run when we came: who asks at the same moment is in the same batch."""
    passed = threading.Event()
    try:
        loop.call_soon_threadsafe(loop.call_soon, passed.set)
    except RuntimeError:
        return
    passed.wait(_LISTEN_SECONDS)


class BatchEngine(Engine[SampleRequest, Sample]):
    """A [`Policy`] over a back end that can only do batches: whoever waits is in the next one, and each turn lasts as
    long as the longest of its batch.

    Args:
        sampler ([`Sampler`]): Called with all that wait, on one thread.
        max_batch_size (`int`, *optional*): At most so many at once.
        on_callers_thread (`bool`, *optional*): As in [`Engine`].
    """

    def __init__(self, sampler: Sampler, max_batch_size: int | None = None, on_callers_thread: bool = False):
        super().__init__(on_callers_thread)
        self.sampler, self.max_batch_size = sampler, max_batch_size

    at_work = 0  # between pieces of work, each of which is a whole batch

    def drop(self) -> list[Job[SampleRequest, Sample]]:
        return []

    def joins(self, waiting: list[Job[SampleRequest, Sample]]) -> list[Job[SampleRequest, Sample]]:
        return waiting[: self.max_batch_size]

    def step(self, arrived: list[Job[SampleRequest, Sample]]) -> None:
        samples = self.sampler([job.request for job in arrived])
        self.finish(zip(arrived, samples, strict=True))


def play_all(
    rollouts: Sequence[Rollout],
    policy: Policy,
    environment: Environment | None,
    chat_format: TextFormat,
    limits: Limits = Limits(),
    on_done: Callable[[Rollout], None] = lambda rollout: None,
    listen: Callable[[], None] = lambda: None,
    full_determinism: bool = False,
) -> None:
    """Play rollouts to their ends, in place, all at once, each as `play` does, whose arguments those not named here
    are.

    Args:
        rollouts (`Sequence[Rollout]`): Fresh rollouts, prompts rendered.
        policy ([`Policy`]): The agent's weights. An engine that is `on_callers_thread` gets the caller's.
        on_done (`Callable`, *optional*): Called with each rollout as it ends, for progress bars.
        listen (`Callable`, *optional*): Called now and then while waiting; what it raises ends all.
        full_determinism (`bool`, *optional*, defaults to `False`): Sample whenever each living episode waits for it,
            all together: then the last bits of sums do not depend on which reply came first either.

    Raises:
        `Exception`: Whatever the policy raises; everything in flight is cancelled first.
    """
    living = len(rollouts)

    async def one(rollout: Rollout) -> None:
        nonlocal living
        await play(rollout, policy, environment, chat_format, limits)
        living -= 1
        on_done(rollout)
        if full_determinism and isinstance(policy, Engine):
            policy.wake()  # one fewer to wait for

    run_with_engine(policy, gather(map(one, rollouts)), listen, (lambda: living) if full_determinism else None)


def run_with_engine(
    policy: Policy,
    coroutine: Coroutine[Any, Any, T],
    listen: Callable[[], None] = lambda: None,
    together: Callable[[], int] | None = None,
) -> T:
    """Run a coroutine that asks `policy` on the background loop, and wait for it; meanwhile an engine that needs a
    thread has this one. The arguments are those of [`Engine.work`]."""
    done = asyncio.run_coroutine_threadsafe(coroutine, background_loop())
    try:
        if isinstance(policy, Engine) and policy.on_callers_thread:
            policy.work(done, listen, together)
        while not wait([done], _LISTEN_SECONDS).done:
            listen()
        return done.result()
    finally:
        done.cancel()


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines side by side; the first that fails cancels the others, and its error is raised as it is."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
