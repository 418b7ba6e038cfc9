"""Credit per turn: the arithmetic by hand, its gradients under every loss type, and what is refused."""

import math
from itertools import groupby

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from agentic_prompting.llm import ScriptedChat
from agentic_prompting.programs import Program
from agentic_prompting.rewards import PromptR1Reward
from agentic_prompting.trainers.credit import add_up, returns_of, state_advantages, turn_advantages, turn_rewards
from support.crafted_rollouts import agent, trainer_for as program_trainer
from support.distributed_credit import SIZE, advantages, launched
from support.training import arguments, one_batch, trainer_for

NUMBERS = st.floats(-3, 3).map(lambda one: round(one, 3))


def test_a_reward_for_the_rollout_is_its_last_turns():
    assert turn_rewards([1.0, [0.5, None, float("nan")], None], [2.0, 1.0, 1.0], 3) == [0.5, 0.0, 2.0]
    assert turn_rewards([None, [None, None]], [1.0, 1.0], 2) is None
    assert turn_rewards([float("nan")], [1.0], 2) is None
    assert turn_rewards([1.0], [1.0], 0) == [1.0]  # the prompt filled the context
    assert [add_up(one) for one in (1.0, None, [1.0, None, 2], [None], [])] == [1.0, None, 3.0, None, None]


def test_returns_are_discounted():
    assert returns_of([1.0, 0.0, 4.0], 0.5) == [2.0, 2.0, 4.0]


def by_hand(rewards, turns):
    """GRPO's advantages as TRL computes them, for each turn of a rollout the same."""
    known = np.array([one for one in rewards if one is not None])
    mean, deviation = known.mean(), known.std(ddof=1) if len(known) > 1 else 0.0
    return [
        [] if one is None else [(one - mean) / (deviation + 1e-4)] * n for one, n in zip(rewards, turns, strict=True)
    ]


@given(st.lists(st.tuples(st.none() | NUMBERS, st.integers(1, 5)), min_size=2, max_size=6))
def test_all_weight_on_the_last_turn_is_grpo(drawn):
    """Also where the rollouts of a group have different numbers of turns."""
    rewards, turns = zip(*drawn, strict=True)
    group = [turn_rewards([one], [1.0], n) for one, n in drawn]
    expected = by_hand(rewards, turns) if any(one is not None for one in rewards) else [[] for _ in rewards]
    (found,) = turn_advantages([group], 1.0, "group")
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


def test_turns_are_compared_with_those_of_the_same_position():
    # The first turn is right in one and wrong in the other, the second turn the other way round.
    (found,) = turn_advantages([[[1.0, 0.0], [0.0, 1.0]]], 1.0, "none")
    assert found == [[0.0, -0.5], [0.0, 0.5]]
    (found,) = turn_advantages([[[1.0, 0.0], [0.0, 1.0]]], 0.5, "none")
    assert found == [[0.25, -0.5], [-0.25, 0.5]]
    # A rollout that ended takes part with its last turn.
    assert turn_advantages([[[1.0], [0.0, 0.0], None]], 1.0, "none") == [[[0.5], [-0.5, -0.5], []]]
    assert turn_advantages([[[1.0, 1.0], None]], 1.0, "group") == [[[0.0, 0.0], []]]


def test_turns_are_compared_with_those_in_the_same_state():
    group = [[0.0, 1.0], [0.0, 0.0], [0.5], None]
    states = ["ax", "ax", "b", "a"]
    (found,) = state_advantages([group], [states], 1.0, "none")
    assert found == [[0.5, 0.5], [-0.5, -0.5], [0.0], []]
    assert state_advantages([[[1.0]], [[0.0]]], [["a"], ["a"]], 1.0, "none") == [[[0.0]], [[0.0]]]  # two groups
    assert state_advantages([[[1.0], [0.0]]], [["", ""]], 1.0, "none") == [[[], []]]  # without a turn


