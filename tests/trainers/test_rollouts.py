"""A rollout in several token sequences has the gradient of the same rollout in one: for a program's
episodes.
"""

import pytest
import torch

from agentic_prompting.programs import Program
from agentic_prompting.trainers.rollouts import padded_row_count, trained_sequences
from support.crafted_rollouts import (
    ROW,
    B,
    Crafted,
    agent,
    crafted,
    launched,
    split_errors,
    trainer_for,
)
from support.distributed_backends import TYPES
from support.marks import LONG


@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo"])
def test_split_error(tiny_policy, tmp_path, loss_type, parts, beta):
    errors = split_errors(tiny_policy, tmp_path, loss_type, parts, beta)
    _, whole, split = errors["rows"]
    assert errors["largest"] > 1e-4 and sum(whole) == B and sum(split) > B and len(set(split)) == 1
    assert max(errors["whole"], errors["split"]) <= 1e-6
    assert errors["losses"][1:] == pytest.approx(errors["losses"][:1] * 2, abs=1e-6)


@pytest.mark.parametrize(
    "loss_type, backend",
    [
        ("grpo", "ddp"),
        pytest.param("dapo", "ddp", marks=LONG),
        ("grpo", "zero3"),
        ("grpo", "fsdp2"),
    ],
)
def test_processes_with_other_numbers_of_sequences(tiny_policy, tmp_path, loss_type, backend):
    """Two processes, the rollouts of one in a sequence each, those of the other in three: the step
    of one process.
    """
    if backend == "zero3":
        pytest.importorskip("deepspeed")
    error, seen, kind = launched(tiny_policy, tmp_path, loss_type, backend)
    # Of the step's largest component; in float32 under ZeRO-3, in float64 otherwise.
    assert error <= (1e-5 if backend == "zero3" else 1e-6) and kind == TYPES[backend]
    for rows in seen:
        assert sum(rows) == 12 - 2, "as many rows as the process with the most"
        assert max(rows) <= (10 if backend == "zero3" else 4), "in slices"


def test_rewards_and_logs_have_one_entry_for_each_rollout(tiny_policy, tmp_path):
    trainer = trainer_for(tiny_policy, tmp_path, Program(agent))
    trainer.on_policy_source = trainer.batch_source = Crafted(crafted(lambda i: 1 + i % 3, (2,)))
    trainer.model.train()
    scored = trainer._generate_and_score_completions([ROW] * B)
    assert len(scored["advantages"]) == len(scored["prompt_ids"]) > B
    assert (
        len(trainer._logs["completion"])
        == len(trainer._logs["prompt"])
        == B
        == len(trainer._logs["advantages"])
    )
    assert trainer.reward_func_names == ["reward"]
    firsts = [
        trainer.processing_class.decode(completion.ids, skip_special_tokens=True)
        for completion in trainer.batch_source.rollouts
    ]
    assert [completion[-1]["content"] for completion in trainer._logs["completion"]] == firsts
    owners = []
    for owner, rollout in enumerate(crafted(lambda i: 1 + i % 3, (2,))):
        owners += [owner] * len(trained_sequences(rollout))
    by_rollout = torch.tensor(trainer._logs["advantages"])
    assert torch.allclose(scored["advantages"].float(), by_rollout[owners].float())


def test_rows_are_as_many_as_parts_need(monkeypatch):
    monkeypatch.setattr(
        "agentic_prompting.trainers.rollouts.gather_object", lambda rows: [*rows, 13]
    )
    assert padded_row_count(9, 4) == 16 and padded_row_count(17, 1) == 17


WRONG = {
    "loss_type": "bnpo",
    "importance_sampling_level": "sequence",
    "top_entropy_quantile": 0.2,
    "entropy_coef": 0.1,
    "off_policy_mask_threshold": 0.5,
    "mask_truncated_completions": True,
    "full_determinism": True,
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_right_is_refused_by_name(tiny_policy, tmp_path, name):
    with pytest.raises(ValueError, match=f"several token sequences.*{name}"):
        trainer_for(tiny_policy, tmp_path, Program(agent), **{name: WRONG[name]})


def test_ahead_of_the_weights_ratios_are_of_tokens(tiny_policy, tmp_path):
    options = {"async_lead": 1, "vllm_importance_sampling_mode": "sequence_truncate"}
    with pytest.raises(
        ValueError, match="vllm_importance_sampling_mode='sequence_truncate' .use 'token_truncate'"
    ):
        trainer_for(tiny_policy, tmp_path, Program(agent), **options)


def test_a_failed_rollout_keeps_one_row():
    assert [len(trained_sequences(rollout)) for rollout in crafted(lambda i: 3, range(B))] == [
        1
    ] * B
    assert [len(trained_sequences(rollout)) for rollout in crafted(lambda i: 1 + i % 3, ())] == [
        1,
        2,
        3,
        1,
        2,
        3,
        1,
        2,
    ]
