"""The log of groups in flight: which run it belongs to, and what damage does to it.

Trainings are in test_async_source.py.
"""

import json
import logging

import pytest
from hypothesis import given, settings, strategies as st

from agentic_prompting.trainers.async_rollouts import AsyncSource, InFlightFile
from agentic_prompting.trainers.async_rollouts.in_flight_file import SavedEpisode
from support.in_flight import IDENTITY, REPLY, TURN, resumed, write


def test_what_was_written_is_found_again(tmp_path):
    path = tmp_path / "0.jsonl"
    first = write(path)
    again, trusted = resumed(path)
    assert trusted and again.run_id == first.run_id and set(again.saved_groups) == {0, 1}
    assert again.saved_groups[1].episodes == {0: SavedEpisode([TURN], [REPLY])}


def test_a_run_that_does_not_resume_deletes_it(tmp_path):
    path = tmp_path / "0.jsonl"
    write(path)
    assert InFlightFile(path, IDENTITY, 7, resumes=False).saved_groups == {} and not path.exists()


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
    assert not trusted and file.saved_groups == {} and not path.exists()
    (line,) = caplog.messages
    assert "2 groups in flight are not used" in line and f"differs in {named};" in line
    assert (tmp_path / "0.unused.jsonl").exists()
    file.write({"group": 0, "update": 0, "prompts": 11, "metadata": [{}, {}]})
    assert resumed(path, changes.get("identity", IDENTITY), changes.get("policy", 7))[1], (
        "the new run's own log"
    )


def test_replies_of_edited_code_are_put_aside(tmp_path, caplog):
    path = tmp_path / "groups.jsonl"
    code = {"environment_code": "a"}
    write(path, identity={**IDENTITY, **code})
    assert resumed(path, {**IDENTITY, **code})[1]
    assert not resumed(path, {**IDENTITY, "environment_code": "b"})[1]
    assert "environment_code" in caplog.text
    # A file of an older version does not say, and is used.
    write(tmp_path / "old.jsonl")
    assert resumed(tmp_path / "old.jsonl", {**IDENTITY, **code})[1]


def test_groups_of_a_refused_checkpoint_are_counted(tmp_path, caplog):
    """There is no file, so the warning speaks of none that is kept."""
    groups = [{"group": 4}, {"group": 5}, {"group": 6}]
    state = {"run": "first", "identity": {**IDENTITY, "seed": 1}, "groups": groups}
    assert not resumed(tmp_path / "0.jsonl", state=state)[1]
    (line,) = caplog.messages
    assert "3 groups in flight are not used" in line and "unused.jsonl" not in line


def test_the_log_of_the_checkpoints_run_is_used_whatever_the_weights_are_now(tmp_path):
    path = tmp_path / "0.jsonl"
    first = write(path)
    file, trusted = resumed(path, policy=8, state={"run": first.run_id, "identity": IDENTITY})
    assert trusted and set(file.saved_groups) == {0, 1}


def test_a_checkpoint_without_its_log_is_gone_on_with(tmp_path, caplog):
    file, trusted = resumed(tmp_path / "0.jsonl", state={"run": "first", "identity": IDENTITY})
    assert trusted and file.run_id == "first" and not caplog.messages


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
    assert trusted
    assert set(file.saved_groups) == {0, 1}
    assert file.saved_groups[1].episodes[0].replies == [REPLY]
    assert any(
        "1 damaged lines are not used, the first is line 5" in line for line in caplog.messages
    )
    file.delete_groups_before(1)  # a checkpoint reads the file once more
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
    assert trusted and file.saved_groups == {}
    file.write({"group": 0, "update": 0, "prompts": 11, "metadata": [{}, {}]})
    assert set(resumed(path)[0].saved_groups) == {0}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_damage_blocks_a_resume(tmp_path_factory, data):
    """Bytes changed, cut out or put in anywhere: what is left is used or not, and nothing is
    raised.
    """
    path = tmp_path_factory.mktemp("flight") / "0.jsonl"
    write(path)
    raw = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(raw)))
    raw[at : at + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=40))
    path.write_bytes(bytes(raw))
    file, _ = resumed(path)
    for group in file.saved_groups.values():
        for episode in group.episodes.values():
            assert all(len(turn["ids"]) == len(turn["logprobs"]) for turn in episode.turns)
    file.write({"group": 0, "update": 0, "prompts": 11, "metadata": [{}, {}]})
    file.delete_groups_before(0)


@pytest.mark.parametrize("rollout", [1, 7])
def test_an_entry_of_no_rollout_does_not_block_a_resume(tmp_path, rollout):
    path = tmp_path / "0.jsonl"
    run = write(path, groups=1).run_id
    path.write_bytes(path.read_bytes() + entry("turn", rollout=rollout, **TURN) + b"\n")
    source = AsyncSource(None, None, None, resumed(path)[0], 1, 2)
    episodes = [{"turns": [], "replies": []}] * 2
    group = {"group": 0, "update": 0, "prompts": 11, "metadata": [{}, {}], "episodes": episodes}
    source.load_state_dict({"run": run, "identity": IDENTITY, "started": 1, "groups": [group]})
    assert [
        len(episode.turns) for episode in source.in_flight_file.saved_groups[0].episodes.values()
    ] == [
        1,
        int(rollout == 1),
    ]


def test_a_full_disk_keeps_old_entries_and_costs_no_checkpoint(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    file = write(tmp_path / "0.jsonl")
    before = (tmp_path / "0.jsonl").read_bytes()
    monkeypatch.setattr("agentic_prompting.records.atomic_write", full)
    file.delete_groups_before(1)
    assert (tmp_path / "0.jsonl").read_bytes() == before
