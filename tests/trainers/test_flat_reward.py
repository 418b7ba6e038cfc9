"""A first batch that trains nothing is warned of, with the reason."""

import logging
import math

import pytest

from agentic_prompting.rollout import BatchEngine, RolloutFacts
from agentic_prompting.trainers.batch_monitor import describe_flat_reward
from support.training import Acts, trainer_for


def facts_of(status="answered", interactions=1, counts=()):
    return RolloutFacts(
        status=status,
        error_kind=None,
        error=None,
        fatal=False,
        turns=1,
        interactions=interactions,
        agent_tokens=1,
        observation_tokens=0,
        latencies=(),
        calls=0,
        cached=0,
        shared=0,
        retries=0,
        tokens=0,
        cost_usd=0.0,
        counts=dict(counts),
    )


@pytest.mark.parametrize(
    ("fact", "rewards", "words"),
    [
        (facts_of(), [0.0] * 4, ["every reward is 0", "num_generations="]),
        (facts_of(), [0.0, 0.0, 1.0, 1.0], ["between questions only"]),
        (facts_of("truncated"), [0.0] * 4, ["cut off", "max_turn_tokens="]),
        (facts_of("malformed"), [-1.0] * 4, ["every reward is -1", "malformed"]),
        (facts_of(interactions=0), [0.5] * 4, ["asked the environment"]),
    ],
    ids=["all equal", "equal in groups", "all cut", "all malformed", "never asked"],
)
def test_a_flat_reward_has_a_reason(fact, rewards, words):
    reason = describe_flat_reward([fact] * 4, rewards, 2, has_environment=True)
    assert all(word in reason for word in words), reason


def test_one_group_with_a_gradient_is_enough():
    facts = [facts_of()] * 4
    assert describe_flat_reward(facts, [0.0, 0.0, 0.0, 1.0], 2, True) == ""
    # Without two rewards in a group there is nothing to compare.
    assert describe_flat_reward(facts, [0.0, math.nan, 1.0, math.nan], 2, True) == ""


@pytest.mark.parametrize(
    ("fact", "has_environment"),
    [
        (facts_of(interactions=0), False),
        (facts_of(interactions=0, counts={"program/calls": 2}), True),
    ],
    ids=["no environment", "program"],
)
def test_who_cannot_ask_is_not_blamed(fact, has_environment):
    assert "asked" not in describe_flat_reward([fact] * 2, [0.0, 0.0], 2, has_environment)


def test_a_flat_first_step_is_warned_of(tiny_policy, rows, tmp_path, caplog):
    def constant(rollout, **columns):
        return [0.25] * len(rollout)

    def train(folder, **options):
        trainer = trainer_for(tiny_policy, tmp_path / folder, rows, options=options)
        trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
        with caplog.at_level(logging.WARNING):
            trainer.train()
        messages = [record.message for record in caplog.records if "flat" in record.message]
        caplog.clear()
        return messages, trainer.state.log_history

    messages, logs = train("flat", reward_funcs=constant)
    assert len(messages) == 1 and "every reward is 0.25" in messages[0]
    assert 0 < logs[0]["groups/diversity"] <= 1
    messages, _ = train("differing")
    assert messages == []


def test_a_function_that_scores_nothing_is_named(tiny_policy, rows, tmp_path, caplog):
    def silent(rollout, **columns):
        return [None] * len(rollout)

    def by_length(rollout, **columns):
        return [float(len(one.turns)) for one in rollout]

    options = {"reward_funcs": [by_length, silent]}
    trainer = trainer_for(tiny_policy, tmp_path, rows, options=options)
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    messages = [record.message for record in caplog.records if "first batch" in record.message]
    assert [message for message in messages if "silent" in message]
    assert not [message for message in messages if "by_length" in message]
