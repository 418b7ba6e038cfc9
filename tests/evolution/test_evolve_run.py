"""A run of `evolve`, step by step."""

import asyncio
import re

import pytest

from agentic_prompting.evolution import EvolutionStopped, EvolveConfig, EvolveRun
from agentic_prompting.llm import ServerFailed
from agentic_prompting.rewards import exact_match_reward
from support.evolving import ROOT, ROWS, SETTINGS, Policy, run


def test_every_row_once_a_pass_and_every_sample_new():
    policy = Policy()
    result = run(policy)
    assert len(policy.seen) == policy.calls == sum(len(log.prompts) for log in result.steps) * 6 * 4
    evolution = EvolveRun(
        policy, policy, ROWS, exact_match_reward, ROOT, EvolveConfig(problems_per_step=5)
    )
    passes = []
    for step in range(4):
        evolution.logs = [None] * step
        passes.append(evolution._draw_rows())
    assert [epoch for epoch, _ in passes] == [0, 0, 1, 1]
    first, second = ({row["question"] for row in rows} for _, rows in passes[:2])
    assert not first & second


def test_it_stops_when_too_much_fails():
    down = Policy(fail=lambda number: ServerFailed("down", "there") if number > 100 else None)
    result = run(down)
    assert re.search(
        r"% of the rollouts have no reward \(max_failed_share=50%\): down", result.stopped
    )
    evolution = EvolveRun(down, down, ROWS, exact_match_reward, ROOT, SETTINGS)
    before = evolution.state_dict()
    with pytest.raises(EvolutionStopped):
        asyncio.run(evolution.step())
    assert {**evolution.state_dict(), "usage": 0} == {**before, "usage": 0}
