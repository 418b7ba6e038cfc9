"""The log of groups in flight: which run it belongs to, and what damage does to it. Trainings are in test_ahead.py."""

import asyncio
import json
import logging
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from agentic_prompting.llm import RateLimited, Reply, ServerFailed, Usage
from agentic_prompting.rollout import (
    AgentSpec,
    Environment,
    Limits,
    Observation,
    Rollout,
    Sample,
    SampleRequest,
    Turn,
    observe,
)
from agentic_prompting.trainers.ahead import Ahead
from agentic_prompting.trainers.in_flight import (
    EpisodeLog,
    InFlightFile,
    identity_of,
    policy_fingerprint,
)

IDENTITY = {"seed": 0, "num_generations": 2, "limits": {"max_turns": 5}}
TURN = {
    "ids": [5, 6],
    "logprobs": [-0.5, -0.5],
    "finished": True,
    "drafted": 0,
    "updates": [0, 0],
    "seed": 3,
}
REPLY = {"text": "Nairobi", "seconds": 0.5, "replies": []}


class UsersError(ServerFailed):
    """An environment may have errors of its own."""


def write(path, groups=2, identity=IDENTITY, policy=7):
    """A file as a run leaves it: each group started, with a turn and a reply of its first rollout."""
    file = InFlightFile(path, identity, policy, resumes=False)
    for number in range(groups):
        file.write({"group": number, "update": 0, "prompts": 11, "metadata": [{}, {}]})
        file.write({"group": number, "rollout": 0, "at": 0, "turn": TURN})
        file.write({"group": number, "rollout": 0, "at": 0, "reply": REPLY})
    return file


def resumed(path, identity=IDENTITY, policy=7, state=None):
    file = InFlightFile(path, identity, policy, resumes=True)
    return file, file.trust(state)


def test_what_was_written_is_found_again(tmp_path):
    path = tmp_path / "0.jsonl"
    first = write(path)
    again, trusted = resumed(path)
    assert trusted and again.run == first.run and set(again.groups) == {0, 1}
    assert again.groups[1]["episodes"] == {0: {"turns": [TURN], "replies": [REPLY]}}


def test_a_run_that_does_not_resume_deletes_it(tmp_path):
    path = tmp_path / "0.jsonl"
    write(path)
    assert InFlightFile(path, IDENTITY, 7, resumes=False).groups == {} and not path.exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"identity": {**IDENTITY, "num_generations": 4}}, "num_generations"),
        ({"identity": {**IDENTITY, "seed": 1}}, "seed"),
        ({"identity": {**IDENTITY, "limits": {"max_turns": 3}}}, "limits"),
        ({"policy": 8}, "the weights that the run began with"),
        ({"state": {"run": "another", "identity": IDENTITY}}, "the run"),
        (
            {"state": {"run": "another", "identity": {**IDENTITY, "num_generations": 4}}},
            "num_generations, the run",
        ),
    ],
)
def test_entries_of_another_run_are_put_aside_and_counted(tmp_path, caplog, changes, named):
    path = tmp_path / "0.jsonl"
    write(path)
    with caplog.at_level(logging.WARNING):
        file, trusted = resumed(path, **changes)
    assert not trusted and file.groups == {} and not path.exists()
    (line,) = caplog.messages
    assert "2 groups in flight are not used" in line and f"differs in {named};" in line
    assert (tmp_path / "0.unused.jsonl").exists()
    file.write({"group": 0, "update": 0, "prompts": 11, "metadata": [{}, {}]})
    assert resumed(path, changes.get("identity", IDENTITY), changes.get("policy", 7))[1], (
        "the new run's own log"
    )


def test_the_log_of_the_checkpoints_run_is_used_whatever_the_weights_are_now(tmp_path):
    path = tmp_path / "0.jsonl"
    first = write(path)
    file, trusted = resumed(path, policy=8, state={"run": first.run, "identity": IDENTITY})
    assert trusted and set(file.groups) == {0, 1}


