"""Fewer calls: each rule by itself, and that its estimate of the gradient is unbiased, by enumeration."""

import asyncio
import itertools
import random

import pytest
import torch

from agentic_prompting.rollout import Observation, Rollout, Sample, parse_turn
from agentic_prompting.trainers.saving_calls import Curriculum, EndsHopeless, group_weight, honest_advantages

# A policy of one decision between three actions with these chances, each with a reward of its own: everything that can
# happen in a group of four is enumerated, with its exact probability.
CHANCES, REWARDS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64), torch.tensor([1.0, 0.0, -1.0]).double()
N = 4


def score(action):
    """d log pi(action) / d logits"""
    return torch.eye(3, dtype=torch.float64)[action] - CHANCES


def expected(estimate):
    """The expectation of `estimate(actions)`, a gradient, over all groups."""
    total = torch.zeros(3, dtype=torch.float64)
    for actions in itertools.product(range(3), repeat=N):
        total += CHANCES[list(actions)].prod() * estimate(actions)
    return total


def gradient(actions, advantages):
    return sum(advantage * score(action) for action, advantage in zip(actions, advantages, strict=True))


def full(actions, scale=False):
    rewards = REWARDS[list(actions)]
    advantages = rewards - rewards.mean()
    return gradient(actions, advantages / (rewards.std() + 1e-4) if scale else advantages)


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("chance", [1.0, 0.5, 0.1])
def test_groups_that_grow_have_the_gradient_of_full_groups(chance, scale):
    """Whatever the advantages are: the weight multiplies the whole group."""

    def grown(actions):
        first = REWARDS[list(actions[:2])].tolist()
        kept = group_weight(first, chance, draw=0.0) * full(actions, scale)
        left = group_weight(first, chance, draw=chance) * full(actions, scale) if chance < 1 else 0
        return chance * kept + (1 - chance) * left

    assert torch.allclose(expected(grown), expected(lambda actions: full(actions, scale)), atol=1e-12)
    unweighted = expected(lambda actions: full(actions) * (len({*actions[:2]}) > 1))
    assert not torch.allclose(unweighted, expected(full), atol=1e-3), "without the weights it would be another"


def test_what_a_group_counts():
    assert group_weight([1.0, 0.0], 0.1, 0.99) == 1 == group_weight([None, 0.0], 0.1, 0.99)
    assert [group_weight([1.0, 1.0], 0.25, draw) for draw in (0.0, 0.24, 0.25, 0.9)] == [4, 4, 0, 0]


@pytest.mark.parametrize("share", [1.0, 0.5, 0.2])
def test_hopeless_rollouts_left_out_by_chance_leave_the_gradient_as_it_is(share):
    """Actions 1 and 2 turn out hopeless; each of them is played on with probability `share`."""

    def by_chance(actions):
        total = torch.zeros(3, dtype=torch.float64)
        hopeless = [i for i, action in enumerate(actions) if action > 0]
        for played in itertools.product((True, False), repeat=len(hopeless)):
            rewards, weights, chance = REWARDS[list(actions)].clone(), torch.ones(N).double(), 1.0
            for i, on in zip(hopeless, played, strict=True):
                weights[i] = 1 / share if on else 0.0
                rewards[i] = rewards[i] if on else torch.nan
                chance *= share if on else 1 - share
            total += chance * gradient(actions, honest_advantages(rewards[None], weights[None])[0])
        return total

    assert torch.allclose(expected(by_chance), expected(full), atol=1e-12)


def test_advantages_without_weights_are_those_of_the_group():
    rewards = torch.tensor([[1.0, 0.0, 0.5, torch.nan]])
    there = torch.tensor([1.0, 0.0, 0.5])
    ones = torch.ones(1, 4)
    assert torch.allclose(honest_advantages(rewards, ones)[0, :3], there - there.mean())
    scaled = (there - there.mean()) / (there.std() + 1e-4)
    assert torch.allclose(honest_advantages(rewards, ones, scale=True)[0, :3], scaled)
    assert honest_advantages(rewards, ones)[0, 3] == 0, "failed: no part in its group"
    assert not honest_advantages(torch.full((1, 4), torch.nan), ones).any()


def test_what_cannot_be_saved_is_not_asked_for_and_a_share_is_played_on():
    asked = []

    class Asked:
        grammar = "its own"

        def step(self, rollout):
            asked.append(rollout.seed)
            return Observation("ok")

    environment = EndsHopeless(Asked(), lambda rollout: rollout.row["lost"], share=0.25)
    assert environment.grammar == "its own"
    rollouts = [Rollout([1], {"lost": seed % 2 == 0}, seed, batch="1") for seed in range(800)]
    for rollout in rollouts:
        rollout.sampled(Sample([2]), parse_turn("<interaction_prompt>q</interaction_prompt>"))
        said = asyncio.run(environment.step(rollout))
        assert (said is None) == (rollout.weight == 0)
        assert rollout.weight in ((0, 4) if rollout.row["lost"] else (1,))
    on = sum(rollout.weight == 4 for rollout in rollouts)
    assert len(asked) == 400 + on and 70 < on < 130
    alone = Rollout([1], {"lost": True}, 3)
    assert asyncio.run(environment.step(alone)).text == "ok" and alone.weight == 1, "evaluation plays everything"


# --- the curriculum -----------------------------------------------------------------------------------------------


def test_a_question_is_settled_after_visits_without_spread():
    known = Curriculum(patience=2, rare=0.1)
    known.observe("q", [1.0, 1.0])
    assert not known.settled("q")
    known.observe("q", [0.0, 0.0, 0.0])
    assert known.settled("q") and not known.settled("other")
    known.observe("q", [1.0])
    assert known.settled("q"), "one rollout has no spread to show"
    known.observe("q", [1.0, 0.0])
    assert not known.settled("q")


def test_settled_questions_come_back_rarely_and_another_takes_their_place():
    known, rows = Curriculum(patience=1, rare=0.2), ["easy", "hard", "open 1", "open 2"]
    for question in rows[:2]:
        known.observe(question, [1.0, 1.0])
    draw = random.Random(0)
    instead = [known.instead("easy", rows, draw) for _ in range(1000)]
    assert 150 < instead.count(None) < 250 and set(instead) == {None, 2, 3}
    assert known.instead("open 1", rows, draw) is None
    for question in rows:
        known.observe(question, [1.0, 1.0])
    assert known.instead("easy", rows, random.Random(0)) in range(4), "where all are settled any will do"


def test_its_state_goes_on_as_it_was():
    known, twin = Curriculum(2, 0.1), Curriculum(2, 0.1)
    for question in "aab":
        known.observe(question, [0.0, 0.0])
    twin.load_state_dict(known.state_dict())
    for one in (known, twin):
        one.observe("b", [0.0, 0.0])
    assert [twin.settled(question) for question in "abc"] == [known.settled(question) for question in "abc"]
    assert twin.state_dict() == known.state_dict()
