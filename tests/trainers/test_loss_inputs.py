"""Observation tokens are left out of the head's work, and nothing that is learnt changes."""

import pytest
import torch
import trl.trainer.utils as trl_utils
from peft import LoraConfig
from transformers import (
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from agentic_prompting.rollout import BatchEngine
from agentic_prompting.sandbox.policy import sandbox_spec, save_policy, world_tokenizer
from agentic_prompting.trainers.loss_inputs import IGNORED_LABEL, ScoredTokensModel
from support.training import Acts, one_batch, trainer_for


class Watched:
    """A model that notes the labels it is called with."""

    def __init__(self, model):
        self.model = model
        self.labels = []

    def __call__(self, *args, labels, **kwargs):
        self.labels.append(labels)
        return self.model(*args, labels=labels, **kwargs)


@pytest.fixture
def trainer(tiny_policy, rows, tmp_path):
    return trainer_for(tiny_policy, tmp_path, rows, beta=0.01, num_iterations=2)


def loss_and_gradients(loss_of, trainer, batch):
    trainer.model.zero_grad()
    loss = loss_of(trainer, trainer.model, dict(batch))
    loss.backward()
    return loss.item(), [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("skips", [False, True], ids=["as on a CPU", "as on a GPU"])
def test_loss_and_gradients_are_those_of_trl(trainer, skips, monkeypatch):
    """TRL's head skips what is labelled -100 where Triton is; its kernel falls back to torch here."""
    monkeypatch.setattr(trl_utils, "_use_triton", lambda device: skips)
    batch = one_batch(trainer)
    assert "old_per_token_logps" in batch and (batch["tool_mask"] == 0).any()
    loss, gradients = loss_and_gradients(type(trainer)._compute_loss, trainer, batch)

    def plain(trainer, model, inputs):
        score = GRPOTrainer._get_per_token_logps_and_entropies
        monkeypatch.setattr(
            trainer, "_get_per_token_logps_and_entropies", lambda *a, **k: score(trainer, *a, **k)
        )
        with torch.no_grad():  # what TRL would have had from before: scored everywhere
            inputs = {
                **inputs,
                "old_per_token_logps": None,
                "ref_per_token_logps": batch["ref_per_token_logps"],
            }
        return GRPOTrainer._compute_loss(trainer, model, inputs)

    plain_loss, plain_gradients = loss_and_gradients(plain, trainer, batch)
    assert loss == pytest.approx(plain_loss, rel=1e-6, abs=1e-9)
    assert len(gradients) == len(plain_gradients) > 0
    assert any(gradient.abs().max() > 0 for gradient in gradients)
    for ours, theirs in zip(gradients, plain_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


def test_the_head_is_asked_for_the_agents_tokens_only(trainer):
    batch = one_batch(trainer)
    watched = Watched(trainer.model)
    trainer._compute_loss(watched, batch)
    scored = (watched.labels[0] != IGNORED_LABEL).sum()
    token_count = (batch["completion_mask"] * batch["tool_mask"]).sum()
    assert scored == token_count < batch["completion_mask"].sum()


@pytest.fixture
def head_positions(monkeypatch):
    """The numbers of positions that TRL's head computes, one for each call."""
    positions = []
    apply = trl_utils._ChunkedLogProbFunction.apply

    def count(hidden, *args):
        positions.append(len(hidden))
        return apply(hidden, *args)

    monkeypatch.setattr(trl_utils._ChunkedLogProbFunction, "apply", count)
    return positions


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "LoRA"])
def test_on_a_cpu_the_head_computes_scored_positions(
    tiny_policy, rows, tmp_path, head_positions, adapter
):
    """Neither prompts nor observations nor padding."""
    config = LoraConfig(r=4, target_modules="all-linear") if adapter else None
    trainer = trainer_for(tiny_policy, tmp_path, rows, options={"peft_config": config})
    batch = one_batch(trainer)
    head_positions.clear()
    trainer._compute_loss(trainer.model, batch).backward()
    assert head_positions == [int((batch["completion_mask"] * batch["tool_mask"]).sum())]


def test_a_batch_without_scored_tokens_has_zero_gradients(trainer, head_positions):
    batch = one_batch(trainer)
    batch["tool_mask"] = torch.zeros_like(batch["tool_mask"])
    head_positions.clear()
    loss, gradients = loss_and_gradients(type(trainer)._compute_loss, trainer, batch)
    assert head_positions[0] == 0 and loss == 0
    assert gradients and all((gradient == 0).all() for gradient in gradients)


def test_entropies_stay_at_their_positions(trainer, monkeypatch):
    """As TRL computes them, at the agent's tokens; 0 elsewhere."""
    batch = one_batch(trainer)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    width = batch["completion_ids"].shape[1]
    is_scored = batch["completion_mask"] * batch["tool_mask"]
    add_fused_lm_head(trainer.model, outputs=("log_probs", "entropy"))
    with torch.no_grad():
        score = GRPOTrainer._get_per_token_logps_and_entropies
        expected = score(trainer, trainer.model, ids, mask, width, compute_entropy=True)
        scored = ScoredTokensModel(trainer.model, is_scored)
        got = score(trainer, scored, ids, mask, width, batch_size=3, compute_entropy=True)
    for ours, theirs in zip(got[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, theirs * is_scored, atol=1e-6, rtol=1e-6)


def test_earlier_log_probabilities_are_of_the_agents_tokens_too(trainer):
    """TRL takes them in slices, before the loss: each slice gets its own rows of the mask."""
    batch = one_batch(trainer)
    outside = batch["tool_mask"] == 0
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        assert (batch[name][outside] == 0).all()
        assert (batch[name][~outside & (batch["completion_mask"] == 1)] != 0).all()


def test_no_ratio_overflows_where_nothing_is_scored(trainer):
    batch = one_batch(trainer)
    outside = batch["tool_mask"] == 0
    batch["old_per_token_logps"] = batch["old_per_token_logps"].masked_fill(outside, -1000.0)
    assert torch.isfinite(trainer._compute_loss(trainer.model, batch))


def test_slices_get_their_own_rows_and_the_callers_labels_stay():
    labels_of_calls = []
    model = ScoredTokensModel(
        lambda labels: labels_of_calls.append(labels), torch.tensor([[1, 0], [0, 1], [1, 0]])
    )
    labels = torch.arange(12).reshape(3, 4)
    model(labels=labels[:2])
    model(labels=labels[2:])
    assert torch.cat(labels_of_calls).tolist() == [
        [0, 1, 2, IGNORED_LABEL],
        [4, 5, IGNORED_LABEL, 7],
        [8, 9, 10, IGNORED_LABEL],
    ]
    assert (labels >= 0).all()


# --- mixtures of experts --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A tiny Qwen3-MoE whose configuration asks for router logits, saved."""
    tokenizer = world_tokenizer()
    folder = tmp_path_factory.mktemp("experts")
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    save_policy(Qwen3MoeForCausalLM(config), tokenizer, sandbox_spec(), folder)
    return folder


@pytest.mark.parametrize("bf16", [False, True])
def test_experts_are_trained_with_their_auxiliary_loss(experts, rows, tmp_path, bf16):
    """The engine samples without it: it would weigh router logits by a mask of another shape."""
    trainer = trainer_for(experts, tmp_path, rows, bf16=bf16, max_steps=2)
    trainer.train()
    assert all(log["aux_loss"] > 0 for log in trainer.state.log_history if "loss" in log)
    assert trainer.model.config.output_router_logits


def test_experts_that_trl_cannot_count_are_refused(rows, tmp_path):
    """Granite's configuration calls their number otherwise; TRL's head fails at the first step."""
    tokenizer = world_tokenizer()
    folder = tmp_path / "granite"
    config = GraniteMoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    save_policy(GraniteMoeForCausalLM(config), tokenizer, sandbox_spec(), folder)
    with pytest.raises(ValueError, match="GraniteMoeForCausalLM.*router_aux_loss_coef=0"):
        trainer_for(folder, tmp_path, rows)
    trainer = trainer_for(folder, tmp_path, rows, router_aux_loss_coef=0.0)
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0


def test_the_auxiliary_loss_is_of_all_positions(experts, rows, tmp_path):
    trainer = trainer_for(experts, tmp_path, rows, beta=0.01)
    batch = one_batch(trainer)
    loss, gradients = loss_and_gradients(type(trainer)._compute_loss, trainer, batch)

    def plain(trainer, model, inputs):
        score = GRPOTrainer._get_per_token_logps_and_entropies
        trainer._get_per_token_logps_and_entropies = lambda *a, **k: score(trainer, *a, **k)
        return GRPOTrainer._compute_loss(trainer, model, inputs)

    plain_loss, plain_gradients = loss_and_gradients(plain, trainer, batch)
    assert loss == pytest.approx(plain_loss, rel=1e-6) and trainer.aux_loss_enabled
    for ours, theirs in zip(gradients, plain_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)
