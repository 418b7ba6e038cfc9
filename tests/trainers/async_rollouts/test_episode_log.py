"""An episode is replayed from its log, and nothing in the log is requested again."""

import asyncio

import pytest

from agentic_prompting.llm import RateLimited, Reply, ServerFailed, Usage
from agentic_prompting.rollout import (
    Environment,
    Observation,
    Rollout,
    Sample,
    SampleRequest,
    Turn,
    observe,
)
from agentic_prompting.trainers.async_rollouts import InFlightFile
from agentic_prompting.trainers.async_rollouts.episode_log import EpisodeLog
from agentic_prompting.trainers.async_rollouts.in_flight_file import SavedEpisode
from support.in_flight import IDENTITY, REPLY, TURN, resumed


class UsersError(ServerFailed):
    """An environment may have errors of its own."""


@pytest.mark.parametrize("lost", ["turn", "reply"])
def test_what_came_after_a_lost_line_is_asked_for_again(tmp_path, lost):
    """A reply to another turn, or a turn that has read another reply, is no part of this episode;
    after two kills.
    """
    path = tmp_path / "0.jsonl"
    file = InFlightFile(path, IDENTITY, 7, resumes=False)
    file.write({"group": 0, "update": 0, "prompts": 11, "metadata": [{}]})
    for at in (0, 1):
        for kind, content in (("turn", {**TURN, "seed": at}), ("reply", {**REPLY, "text": "old"})):
            if (kind, at) != (lost, 0):
                file.write({"group": 0, "rollout": 0, "at": at, kind: content})
    asked = []

    async def policy(request):
        asked.append(("turn", request.seed))
        return Sample([request.seed, 3], [-1.0, -1.0])

    async def environment(rollout, record):
        asked.append(("reply", len(rollout.turns) - 1))
        observation = Observation("new")
        record(observation)
        return observation

    async def played(turns):
        """What a resumed run asks for until it is killed, after so many turns."""
        file, _ = resumed(path)
        saved = file.saved_groups[0].episodes.get(0, SavedEpisode())
        rollout = Rollout([1])
        log = EpisodeLog(
            policy,
            environment,
            int,
            lambda line: file.write({"group": 0, "rollout": 0, **line}),
            saved.turns,
            saved.replies,
        )
        asked.clear()
        for number in range(turns):
            rollout.add_turn(
                await log.sample(SampleRequest(rollout.context, 4, number)), Turn("", "act", True)
            )
            assert (await log.reply(rollout)).text == "new"
        return asked

    first = [("turn", 0), ("reply", 0)] if lost == "turn" else [("reply", 0)]
    assert asyncio.run(played(1)) == first
    assert asyncio.run(played(2)) == [("turn", 1), ("reply", 1)]
    assert asyncio.run(played(2)) == []


def test_failed_replies_are_found_again(tmp_path):
    """Without them a resumed run counts other calls, and an environment that numbers its calls
    shifts.
    """
    path = tmp_path / "0.jsonl"
    file = InFlightFile(path, IDENTITY, 7, resumes=False)
    file.write({"group": 0, "update": 0, "prompts": 11, "metadata": [{}]})
    failed = Reply(
        error=RateLimited("busy", "m at http://x/v1", 6, 429), usage=Usage(3, 0, 0.5), attempts=6
    )
    replies = (
        failed,
        Reply("Nairobi", usage=Usage(3, 1, 0.5, 4), saved=Usage(1, 1)),
        Reply(error=UsersError("own")),
    )
    asked = []

    async def policy(request):
        return Sample([5, 3], [-1.0, -1.0])

    async def environment(rollout, record):
        asked.append(len(rollout.replies))
        observation = Observation("Nairobi", replies=replies, seconds=0.5)
        record(observation)
        return observation

    async def played():
        saved = resumed(path)[0].saved_groups[0].episodes.get(0, SavedEpisode())
        log = EpisodeLog(
            policy,
            environment,
            int,
            lambda line: file.write({"group": 0, "rollout": 0, **line}),
            saved.turns,
            saved.replies,
        )
        rollout = Rollout([1])
        rollout.add_turn(await log.sample(SampleRequest([1], 4, 0)), Turn("", "act", True))
        return await log.reply(rollout)

    first = asyncio.run(played())
    again = asyncio.run(played())
    assert asked == [0] and first.replies == replies
    assert [(reply.text, reply.usage, reply.saved, reply.attempts) for reply in again.replies] == [
        (reply.text, reply.usage, reply.saved, reply.attempts) for reply in replies
    ]
    assert [type(reply.error) for reply in again.replies] == [RateLimited, type(None), ServerFailed]
    assert str(again.replies[0].error) == str(failed.error)


def test_a_reply_is_kept_when_its_episode_is_cancelled(tmp_path):
    """At the moment between the environment's return and the episode's next line, as when another
    rollout fails.
    """
    entries = []

    class Shop(Environment):
        async def step(self, rollout):
            asyncio.get_running_loop().call_soon(episode.cancel)  # before the episode resumes
            return Observation("paid")

    async def ask(rollout, record):
        return await observe(Shop(), rollout, step_timeout=60, record=record)

    async def play_until_cancelled():
        nonlocal episode
        rollout = Rollout([1])
        rollout.add_turn(Sample([5]), Turn("", "act", True))
        log = EpisodeLog(None, ask, int, entries.append)
        episode = asyncio.ensure_future(log.reply(rollout))
        with pytest.raises(asyncio.CancelledError):
            await episode
        return log.replies

    episode: asyncio.Future
    replies = asyncio.run(play_until_cancelled())
    assert [reply["text"] for reply in replies] == ["paid"]
    assert entries == [{"at": 0, "reply": replies[0]}]
