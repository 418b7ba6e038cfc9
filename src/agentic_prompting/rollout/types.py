"""The types of an episode: requests, samples, observations, the [`Rollout`], its seeds and limits.

A [`Rollout`] keeps token ids, mask and log-probabilities in step by construction: they change only
through [`Rollout.add_turn`] and [`Rollout.add_observation`].
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, Protocol

from ..llm import LLMError, Reply
from ..llm.numbers import value_text
from .grammar import Turn

_REFERENCE = re.compile(r"#(\d{1,3})")

Status = Literal["running", "answered", "out_of_turns", "truncated", "malformed", "failed"]


@dataclass(frozen=True)
class SampleRequest:
    """A request to a policy: continue one context.

    Args:
        context (`list[int]`): Token ids so far, prompt included.
        max_new_tokens (`int`): The most tokens to sample, at least 1.
        seed (`int`): The randomness of this continuation. The same seed and context give the same
            tokens whatever else is in the batch, so that a run does not depend on the order in
            which replies arrive.
        conversation (`int`, *optional*): The number of the conversation that this turn belongs to.
            A policy may keep the keys and values of one turn and reuse them in the next turn of the
            same conversation.
        greedy (`bool`, *optional*, defaults to `False`): Take the likeliest token each time,
            whatever the policy's temperature. Read by models in this process.
        draft (`Sequence[int]`, *optional*): A guess at the continuation: it saves forward passes
            and never changes the result. Read by models in this process.
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
        ids (`list[int]`): The sampled token ids, at least one, including the end-of-turn token if
            it was sampled.
        logprobs (`list[float]`, *optional*): Log-probability of each token, if the back end returns
            them: the model's at the sampling temperature, without truncation (`top_p`, ...) or
            penalties, as a trainer computes them.
        finished (`bool`, *optional*, defaults to `True`): `False` if the token limit cut the turn
            off.
        drafted (`int`, *optional*, defaults to `0`): The number of tokens that came from the
            request's draft.
        updates (`Sequence[int]`, *optional*): For each token the number of weight updates before
            it, if the policy counts them.
    """

    ids: list[int]
    logprobs: list[float] | None = None
    finished: bool = True
    drafted: int = 0
    updates: Sequence[int] = ()


class Policy(Protocol):
    """The agent's weights at token level: samples one turn of one conversation.

    The policy decides which requests share a batch; see `engine.py`.
    """

    async def __call__(self, request: SampleRequest) -> Sample: ...


class Sampler(Protocol):
    """A back end that works in batches only: returns one [`Sample`] per request, in order.

    [`BatchEngine`] makes a [`Policy`] of it.
    """

    def __call__(self, requests: Sequence[SampleRequest]) -> list[Sample]: ...


@dataclass(frozen=True)
class Observation:
    """The environment's return value after one turn.

    Args:
        text (`str`, *optional*, defaults to `""`): The text that the agent reads. Unused when
            `error` is set.
        error ([`LLMError`], *optional*): The environment failed, through no fault of the agent: the
            rollout ends as `failed` and gets no reward.
        replies (`tuple[Reply, ...]`, *optional*): The large-LLM calls that it took, for counting.
        seconds (`float`, *optional*, defaults to `0.0`): The seconds that the environment took.
        quotable_texts (`tuple[str, ...]`, *optional*): The whole reply to each call of the turn, if
            the agent may refer to it by number (`#1`); numbers run through the episode. Empty for a
            call that has no text to hand on. Records have them as `parts`.
    """

    text: str = ""
    error: LLMError | None = None
    replies: tuple[Reply, ...] = ()
    seconds: float = 0.0
    quotable_texts: tuple[str, ...] = ()


@dataclass
class TokenSequence:
    """One training row: a token sequence and a mask over the sampled tokens.

    Args:
        prompt_ids (`list[int]`): The tokens in front of the first sampled one.
        ids (`list[int]`): Everything after the prompt: sampled tokens and the tokens between them.
        mask (`list[int]`): 1 where `ids` holds a sampled token that is in the loss.
        logprobs (`list[float]`, *optional*): Log-probability per token, 0.0 where none was sampled;
            `None` if unknown.
        role (`str`, *optional*, defaults to `"agent"`): `auxiliary` for calls beside the agent's
            work (a title).
        turn_spans (`list[tuple[int, int]]`): Start and end in `ids` of each sampled turn, including
            turns that are not in the loss.
    """

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list, kw_only=True)
    mask: list[int] = field(default_factory=list, kw_only=True)
    logprobs: list[float] | None = field(default=None, kw_only=True)
    role: str = field(default="agent", kw_only=True)
    turn_spans: list[tuple[int, int]] = field(
        default_factory=list, kw_only=True, repr=False, compare=False
    )

    def add_sampled(self, sample: Sample, in_loss: bool = True) -> None:
        """Append sampled tokens."""
        # A back end may be the user's own, so check what it returns.
        if not sample.ids:
            raise ValueError("a sampler returned no token; it must return at least one")
        if sample.logprobs is not None and len(sample.logprobs) != len(sample.ids):
            raise ValueError(
                f"{len(sample.ids)} sampled tokens but {len(sample.logprobs)} log-probabilities"
            )

        # One turn without log-probabilities leaves the whole sequence without them.
        if sample.logprobs is None:
            self.logprobs = None
        elif not self.ids:
            self.logprobs = list(sample.logprobs)
        elif self.logprobs is not None:
            self.logprobs = self.logprobs + sample.logprobs

        # The turn is a span of `ids`; the mask says whether its tokens are in the loss.
        start = len(self.ids)
        self.ids += sample.ids
        self.turn_spans.append((start, len(self.ids)))
        self.mask += [int(in_loss)] * len(sample.ids)

    def add_observed(self, ids: list[int]) -> None:
        """Append tokens that were not sampled."""
        self.ids += ids
        self.mask += [0] * len(ids)
        # The tokens were not sampled, so they have no log-probability.
        if self.logprobs is not None:
            self.logprobs += [0.0] * len(ids)


@dataclass
class Rollout(TokenSequence):
    """One episode.

    The rollout's own tokens are its first token sequence; the episode of a program may have others.

    Args:
        prompt_ids (`list[int]`): The rendered prompt.
        row (`dict`, *optional*): The dataset row it comes from: `question`, `answers`, ...
        seed (`int`, *optional*, defaults to `0`): The rollout's own randomness; also its identity
            for replay.
        batch (`str`, *optional*): The training batch that the rollout belongs to; `""` if it
            belongs to none.
        group (`int`, *optional*): Number of the group in the batch: rollouts of one group have the
            same prompt.

    Attributes:
        ids (`list[int]`): Everything after the prompt: the agent's tokens and the observations
            between them.
        mask (`list[int]`): 1 where `ids` holds the agent's token, 0 where it holds an
            observation's.
        logprobs (`list[float]`, *optional*): Log-probability per token, 0.0 under the mask; `None`
            if unknown.
        turns (`list[Turn]`): The agent's turns, parsed; in a program's episode, sequence by
            sequence.
        observations (`list[Observation]`): The environment's observations; one fewer than turns, or
            as many after a failure.
        status (`str`): How the episode ended: `answered`; `out_of_turns`, the last turn allowed was
            still a request; `truncated`, a turn, the response or the context hit its token limit;
            `malformed`, a turn fits no rule of the grammar; `failed`, the environment failed: no
            reward, no gradient.
        error ([`LLMError`], *optional*): The reason for `failed`.
        others (`list[TokenSequence]`): The further sequences of a program's episode.
        returned (`dict`, *optional*): The result of a program: `answer`, `reward`, and other keys
            for rewards.
        counts (`dict[str, float]`): Numbers about the episode for the logs, by the name of the
            metric.
        first_request (`str`): What a program sent before the first reply; empty for other episodes.
        traceparent (`str`): The name of its span, if traces are on.
    """

    row: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    batch: str = ""
    group: int | None = None
    turns: list[Turn] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    status: Status = "running"
    error: LLMError | None = None
    others: list[TokenSequence] = field(default_factory=list, repr=False)
    returned: dict[str, Any] | None = None
    counts: dict[str, float] = field(default_factory=dict, repr=False)
    first_request: str = field(default="", repr=False)
    traceparent: str = field(default="", repr=False, compare=False)

    def add_turn(self, sample: Sample, turn: Turn) -> None:
        """Append the agent's next turn: its tokens (mask 1) and their parsed text.

        An answer that is a reference (`#3`) becomes the whole text of that reply, if there is one.
        """
        self.add_sampled(sample)

        # Resolve a reference to an earlier reply.
        reference = _REFERENCE.fullmatch(turn.answer or "")
        if reference:
            number = int(reference[1])
            texts = self.quotable_texts
            # A reply without text cannot be referred to.
            if 1 <= number <= len(texts) and texts[number - 1]:
                turn = replace(turn, answer=texts[number - 1], answer_reference=number)
        self.turns.append(turn)

    def add_observation(self, observation: Observation, ids: list[int]) -> None:
        """Append an observation, its tokens with the template's tokens around them (mask 0)."""
        self.observations.append(observation)
        self.add_observed(ids)

    def fail(self, observation: Observation) -> Rollout:
        """End as `failed`, through the environment's fault. Its calls are still counted."""
        self.observations.append(observation)
        self.error = observation.error
        return self.finish("failed")

    def finish(self, status: Status) -> Rollout:
        """End with this status."""
        self.status = status
        return self

    @property
    def sequences(self) -> list[TokenSequence]:
        """All token sequences of the episode, the rollout's own tokens first."""
        return [self, *self.others]

    @property
    def context(self) -> list[int]:
        """The prompt and everything after it, which the policy continues."""
        return self.prompt_ids + self.ids

    @property
    def done(self) -> bool:
        return self.status != "running"

    @property
    def answer(self) -> str | None:
        """The answer's text, stripped; `None` without one."""
        if self.status != "answered":
            return None
        # A program returns its answer; any other agent writes it in its last turn.
        if self.returned is not None:
            return value_text(self.returned.get("answer")).strip()
        return self.turns[-1].answer if self.turns else None

    @property
    def texts(self) -> list[str]:
        """The agent's turns as text, for example for [`PromptR1Reward.score_turns`]."""
        return [turn.text for turn in self.turns]

    @property
    def replies(self) -> list[Reply]:
        """All large-LLM calls made for this episode."""
        return list(chain.from_iterable(observation.replies for observation in self.observations))

    @property
    def quotable_texts(self) -> list[str]:
        """The texts that the agent may refer to: the reference `#1` means the first one."""
        return list(
            chain.from_iterable(observation.quotable_texts for observation in self.observations)
        )

    def __repr__(self) -> str:
        size = f"{len(self.turns)} turns, {len(self.ids)} tokens"
        return f"Rollout({self.status}, {size}, seed={self.seed})"


