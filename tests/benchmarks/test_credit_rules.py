"""benchmarks/credit_rules.py: the arithmetic by hand, and its gradients under every loss type of TRL.

TRL takes an advantage for each token, and these tests are also those of the trainers with such advantages.
"""

import math
from functools import partial
from itertools import groupby

import numpy as np
import pytest
import torch
from credit_rules import CreditTrainer, returns_of, starts_of, state_advantages, turn_advantages
from hypothesis import given, strategies as st

from support.training import one_batch, trainer_for

NUMBERS = st.floats(-3, 3).map(lambda one: round(one, 3))


def test_returns_are_discounted():
    assert returns_of([1.0, 0.0, 4.0], 0.5) == [2.0, 2.0, 4.0]


def test_turns_start_where_the_agent_writes():
    assert starts_of([1, 1, 0, 0, 1, 0, 1]) == [0, 4, 6] and starts_of([]) == []


@given(st.lists(st.tuples(NUMBERS, st.integers(1, 5)), min_size=2, max_size=6))
def test_all_weight_on_the_last_turn_is_grpo(drawn):
    """Also where the rollouts of a group have different numbers of turns."""
    rewards = np.array([reward for reward, _ in drawn])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    found = turn_advantages([[*[0.0] * (turns - 1), reward] for reward, turns in drawn], 1.0)
    for one, other, (_, turns) in zip(found, expected, drawn, strict=True):
        assert one == pytest.approx([other] * turns, abs=1e-6)


def test_turns_are_compared_with_those_of_the_same_position():
    half = 0.5 / (np.std([1, 0], ddof=1) + 1e-4)
    # The first turn is right in one and wrong in the other, the second turn the other way round.
    assert turn_advantages([[1.0, 0.0], [0.0, 1.0]], 1.0) == [[0.0, pytest.approx(-half)], [0.0, pytest.approx(half)]]
    # A rollout that ended takes part with its last turn.
    assert turn_advantages([[1.0], [0.0, 0.0]], 1.0) == [[pytest.approx(half)], [pytest.approx(-half)] * 2]


def test_turns_are_compared_with_those_in_the_same_state():
    half = 0.5 / (np.std([1, 0], ddof=1) + 1e-4)
    found = state_advantages([[0.0, 1.0], [0.0, 0.0], [0.5]], ["ax", "ax", "b"], 1.0)
    assert found == [[pytest.approx(half)] * 2, [pytest.approx(-half)] * 2, [0.0]]
    assert state_advantages([[1.0], [0.0]], ["", ""], 1.0) == [[], []], "without a turn"


# In a trainer ---------------------------------------------------------------------------------------------------------

