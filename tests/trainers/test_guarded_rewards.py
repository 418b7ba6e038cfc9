"""Reward functions that do what would end the process or hang TRL's own event loop."""

import asyncio

import numpy as np
import pytest
import torch

from agentic_prompting import MultiTurnGRPOTrainer, PromptR1Trainer
from agentic_prompting.trainers.scoring import guard_reward_function
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


# --- what a function needs and returns --------------------------------------------------------------------------


class Asked:
    """An environment that counts what is asked of it, which would be paid for."""

    calls = 0

    def step(self, rollout):
        type(self).calls += 1
        return "it is Kenya ."

    def check(self):
        type(self).calls += 1


def needs_answers(completions, answers, **columns):
    return [float(bool(one)) for one in answers]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            [{"question": "a ?"}] * 4,
            r"the reward function needs_answers \(.*:\d+\) needs the column 'answers'",
        ),
        ([{"question": "a ?", "answers": []}] * 4, "row 0 of the dataset"),
    ],
)
def test_rows_without_what_a_reward_reads_are_refused_before_anything_is_paid(
    tiny_policy, tmp_path, dataset, message
):
    """`MultiTurnGRPOTrainer` too: a `KeyError` came when the first batch had been paid for."""
    Asked.calls = 0
    with pytest.raises(ValueError, match=message) as refused:
        trainer_for(tiny_policy, tmp_path, dataset, kind=MultiTurnGRPOTrainer, environment=Asked(),
                    options={"reward_funcs": [lambda rollout, **_: [1.0] * len(rollout), needs_answers]})  # fmt: skip
    assert Asked.calls == 0 and "\n" not in str(refused.value)


def test_a_reward_that_reads_no_answers_needs_none(tiny_policy, tmp_path):
    def own(rollout, bonus=1.0, **columns):
        return [bonus] * len(rollout)

    rows = [{"question": "a ?"}] * 4
    for kind in (PromptR1Trainer, MultiTurnGRPOTrainer):
        trainer_for(
            tiny_policy,
            tmp_path,
            rows,
            kind=kind,
            environment=Asked(),
            options={"reward_funcs": own},
        )


def test_columns_that_an_environments_reset_adds_are_not_missed(tiny_policy, tmp_path):
    class Deals(Asked):
        def reset(self, row):
            return {**row, "answers": ["x"]}

    trainer_for(tiny_policy, tmp_path, [{"question": "a ?"}] * 4, kind=MultiTurnGRPOTrainer, environment=Deals(),
                options={"reward_funcs": needs_answers})  # fmt: skip


def test_infinite_rewards_are_left_out(caplog):
    """Such as a reward function computes from digits that the policy wrote."""
    guarded = guard_reward_function(
        lambda completions, **columns: [10**400, 1e39, float("inf"), 0.5, None]
    )
    assert guarded(completions=[""] * 5) == [None, None, None, 0.5, None]
    assert "3 infinite rewards" in caplog.text


def test_answers_no_reply_can_match_are_refused(tiny_policy, tmp_path):
    from agentic_prompting.rewards import math_reward

    pytest.importorskip("math_verify")
    rows = [{"question": "a ?", "answers": ["4"]}] * 3 + [{"question": "a ?", "answers": ["$"]}]
    Asked.calls = 0
    with pytest.raises(ValueError, match="row 3 of the dataset: no reply can match"):
        options = {"reward_funcs": math_reward}
        trainer_for(
            tiny_policy,
            tmp_path,
            rows,
            kind=MultiTurnGRPOTrainer,
            environment=Asked(),
            options=options,
        )
    assert Asked.calls == 0


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
    made, message = WRONG[kind]

    def mine(completions, **columns):
        return made(len(completions))

    async def mine_async(completions, **columns):
        return made(len(completions))

    reward = guard_reward_function(mine_async if asynchronous else mine)
    with pytest.raises(
        ValueError, match=r"the reward function .*mine.* \(.*test_guarded_rewards.py:\d+\) must"
    ) as said:
        asked = reward(prompts=["a"] * 4, completions=["b"] * 4)
        asyncio.run(asked) if asynchronous else None
    assert str(said.value).endswith(message) and "\n" not in str(said.value)


def test_a_wrong_return_stops_training_at_the_first_batch(tiny_policy, rows, tmp_path):
    batches = []

    def mine(completions, **columns):
        batches.append(len(completions))
        return 1.0

    trainer = trainer_for(tiny_policy, tmp_path, rows, options={"reward_funcs": mine}, max_steps=3)
    with pytest.raises(ValueError, match="it returned a float"):
        trainer.train()
    assert len(batches) == 1


@pytest.mark.parametrize(
    "value", [[1, None, 0.5, True], (1.0,) * 4, torch.ones(4), np.ones(4), iter([1.0] * 4)]
)
def test_whatever_holds_a_number_for_each_completion_is_taken(value):
    rewards = guard_reward_function(lambda completions, **columns: value)(completions=["b"] * 4)
    assert len(rewards) == 4 and all(one is None or 0 <= float(one) <= 1 for one in rewards)
