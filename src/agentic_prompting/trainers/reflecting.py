"""Reflectors: they turn the [`Job`] of a batch into the outcomes that [`Generation.join`] takes.

Either a reference LLM reflects, on the background event loop while the weights are updated; or the policy itself does,
when the children are due, with its weights at that time, which are those of a checkpoint. Only the first process sends
requests; it broadcasts the outcomes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from accelerate.utils import broadcast_object_list

from ..evolution import Job, Outcome, propose_children
from ..llm import BadRequest, ChatModel, Message, Reply, TimedOut, Usage, as_chat, start
from ..llm.guard import describe
from ..rollout import (
    ChatFormat,
    Limits,
    Policy,
    Rollout,
    SampleRequest,
    rollout_seed,
    run_with_engine,
)
from .config import ESPLConfig

logger = logging.getLogger(__name__)


class ReferenceReflector:
    """A reference LLM that reflects while the weights are updated.

    Args:
        reference ([`ChatModel`], *optional*): π_ref. `None` if there will be no job.
        settings ([`ESPLConfig`]): Time limit, sampling options, seed and the settings of the operators.
        asks (`bool`): Whether this process sends the requests.
    """

    def __init__(self, reference: ChatModel | None, settings: ESPLConfig, asks: bool):
        self.reference, self.settings, self.asks = reference, settings, asks
        self._running: dict[int, Future[list[Outcome]]] = {}  # by batch

    def begin(self, job: Job) -> None:
        """Send the first requests of a job, without waiting for replies."""
        if self.asks:
            self._running[job.batch] = start(self._run(job))

    def finish(self, job: Job) -> list[Outcome]:
        """Wait for the outcomes of a job. Called on every process, and the same on every process."""
        if self.asks and job.batch not in self._running:
            self.begin(job)
        running = self._running.pop(job.batch, None)
        return _on_every_process(None if running is None else running.result)

    async def _run(self, job: Job) -> list[Outcome]:
        """The outcomes, at the latest when the job's time is over, so that no model delays training further."""
        seconds, late = self.settings.reflection_timeout, 0
        deadline = asyncio.get_running_loop().time() + seconds

        async def in_time(messages: Sequence[Message], **options: Any) -> Reply:
            nonlocal late
            try:
                async with asyncio.timeout_at(deadline):
                    return await as_chat(self.reference)(messages, **options)
            except TimeoutError:
                late += 1
                return Reply(error=TimedOut(f"no reply within reflection_timeout={seconds:g} s"))

        repeat = rollout_seed(self.settings.seed, "reflection", job.batch)
        sampling: Any = self.settings.reference_sampling or {}
        outcomes = await propose_children(in_time, job, self.settings, repeat=repeat, **sampling)
        if late:
            logger.warning(
                "the reference LLM did not reply to %d calls within %g s: batch %d has no children from them",
                late, seconds, job.batch,
            )  # fmt: skip
        return outcomes


class PolicyReflector:
    """The policy being trained, which revises the instructions that it works under (the paper's Figure 15).

    A reply is one of its turns, as long as `max_turn_tokens` allows. All processes enter a session of the policy's
    back end; the first one samples.

    Args:
        policy (`Callable[[], Policy]`): Returns the policy.
        session (`Callable`): Opens a session of its back end, as a context manager.
        chat_format ([`ChatFormat`]): Its chat template.
        limits ([`Limits`]): Its limits, as in rollouts.
        settings ([`ESPLConfig`]): Seed and the settings of the operators.
        asks (`bool`): Whether this process samples.
    """

    def __init__(
        self,
        policy: Callable[[], Policy],
        session: Callable[[], AbstractContextManager[Any]],
        chat_format: ChatFormat,
        limits: Limits,
        settings: ESPLConfig,
        asks: bool,
    ):
        self.policy, self.session, self.chat_format, self.limits = (
            policy,
            session,
            chat_format,
            limits,
        )
        self.settings, self.asks = settings, asks

    def begin(self, job: Job) -> None:
        """Does nothing: the weights are being updated."""

    def finish(self, job: Job) -> list[Outcome]:
        """The outcomes of a job. Called on every process, and the same on every process."""

        outcomes: Future[list[Outcome]] = Future()
        # The other processes leave at once or, where sampling is a collective, take part in that until this one leaves.
        with self.session():
            if self.asks:
                try:
                    policy, work = (
                        self.policy(),
                        propose_children(self.write, job, self.settings, repeat=job.batch),
                    )
                    outcomes.set_result(run_with_engine(policy, work))
                except Exception as error:
                    outcomes.set_exception(error)
        return _on_every_process(outcomes.result if self.asks else None)

    async def write(
        self,
        messages: Sequence[Message],
        *,
        repeat: int | None = None,
        session: str | None = None,
        **sampling: Any,
    ) -> Reply:
        """The policy as a [`ChatModel`]: one turn; an error if the context has no room for one."""
        context = self.chat_format.prompt_ids(messages)
        room = self.limits.remaining_tokens(Rollout(context))
        if room < 1:
            return Reply(error=BadRequest(f"{len(context)} tokens leave no room to write"))
        seed = rollout_seed(self.settings.seed, "reflect", repeat, messages[-1]["content"])
        sample = await self.policy()(SampleRequest(context, room, seed))
        return Reply(
            self.chat_format.parse(sample.ids).text, usage=Usage(len(context), len(sample.ids))
        )


def _on_every_process(reflect: Callable[[], list[Outcome]] | None) -> list[Outcome]:
    """Call `reflect` on the process that has one; every process gets its outcomes, or raises an error if it failed."""
    shared: list[Any] = [[], None]
    if reflect is not None:
        try:
            shared[0] = reflect()
        except Exception as error:
            broadcast_object_list([None, describe(error)])
            raise
    broadcast_object_list(shared)
    if shared[1] is not None:
        raise RuntimeError(f"the reflection failed on another process: {shared[1]}")
    return shared[0]


def check_reflector(args: ESPLConfig, reference: ChatModel | None) -> None:
    """Raise `ValueError` if the reference LLM is missing, or would never be called."""
    if args.evolves and reference is None and args.reflector == "reference":
        raise ValueError(
            f"mode={args.mode!r} needs a reference LLM to reflect: pass reference=, or use mode='rl', or "
            "reflector='policy' to let the policy reflect"
        )
    if args.evolves and reference is not None and args.reflector == "policy":
        raise ValueError(
            "with reflector='policy' the reference LLM would never be asked: pass reference=None"
        )
