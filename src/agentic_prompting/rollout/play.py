"""An episode: what it is made of, and how agent and environment take turns until it is over.

A [`Rollout`] keeps token ids, mask and log-probabilities in step by construction: they change only through
[`Rollout.add_turn`] and [`Rollout.add_observation`]. `play` is a coroutine, so any number of episodes run side by side
and none waits for another. The policy decides which requests share a batch (`engine.py`). What an episode samples does
not depend on the batch: every turn draws from a seed of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..llm import LLMError, Reply, ServerFailed
from .grammar import Turn
from .text_format import TextFormat

Status = Literal["running", "answered", "out_of_turns", "truncated", "malformed", "failed", "left_out"]

# An engine keeps what it computed for one turn for the next of the same conversation.
_conversations = itertools.count()


@dataclass(frozen=True)
class SampleRequest:
    """What a sampler is asked for: the continuation of one context.

    Args:
        context (`list[int]`): Token ids so far, prompt included.
        max_new_tokens (`int`): At most this many tokens, >= 1.
        seed (`int`): The randomness of this continuation. The same seed and context give the same tokens whatever
            else is in the batch, so that a run does not depend on which reply happened to arrive first.
        conversation (`int`, *optional*): Which conversation this is a turn of. A sampler may keep what it computed for
            one turn and use it in the next of the same conversation.
        greedy (`bool`, *optional*, defaults to `False`): Take the likeliest token each time, whatever the policy's
            temperature. Read by models in this process.
        draft (`Sequence[int]`, *optional*): A guess at the continuation: saves passes, never changes it. Read by
            models in this process.
    """

    context: list[int]
    max_new_tokens: int
    seed: int
    conversation: int | None = None
    greedy: bool = False
    draft: Sequence[int] = ()


@dataclass(frozen=True)
class Sample:
    """One sampled continuation.

    Args:
        ids (`list[int]`): The sampled token ids, at least one, the end-of-turn token included where it was sampled.
        logprobs (`list[float]`, *optional*): Log-probability of each, where the backend gives them.
        finished (`bool`, *optional*, defaults to `True`): `False` if the token limit cut the turn off.
        drafted (`int`, *optional*, defaults to `0`): How many of them came from the request's draft.
        updates (`Sequence[int]`, *optional*): Updates of the weights before each, where the policy counts them.
    """

    ids: list[int]
    logprobs: list[float] | None = None
    finished: bool = True
    drafted: int = 0
    updates: Sequence[int] = ()


class Policy(Protocol):
    """The agent's weights at token level: one turn of one conversation. Who shares a batch with it is its own affair;
    see `engine.py`."""

    async def __call__(self, request: SampleRequest) -> Sample: ...


class Sampler(Protocol):
    """A back end that can only do batches. Returns one [`Sample`] per request, in order; [`BatchEngine`] makes a
    [`Policy`] of it."""

    def __call__(self, requests: Sequence[SampleRequest]) -> list[Sample]: ...


@dataclass(frozen=True)
class Observation:
    """What the environment answered to one turn.

    Args:
        text (`str`, *optional*, defaults to `""`): What the agent gets to read. Unused when `error` is set.
        error ([`LLMError`], *optional*): The environment failed, through no fault of the agent: the rollout ends as
            `failed` and gets no reward.
        replies (`tuple[Reply, ...]`, *optional*): The large-LLM calls behind it, for counting.
        seconds (`float`, *optional*, defaults to `0.0`): How long the environment took.
    """

    text: str = ""
    error: LLMError | None = None
    replies: tuple[Reply, ...] = ()
    seconds: float = 0.0


class Environment(Protocol):
    """What the agent talks to.

    `step` is an `async def`, awaited after each turn that asks something (`rollout.turns[-1].kind == "act"`). It gives
    an [`Observation`] (or its text); `None` declares the episode over. A plain `def` works too: it runs in a thread,
    several of them at once, and may block.
    """

    def step(self, rollout: Rollout) -> Awaitable[Observation | str | None] | Observation | str | None: ...


@dataclass
class Rollout:
    """One episode.

    Args:
        prompt_ids (`list[int]`): The rendered prompt.
        row (`dict`, *optional*): The dataset row it comes from: `question`, `answers`, ...
        seed (`int`, *optional*, defaults to `0`): The rollout's own randomness; also its identity for replay.
        batch (`str`, *optional*): The training batch it is played for; `""`: it stands alone.
        group (`int`, *optional*): Which group of the batch: rollouts of one group have the same prompt.
        weight (`float`, *optional*, defaults to `1.0`): What it counts in the gradient where calls are saved by
            chance. 0: it was not played, or not to its end, and has no reward.

    Attributes:
        ids (`list[int]`): Everything after the prompt: the agent's tokens and the observations between them.
        mask (`list[int]`): 1 where `ids` holds the agent's token, 0 where it holds an observation's.
        logprobs (`list[float]`, *optional*): Log-probability per token, 0.0 under the mask; `None` if not known.
        turns (`list[Turn]`): The agent's turns, parsed.
        observations (`list[Observation]`): What came back; one fewer than turns, or as many after a failure.
        status (`str`): How it ended: `answered`; `out_of_turns`, it still asked in the last turn it had; `truncated`,
            a turn, the response or the context hit its token limit; `malformed`, a turn fits no rule of the grammar;
            `failed`, the environment failed: no reward, no gradient; `left_out`, it was not played, to save calls.
        error ([`LLMError`], *optional*): The reason of `failed`.
    """

    prompt_ids: list[int]
    row: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    batch: str = ""
    group: int | None = None
    weight: float = 1.0
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    turns: list[Turn] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    status: Status = "running"
    error: LLMError | None = None

    def add_turn(self, sample: Sample, turn: Turn) -> None:
        """Append the agent's next turn: its tokens (mask 1) and what they say."""
        if not sample.ids:
            raise ValueError("a sampler returned no token; it must return at least one")
        if sample.logprobs is not None and len(sample.logprobs) != len(sample.ids):
            raise ValueError(f"{len(sample.ids)} sampled tokens but {len(sample.logprobs)} log-probabilities")
        if not self.ids and sample.logprobs is not None:
            self.logprobs = list(sample.logprobs)
        elif self.logprobs is not None:  # after one turn without them there are none for the whole
            self.logprobs = None if sample.logprobs is None else self.logprobs + sample.logprobs
        self.ids += sample.ids
        self.mask += [1] * len(sample.ids)
        self.turns.append(turn)

    def add_observation(self, observation: Observation, ids: list[int]) -> None:
        """Append an observation and the template's tokens around it (mask 0)."""
        self.observations.append(observation)
        self.ids += ids
        self.mask += [0] * len(ids)
        if self.logprobs is not None:
            self.logprobs += [0.0] * len(ids)

    def fail(self, observation: Observation) -> Rollout:
        """End as `failed`: the environment's fault, not the agent's. Its calls are still counted."""
        self.observations.append(observation)
        self.error = observation.error
        return self.finish("failed")

    def finish(self, status: Status) -> Rollout:
        """End, as `status`."""
        self.status = status
        return self

    @property
    def context(self) -> list[int]:
        """Prompt and everything after it: what the policy continues."""
        return self.prompt_ids + self.ids

    @property
    def done(self) -> bool:
        return self.status != "running"

    @property
    def answer(self) -> str | None:
        """The answer's text, stripped; `None` if the agent gave none."""
        return self.turns[-1].answer if self.turns and self.status == "answered" else None

    @property
    def texts(self) -> list[str]:
        """The agent's turns as text, what [`prompt_r1_score`] reads."""
        return [turn.text for turn in self.turns]

    @property
    def replies(self) -> list[Reply]:
        """All large-LLM calls made for this episode."""
        return [reply for observation in self.observations for reply in observation.replies]

    def __repr__(self) -> str:
        return f"Rollout({self.status}, {len(self.turns)} turns, {len(self.ids)} tokens, seed={self.seed})"


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
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def remaining_tokens(self, rollout: Rollout, extra: int = 0) -> int:
        """Tokens that the next turn may have, after `extra` more tokens of observation."""
        used = len(rollout.ids) + extra
        left = min(self.max_turn_tokens, self.max_tokens - used)
        return left if self.max_context is None else min(left, self.max_context - len(rollout.prompt_ids) - used)


