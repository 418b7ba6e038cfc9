"""Reward functions that do what would end the process or hang TRL's own event loop."""

import asyncio

import pytest

from agentic_prompting.trainers.guarded_rewards import guarded_reward
from support.training import trainer_for

KINDS = [SystemExit, GeneratorExit, asyncio.CancelledError, StopIteration]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_reward_that_exits_costs_its_batch_the_rewards(tiny_policy, rows, tmp_path, caplog, kind, asynchronous):
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
    trainer = trainer_for(tiny_policy, tmp_path, rows, options={"reward_funcs": reward}, max_steps=2)
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
    assert guarded_reward(model) is model and guarded_reward("a/model") == "a/model"
