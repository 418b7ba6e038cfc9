"""The episode: agent and environment take turns until it is over.

`play` is a coroutine, so any number of episodes run concurrently and none waits for another. The
policy decides which requests share a batch (`engine.py`). The tokens of an episode do not depend on
the batch: each turn has a seed of its own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..llm import LLMError, ServerFailed
from ..llm.guard import failure_of, place_of, wait_for
from ..llm.spans import traced
from .chat_format import TextFormat
from .environment import RESET_ERROR, Environment, Environments, call_environment
from .tracing import trace_episode, trace_step, trace_tool, trace_turn
from .types import Limits, Observation, Policy, Rollout, Sample, SampleRequest, turn_seed

T = TypeVar("T")

# An engine may keep the keys and values of one turn for the next turn of the same conversation.
_conversation_numbers = itertools.count()


@traced(trace_episode)
async def play(
    rollout: Rollout,
    policy: Policy,
    environment: Environment | None,
    chat_format: TextFormat,
    limits: Limits = Limits(),
) -> Rollout:
    """Play one rollout to its end, in place.

    Args:
        rollout ([`Rollout`]): A fresh rollout with its rendered prompt.
        policy ([`Policy`]): The agent's weights.
        environment ([`Environment`], *optional*): Answers the agent's requests. Without one a
            request ends the episode as `out_of_turns`.
        chat_format ([`TextFormat`]): Renders observations and parses turns; for conversations a
            [`ChatFormat`].
        limits ([`Limits`], *optional*): Turn and token limits.

    Returns:
        [`Rollout`]: The same object, `done`.

    Raises:
        `Exception`: Any error of the policy. An error of the environment fails this rollout only.
    """
    # The environment's `reset` failed, so the episode cannot start.
    reset_error = rollout.row.get(RESET_ERROR)
    if reset_error is not None:
        return rollout.fail(Observation(error=reset_error))

    # A program keeps its own loop.
    if environment is not None and environment.plays_whole_episodes:
        assert environment.play_episode is not None
        return await environment.play_episode(rollout, policy, chat_format, limits)

    # Among several environments, the row's own has its format and limits.
    chat_format = chat_format.for_row(rollout.row)
    limits = limits.for_row(rollout.row)
    conversation = next(_conversation_numbers)
    while (remaining := limits.remaining_tokens(rollout)) > 0:
        # The agent's turn.
        turn_number = len(rollout.turns)
        seed = turn_seed(rollout.seed, turn_number)
        request = SampleRequest(rollout.context, remaining, seed, conversation)
        sample = await sample_turn(policy, request, turn_number, chat_format)
        turn = chat_format.parse(sample.ids)
        rollout.add_turn(sample, turn)
        if turn.kind == "answer":
            # An answer cut off by the token limit is incomplete, unless its closing tag came first.
            is_closed = any(stop in turn.text for stop in chat_format.grammar.stops)
            return rollout.finish("answered" if sample.finished or is_closed else "truncated")
        if turn.kind == "malformed":
            # A turn that was cut off before it could close its tags is too long, not malformed.
            return rollout.finish("malformed" if sample.finished else "truncated")

        # The environment's turn. Without a further turn of the agent the reply would be useless.
        if len(rollout.turns) >= limits.max_turns:
            return rollout.finish("out_of_turns")
        observation = await observe(environment, rollout, limits.step_timeout)
        if observation is None:
            return rollout.finish("out_of_turns")
        if observation.error is not None:
            return rollout.fail(observation)
        ids = chat_format.observation_ids(observation.text, after=rollout.ids)
        if limits.remaining_tokens(rollout, extra=len(ids)) < 1:
            # A rollout never ends on an observation: there is nothing after it to learn from.
            rollout.observations.append(observation)
            return rollout.finish("truncated")
        rollout.add_observation(observation, ids)

    # The prompt and the turns fill the context.
    return rollout.finish("truncated")


@traced(trace_turn)
async def sample_turn(
    policy: Policy, request: SampleRequest, turn_number: int, chat_format: TextFormat
) -> Sample:
    """Sample one turn; its number and the chat format describe it in traces."""
    return await policy(request)


@traced(trace_step)
async def observe(
    environment: Environment | None,
    rollout: Rollout,
    step_timeout: float | None = None,
    record: Callable[[Observation | None], None] = lambda observation: None,
) -> Observation | None:
    """Return the environment's observation after the rollout's last turn.

    A plain `def step` runs in a thread and may block. An error of the environment is returned in
    the observation.

    Args:
        environment ([`Environment`], *optional*): Answers the turn.
        rollout ([`Rollout`]): The rollout.
        step_timeout (`float`, *optional*): Seconds that the step may take. The environment's own
            `step_timeout` takes precedence.
        record (`Callable`, *optional*): Called with an observation as soon as the step returns it,
            in the step's own task: a reply that was paid for is then recorded even if this call is
            cancelled at that moment.

    Returns:
        [`Observation`]: The observation; `None` if the episode is over.
    """
    if environment is None:
        return None
    if isinstance(environment, Environments):
        environment = environment.for_row(rollout.row)
    step = environment.step
    started = time.perf_counter()

    # Runs in the step's own task, even if this call is cancelled.
    def receive(returned: Any) -> Observation | None:
        # Any other value is a mistake in the environment.
        if not (returned is None or isinstance(returned, str | Observation)):
            raise ServerFailed(
                f"{place_of(step)} must return an Observation, a str or None, "
                f"not {type(returned).__name__}"
            )
        if isinstance(returned, str):
            returned = Observation(returned, seconds=time.perf_counter() - started)
        record(returned)
        return returned

    try:
        return await call_environment(environment, step, rollout, step_timeout, receive)
    except LLMError as error:
        return Observation(error=error, seconds=time.perf_counter() - started)
    except Exception as error:
        # A bug in an environment fails this rollout, not the batch.
        failure = failure_of(ServerFailed, "the environment", error)
        return Observation(error=failure, seconds=time.perf_counter() - started)


@traced(trace_tool)
async def run_tool(name: str, arguments: str, call: Coroutine[Any, Any, T]) -> T:
    """Await a tool's result, and warn if it takes long; its arguments describe it in traces."""
    return await wait_for(call, f"the environment's tool {name}")