@dataclass(frozen=True)
class Limits:
    """The limits of a rollout.

    Args:
        max_turns (`int`, *optional*, defaults to `5`): Turns of the agent, including the one with
            the answer (Table 6: T=5).
        max_turn_tokens (`int`, *optional*, defaults to `1024`): Tokens of one turn (Table 6).
        max_tokens (`int`, *optional*, defaults to `8192`): Tokens after the prompt, including
            observations (Table 6).
        max_context (`int`, *optional*): Tokens of prompt and response together; the model's own
            limit.
        step_timeout (`float`, *optional*, defaults to `1800`): Seconds that the environment may
            take for one step or reset; the rollout then fails. `None`: no limit.
        environments (`Mapping`, *optional*): With several environments, by name, the limits that
            differ: `{"shop": {"max_turns": 3}}`.

    Raises:
        `ValueError`: If a limit is below 1 or `None`, `step_timeout` is not above 0, or an
            environment has an unknown limit.
    """

    max_turns: int = 5
    max_turn_tokens: int = 1024
    max_tokens: int = 8192
    max_context: int | None = None
    environments: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    step_timeout: float | None = 1800.0

    def __post_init__(self):
        # All limits but the time limit are counts; only that of the context may be missing.
        for name, value in vars(self).items():
            if name in ("environments", "step_timeout"):
                continue
            is_unlimited = name == "max_context" and value is None
            if not is_unlimited and (value is None or value < 1):
                raise ValueError(f"{name} must be at least 1, got {value}")
        # The time limit is in seconds, and need not be a whole number.
        if self.step_timeout is not None and not 0 < self.step_timeout < math.inf:
            raise ValueError(
                "step_timeout must be above 0 seconds, or None for no limit, "
                f"got {self.step_timeout}"
            )

        # The limits of an environment have the same names, and the same rules.
        limit_names = [name for name in vars(self) if name != "environments"]
        for environment, environment_limits in self.environments.items():
            for limit in environment_limits:
                if limit not in limit_names:
                    raise ValueError(
                        f"environment {environment!r} has no limit {limit!r}: the limits are "
                        f"{', '.join(limit_names)}"
                    )
            self.for_row({"environment": environment})  # checks the values

    def for_row(self, row: Mapping[str, Any]) -> Limits:
        """Return the limits in a row's environment."""
        if not self.environments:
            return self
        # An environment without limits of its own has those of the run.
        limits: Mapping[str, Any] = self.environments.get(row["environment"], {})
        return replace(self, environments={}, **limits)

    def remaining_tokens(self, rollout: Rollout, extra: int = 0) -> int:
        """Return how many tokens the next turn may have, after `extra` more observation tokens."""
        # The prompt counts for `max_context` only.
        used = len(rollout.ids) + extra
        remaining = min(self.max_turn_tokens, self.max_tokens - used)
        if self.max_context is not None:
            remaining = min(remaining, self.max_context - len(rollout.prompt_ids) - used)
        return remaining


