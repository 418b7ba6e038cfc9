"""Reward functions that exit or return something wrong."""

import asyncio

import numpy as np
import pytest
import torch

from agentic_prompting.trainers.reward_functions import guard_reward_function
from support.training import trainer_for

KINDS = [SystemExit, GeneratorExit, asyncio.CancelledError, StopIteration]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_reward_that_exits_costs_its_batch_the_rewards(
    tiny_policy, rows, tmp_path, caplog, kind, asynchronous
):
    """Training goes on, and the line names the function and what it raised."""
    batches = []

    def judged(completions, **columns):
        batches.append(len(completions))
        if len(batches) == 1:
            raise kind("enough")
        return [float(i % 2) for i, _ in enumerate(completions)]

    async def judged_async(completions, **columns):
        return judged(completions, **columns)

    reward = judged_async if asynchronous else judged
    trainer = trainer_for(
        tiny_policy, tmp_path, rows, options={"reward_funcs": reward}, max_steps=2
    )
    trainer.train()
    assert trainer.state.global_step == 2 and len(batches) == 2
    (line,) = [message for message in caplog.messages if "has no reward from it" in message]
    assert reward.__name__ in line and kind.__name__ in line
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logged[0]["reward"] is None and logged[1]["reward"] == 0.5, "none, then the mean"


def test_a_mistake_in_a_reward_is_raised_as_it_is(tiny_policy, rows, tmp_path):
    def wrong(completions, **columns):
        return completions[0]["no such column"]

    trainer = trainer_for(tiny_policy, tmp_path, rows, options={"reward_funcs": wrong}, max_steps=1)
    with pytest.raises(TypeError):
        trainer.train()


def test_models_and_their_names_are_left_to_trl():
    import torch

    model = torch.nn.Linear(1, 1)
    assert guard_reward_function(model) is model and guard_reward_function("a/model") == "a/model"


# --- what a function returns ---------------------------------------------------------------------


def test_infinite_rewards_are_left_out(caplog):
    """Such as a reward function computes from digits that the policy wrote."""
    guarded = guard_reward_function(
        lambda completions, **columns: [10**400, 1e39, float("inf"), 0.5, None]
    )
    assert guarded(completions=[""] * 5) == [None, None, None, 0.5, None]
    assert "3 infinite rewards" in caplog.text


def test_nan_rewards_are_named_once(caplog):
    guarded = guard_reward_function(lambda completions, **columns: [float("nan"), 0.5, None])
    for _ in range(2):
        assert guarded(completions=[""] * 3)[1:] == [0.5, None]
    (line,) = caplog.messages
    assert "NaN for 1 of 3" in line


WRONG = {
    "None": (lambda n: None, "returned None"),
    "a number": (lambda n: 0.5, "returned a float"),
    "a text": (lambda n: "1" * n, "returned a str"),
    "too few": (lambda n: [0.5] * (n - 1), "returned a list of 3"),
    "texts": (lambda n: ["good"] * n, "returned a list with a str in it"),
    "lists": (lambda n: [[1.0]] * n, "returned a list"),
    "no dimension": (lambda n: torch.tensor(0.5), "returned a Tensor"),
}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_return_of_a_reward_is_one_line_with_its_name(kind, asynchronous):
    """At the first batch, before the next one is paid for."""
    make_value, message = WRONG[kind]

    def wrong_reward(completions, **columns):
        return make_value(len(completions))

    async def wrong_reward_async(completions, **columns):
        return make_value(len(completions))

    reward = guard_reward_function(wrong_reward_async if asynchronous else wrong_reward)
    with pytest.raises(
        ValueError,
        match=r"the reward function .*wrong_reward.* \(.*test_reward_functions.py:\d+\) must",
    ) as error:
        returned = reward(prompts=["a"] * 4, completions=["b"] * 4)
        if asynchronous:
            asyncio.run(returned)
    assert str(error.value).endswith(message) and "\n" not in str(error.value)


def test_a_wrong_return_stops_training_at_the_first_batch(tiny_policy, rows, tmp_path):
    batches = []

    def wrong_reward(completions, **columns):
        batches.append(len(completions))
        return 1.0

    trainer = trainer_for(
        tiny_policy, tmp_path, rows, options={"reward_funcs": wrong_reward}, max_steps=3
    )
    with pytest.raises(ValueError, match="it returned a float"):
        trainer.train()
    assert len(batches) == 1


@pytest.mark.parametrize(
    "value", [[1, None, 0.5, True], (1.0,) * 4, torch.ones(4), np.ones(4), iter([1.0] * 4)]
)
def test_whatever_holds_a_number_for_each_completion_is_taken(value):
    rewards = guard_reward_function(lambda completions, **columns: value)(completions=["b"] * 4)
    assert len(rewards) == 4
    assert all(reward is None or 0 <= float(reward) <= 1 for reward in rewards)