TURNS = [[0.5, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]  # of the four rollouts of a batch, two of them a group


def credit_batch(tiny_policy, rows, folder, rewards=TURNS, rule="turn", discount=1.0, **changes):
    """A trainer and a batch; the rollouts of `Acts` have two turns each."""
    numbers = {}

    def reward(rollout, **columns):
        numbers.update({id(one): place for place, one in enumerate(rollout)})
        return [sum(one) for one in rewards]

    kind = partial(CreditTrainer, by_turn=lambda one: rewards[numbers[id(one)]], rule=rule, discount=discount)
    trainer = trainer_for(tiny_policy, folder, rows, kind=kind, options={"reward_funcs": reward}, **changes)
    return trainer, one_batch(trainer)


def turn_tokens(batch, row):
    """The places of each turn's tokens: runs of the mask."""
    own = (batch["tool_mask"] * batch["completion_mask"])[row].tolist()
    runs = [(key, [place for place, _ in run]) for key, run in groupby(enumerate(own), key=lambda one: one[1])]
    return [places for key, places in runs if key]


@pytest.mark.parametrize("rule", ["turn", "state"])
def test_each_token_has_its_turns_advantage(tiny_policy, rows, tmp_path, rule):
    """Both rollouts of a group begin in the same state, and `Acts` writes the same first turn in both."""
    _, batch = credit_batch(tiny_policy, rows, tmp_path, rule=rule, discount=0.5)
    found = batch["advantages"]
    assert found.shape == batch["completion_ids"].shape
    signs = [[1, 1], [-1, -1], [1, 0], [-1, 0]]  # returns: 1, 1 against 0, 0; 1, 0 against 0, 0
    half = 0.5 / (np.std([1, 0], ddof=1) + 1e-4)
    sums = [0.75 / (np.std([1.5, 0], ddof=1) + 1e-4), half]
    for row, of_turns in enumerate(signs):
        whole = 0.0 if rule == "turn" else sums[row // 2] * (1 - 2 * (row % 2))
        for places, sign in zip(turn_tokens(batch, row), of_turns, strict=True):
            assert found[row, places].tolist() == pytest.approx([whole + sign * half] * len(places), abs=1e-4)


def test_all_weight_on_the_last_turn_is_rollout(tiny_policy, rows, tmp_path):
    last = [[0.0, float(place % 2 == 0)] for place in range(4)]
    _, whole = credit_batch(tiny_policy, rows, tmp_path / "a", last, rule="rollout")
    _, turn = credit_batch(tiny_policy, rows, tmp_path / "b", last)
    mask = turn["tool_mask"] * turn["completion_mask"]
    assert torch.allclose(turn["advantages"] * mask, whole["advantages"].unsqueeze(1) * mask, atol=1e-6)


LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


def loss_by_hand(kind, args, new, old, reference, advantages, mask, items):
    """TRL's loss types written down once more, one token at a time where they are sums over tokens."""
    total, rows = 0.0, len(new)
    for row in range(rows):
        log_ratio = new[row] - old[row]
        own, count = 0.0, mask[row].sum()
        weight = torch.exp((log_ratio.detach().clamp(-20, 20) * mask[row]).sum().clamp(math.log(1e-8), 20))
        for token in range(new.shape[1]):
            if not mask[row, token]:
                continue
            advantage, logp, ratio = advantages[row, token], new[row, token], torch.exp(log_ratio[token])
            if kind == "cispo":
                value = -ratio.detach().clamp(max=args.epsilon_high) * advantage * logp
            elif kind == "sapo":
                heat = args.sapo_temperature_pos if advantage > 0 else args.sapo_temperature_neg
                value = -torch.sigmoid(heat * (ratio - 1)) * 4 / heat * advantage
            elif kind == "vespo":
                k, rate = (
                    (args.vespo_k_pos, args.vespo_lambda_pos)
                    if advantage >= 0
                    else (args.vespo_k_neg, args.vespo_lambda_neg)
                )
                value = -torch.exp(rate + k * torch.log(weight) - rate * weight) * advantage * logp
            else:
                value = -torch.min(ratio * advantage, ratio.clamp(1 - args.epsilon, 1 + args.epsilon) * advantage)
            apart = reference[row, token] - logp
            value = value + args.beta * (torch.exp(apart) - apart - 1)
            own = own + value
        total = total + (own / count if kind in ("grpo", "sapo") else own)
    if kind in ("grpo", "sapo", "luspo"):
        return total / rows
    return total / {"bnpo": mask.sum(), "dr_grpo": rows * args.max_completion_length}.get(kind, items)


@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_equal_those_by_hand(tiny_policy, rows, tmp_path, kind):
    options = {"epsilon_high": 2.0} if kind == "cispo" else {}
    trainer, batch = credit_batch(tiny_policy, rows, tmp_path, loss_type=kind, beta=0.05, **options)
    assert batch["advantages"].ndim == 2 and (batch["advantages"] != 0).any()
    generator = torch.Generator().manual_seed(0)
    shape = batch["completion_ids"].shape
    new, old, reference = (torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3 - 2 for _ in range(3))
    batch |= {"old_per_token_logps": old, "ref_per_token_logps": reference}
    batch["advantages"] = batch["advantages"].double()
    batch.pop("sampled_at")  # these weights did not sample the batch
    leaf, other = new.clone().requires_grad_(True), new.clone().requires_grad_(True)
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: (leaf, torch.zeros_like(leaf), None)
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    mask = batch["tool_mask"] * batch["completion_mask"]
    items = batch["num_items_in_batch"].item()
    expected = loss_by_hand(kind, trainer.args, other, old, reference, batch["advantages"], mask, items)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert (leaf.grad - other.grad).abs().max() <= 1e-6 and other.grad.abs().max() > 1e-3
