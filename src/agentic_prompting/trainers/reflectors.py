"""The models that reflect on a batch under E-SPL: a reference LLM, or the policy itself.

A reflector turns the task of a batch into the outcomes that `PopulationEvolution.join` takes. Only
the first process sends requests; it broadcasts the outcomes, so that every process returns the
same.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from accelerate.utils import broadcast_object_list

from ..evolution import Outcome, ReflectionTask, propose_children
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

# Attempts without a child after which a run is warned of its reflector.
MAX_SILENT_FAILURES = 3


class ReferenceReflector:
    """A reference LLM that reflects on the background event loop while the weights are updated.

    Args:
        reference ([`ChatModel`], *optional*): π_ref. `None` if there will be no task.
        args ([`ESPLConfig`]): Time limit, sampling options, seed and the settings of the operators.
        sends_requests (`bool`): Whether this process sends the requests.
    """

    def __init__(self, reference: ChatModel | None, args: ESPLConfig, sends_requests: bool):
        self.reference = reference
        self.args = args
        self.sends_requests = sends_requests
        self._running: dict[int, Future[list[Outcome]]] = {}  # by batch

    def begin(self, task: ReflectionTask) -> None:
        """Send the first requests of a task, without waiting for replies."""
        if self.sends_requests:
            self._running[task.batch] = start(self._reflect(task))

    def finish(self, task: ReflectionTask) -> list[Outcome]:
        """Wait for the outcomes of a task. Called on every process; all return the same."""
        if self.sends_requests and task.batch not in self._running:
            self.begin(task)
        running = self._running.pop(task.batch, None)
        return _share_outcomes(None if running is None else running.result)

    async def _reflect(self, task: ReflectionTask) -> list[Outcome]:
        """Return the outcomes, at the latest when the time for the task is over.

        A model that does not reply in time delays training no further.
        """
        timeout = self.args.reflection_timeout
        deadline = asyncio.get_running_loop().time() + timeout
        late_replies = 0

        # A model call that returns a failure instead of raising an error when the time is over, so
        # that the other calls of the task still count.
        async def reply_in_time(messages: Sequence[Message], **options: Any) -> Reply:
            nonlocal late_replies
            try:
                async with asyncio.timeout_at(deadline):
                    return await as_chat(self.reference)(messages, **options)
            except TimeoutError:
                late_replies += 1
                return Reply(error=TimedOut(f"no reply within reflection_timeout={timeout:g} s"))

        # The requests' `repeat` is a function of seed and batch, so a resumed run sends the same.
        repeat = rollout_seed(self.args.seed, "reflection", task.batch)
        sampling: Any = self.args.reference_sampling or {}
        outcomes = await propose_children(reply_in_time, task, self.args, repeat=repeat, **sampling)
        if late_replies:
            logger.warning(
                "the reference LLM did not reply to %d calls within %g s: batch %d has no children "
                "from them",
                late_replies,
                timeout,
                task.batch,
            )
        return outcomes


class PolicyReflector:
    """The policy being trained, which revises its own instructions (the paper's Figure 15).

    It reflects when the children are due, with its weights at that time, which are those of a
    checkpoint. A reply is one of its turns, as long as `max_turn_tokens` allows. All processes
    enter a session of the policy's back end; the first one samples.

    Args:
        get_policy (`Callable[[], Policy]`): Returns the policy.
        open_session (`Callable`): Opens a session of its back end, as a context manager.
        chat_format ([`ChatFormat`]): Its chat template.
        limits ([`Limits`]): Its limits, as in rollouts.
        args ([`ESPLConfig`]): Seed and the settings of the operators.
        sends_requests (`bool`): Whether this process samples.
    """

    def __init__(
        self,
        get_policy: Callable[[], Policy],
        open_session: Callable[[], AbstractContextManager[None]],
        chat_format: ChatFormat,
        limits: Limits,
        args: ESPLConfig,
        sends_requests: bool,
    ):
        self.get_policy = get_policy
        self.open_session = open_session
        self.chat_format = chat_format
        self.limits = limits
        self.args = args
        self.sends_requests = sends_requests

    def begin(self, task: ReflectionTask) -> None:
        """Does nothing, because the weights are being updated."""

    def finish(self, task: ReflectionTask) -> list[Outcome]:
        """Return the outcomes of a task. Called on every process; all return the same."""
        outcomes: Future[list[Outcome]] = Future()
        # The other processes leave the session at once or, if sampling is a collective operation,
        # take part in it until this one leaves.
        with self.open_session():
            if self.sends_requests:
                try:
                    reflection = propose_children(self.write, task, self.args, repeat=task.batch)
                    outcomes.set_result(run_with_engine(self.get_policy(), reflection))
                except Exception as error:
                    outcomes.set_exception(error)
        return _share_outcomes(outcomes.result if self.sends_requests else None)

    async def write(
        self,
        messages: Sequence[Message],
        *,
        repeat: int | None = None,
        session: str | None = None,
        **sampling: object,
    ) -> Reply:
        """Sample one turn, as a [`ChatModel`]; an error if the context has no room for one."""
        context = self.chat_format.prompt_ids(messages)
        max_tokens = self.limits.remaining_tokens(Rollout(context))
        if max_tokens < 1:
            return Reply(error=BadRequest(f"{len(context)} tokens leave no room to write"))
        # Requests of the same task differ in their last message, and so in their seed.
        seed = rollout_seed(self.args.seed, "reflect", repeat, messages[-1]["content"])
        sample = await self.get_policy()(SampleRequest(context, max_tokens, seed))
        text = self.chat_format.parse(sample.ids).text
        return Reply(text, usage=Usage(len(context), len(sample.ids)))


class ReflectionWatch:
    """Warns once if no attempt of a run to write a new system prompt makes a child.

    Training goes on without children, so only the log would show it.
    """

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()  # by reason, and what could not be read
        self.failed_attempts = 0
        self.no_change_attempts = 0  # the reference LLM proposed no change
        self.first_error = ""
        self.has_child = False
        self.has_warned = False

    def note(self, outcomes: Sequence[Outcome]) -> None:
        """Count the outcomes of a batch, after its children have joined the population."""
        for outcome in outcomes:
            if outcome.reason == "child":
                self.has_child = True
            if outcome.reason == "no_change":
                self.no_change_attempts += 1
            if not outcome.failed:
                continue
            self.failed_attempts += 1
            self.failures[outcome.reason] += 1
            for name, count in outcome.counts.items():
                if name.startswith(("unread/", "refused/")):
                    self.failures[name] += count
            if outcome.error is not None and not self.first_error:
                self.first_error = f"; the first error: {outcome.error}"
        if self.failed_attempts + self.no_change_attempts >= MAX_SILENT_FAILURES:
            self.warn()

    def warn(self) -> None:
        """Warn if there were attempts and none has made a child."""
        attempts = self.failed_attempts + self.no_change_attempts
        if self.has_child or self.has_warned or not attempts:
            return
        self.has_warned = True
        # A reference LLM that finds nothing to change has not failed.
        if not self.failed_attempts:
            logger.warning(
                "no new system prompt: in all %d attempts the reference LLM proposed no change, "
                "which is a valid reply. Take harder problems, or another reference LLM",
                attempts,
            )
            return
        no_change = ""
        if self.no_change_attempts:
            no_change = f", and {self.no_change_attempts} proposed no change"
        reasons = ", ".join(f"{name} {count}" for name, count in self.failures.items())
        logger.warning(
            "no new system prompt: %s %d attempts to write one have failed (%s)%s%s; "
            "evolution.jsonl in output_dir has each of them. Take a more capable reference LLM, or "
            "raise max_words or the max_tokens of its replies",
            f"{self.failed_attempts} of" if no_change else "all",
            attempts,
            reasons,
            no_change,
            self.first_error,
        )


def _share_outcomes(reflect: Callable[[], list[Outcome]] | None) -> list[Outcome]:
    """Call `reflect` on the process that has one, and return its outcomes on every process.

    If it fails, every process raises an error.
    """
    shared: list[Any] = [[], None]  # outcomes and the description of an error
    if reflect is not None:
        try:
            shared[0] = reflect()
        except Exception as error:
            # The other processes wait for a broadcast, so this one must take part before it raises.
            broadcast_object_list([None, describe(error)])
            raise
    broadcast_object_list(shared)
    outcomes, error_description = shared
    if error_description is not None:
        raise RuntimeError(f"the reflection failed on another process: {error_description}")
    return outcomes


def check_reflector(args: ESPLConfig, reference: ChatModel | None) -> None:
    """Raise `ValueError` if the reference LLM is missing, or would never be called."""
    # Without an evolution there are no children to write.
    if not args.evolves:
        return
    if args.reflector == "reference" and reference is None:
        raise ValueError(
            f"mode={args.mode!r} needs a reference LLM that reflects: pass reference=, or set "
            "mode='rl', or set reflector='policy' to let the policy reflect"
        )
    if args.reflector == "policy" and reference is not None:
        raise ValueError(
            "the reference LLM would never be called with reflector='policy': pass reference=None"
        )
