"""The rollout loop: agent and environment take turns, and nobody waits for anybody else.

Event-driven: while environment calls are in flight, whatever is ready is sampled. A rollout whose reply came back early
goes on at once; the slowest reply of a turn holds up one rollout, not the batch. The sampler is the only thing that
blocks, and environment calls proceed while it does.

What each rollout samples does not depend on this order: every turn draws from a seed of its own
([`SampleRequest.seed`]).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from ..llm import LLMError, ServerFailed
from .chat_format import ChatFormat
from .types import Environment, Observation, Rollout, Sample, Sampler, SampleRequest, Status


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

    def room(self, rollout: Rollout, extra: int = 0) -> int:
        """Tokens that the next turn may have, after `extra` more tokens of observation."""
        left = min(self.max_turn_tokens, self.max_tokens - len(rollout.ids) - extra)
        if self.max_context is not None:
            left = min(left, self.max_context - len(rollout.prompt_ids) - len(rollout.ids) - extra)
        return left


def run_rollouts(
    rollouts: Sequence[Rollout],
    sampler: Sampler,
    environment: Environment | None,
    chat_format: ChatFormat,
    limits: Limits = Limits(),
    on_done: Callable[[Rollout], None] | None = None,
    linger: float = 0.1,
) -> None:
    """Play every rollout to its end, in place.

    Args:
        rollouts (`Sequence[Rollout]`): Fresh rollouts, prompts rendered.
        sampler ([`Sampler`]): The policy.
        environment ([`Environment`], *optional*): Answers the agent's requests. Without one a request ends the
            episode as `out_of_turns`.
        chat_format ([`ChatFormat`]): Tokens around observations, and the reading of turns.
        limits ([`Limits`], *optional*): Turn and token limits.
        on_done (`Callable`, *optional*): Called with each rollout as it ends, for progress bars.
        linger (`float`, *optional*, defaults to `0.1`): Replies often come in bursts, and a batch costs about the same
            whatever its size: after one has arrived, wait for the next, at most this share of the time that the last
            batch took to sample, and so on, ten times this in all. So waiting never costs more than one batch more
            would. 0 samples at once with what is there; `math.inf` waits for all, so that the rollouts go in lockstep
            and who shares a batch depends on nothing but the rollouts.

    Raises:
        `Exception`: Whatever the sampler raises; calls in flight are cancelled first. An environment that raises fails
            its own rollout only.
    """
    loop = _RolloutLoop(sampler, environment, chat_format, limits, on_done or (lambda rollout: None), linger)
    try:
        loop.play(rollouts)
    finally:
        loop.cancel()


class _RolloutLoop:
    """The state of one `run_rollouts`: who is ready, who waits for a reply, and which replies have arrived."""

    def __init__(
        self,
        sampler: Sampler,
        environment: Environment | None,
        chat_format: ChatFormat,
        limits: Limits,
        on_done: Callable[[Rollout], None],
        linger: float,
    ):
        self.sampler, self.environment, self.chat_format = sampler, environment, chat_format
        self.limits, self.on_done, self.linger = limits, on_done, linger
        self.batch_seconds = 0.0  # what the last batch took to sample
        self.in_flight: dict[int, Future[Observation]] = {}  # by id(rollout)
        # Replies put themselves here as they arrive. Instant ones do so in the order of the requests, which makes a
        # replayed run reproducible.
        self.arrivals: SimpleQueue[tuple[Rollout, Future[Observation], float]] = SimpleQueue()

    def play(self, rollouts: Sequence[Rollout]) -> None:
        place = {id(rollout): i for i, rollout in enumerate(rollouts)}
        ready = list(rollouts)
        while ready or self.in_flight:
            for rollout in self._sample(ready):
                self._ask(rollout)
            ready = self._collect() if self.in_flight else []
            ready.sort(key=lambda rollout: place[id(rollout)])

    def cancel(self) -> None:
        for future in self.in_flight.values():
            future.cancel()

    def _sample(self, ready: list[Rollout]) -> list[Rollout]:
        """Sample the next turn of every ready rollout. Returns those that ask the environment something."""
        able = []
        for rollout in ready:
            if self.limits.room(rollout) < 1:  # the prompt alone fills the context
                self._end(rollout, "truncated")
            else:
                able.append(rollout)
        if not able:
            return []
        requests = [
            SampleRequest(
                rollout.context,
                self.limits.room(rollout),
                turn_seed(rollout.seed, len(rollout.turns)),
                conversation=id(rollout),
            )
            for rollout in able
        ]
        started = time.perf_counter()
        samples = self.sampler(requests)
        self.batch_seconds = time.perf_counter() - started
        for rollout, sample in zip(able, samples, strict=True):
            self._take_turn(rollout, sample)
        return [rollout for rollout in able if not rollout.done]

    def _take_turn(self, rollout: Rollout, sample: Sample) -> None:
        """Append a sampled turn and decide what it means for the episode."""
        turn = self.chat_format.parse(sample.ids)
        rollout.sampled(sample, turn)
        if turn.kind == "answer":
            self._end(rollout, "answered")
        elif turn.kind == "malformed":
            # Cut off before it could close its tags: a matter of length, not of form.
            self._end(rollout, "malformed" if sample.finished else "truncated")
        elif len(rollout.turns) >= self.limits.max_turns:
            # The reply could not be used any more, so it is not paid for.
            self._end(rollout, "out_of_turns")

    def _ask(self, rollout: Rollout) -> None:
        """Hand the rollout's last turn to the environment."""
        started = time.perf_counter()
        try:
            future = self.environment.step(rollout) if self.environment is not None else None
        except Exception as error:  # an environment's bug is its failure, not the batch's
            self._fail(rollout, Observation(error=_as_llm_error(error)))
            return
        if future is None:
            self._end(rollout, "out_of_turns")
            return
        self.in_flight[id(rollout)] = future
        future.add_done_callback(lambda done: self.arrivals.put((rollout, done, started)))

    def _collect(self) -> list[Rollout]:
        """Wait for one reply, then take what arrives with it. Returns the rollouts that can go on."""
        going_on = []
        arrival = self.arrivals.get()
        linger = self.linger * self.batch_seconds
        patience = time.perf_counter() + 10 * linger
        while True:
            rollout, future, started = arrival
            del self.in_flight[id(rollout)]
            self._observe(rollout, _result(future, started))
            if not rollout.done:
                going_on.append(rollout)
            wait = min(linger, patience - time.perf_counter()) if self.in_flight else 0
            try:
                arrival = self.arrivals.get(block=wait > 0, timeout=None if wait == math.inf else max(wait, 0))
            except Empty:
                return going_on

    def _observe(self, rollout: Rollout, observation: Observation) -> None:
        """Append an observation, if there is room for it and for a turn after it."""
        if observation.error is not None:
            self._fail(rollout, observation)
            return
        ids = self.chat_format.observation_ids(observation.text, after=rollout.ids)
        if self.limits.room(rollout, extra=len(ids)) < 1:
            # A rollout never ends on an observation: there is nothing after it to learn from.
            rollout.observations.append(observation)
            self._end(rollout, "truncated")
        else:
            rollout.observed(observation, ids)

    def _fail(self, rollout: Rollout, observation: Observation) -> None:
        rollout.failed(observation)
        self.on_done(rollout)

    def _end(self, rollout: Rollout, status: Status) -> None:
        rollout.status = status
        self.on_done(rollout)


def _result(future: Future[Observation], started: float) -> Observation:
    try:
        return future.result()
    except (Exception, CancelledError) as error:
        return Observation(error=_as_llm_error(error), seconds=time.perf_counter() - started)


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
