"""One sampler for many requests: whoever waits while it is busy is in its next batch, together.

A batch costs about the same whatever its size. Requests come and go at any time, so each is played on a thread of its
own and they meet here, at every turn: nobody waits for somebody else's episode to end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from ..llm import Closed
from ..rollout import Sample, Sampler, SampleRequest


@dataclass(frozen=True)
class _Waiting:
    request: SampleRequest
    future: Future[Sample] = field(default_factory=Future)


class SharedSampler:
    """Batches the sample requests of many threads.

    Args:
        sampler ([`Sampler`]): Called from one thread only, this object's own.
        linger (`float`, *optional*, defaults to `0.005`): Seconds that a batch waits for others to join it.
        on_batch (`Callable[[int], None]`, *optional*): Called with the size of each batch.
    """

    def __init__(self, sampler: Sampler, linger: float = 0.005, on_batch: Callable[[int], None] | None = None):
        self.sampler, self.linger, self.on_batch = sampler, linger, on_batch
        self._waiting: list[_Waiting] = []
        self._news = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="agentic-prompting-sampler", daemon=True)
        self._thread.start()

    def submit(self, request: SampleRequest) -> Future[Sample]:
        """The continuation of one context, some time. Cancelling the future takes it out of the queue."""
        waiting = _Waiting(request)
        with self._news:
            if self._closed:
                raise Closed("the service is shutting down")
            self._waiting.append(waiting)
            self._news.notify()
        return waiting.future

    def close(self) -> None:
        """Let the batch in hand finish, and fail what waits. Safe to call twice."""
        with self._news:
            self._closed = True
            left, self._waiting = self._waiting, []
            self._news.notify()
        for waiting in left:
            if waiting.future.set_running_or_notify_cancel():
                waiting.future.set_exception(Closed("the service is shutting down"))
        self._thread.join()

    def _work(self) -> None:
        while batch := self._next_batch():
            alive = [waiting for waiting in batch if waiting.future.set_running_or_notify_cancel()]
            if alive:
                self._sample(alive)

    def _next_batch(self) -> list[_Waiting]:
        """All that wait, as soon as there is something; nothing when closed."""
        with self._news:
            self._news.wait_for(lambda: self._waiting or self._closed)
        time.sleep(self.linger)
        with self._news:
            batch, self._waiting = self._waiting, []
            return batch

    def _sample(self, batch: Sequence[_Waiting]) -> None:
        if self.on_batch is not None:
            self.on_batch(len(batch))
        try:
            samples = self.sampler([waiting.request for waiting in batch])
        except BaseException as error:  # it belongs to those who asked; this thread goes on for the next ones
            for waiting in batch:
                waiting.future.set_exception(error)
            return
        for waiting, sample in zip(batch, samples, strict=True):
            waiting.future.set_result(sample)
