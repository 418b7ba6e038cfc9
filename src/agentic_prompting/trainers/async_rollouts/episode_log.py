"""The log of one episode: its turns and replies, so that a resumed run requests none of them again.

An [`EpisodeLog`] stands between an episode and its policy and environment. It passes on a request
only if the log has no turn or reply for it yet, and logs what comes back. The episode's policy is
[`EpisodeLog.sample`], its environment a [`LoggedEnvironment`].
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from ...llm import LLMError, Reply, Usage
from ...rollout import Environment, Observation, Rollout, Sample, SampleRequest

RecordReply = Callable[[Observation | None], None]


class EpisodeLog:
    """Every turn and every reply of one rollout's episode.

    Args:
        ask_policy (`Callable`): Samples a turn that is not in the log.
        ask_environment (`Callable`): Answers a turn whose reply is not in the log. Its second
            argument records the reply, and must be called in the task that receives it: the
            episode's own task may be cancelled before it resumes.
        count_updates (`Callable`): Returns the number of weight updates so far.
        write_entry (`Callable[[dict], None]`): Writes an entry to disk.
        turns (`Iterable[dict]`, *optional*): Turns sampled before a restart, each the fields of a
            [`Sample`] and the request's `seed`.
        replies (`Iterable[dict]`, *optional*): The environment's replies to them, each the fields
            of an [`Observation`].
        is_program (`bool`, *optional*, defaults to `False`): Whether a program plays the episode. A
            resumed run runs it again from the start. Its calls come in any order, so a logged turn
            is found by the seed of its request, which is a function of the context; a request with
            another context gets a new turn.

    Attributes:
        updates_during_turns (`list[int]`): For each turn sampled by this process, the number of
            weight updates while it was sampled.
    """

    def __init__(
        self,
        ask_policy: Callable[[SampleRequest], Awaitable[Sample]],
        ask_environment: Callable[[Rollout, RecordReply], Awaitable[Observation | None]],
        count_updates: Callable[[], int],
        write_entry: Callable[[dict[str, Any]], None],
        turns: Iterable[dict[str, Any]] = (),
        replies: Iterable[dict[str, Any]] = (),
        is_program: bool = False,
    ):
        self.ask_policy = ask_policy
        self.ask_environment = ask_environment
        self.count_updates = count_updates
        self.write_entry = write_entry
        self.is_program = is_program
        self.turns = list(turns)
        self.replies = list(replies)
        self.updates_during_turns: list[int] = []

        # Turns are requested in the order of the log: the index of the next one.
        self._next_turn = 0
        # A program requests turns in any order: its logged turns by seed, until they are requested.
        self._unrequested_turns: dict[int, dict[str, Any]] = {}
        if is_program:
            self._unrequested_turns = {turn["seed"]: turn for turn in self.turns}
        else:
            # Where a line was lost, later ones belong to another reply or turn.
            self.turns = self.turns[: len(self.replies) + 1]
            self.replies = self.replies[: len(self.turns)]

    async def sample(self, request: SampleRequest) -> Sample:
        """Return the next turn, from the log if it is there, else from the policy."""
        turn = self._take_logged_turn(request)
        if turn is None:
            turn = await self._sample_turn(request)
            self.write_entry({"at": len(self.turns), "turn": turn})
            self.turns.append(turn)
        return sample_from_json(turn)

    async def reply(self, rollout: Rollout) -> Observation | None:
        """Return the reply to the last turn, from the log or else from the environment.

        Failures are not logged, so a resumed run asks again.
        """
        turn_index = len(rollout.turns) - 1
        if turn_index < len(self.replies):
            return observation_from_json(self.replies[turn_index])
        return await self.ask_environment(rollout, self._record_reply)

    def requested_turns(self) -> list[dict[str, Any]]:
        """Return the episode's turns, without those that its program did not request again."""
        unrequested = self._unrequested_turns.values()
        return [turn for turn in self.turns if turn not in unrequested]

    def _take_logged_turn(self, request: SampleRequest) -> dict[str, Any] | None:
        """Return the logged turn of a request, which no later request gets."""
        # The requests of a program come in any order.
        if self.is_program:
            return self._unrequested_turns.pop(request.seed, None)
        # Otherwise turns are requested in the order of the log.
        turn_index = self._next_turn
        self._next_turn += 1
        if turn_index >= len(self.turns):
            return None
        return self.turns[turn_index]

    async def _sample_turn(self, request: SampleRequest) -> dict[str, Any]:
        # The weights may change while the turn is sampled.
        updates_before = self.count_updates()
        sample = await self.ask_policy(request)
        self.updates_during_turns.append(self.count_updates() - updates_before)
        if sample.logprobs is None:
            raise ValueError(
                "async_lead > 0 needs a policy that gives the log-probability of each token it "
                "samples"
            )
        # If the policy does not report versions, assume the weights at the time of the request: the
        # turn then counts as older than it may be.
        updates = list(sample.updates) or [updates_before] * len(sample.ids)
        return {**asdict(sample), "updates": updates, "seed": request.seed}

    def _record_reply(self, observation: Observation | None) -> None:
        if observation is None or observation.error is None:
            reply = observation_to_json(observation)
            self.write_entry({"at": len(self.replies), "reply": reply})
            self.replies.append(reply)


