"""One episode: agent and environment take turns until it is over.

A coroutine, so that any number of episodes run side by side and none waits for another: each awaits its own turn from
the policy and its own reply from the environment. Who shares a batch is the policy's business (`engine.py`). What an
episode samples does not depend on it: every turn draws from a seed of its own ([`SampleRequest.seed`]).
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import time
from dataclasses import dataclass
from typing import Any

from ..llm import LLMError, ServerFailed
from .chat_format import ChatFormat
from .types import Environment, Observation, Policy, Rollout, SampleRequest

_conversations = (
    itertools.count()
)  # an engine keeps what it computed for one turn for the next of the same conversation


@dataclass(frozen=True)
class Limits:
    """How far a rollout may go.

    Args:
        max_turns (`int`, *optional*, defaults to `5`): Turns of the agent, the answering one included (Table 6: T=5).
        max_turn_tokens (`int`, *optional*, defaults to `1024`): Tokens of one turn (Table 6).
        max_tokens (`int`, *optional*, defaults to `8192`): Tokens after the prompt, observations included (Table 6).
        max_context (`int`, *optional*): Tokens of prompt and response together; the model's own limit.

    Raises:
        `ValueError`: If a limit is below 1.
    """

    max_turns: int = 5
    max_turn_tokens: int = 1024
    max_tokens: int = 8192
    max_context: int | None = None

    def __post_init__(self):
        for name in ("max_turns", "max_turn_tokens", "max_tokens", "max_context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def remaining_tokens(self, rollout: Rollout, extra: int = 0) -> int:
        """Tokens that the next turn may have, after `extra` more tokens of observation."""
        left = min(self.max_turn_tokens, self.max_tokens - len(rollout.ids) - extra)
        if self.max_context is not None:
            left = min(left, self.max_context - len(rollout.prompt_ids) - len(rollout.ids) - extra)
        return left


async def play(
    rollout: Rollout,
    policy: Policy,
    environment: Environment | None,
    chat_format: ChatFormat,
    limits: Limits = Limits(),
) -> Rollout:
    """Play one rollout to its end, in place.

    Args:
        rollout ([`Rollout`]): A fresh one, its prompt rendered.
        policy ([`Policy`]): The agent's weights.
        environment ([`Environment`], *optional*): Answers the agent's requests. Without one a request ends the
            episode as `out_of_turns`.
        chat_format ([`ChatFormat`]): Tokens around observations, and the reading of turns.
        limits ([`Limits`], *optional*): Turn and token limits.

    Returns:
        [`Rollout`]: The same one, `done`.

    Raises:
        `Exception`: Whatever the policy raises. An environment that raises fails its own rollout only.
    """
    conversation = next(_conversations)
    while (remaining := limits.remaining_tokens(rollout)) > 0:
        seed = turn_seed(rollout.seed, len(rollout.turns))
        sample = await policy(SampleRequest(rollout.context, remaining, seed, conversation))
        turn = chat_format.parse(sample.ids)
        rollout.sampled(sample, turn)
        if turn.kind == "answer":
            return rollout.ended("answered")
        if turn.kind == "malformed":
            # Cut off before it could close its tags: a matter of length, not of form.
            return rollout.ended("malformed" if sample.finished else "truncated")
        if len(rollout.turns) >= limits.max_turns:
            return rollout.ended("out_of_turns")  # the reply could not be used any more, so it is not paid for
        observation = await observe(environment, rollout)
        if observation is None:
            return rollout.ended("out_of_turns")
        if observation.error is not None:
            return rollout.failed(observation)
        ids = chat_format.observation_ids(observation.text, after=rollout.ids)
        if limits.remaining_tokens(rollout, extra=len(ids)) < 1:
            # A rollout never ends on an observation: there is nothing after it to learn from.
            rollout.observations.append(observation)
            return rollout.ended("truncated")
        rollout.observed(observation, ids)
    return rollout.ended("truncated")  # the prompt, or what has been said, fills the context


async def observe(environment: Environment | None, rollout: Rollout) -> Observation | None:
    """What the environment says to the rollout's last turn; `None` if it declares the episode over. Never raises.

    A plain `def step` runs in a thread, so that it may block. A `str` is an observation of that text.
    """
    if environment is None:
        return None
    started = time.perf_counter()
    try:
        if inspect.iscoroutinefunction(environment.step):
            said: Any = await environment.step(rollout)
        else:
            said = await asyncio.to_thread(environment.step, rollout)
            if inspect.isawaitable(said):
                said = await said
    except Exception as error:  # an environment's bug is its failure, not the batch's
        return Observation(error=_as_llm_error(error), seconds=time.perf_counter() - started)
    if isinstance(said, str):
        return Observation(said, seconds=time.perf_counter() - started)
    if said is not None and not isinstance(said, Observation):
        wrong = (
            f"{type(environment).__name__}.step must return an Observation, a str or None, not {type(said).__name__}"
        )
        return Observation(error=ServerFailed(wrong), seconds=time.perf_counter() - started)
    return said


def _as_llm_error(error: BaseException) -> LLMError:
    if isinstance(error, LLMError):
        return error
    return ServerFailed(f"the environment raised {type(error).__name__}: {str(error)[:200]}")


def turn_seed(seed: int, turn: int) -> int:
    """The seed of one turn: distinct for every (rollout seed, turn), in 63 bits."""
    return _mix(seed * 1_000_003 + turn)


def _mix(number: int) -> int:
    """SplitMix64's finaliser: near-by numbers become unrelated ones, without any state."""
    number = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (number ^ (number >> 31)) >> 1


def rollout_seed(*parts: Any) -> int:
    """A seed from whatever identifies a rollout: run seed, step, position, ... Equal parts give equal seeds."""
    number = 0
    for part in parts:
        number = _mix(number ^ _mix(part if isinstance(part, int) else int.from_bytes(str(part).encode(), "big")))
    return number