def test_a_checkpoint_without_its_log_is_gone_on_with(tmp_path, caplog):
    file, trusted = resumed(tmp_path / "0.jsonl", state={"run": "first", "identity": IDENTITY})
    assert trusted and file.run == "first" and not caplog.messages


def entry(kind, rollout=1, at=0, group=0, **content):
    return json.dumps({"group": group, "rollout": rollout, "at": at, kind: content}).encode()


DAMAGES = {
    "no JSON": b"{",
    "not UTF-8": b"\xff\xfe",
    "a number": b"3",
    "a list": b"[]",
    "no group": b"{}",
    "a text for a group": entry("reply", group="1"),
    "a group of its own": entry("reply", group=9),
    "a turn without ids": entry("turn", logprobs=[-1.0], updates=[0]),
    "ids that are texts": entry("turn", **{**TURN, "ids": ["a", "b"]}),
    "more ids than log-probabilities": entry("turn", **{**TURN, "logprobs": [-1.0]}),
    "a turn of something else": b'{"group": 0, "rollout": 1, "at": 0, "turn": 3}',
    "a turn out of order": entry("turn", rollout=0, at=5, **TURN),
    "a reply without seconds": entry("reply", text="x", replies=[]),
    "a reply whose text is a number": entry("reply", **{**REPLY, "text": 3}),
    "replies of something else": entry("reply", **{**REPLY, "replies": [3]}),
    "a start without metadata": b'{"group": 2, "update": 0, "prompts": 1}',
    "nested without end": b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_line_is_left_out_and_named(tmp_path, caplog, damage):
    path = tmp_path / "0.jsonl"
    write(path)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:4], damage, *lines[4:]]) + b"\n")
    with caplog.at_level(logging.WARNING):
        file, trusted = resumed(path)
    assert (
        trusted
        and set(file.groups) == {0, 1}
        and file.groups[1]["episodes"][0]["replies"] == [REPLY]
    )
    assert any(
        "1 damaged lines are not used, the first is line 5" in line for line in caplog.messages
    )
    file.forget_before(1)  # a checkpoint reads the file once more
    assert [json.loads(line).get("group", 1) for line in path.read_bytes().splitlines()] == [1] * 4


@pytest.mark.parametrize("key", [None, b'"run"', b'"identity"', b'"policy"'])
def test_without_its_first_line_nothing_is_known(tmp_path, key):
    """Without the line, or without one of its keys."""
    path = tmp_path / "0.jsonl"
    write(path)
    first, *others = path.read_bytes().splitlines()
    kept = others if key is None else [first.replace(key, b'" "'), *others]
    path.write_bytes(b"\n".join(kept) + b"\n")
    file, trusted = resumed(path)
    assert trusted and file.groups == {}
    file.write({"group": 0, "update": 0, "prompts": 11, "metadata": [{}, {}]})
    assert set(resumed(path)[0].groups) == {0}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_damage_blocks_a_resume(tmp_path_factory, data):
    """Bytes changed, cut out or put in anywhere: what is left is used or not, and nothing is raised."""
    path = tmp_path_factory.mktemp("flight") / "0.jsonl"
    write(path)
    raw = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(raw)))
    raw[at : at + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=40))
    path.write_bytes(bytes(raw))
    file, _ = resumed(path)
    for group in file.groups.values():
        for episode in group["episodes"].values():
            assert all(len(turn["ids"]) == len(turn["logprobs"]) for turn in episode["turns"])
    file.write({"group": 0, "update": 0, "prompts": 11, "metadata": [{}, {}]})
    file.forget_before(0)


@pytest.mark.parametrize("lost", ["turn", "reply"])
def test_what_came_after_a_lost_line_is_asked_for_again(tmp_path, lost):
    """A reply to another turn, or a turn that has read another reply, is no part of this episode; after two kills."""
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
        kept, rollout = file.groups[0]["episodes"].get(0, {}), Rollout([1])
        log = EpisodeLog(
            policy,
            environment,
            int,
            lambda line: file.write({"group": 0, "rollout": 0, **line}),
            **kept,
        )
        asked.clear()
        for number in range(turns):
            rollout.add_turn(
                await log(SampleRequest(rollout.context, 4, number)), Turn("", "act", True)
            )
            assert (await log.step(rollout)).text == "new"
        return asked

    first = [("turn", 0), ("reply", 0)] if lost == "turn" else [("reply", 0)]
    assert asyncio.run(played(1)) == first
    assert asyncio.run(played(2)) == [("turn", 1), ("reply", 1)]
    assert asyncio.run(played(2)) == []


