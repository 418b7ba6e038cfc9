"""The simulation of ratings: its world, its reflector, and that a run follows from its seed."""

import random

import pytest

from agentic_prompting.evolution import SystemPrompt
from benchmarks.learning import ratings

PROMPT = SystemPrompt("Solve.", ("help 1", "harm 2"), id=0)


def test_the_reflector_is_right_wrong_and_idle_as_often_as_asked():
    rng = random.Random(0)
    outcomes = [ratings.reflect(PROMPT, 0.6, 0.1, rng) for _ in range(3000)]
    worth = [
        sum(1 if text.startswith("help") else -1 for text in outcome.child.principles)
        if outcome.child
        else 0
        for outcome in outcomes
    ]
    assert set(worth) == {-1, 0, 1}
    for value, share in ((1, 0.6), (-1, 0.1), (0, 0.3)):
        assert worth.count(value) / 3000 == pytest.approx(share, abs=0.03)
    assert {one.reason for one in outcomes if one.child is None} == {"unchanged"}
    assert all(one.child.parents == (0,) for one in outcomes if one.child)


def test_quality_follows_from_the_principles():
    world = ratings.World(random.Random(1))
    worse, better = (
        SystemPrompt("Solve.", texts, id=0) for texts in (("harm 1",), ("help 1", "help 2"))
    )
    assert world.quality(worse) < world.quality(PROMPT) < world.quality(better)
    (result,) = world.play([PROMPT])
    assert len(result.problems) == 8
    assert {len(problem.attempts) for problem in result.problems} == {4}


def test_a_replication_follows_from_its_seed_and_the_table_from_the_records(monkeypatch):
    reflector = next(iter(ratings.REFLECTORS))
    once = ratings.replicate(reflector, "uniform", 3)
    assert (
        once
        == ratings.replicate(reflector, "uniform", 3)
        != ratings.replicate(reflector, "uniform", 4)
    )
    assert once["chosen"] <= 1 and once["best"] >= 0.3
    row = {"reflector": "r", "spearman": [0.5, 0.7], "played": [0.4, 0.4]}
    records = [
        {**row, "rating": "trueskill", "rule": "top_plus_random", "chosen": [0.5, 0.6]},
        {**row, "rating": "paired", "rule": "top_two", "chosen": [0.7, 0.8]},
    ]
    summary = ratings.summarise(records)["r"]["paired, top_two"]
    assert summary["chosen"]["mean"] == 0.75
    assert summary["minus_default"]["mean"] == pytest.approx(0.2)
    assert summary["n"] == 2
    assert "| r | paired, top_two | 0.750 [" in ratings.table(records)
