"""A first batch that trains nothing is warned of, with the reason."""

import logging
import math

import pytest

from agentic_prompting.rollout import BatchEngine, Limits, RolloutFacts
from agentic_prompting.trainers.first_batches import (
    describe_flat_reward,
    describe_missing_answers,
)
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
        (facts_of("malformed", counts={"program/calls": 1}), [0.0] * 4, ["program", "None"]),
    ],
    ids=["all equal", "equal in groups", "all cut", "all malformed", "never asked", "program"],
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


@pytest.mark.parametrize("has_environment", [False, True])
def test_cut_off_completions_have_a_form_only_with_an_environment(has_environment):
    limits = Limits(max_turn_tokens=24, max_tokens=24)
    warning = describe_missing_answers([facts_of("truncated")] * 4, limits, "", has_environment)
    assert "max_completion_length" in warning
    assert ("grammar" in warning) == has_environment


def test_a_program_without_answers_is_not_told_of_a_grammar():
    facts = [facts_of("malformed", counts={"program/calls": 1})] * 4
    warning = describe_missing_answers(facts, Limits(), "'{question}'", has_environment=True)
    assert "program" in warning and "None" in warning
    assert "grammar" not in warning and "{question}" not in warning


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


def silent(rollout, **columns):
    return [None] * len(rollout)


def by_length(rollout, **columns):
    return [float(len(one.turns)) for one in rollout]


@pytest.mark.parametrize(
    ("steps", "first_reward", "is_named"),
    [(1, None, True), (7, None, True), (3, 2, False), (9, 4, False)],
    ids=["short run", "long run", "rare task", "rarer task"],
)
def test_a_function_that_scores_nothing_is_named(
    tiny_policy, rows, tmp_path, caplog, steps, first_reward, is_named
):
    batches = []

    def rare(rollout, **columns):
        batches.append(len(rollout))
        is_silent = first_reward is None or len(batches) <= first_reward
        return [None if is_silent else 1.0] * len(rollout)

    trainer = trainer_for(
        tiny_policy,
        tmp_path,
        rows,
        options={"reward_funcs": [by_length, rare]},
        max_steps=steps,
    )
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    messages = [record.message for record in caplog.records if "None or NaN" in record.message]
    assert len(messages) == is_named
    assert all("rare" in message for message in messages)


def test_one_name_of_two_functions_is_warned_of(tiny_policy, rows, tmp_path, caplog):
    functions = [lambda completions, **columns: [1.0] * len(completions) for _ in range(2)]
    with caplog.at_level(logging.WARNING):
        trainer_for(tiny_policy, tmp_path, rows, options={"reward_funcs": functions})
    (message,) = [record.message for record in caplog.records if "<lambda>" in record.message]
    assert "2 reward functions" in message