class LoggedEnvironment(Environment):
    """The environment of an episode with a log.

    Args:
        log ([`EpisodeLog`]): Has the replies.
        play_episode (`Callable`, *optional*): That of the environment behind the log.
    """

    described_by = None  # traces name the environment behind the log instead
    step_timeout = math.inf  # the environment's own step has the limit

    def __init__(
        self,
        log: EpisodeLog,
        play_episode: Callable[..., Awaitable[Rollout]] | None = None,
    ):
        self.log = log
        self.play_episode = play_episode

    async def step(self, rollout: Rollout) -> Observation | None:
        """Return the reply to the last turn."""
        return await self.log.reply(rollout)


def sample_from_json(turn: Mapping[str, Any]) -> Sample:
    """Return the sample of a logged turn."""
    return Sample(**{name: value for name, value in turn.items() if name != "seed"})


def observation_to_json(observation: Observation | None) -> dict[str, Any]:
    """Return a reply of the environment as plain JSON, empty if the episode ended with it."""
    if observation is None:
        return {}
    # Failed replies too: rewards and environments count them, and a resumed run must count the
    # same.
    replies = [reply_to_json(reply) for reply in observation.replies]
    entry: dict[str, Any] = {
        "text": observation.text,
        "seconds": observation.seconds,
        "replies": replies,
    }
    if observation.quotable_texts:
        entry["parts"] = list(observation.quotable_texts)
    return entry


def observation_from_json(entry: Mapping[str, Any]) -> Observation | None:
    """Return the reply that [`observation_to_json`] wrote."""
    if "text" not in entry:
        return None
    replies = tuple(reply_from_json(reply) for reply in entry["replies"])
    return Observation(
        entry["text"],
        replies=replies,
        seconds=float(entry["seconds"]),
        quotable_texts=tuple(str(text) for text in entry.get("parts", ())),
    )


def reply_to_json(reply: Reply) -> dict[str, Any]:
    """Return an LLM's reply as plain JSON."""
    error = None if reply.error is None else reply.error.to_json()
    return {**asdict(replace(reply, error=None)), "error": error}


def reply_from_json(entry: Mapping[str, Any]) -> Reply:
    """Return the reply that [`reply_to_json`] wrote."""
    error = None if entry["error"] is None else LLMError.from_json(entry["error"])
    usage = Usage(**entry["usage"])
    saved_usage = Usage(**entry["saved"])
    return Reply(**{**entry, "error": error, "usage": usage, "saved": saved_usage})