def transcript(rollout: Rollout) -> str:
    """Return a conversation as text, turn by turn, with the environment's replies."""
    pieces = []
    for number, turn in enumerate(rollout.turns):
        # A turn, and then the reply to it, if there is one.
        pieces.append(turn.text.strip())
        has_reply = number < len(rollout.observations)
        if has_reply and rollout.observations[number].error is None:
            pieces.append(f"[reply] {rollout.observations[number].text.strip()}")
    return "\n".join(pieces)


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of one turn: distinct for every (rollout seed, turn), in 63 bits."""
    # The factor is above any usual number of turns, so the turns of two rollouts stay apart.
    return _mix(seed * 1_000_003 + turn)


def rollout_seed(*parts: object) -> int:
    """Return a seed made of the parts that identify a rollout: run seed, step, position, ...

    Equal parts give equal seeds. Texts that differ anywhere give different ones.
    """
    seed = 0
    # Mix in one part after the other, so that their order matters.
    for part in parts:
        number = part if isinstance(part, int) else _number_of_text(str(part))
        seed = _mix(seed ^ _mix(number))
    return seed


def _number_of_text(text: str) -> int:
    """Return 64 bits that depend on every character of a text."""
    encoded = text.encode()
    # `_mix` keeps 64 bits of a number, which are the end of a longer text: hash it instead.
    if len(encoded) > 8:
        encoded = hashlib.blake2b(encoded, digest_size=8).digest()
    return int.from_bytes(encoded, "big")


def _mix(number: int) -> int:
    """Apply SplitMix64's finaliser: near-by numbers become unrelated ones, without any state."""
    # Arithmetic modulo 2**64. The last shift leaves 63 bits.
    number = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (number ^ (number >> 31)) >> 1