async def play(
    rollout: Rollout,
    policy: Policy,
    environment: Environment | None,
    chat_format: TextFormat,
    limits: Limits = Limits(),
) -> Rollout:
    """Play one rollout to its end, in place.

    Args:
        rollout ([`Rollout`]): A fresh one, its prompt rendered.
        policy ([`Policy`]): The agent's weights.
        environment ([`Environment`], *optional*): Answers the agent's requests. Without one a request ends the
            episode as `out_of_turns`.
        chat_format ([`TextFormat`]): Tokens around observations, and the reading of turns; for conversations a
            [`ChatFormat`].
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
        rollout.add_turn(sample, turn)
        if turn.kind == "answer":
            # Without tags that close it, an answer that the token limit has cut off is no whole answer.
            return rollout.finish("answered" if sample.finished or chat_format.grammar.stops else "truncated")
        if turn.kind == "malformed":
            # Cut off before it could close its tags: a matter of length, not of form.
            return rollout.finish("malformed" if sample.finished else "truncated")
        if len(rollout.turns) >= limits.max_turns:
            return rollout.finish("out_of_turns")  # the reply could not be used any more, so it is not paid for
        observation = await observe(environment, rollout)
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
    return rollout.finish("truncated")  # the prompt, or what has been said, fills the context


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
        if not (said is None or isinstance(said, str | Observation)):
            name, wrong = type(environment).__name__, type(said).__name__
            raise ServerFailed(f"{name}.step must return an Observation, a str or None, not {wrong}")
    except LLMError as error:
        said = Observation(error=error, seconds=time.perf_counter() - started)
    except Exception as error:  # an environment's bug is its failure, not the batch's
        failure = ServerFailed(f"the environment raised {type(error).__name__}: {str(error)[:200]}")
        said = Observation(error=failure, seconds=time.perf_counter() - started)
    return Observation(said, seconds=time.perf_counter() - started) if isinstance(said, str) else said


def turn_seed(seed: int, turn: int) -> int:
    """The seed of one turn: distinct for every (rollout seed, turn), in 63 bits."""
    return _mix(seed * 1_000_003 + turn)


def rollout_seed(*parts: Any) -> int:
    """A seed from whatever identifies a rollout: run seed, step, position, ... Equal parts give equal seeds."""
    number = 0
    for part in parts:
        number = _mix(number ^ _mix(part if isinstance(part, int) else int.from_bytes(str(part).encode(), "big")))
    return number


def _mix(number: int) -> int:
    """SplitMix64's finaliser: near-by numbers become unrelated ones, without any state."""
    number = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (number ^ (number >> 31)) >> 1