def test_scales():
    groups = [[[0.0, 1.0], [0.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]]
    deviation = np.std([1, 0, 1, 1], ddof=1)
    found = turn_advantages(groups, 1.0, "batch")
    assert found[0][0] == pytest.approx([0.5 / (deviation + 1e-4)] * 2) and found[1] == [[0.0, 0.0]] * 2
    found = state_advantages(groups, [["ab", "ac"], ["ab", "ab"]], 1.0, "batch")
    assert found[0] == [pytest.approx([0.5 / (deviation + 1e-4), 0.0]), pytest.approx([-0.5 / (deviation + 1e-4), 0.0])]
    found = turn_advantages(groups, 1.0, "group")
    assert found[0][0] == pytest.approx([0.5 / (np.std([1, 0], ddof=1) + 1e-4)] * 2)


# In a trainer ---------------------------------------------------------------------------------------------------------

TURNS = [[0.5, 1.0], [None, 0.0], [1.0, 0.0], [0.0, 0.0]]  # of the four rollouts of a batch, two of them a group


def by_turns(rollout, **columns):
    return [TURNS[place][: len(one.turns)] for place, one in enumerate(rollout)]


def last_turn(rollout, **columns):
    return [float(place % 2 == 0) for place, _ in enumerate(rollout)]


def scored_batch(tiny_policy, rows, folder, function=by_turns, **changes):
    trainer = trainer_for(tiny_policy, folder, rows, options={"reward_funcs": function}, **changes)
    return trainer, one_batch(trainer)


def turn_tokens(batch, row):
    """The places of each turn's tokens: runs of the mask."""
    own = (batch["tool_mask"] * batch["completion_mask"])[row].tolist()
    runs = [(key, [place for place, _ in run]) for key, run in groupby(enumerate(own), key=lambda one: one[1])]
    return [places for key, places in runs if key]


def test_each_token_has_its_turns_advantage(tiny_policy, rows, tmp_path):
    _, batch = scored_batch(tiny_policy, rows, tmp_path, credit="turn", scale_rewards="none", credit_discount=0.5)
    found = batch["advantages"]
    assert found.shape == batch["completion_ids"].shape
    # Returns: 1, 1 against 0, 0; 1, 0 against 0, 0.
    expected = [[0.5, 0.5], [-0.5, -0.5], [0.5, 0.0], [-0.5, 0.0]]
    for row, of_turns in enumerate(expected):
        turns = turn_tokens(batch, row)
        assert [set(found[row, places].tolist()) for places in turns] == [{one} for one in of_turns]


def test_state_adds_to_the_rollouts_advantage(tiny_policy, rows, tmp_path):
    """Both rollouts of a group begin in the same state, and `Acts` writes the same first turn in both."""
    trainer, batch = scored_batch(
        tiny_policy, rows, tmp_path, credit="state", scale_rewards="none", credit_state_weight=2.0
    )
    whole = [0.75, -0.75, 0.5, -0.5]  # sums 1.5 against 0, 1 against 0
    of_state = [[0.75, 0.5], [-0.75, -0.5], [0.5, 0.0], [-0.5, 0.0]]
    for row, of_turns in enumerate(of_state):
        found = [batch["advantages"][row, places[0]].item() for places in turn_tokens(batch, row)]
        assert found == pytest.approx([whole[row] + 2 * one for one in of_turns])
    assert trainer._metrics["train"]["credit/shared"] == [1.0]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_all_weight_on_the_last_turn_is_rollout(tiny_policy, rows, tmp_path, scale):
    _, whole = scored_batch(tiny_policy, rows, tmp_path / "a", last_turn, scale_rewards=scale)
    _, turn = scored_batch(tiny_policy, rows, tmp_path / "b", last_turn, scale_rewards=scale, credit="turn")
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


@pytest.mark.parametrize("credit", ["turn", "state"])
@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_equal_those_by_hand(tiny_policy, rows, tmp_path, kind, credit):
    options = {"epsilon_high": 2.0} if kind == "cispo" else {}
    trainer, batch = scored_batch(tiny_policy, rows, tmp_path, loss_type=kind, credit=credit, beta=0.05, **options)
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


@pytest.mark.parametrize(
    "options",
    [
        {"importance_sampling_level": "sequence"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "vespo"},
        {"top_entropy_quantile": 0.5},
        {"off_policy_mask_threshold": 0.5},
        {"entropy_coef": 0.01},
        {"num_iterations": 2},
        {"steps_per_generation": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"async_lead": 1, "max_staleness": 2},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("credit", ["turn", "state"])
def test_training_with_trls_options(tiny_policy, rows, tmp_path, options, credit):
    def graded(rollout, **columns):
        return [[float(len(turn.text) % 3) for turn in one.turns] for one in rollout]

    trainer = trainer_for(tiny_policy, tmp_path, rows, options={"reward_funcs": graded}, credit=credit, **options)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train()
    assert trainer.state.global_step == 2
    assert any(not torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())


@pytest.mark.parametrize("credit", ["turn", "state"])
def test_a_group_may_straddle_processes(tiny_policy, tmp_path, credit):
    """One group of eight, four rollouts on each of two processes: the advantages of one process."""
    one = advantages(tiny_policy, tmp_path / "one", credit)
    two = launched(tiny_policy, tmp_path, credit)
    assert len(one) == len(two) == SIZE and len({len(row) for row in one}) > 1, "of several lengths"
    assert any(len(set(row)) > 1 for row in one), "turns differ in their advantages"
    for own, other in zip(one, two, strict=True):
        assert other == pytest.approx(own, abs=1e-6)


def test_prompt_r1s_form_by_turn_trains_like_the_reward_itself(tiny_policy, rows, tmp_path):
    """Its sums are the rewards, so with `rollout` nothing changes; with `turn` the first turn's advantage does."""
    both = []
    for per_turn in (False, True):
        reward = PromptR1Reward(per_turn=per_turn)
        both.append(scored_batch(tiny_policy, rows, tmp_path / str(per_turn), reward)[1]["advantages"])
    assert torch.allclose(*both, atol=1e-5)


# Bad input ------------------------------------------------------------------------------------------------------------


def test_a_list_of_another_length_is_an_error(tiny_policy, rows, tmp_path):
    def three(rollout, **columns):
        return [1.0, [1.0, 0.0, 0.0], 1.0, 1.0]

    with pytest.raises(ValueError, match=r"three .*returned 3 rewards by turn for row 1 .*has 2 turns"):
        scored_batch(tiny_policy, rows, tmp_path, three)


@pytest.mark.parametrize("wrong", ["1", [1.0], {}])
def test_what_is_no_number_is_an_error_in_a_list_too(tiny_policy, rows, tmp_path, wrong):
    with pytest.raises(ValueError, match="must return a list of 4 numbers"):
        scored_batch(tiny_policy, rows, tmp_path, lambda rollout, **columns: [[wrong, 1.0], 1.0, 1.0, 1.0])


@pytest.mark.parametrize("credit", ["rollout", "turn", "state"])
def test_turns_without_reward(tiny_policy, rows, tmp_path, credit):
    """NaN is None, a boolean a number, as for rewards of rollouts. A rollout without any reward is in no baseline."""

    def some(rollout, **columns):
        return [[True, float("nan")], [None, None], [1.0, None], [0.0, 0.0]]

    trainer, batch = scored_batch(tiny_policy, rows, tmp_path, some, credit=credit, scale_rewards="none")
    assert batch["advantages"].isfinite().all() and (batch["advantages"][:2] == 0).all()
    assert trainer._metrics["train"]["reward"] == [pytest.approx(2 / 3)]


def test_a_failed_rollout_has_no_advantage_by_turn(tiny_policy, rows, tmp_path):
    chat = ScriptedChat(lambda messages: "x", fail_on=lambda call: call == 0)
    options = {"reward_funcs": by_turns}
    trainer = trainer_for(tiny_policy, tmp_path, rows, chat, options=options, credit="turn", max_failed_share=1.0)
    batch = one_batch(trainer)
    failed = (batch["tool_mask"] * batch["completion_mask"]).sum(1) == 0
    assert failed.sum() == 1 and (batch["advantages"][failed] == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"credit": "token"}, "credit must be rollout, turn or state, got 'token'"),
        ({"credit": "turn", "credit_discount": 0.0}, "credit_discount must be above 0"),
        ({"credit": "turn", "credit_discount": float("nan")}, "credit_discount must be above 0"),
        ({"credit": "state", "credit_state_weight": -1.0}, "credit_state_weight must be at least 0"),
        ({"credit_discount": 0.9}, "credit_discount would be ignored"),
        ({"credit": "turn", "credit_state_weight": 0.5}, "credit_state_weight would be ignored"),
        ({"credit": "turn", "multi_objective_aggregation": "normalize_then_sum"}, "adds rewards up before"),
    ],
)
def test_options_that_cannot_be_had(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **options)


def test_a_program_has_no_credit_by_turn(tiny_policy, tmp_path):
    with pytest.raises(ValueError, match="several token sequences.*credit='turn'"):
        program_trainer(tiny_policy, tmp_path, Program(agent), credit="turn")
