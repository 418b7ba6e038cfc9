"""[`AgentProgram`]: an agent that keeps its own loop, as an environment that plays whole episodes.

The program calls an address as it would call OpenAI, and the policy answers. An episode is one run
of the program. The calls of a rollout become its token sequences (`session.py`, `call_tree.py`).

How the agent runs is up to the subclass: [`Program`] calls a function, and
`harnesses.CommandProgram` starts a command.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypedDict

from ..llm import ChatModel, LLMError, Misconfigured, ServerFailed, TimedOut
from ..llm.guard import abandon, text_of
from ..llm.loop import on_background_thread, start
from ..rollout import (
    ChatFormat,
    Environment,
    FreeText,
    Limits,
    Observation,
    Policy,
    Rollout,
    TextFormat,
    Turn,
)
from .advice import Advice, find_changed_message
from .call_tree import Call
from .failures import LimitExceeded, ProgramFailed, raised_by
from .gateway import Gateway
from .protocol import MAX_BODY_BYTES, ChatMessage
from .rendering import Renderer
from .session import Session

logger = logging.getLogger(__name__)

_STOP_SECONDS = 2.0
_IDLE_SECONDS = 60.0  # without a request, before a warning
_GRACE_SECONDS = 10.0  # for a process to end, after it has heard that its rollout is over


@dataclass(frozen=True)
class RunRequest:
    """The data that an agent needs to play an episode.

    Args:
        row (`dict`): The row of the rollout.
        base_url (`str`): The address that the agent calls; it ends with `/v1`.
        api_key (`str`): The key of the rollout at that address.
        system_prompt (`str`, *optional*): The system prompt of the run.
        limits ([`Limits`]): The limits of the rollout.
    """

    row: Mapping[str, Any]
    base_url: str
    api_key: str
    system_prompt: str | None
    limits: Limits


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run of an agent: an answer, an error, or neither.

    Args:
        returned (`dict`, *optional*): Its answer and other fields.
        error ([`LLMError`], *optional*): What fails the rollout.
    """

    returned: dict[str, Any] | None = None
    error: LLMError | None = None


class AgentRun(ABC):
    """One run of an agent, which plays one episode.

    Attributes:
        takes_system_prompt (`bool`): Whether the agent gets the system prompt itself. Otherwise it
            stands in front of each conversation.
        has_processes (`bool`): Whether the run has processes of its own, which have to end before
            the episode does.
    """

    takes_system_prompt: bool = False
    has_processes: bool = False

    @abstractmethod
    async def play(self, request: RunRequest) -> dict[str, Any] | None:
        """Run the agent until it returns.

        Returns:
            `dict`, *optional*: Its answer and other fields; `None` if it has no answer.

        Raises:
            `Exception`: Whatever the agent raises.
        """

    def is_policy_to_blame(self, failure: LLMError, session: Session) -> bool:
        """Whether a failure is the policy's mistake in a way that only this kind of run knows."""
        return False

    @abstractmethod
    async def finish(self, rollout: Rollout, session: Session) -> None:
        """Complete a rollout whose calls and answer are written."""


class ProgramOptions(TypedDict, total=False):
    """The options that every kind of program has, described in [`AgentProgram`]."""

    llms: Mapping[str, ChatModel] | None
    trains: Callable[[Call], bool] | None
    max_calls: int
    max_llm_calls: int
    max_sequences: int
    timeout: float
    host: str
    port: int
    public_url: str | None
    max_body_bytes: int


