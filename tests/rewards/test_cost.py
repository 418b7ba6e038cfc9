"""The reward for saving calls."""

import pytest

from agentic_prompting.rewards import (
    CostReward,
)
from support.agent_turns import ASK, END, episode, failed_episode


def test_a_price_is_no_reward_where_there_is_none():
    """Else the total of a rollout that was never sampled is 0, the best that there is where answers cost."""
    rollouts = [episode(ASK, END), failed_episode(), episode(status="truncated")]
    assert CostReward(1.0)(rollouts) == [0.0, None, None]


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_price_is_finite(weight):
    with pytest.raises(ValueError, match="weight"):
        CostReward(weight)
