"""A rollout: one episode as one object, and what it is grown from.

A [`Rollout`] keeps token ids, mask and log-probabilities in step by construction: they change only through
[`Rollout.sampled`] and [`Rollout.observed`]. Everything a reward, a log or a later tool wants to know of an episode is
on this object, so nothing has to be recovered from decoded text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..llm import LLMError, Reply
from .grammar import Turn

Status = Literal["running", "answered", "out_of_turns", "truncated", "malformed", "failed"]


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
    """

    context: list[int]
    max_new_tokens: int
    seed: int
    conversation: int | None = None
    greedy: bool = False


@dataclass(frozen=True)
class Sample:
    """One sampled continuation.

    Args:
        ids (`list[int]`): The sampled token ids, at least one, the end-of-turn token included where it was sampled.
        logprobs (`list[float]`, *optional*): Log-probability of each, where the backend gives them.
        finished (`bool`, *optional*, defaults to `True`): `False` if the token limit cut the turn off.
    """

    ids: list[int]
    logprobs: list[float] | None = None
    finished: bool = True


class Policy(Protocol):
    """The agent's weights at token level: one turn of one conversation. Whoever shares a batch with it is up to the
    policy; see `engine.py`."""

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
        status (`str`): How it ended:
            `answered`: the agent gave its answer;
            `out_of_turns`: it still asked in the last turn it had;
            `truncated`: a turn, the response or the context hit its token limit;
            `malformed`: a turn fits no rule of the grammar;
            `failed`: the environment failed. No reward, no gradient.
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

    def sampled(self, sample: Sample, turn: Turn) -> None:
        """Append the agent's next turn: its tokens (mask 1) and what they say."""
        if not sample.ids:
            raise ValueError("a sampler returned no token; it must return at least one")
        if sample.logprobs is not None and len(sample.logprobs) != len(sample.ids):
            raise ValueError(f"{len(sample.ids)} sampled tokens but {len(sample.logprobs)} log-probabilities")
        if sample.logprobs is None:
            self.logprobs = None
        elif self.logprobs is not None:
            self.logprobs += sample.logprobs
        elif not self.ids:  # the first turn; after a turn without log-probabilities there are none for the whole
            self.logprobs = list(sample.logprobs)
        self.ids += sample.ids
        self.mask += [1] * len(sample.ids)
        self.turns.append(turn)

    def observed(self, observation: Observation, ids: list[int]) -> None:
        """Append an observation and the template's tokens around it (mask 0)."""
        self.observations.append(observation)
        self.ids += ids
        self.mask += [0] * len(ids)
        if self.logprobs is not None:
            self.logprobs += [0.0] * len(ids)

    def failed(self, observation: Observation) -> Rollout:
        """End as `failed`: the environment's fault, not the agent's. Its calls are still counted."""
        self.observations.append(observation)
        self.error = observation.error
        return self.ended("failed")

    def ended(self, status: Status) -> Rollout:
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