class AgentProgram(Environment, ABC):
    """An agent program as an environment: it calls an address as it would call OpenAI, and the
    policy answers.

    Args:
        llms (`dict[str, ChatModel]`, *optional*): Large LLMs that the program calls at the same
            address, by the name of the model. They count towards the job's budget. If one fails,
            the rollout fails.
        mistakes (`tuple`, *optional*): Exceptions for which the policy is to blame, such as output
            that cannot be parsed: the rollout is `malformed` and learns. Every other one fails the
            rollout.
        trains (`Callable[[Call], bool]`, *optional*): Whether a call's tokens are in the loss. By
            default those of the agent are, and not those beside its work; see [`Call`].
        max_calls (`int`, *optional*, defaults to `64`): Calls of the policy in an episode. A
            request that is refused counts as one.
        max_llm_calls (`int`, *optional*, defaults to `64`): Calls of the large LLMs of `llms=` in
            an episode.
        max_sequences (`int`, *optional*, defaults to `16`): Token sequences in an episode.
        timeout (`float`, *optional*, defaults to `600.0`): Seconds of an episode.
        host (`str`, *optional*, defaults to `"127.0.0.1"`): The address that the gateway listens
            on.
        port (`int`, *optional*, defaults to `0`): Its port; 0 takes a free one.
        public_url (`str`, *optional*): How programs that run elsewhere reach the gateway:
            `http://trainer:8000`.
        max_body_bytes (`int`, *optional*, defaults to 4 MiB): A request with a larger body is
            refused.

    Raises:
        `ValueError`: A limit is not positive, or a large LLM has the policy's name.
    """

    grammar = FreeText()
    model = "agent"  # the policy's name at the address

    def __init__(
        self,
        *,
        llms: Mapping[str, ChatModel] | None = None,
        mistakes: Sequence[type[BaseException]] = (),
        trains: Callable[[Call], bool] | None = None,
        max_calls: int = 64,
        max_llm_calls: int = 64,
        max_sequences: int = 16,
        timeout: float = 600.0,
        host: str = "127.0.0.1",
        port: int = 0,
        public_url: str | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ):
        positive_limits = {
            "max_calls": max_calls,
            "max_sequences": max_sequences,
            "timeout": timeout,
            "max_body_bytes": max_body_bytes,
        }
        for name, limit in positive_limits.items():
            # In a form that is false for NaN, which is no limit.
            if not limit > 0:
                raise ValueError(f"{name} must be positive, not {limit}")
        if max_llm_calls < 0:
            raise ValueError(f"max_llm_calls must be 0 or more, not {max_llm_calls}")
        # At the address a name decides which model answers.
        if self.model in (llms or {}):
            raise ValueError(
                f"{self.model!r} is the policy's own name: give the large LLM another one"
            )

        # Limits of an episode, and how it ends.
        self.max_calls = max_calls
        self.max_llm_calls = max_llm_calls
        self.max_sequences = max_sequences
        self.timeout = timeout
        self.mistakes = tuple(mistakes)

        # Large LLMs, and the address at which they are called. `models` is the name under which
        # `Environment.charge_to` looks for large LLMs to charge to the job's budget.
        self.models = dict(llms or {})
        self.trains = trains
        self._gateway = Gateway(host, port, public_url, max_body_bytes)
        self._renderers: dict[int, Renderer] = {}  # by the id of a chat format
        self._conversation_ids = itertools.count(2**40)  # far from those of `play`
        self._advice = Advice()

    @abstractmethod
    def open_run(self, rollout: Rollout) -> AbstractAsyncContextManager[AgentRun]:
        """The run of an episode. It is left when the rollout is complete or has failed."""

    @property
    @abstractmethod
    def returns_reward(self) -> bool:
        """Whether the program itself returns rewards."""

    def step(self, rollout: Rollout) -> None:
        """Never called: a program plays whole episodes."""

    def check(self) -> None:
        """Open the address, and raise the [`LLMError`] that the first rollout would get.

        For example if the port does not exist, or a large LLM is misconfigured.
        """
        start(self._gateway.listen()).result()
        for chat in self.models.values():
            # A large LLM can be a plain function, which has nothing to check.
            check = getattr(chat, "check", None)
            if check is not None:
                check()

    def close(self) -> None:
        """Stop the gateway."""
        # The background thread runs the gateway, so it cannot wait for the gateway's end.
        if not on_background_thread():
            start(self._gateway.stop()).result(_STOP_SECONDS)

    @staticmethod
    def reward(rollout: Sequence[Rollout], **columns: Any) -> list[float | None]:
        """The reward that the program itself returned, as a reward function.

        It is 0 for rollouts without an answer, and `None` for failed ones and for a command without
        a reward function.

        Raises:
            `ValueError`: The program returned an answer without a reward.
        """
        rewards: list[float | None] = []
        for episode in rollout:
            returned = episode.returned or {}
            # A failed episode has no reward. Of others without an answer the policy learns.
            if episode.status == "failed":
                rewards.append(None)
                continue
            if episode.status != "answered":
                rewards.append(float(returned.get("reward") or 0.0))
                continue

            # An answer needs a reward, though it may be None.
            if "reward" not in returned:
                raise ValueError(
                    "the program returned an answer and no reward: return {'answer': ..., "
                    "'reward': ...}, or give the trainer a reward function"
                )
            reward = returned["reward"]
            rewards.append(None if reward is None else float(reward))
        return rewards

    # ---- an episode ----

    async def play_episode(  # type: ignore[override]
        self, rollout: Rollout, policy: Policy, chat_format: TextFormat, limits: Limits
    ) -> Rollout:
        """Run the program once, in place of the turns of an episode.

        Arguments as in `rollout.play`.

        Raises:
            `Exception`: Whatever the policy raises. A program that raises fails only its own
                rollout.
        """
        if not isinstance(chat_format, ChatFormat):
            raise ValueError(
                "a program's calls are conversations: give the tokenizer a chat template, and rows "
                "no text `prompt`"
            )
        try:
            async with self.open_run(rollout) as run:
                await self._play(rollout, policy, chat_format, limits, run)
            return rollout
        except (ServerFailed, Misconfigured) as error:
            # The cause is outside of the agent: the gateway, the row's files, the reward function.
            return rollout.fail(Observation(error=error))

    async def _play(
        self,
        rollout: Rollout,
        policy: Policy,
        chat_format: ChatFormat,
        limits: Limits,
        run: AgentRun,
    ) -> None:
        """Run the agent, and write its calls and its answer into the rollout."""
        # Open a session: the address at which the policy answers this run.
        system_prompt = _find_system_prompt(rollout.row)
        session = Session(
            rollout=rollout,
            policy=policy,
            renderer=self._find_renderer(chat_format),
            limits=limits,
            llms=self.models,
            max_calls=self.max_calls,
            max_llm_calls=self.max_llm_calls,
            max_sequences=self.max_sequences,
            system_prompt=None if run.takes_system_prompt else system_prompt,
            model=self.model,
            conversation_ids=self._conversation_ids,
            grace_period=_GRACE_SECONDS if run.has_processes else None,
        )
        base_url, api_key = await self._gateway.open(session)

        # Run the agent until it returns or the session ends.
        request = RunRequest(rollout.row, base_url, api_key, system_prompt, limits)
        task = asyncio.ensure_future(self._convert_errors(run.play(request)))
        outcome = RunOutcome()
        try:
            outcome = await self._wait_for_outcome(task, session, run)
        finally:
            # Also when the policy has raised, or the episode is cancelled.
            for variable in _find_variables_with(api_key):
                self._advice.warn_of_shared_key(variable)
            # From here on no call is answered, so that the call tree stays as it is.
            session.close("it has failed" if outcome.error else "the program has ended")
            self._gateway.close_key(api_key)
            abandon(task)
            # The processes of the run end when its task does.
            if run.has_processes:
                await asyncio.wait({task})

        # Without any call there is nothing to train on.
        if outcome.error is None and not session.tree.calls:
            message = (
                "the program made no call that was answered: does it use the base_url that it got?"
            )
            outcome = RunOutcome(error=ServerFailed(message))

        # Write the rollout. In a thread, because a program can send many megabytes.
        await asyncio.to_thread(self._write_rollout, rollout, session, outcome)

        # Warn about common problems, and let the run add what it alone knows, such as a reward.
        await self._look_at_calls(session, outcome.error)
        await run.finish(rollout, session)

    def _find_renderer(self, chat_format: ChatFormat) -> Renderer:
        # A renderer tries out its template only once, so it serves all rollouts.
        renderer = self._renderers.get(id(chat_format))
        if renderer is None:
            renderer = Renderer(chat_format)
            self._renderers[id(chat_format)] = renderer
        return renderer

    async def _convert_errors(self, run: Awaitable[dict[str, Any] | None]) -> dict[str, Any] | None:
        """Await a run of the program. Whatever it raises becomes an [`LLMError`]."""
        try:
            return await run
        except LLMError:
            raise
        except Exception as error:
            raise raised_by(error, self.mistakes) from None

    async def _wait_for_outcome(
        self, task: asyncio.Future[dict[str, Any] | None], session: Session, run: AgentRun
    ) -> RunOutcome:
        """Wait for the run, and decide whether a failure is an error or the policy's mistake.

        Raises:
            `Exception`: Whatever the policy raises.
        """
        try:
            return RunOutcome(returned=await self._wait_for(task, session))
        except LimitExceeded as failure:
            # The run has used more resources than it may: the policy's mistake, and no error.
            logger.info("a rollout was ended: %s", failure)
            session.reach_limit("malformed")
            return RunOutcome()
        except LLMError as failure:
            # A mistake of the policy is an outcome that it learns from, and no error.
            if self._is_policy_to_blame(failure, session, run):
                return RunOutcome()
            return RunOutcome(error=failure)

    async def _wait_for(
        self, task: asyncio.Future[dict[str, Any] | None], session: Session
    ) -> dict[str, Any] | None:
        """Return the result of the program; `None` if its session ends before it does.

        Raises:
            [`LLMError`]: The program, or one of its large LLMs, has failed.
            `Exception`: Whatever the policy raises.
        """
        pending: set[asyncio.Future[Any]] = {task, session.end.future}
        done: set[asyncio.Future[Any]] = set()
        deadline = time.monotonic() + self.timeout
        # Wait piece by piece, to see a program that hangs long before its time is over.
        while not done and (remaining := deadline - time.monotonic()) > 0:
            # Look again when it can first have been idle for long enough.
            until_idle = _IDLE_SECONDS - session.idle_seconds
            if until_idle <= 0:
                until_idle = _IDLE_SECONDS
            done, _ = await asyncio.wait(
                pending,
                timeout=min(remaining, until_idle),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done and session.idle_seconds >= _IDLE_SECONDS:
                self._advice.warn_of_idle_program(session.idle_seconds, self.timeout)
        # The end of the session counts before anything that the program made of it.
        if session.end.future in done:
            session.end.future.result()  # raises the error with which the session has ended, if any
        if not done:
            raise TimedOut(f"the program took longer than {self.timeout:g} seconds")
        if task in done:
            return task.result()
        # The session has ended without an error, and the program has not returned yet.
        return None

    def _is_policy_to_blame(self, failure: LLMError, session: Session, run: AgentRun) -> bool:
        """Whether a failure is the policy's mistake, or follows from a limit that was reached."""
        if isinstance(failure, self.mistakes) or run.is_policy_to_blame(failure, session):
            return True
        # A program that fails after a limit was reached has failed because of it. Other failures,
        # such as outages, are not the policy's.
        if not isinstance(failure, ProgramFailed):
            return False
        return failure.is_mistake or session.limit_reached is not None

    # ---- after an episode ----

    def _write_rollout(
        self,
        rollout: Rollout,
        session: Session,
        outcome: RunOutcome,
    ) -> None:
        """Write the calls of a session and the outcome into its rollout."""
        # Token sequences. The first one is the rollout's own.
        session.tree.assign_roles(self.model, self.trains)
        sequences = session.tree.sequences()
        if sequences:
            main_sequence, _ = sequences[0]
            rollout.prompt_ids = main_sequence.prompt_ids
            rollout.ids = main_sequence.ids
            rollout.mask = main_sequence.mask
            rollout.logprobs = main_sequence.logprobs
            rollout.role = main_sequence.role
            rollout.turn_spans = main_sequence.turn_spans
            rollout.others = [sequence for sequence, _ in sequences[1:]]

        # Turns, and between two turns the messages that the program added.
        calls: list[Call] = []
        for _, sequence_calls in sequences:
            calls += sequence_calls
        rollout.turns = [
            Turn(call.text, "act", True, thought=call.reply.thought or None) for call in calls
        ]
        if calls:
            rollout.first_request = _shown_text(calls[0].new_messages)
        rollout.observations = [
            Observation(_shown_text(call.new_messages), replies=call.llm_replies)
            for call in calls[1:]
        ]

        # Counts for the trainer's metrics.
        rollout.counts = {
            "program/calls": len(calls),
            "program/sequences": len(sequences),
            "program/auxiliary_calls": sum(call.role == "auxiliary" for call in calls),
            "program/cut_replies": sum(not call.sample.finished for call in calls),
            "program/llm_calls": session.llm_call_count,
            "program/llm_seconds": session.llm_seconds,
            "program/undelivered_tokens": session.tree.undelivered_tokens,
            "program/limits_reached": float(session.limit_reached is not None),
        }

        # Replies of large LLMs before the first call and after the last one.
        other_replies = tuple(session.llm_replies)
        if calls:
            other_replies = calls[0].llm_replies + other_replies
        if outcome.error is not None:
            rollout.fail(Observation(error=outcome.error, replies=other_replies))
            return
        if other_replies:
            rollout.observations.append(Observation(replies=other_replies))
        # The outcome: an answer, else the limit that the program reached, else neither.
        rollout.returned = outcome.returned or {}
        if outcome.returned is not None:
            rollout.finish("answered")
        elif session.limit_reached is not None:
            rollout.finish(session.limit_reached.status)
        else:
            rollout.finish("malformed")

    async def _look_at_calls(self, session: Session, error: LLMError | None) -> None:
        """Warn about common problems of programs."""
        calls = session.tree.calls
        has_raised = isinstance(error, ProgramFailed)
        self._advice.warn_of_model_names(calls, self.model, self.models)
        if has_raised and not session.has_requests:
            self._advice.warn_of_unused_address()
        limit = session.limit_reached
        if limit is not None and limit.status == "out_of_turns":
            self._advice.warn_of_used_up_limit(limit.name, limit.size)
        # The comparison of histories takes time: it is left out once it has found something.
        changed_message = ""
        if self._advice.wants_changed_message:
            changed_message = await asyncio.to_thread(find_changed_message, calls)
        self._advice.look_at(
            calls,
            ignored_settings=session.ignored_settings,
            changed_message=changed_message,
            has_raised=has_raised,
        )


def _find_variables_with(api_key: str) -> list[str]:
    """Return the variables of this process that have the key of a rollout.

    The environment is shared with the rollouts that run at the same time.
    """
    return [variable for variable in os.environ if api_key in os.environ.get(variable, "")]


# ---- rows and returned values ----


def _find_system_prompt(row: Mapping[str, Any]) -> str | None:
    """The system prompt of the run, in front of the row's prompt."""
    messages = row.get("prompt") or [None]
    first_message = messages[0]
    if isinstance(first_message, Mapping) and first_message.get("role") == "system":
        system_prompt: str = first_message["content"]
        return system_prompt
    return None


def read_reward(reward: Any, source: str) -> float:
    """A reward as a number.

    Raises:
        [`ServerFailed`]: It is no finite number.
    """
    # Whatever is no number becomes NaN, which is refused with the infinite ones.
    try:
        number = float(reward)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ServerFailed(
            f"{source} could not score the episode: its reward is {text_of(reward, 80, repr)}, not "
            "a number"
        )
    return number


def _shown_text(messages: Sequence[ChatMessage]) -> str:
    """The text of the messages that the program itself has added."""
    return "\n".join(message.text for message in messages if message.role != "assistant")
