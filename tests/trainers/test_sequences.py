"""A rollout in several token sequences has the gradient of the same rollout in one: for a program's episodes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentic_prompting.programs import Program
from agentic_prompting.trainers.sequences import padded_rows, sequences_of
from support.crafted_rollouts import ROW, B, Crafted, agent, crafted, parameters_after_a_step, trainer_for


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def gradient(tiny_policy, folder, pieces, native=False, failed=(), most=None, **options):
    """The gradient and the loss of one generation batch, and the rows of each of its micro-batches."""
    trainer = trainer_for(tiny_policy, folder, None if native else Program(agent), **options)
    if options.get("beta"):  # a reference like the policy has no KL term
        with torch.no_grad():
            for p in trainer.ref_model.parameters():
                noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype)
                p.add_(0.02 * noise)
    trainer.on_policy = trainer.source = Crafted(crafted(pieces, failed))
    trainer.args.per_device_train_batch_size = most or trainer.args.per_device_train_batch_size
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = options.get("gradient_accumulation_steps", 1)
    rows, total = [], 0.0
    for step in range(options.get("steps_per_generation", 1)):
        trainer._step = step
        inputs = trainer._prepare_inputs([ROW] * B)
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        total += loss.item()
        rows.append(len(inputs["prompt_ids"]))
    found = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
    return torch.cat(found), total, rows


@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo"])
def test_split_error(tiny_policy, tmp_path, loss_type, parts, beta):
    options = {
        "loss_type": loss_type, "beta": beta, "steps_per_generation": parts, "gradient_accumulation_steps": parts,
        "failed": (2, 5),
    }  # fmt: skip
    native, loss, _ = gradient(tiny_policy, tmp_path / "a", lambda i: 1, native=True, **options)
    whole, loss_whole, rows_whole = gradient(tiny_policy, tmp_path / "b", lambda i: 1, **options)
    split, loss_split, rows = gradient(tiny_policy, tmp_path / "c", lambda i: 1 + i % 3, most=2, **options)
    largest = native.abs().max()
    assert largest > 1e-4 and sum(rows_whole) == B and sum(rows) > B and len(set(rows)) == 1
    errors = [((one - native).abs().max() / largest).item() for one in (whole, split)]
    print(f"{loss_type} beta={beta} parts={parts}: split_error {errors}, {sum(rows_whole)} -> {sum(rows)} rows")
    assert max(errors) <= 1e-6
    assert loss_whole == pytest.approx(loss, abs=1e-6) and loss_split == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_processes_with_other_numbers_of_sequences(tiny_policy, tmp_path, loss_type):
    """Two processes, the rollouts of one in a sequence each, those of the other in three: the step of one process."""
    script = Path(__file__).parents[1] / "support" / "crafted_rollouts.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    paths = os.pathsep.join(filter(None, [str(script.parents[1]), *map(str, sys.path)]))
    done = subprocess.run(
        [*launch, str(script), str(tiny_policy), str(tmp_path), loss_type],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    both = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    native, _ = parameters_after_a_step(tiny_policy, tmp_path / "one", lambda i: 1, None, loss_type=loss_type)
    start = torch.cat([value.detach().double().flatten() for value in load(tiny_policy).parameters()])
    step = (native - start).abs().max()
    assert step > 1e-4
    for found, seen in both:
        assert sum(seen) == 12 - 2 and max(seen) <= 4, "as many rows as the process with the most, in slices"
        assert (found - native).abs().max() / step <= 1e-6


def test_rewards_and_logs_have_one_entry_for_each_rollout(tiny_policy, tmp_path):
    trainer = trainer_for(tiny_policy, tmp_path, Program(agent))
    trainer.on_policy = trainer.source = Crafted(crafted(lambda i: 1 + i % 3, (2,)))
    trainer.model.train()
    scored = trainer._generate_and_score_completions([ROW] * B)
    assert len(scored["advantages"]) == len(scored["prompt_ids"]) > B
    assert len(trainer._logs["completion"]) == len(trainer._logs["prompt"]) == B == len(trainer._logs["advantages"])
    assert trainer.reward_func_names == ["reward"]
    firsts = [trainer.processing_class.decode(one.ids, skip_special_tokens=True) for one in trainer.source.rollouts]
    assert [one[-1]["content"] for one in trainer._logs["completion"]] == firsts
    owners = [owner for owner, rollout in enumerate(crafted(lambda i: 1 + i % 3, (2,))) for _ in sequences_of(rollout)]
    by_rollout = torch.tensor(trainer._logs["advantages"])
    assert torch.allclose(scored["advantages"].float(), by_rollout[owners].float())


def test_rows_are_as_many_as_parts_need(monkeypatch):
    monkeypatch.setattr("agentic_prompting.trainers.sequences.gather_object", lambda rows: [*rows, 13])
    assert padded_rows(9, 4) == 16 and padded_rows(17, 1) == 17


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
    with pytest.raises(ValueError, match="vllm_importance_sampling_mode='sequence_truncate' .use 'token_truncate'"):
        trainer_for(tiny_policy, tmp_path, Program(agent), **options)


def test_a_failed_rollout_keeps_one_row():
    assert [len(sequences_of(one)) for one in crafted(lambda i: 3, range(B))] == [1] * B
    assert [len(sequences_of(one)) for one in crafted(lambda i: 1 + i % 3, ())] == [1, 2, 3, 1, 2, 3, 1, 2]