def test_failed_replies_are_found_again(tmp_path):
    """Without them a resumed run counts other calls, and an environment that numbers its calls shifts."""
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
        kept = resumed(path)[0].groups[0]["episodes"].get(0, {})
        log = EpisodeLog(
            policy,
            environment,
            int,
            lambda line: file.write({"group": 0, "rollout": 0, **line}),
            **kept,
        )
        rollout = Rollout([1])
        rollout.add_turn(await log(SampleRequest([1], 4, 0)), Turn("", "act", True))
        return await log.step(rollout)

    first, again = asyncio.run(played()), asyncio.run(played())
    assert asked == [0] and first.replies == replies
    assert [(reply.text, reply.usage, reply.saved, reply.attempts) for reply in again.replies] == [
        (reply.text, reply.usage, reply.saved, reply.attempts) for reply in replies
    ]
    assert [type(reply.error) for reply in again.replies] == [RateLimited, type(None), ServerFailed]
    assert str(again.replies[0].error) == str(failed.error)


def test_a_reply_is_kept_when_its_episode_is_cancelled(tmp_path):
    """At the moment between the environment's return and the episode's next line, as when another rollout fails."""
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
        episode = asyncio.ensure_future(log.step(rollout))
        with pytest.raises(asyncio.CancelledError):
            await episode
        return log.replies

    episode: asyncio.Future
    replies = asyncio.run(play_until_cancelled())
    assert [reply["text"] for reply in replies] == ["paid"]
    assert entries == [{"at": 0, "reply": replies[0]}]


def test_a_time_limit_may_change_on_resume():
    identities = []
    for seconds in (60, 1800):
        limits = Limits(
            step_timeout=seconds, environments={"shop": {"max_turns": 3, "step_timeout": seconds}}
        )
        args = SimpleNamespace(seed=0, num_generations=2, generation_batch_size=4, world_size=1)
        identities.append(identity_of(AgentSpec(), limits, None, 2, args))
    assert identities[0] == identities[1]
    assert identities[0]["limits"]["environments"] == {"shop": {"max_turns": 3}}


@pytest.mark.parametrize("rollout", [1, 7])
def test_an_entry_of_no_rollout_does_not_block_a_resume(tmp_path, rollout):
    path = tmp_path / "0.jsonl"
    run = write(path, groups=1).run
    path.write_bytes(path.read_bytes() + entry("turn", rollout=rollout, **TURN) + b"\n")
    ahead = Ahead(None, None, None, resumed(path)[0], 1, 2)
    episodes = [{"turns": [], "replies": []}] * 2
    group = {"group": 0, "update": 0, "prompts": 11, "metadata": [{}, {}], "episodes": episodes}
    ahead.load_state_dict({"run": run, "identity": IDENTITY, "started": 1, "groups": [group]})
    assert [len(one["turns"]) for one in ahead.file.groups[0]["episodes"].values()] == [
        1,
        int(rollout == 1),
    ]


def test_a_full_disk_keeps_old_entries_and_costs_no_checkpoint(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    file = write(tmp_path / "0.jsonl")
    before = (tmp_path / "0.jsonl").read_bytes()
    monkeypatch.setattr("agentic_prompting.records.atomic_write", full)
    file.forget_before(1)
    assert (tmp_path / "0.jsonl").read_bytes() == before


def test_other_weights_have_another_fingerprint():
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 40)
    before = policy_fingerprint(model)
    assert policy_fingerprint(model) == before
    with torch.no_grad():
        model.weight += 1e-4
    assert policy_fingerprint(model) != before
