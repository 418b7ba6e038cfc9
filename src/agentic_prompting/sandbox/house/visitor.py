"""The tiny policy as a closed model: a [`ChatModel`] that makes whole visits, its weights out of reach.

What [`evolve`] is for: somebody else's agent, of which only the system prompt can be changed. One call is one visit,
the reply its transcript; [`Transcript`] finds the answer in it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from ...agent import PromptAgent
from ...llm import Closed, Message, Reply, ServerFailed, Usage
from ...rollout import Rollout, TagGrammar, Turn, rollout_seed, run_rollouts
from ...trainers.reflecting import transcript


@dataclass(frozen=True)
class Transcript(TagGrammar):
    """Reads the last turn of a transcript: the one that answers."""

    def parse(self, text: str) -> Turn:
        return super().parse(text.rpartition("\n")[2])


class Visitor:
    """An agent with its environment as a [`ChatModel`].

    Calls that come together are played together, on a thread of its own. What is sampled depends on the conversation's
    `repeat` and `seed` alone, not on who shares a batch.

    Args:
        agent ([`PromptAgent`]): The agent. Its own template is not used: the conversation is the prompt.
        seed (`int`, *optional*, defaults to `0`): Of what is sampled.
    """

    def __init__(self, agent: PromptAgent, seed: int = 0):
        self.agent, self.seed = agent, seed
        self._arrived: SimpleQueue[tuple[Rollout, Future[Reply]] | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="Visitor", daemon=True)
        self._thread.start()

    def submit(
        self, messages: Sequence[Message], *, repeat: int | None = None, session: str | None = None, **sampling: Any
    ) -> Future[Reply]:
        future: Future[Reply] = Future()
        future.set_running_or_notify_cancel()
        if self._closed:
            future.set_result(Reply(error=Closed("the visitor has left")))
            return future
        ids = self.agent.chat_format.prompt_ids(messages)
        told = repr([(message["role"], message["content"]) for message in messages])
        self._arrived.put((Rollout(ids, seed=rollout_seed(self.seed, told, repeat or 0)), future))
        return future

    def close(self) -> None:
        """Finish what has been asked, then end the thread."""
        self._closed = True
        self._arrived.put(None)
        self._thread.join()

    def __enter__(self) -> Visitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        job = self._arrived.get()
        while job is not None:
            jobs = [job]
            try:
                while (job := self._arrived.get(timeout=0.02)) is not None:
                    jobs.append(job)
            except Empty:
                self._play(jobs)
                job = self._arrived.get()
            else:
                self._play(jobs)

    def _play(self, jobs: Sequence[tuple[Rollout, Future[Reply]]]) -> None:
        agent, rollouts = self.agent, [rollout for rollout, _ in jobs]
        try:
            run_rollouts(rollouts, agent.sampler, agent.environment, agent.chat_format, agent.spec.limits)
        except Exception as error:  # out of memory, say: these calls fail, the next ones may not
            for _, future in jobs:
                future.set_result(Reply(error=ServerFailed(f"the visit raised {error!r}")))
            return
        for rollout, future in jobs:
            usage = Usage(len(rollout.prompt_ids), len(rollout.ids))
            future.set_result(Reply(transcript(rollout), error=rollout.error, usage=usage))
