"""The reward for saving calls."""

import pytest

from agentic_prompting.llm import Reply, Usage
from agentic_prompting.rewards import CostReward
from agentic_prompting.rollout import Observation
from support.agent_turns import ASK, END, episode, failed_episode


def test_a_price_is_no_reward_where_there_is_none():
    """Else the total of a rollout that was never sampled is 0, the best that there is where answers
    cost.
    """
    rollouts = [episode(ASK, END), failed_episode(), episode(status="truncated")]
    assert CostReward(1.0)(rollouts) == [0.0, None, None]


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_price_is_finite(weight):
    with pytest.raises(ValueError, match="weight"):
        CostReward(weight)


def spent(usd, budget=None):
    rollout = episode(ASK, END)
    rollout.observations.append(Observation("r", replies=(Reply("r", usage=Usage(cost_usd=usd)),)))
    rollout.row = {} if budget is None else {"budget": budget}
    return rollout


def test_a_named_budget_has_its_own_weight():
    reward = CostReward({"low": 100.0, "high": 5.0})
    assert reward([spent(0.01, "low"), spent(0.01, "high")]) == pytest.approx([-1.0, -0.05])
    with pytest.raises(ValueError, match="medium"):
        reward([spent(0.01, "medium")])
    with pytest.raises(ValueError):
        reward([spent(0.01)])


def test_an_amount_is_free_up_to_itself():
    for reward in (CostReward(10.0), CostReward({"": 10.0, "low": 1.0})):
        scores = reward([spent(0.3, 0.1), spent(0.1, 0.1), spent(0.3)])
        assert scores == pytest.approx([-2.0, 0.0, -3.0])


def test_an_empty_cell_among_amounts_is_no_budget():
    assert CostReward(10.0)([spent(0.3, float("nan"))]) == pytest.approx([-3.0])


def test_calls_without_a_price_are_warned_of():
    with pytest.warns(UserWarning, match="price.*unit='calls'"):
        assert CostReward(10.0)([spent(0.0), spent(0.0)]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("reward", "rollouts"),
    [
        (CostReward(10.0), [spent(0.0), spent(0.1)]),
        (CostReward(10.0, unit="calls"), [spent(0.0)]),
        (CostReward(0.0), [spent(0.0)]),
        (CostReward(10.0), [episode(END)]),
    ],
)
def test_calls_that_cost_something_or_nothing_on_purpose_are_not_warned_of(
    reward, rollouts, recwarn
):
    reward(rollouts)
    assert not recwarn.list
