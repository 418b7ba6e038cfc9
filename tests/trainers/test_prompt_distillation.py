"""On-policy distillation of a system prompt: what a token learns from, and that the student comes closer."""

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from agentic_prompting import Program
from agentic_prompting.rollout import BatchEngine
from agentic_prompting.trainers.prompt_distillation import PromptDistillationTrainer
from support.training import Acts, one_batch, trainer_for

PROMPT = "Answer .\n[G0]. Ask first ."


def distilling(tiny_policy, folder, rows, prompt=PROMPT, peft_config=None, **changes):
    options = {
        "peft_config": peft_config,
        "prompt": prompt,
        "reward_funcs": lambda completions, **columns: [0.0] * len(completions),
    }
    return trainer_for(tiny_policy, folder, rows, kind=PromptDistillationTrainer, options=options, **changes)


def logps(model, prompt, ids):
    """The log-probabilities of `ids` behind a prompt."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(ids)), ids]


@pytest.mark.parametrize("place", ["system", "user"])
def test_a_token_learns_from_what_the_prompt_would_change(tiny_policy, rows, tmp_path, place):
    """Of the student's own tokens; the reward functions say nothing here."""
    trainer = distilling(tiny_policy, tmp_path, rows)
    trainer.place = place
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    played, after_scoring = [], trainer._after_scoring
    trainer._after_scoring = lambda batch, scored: played.extend(batch.rollouts) or after_scoring(batch, scored)
    batch = one_batch(trainer)
    own = (batch["completion_mask"] * batch["tool_mask"]).bool()
    assert batch["advantages"].shape == own.shape and not batch["advantages"][~own].any()
    for row, rollout in enumerate(played):
        bare = trainer.chat_format.prompt_ids(rollout.row["prompt"])
        under = trainer.chat_format.prompt_ids(trainer.teacher.messages(rollout.row["prompt"], place))
        assert bare == rollout.prompt_ids and len(under) > len(bare)
        apart = logps(trainer.model, under, rollout.ids) - logps(trainer.model, bare, rollout.ids)
        mask = torch.tensor(rollout.mask).bool()
        found = batch["advantages"][row, : len(rollout.ids)][mask]
        assert torch.allclose(found, apart[mask], atol=1e-5) and found.abs().max() > 1e-3


@pytest.mark.parametrize("lora", [False, True])
def test_the_teacher_stays_what_the_student_was_at_the_start(tiny_policy, rows, tmp_path, lora):
    """Red before: the teacher was the student's own weights, and both lost everything."""
    options = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])} if lora else {}
    trainer = distilling(tiny_policy, tmp_path, rows, beta=0.0, **options)
    assert trainer.beta == trainer.args.beta == 0.0, "no KL term to the student's own start"
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    with torch.no_grad():
        for one in trainer.model.parameters():
            if one.requires_grad:
                one.add_(0.05 * torch.randn_like(one))
    played, after_scoring = [], trainer._after_scoring
    trainer._after_scoring = lambda batch, scored: played.extend(batch.rollouts) or after_scoring(batch, scored)
    batch, start = one_batch(trainer), AutoModelForCausalLM.from_pretrained(tiny_policy)
    for row, rollout in enumerate(played):
        under = trainer.chat_format.prompt_ids(trainer.teacher.messages(rollout.row["prompt"], "system"))
        apart = logps(start, under, rollout.ids) - logps(trainer.model, rollout.prompt_ids, rollout.ids)
        mask = torch.tensor(rollout.mask).bool()
        assert torch.allclose(batch["advantages"][row, : len(rollout.ids)][mask], apart[mask], atol=1e-4)


def test_the_student_comes_closer_to_the_teacher(tiny_policy, rows, tmp_path):
    """Half the way at least: the mean of the last eight batches against the first."""
    trainer = distilling(
        tiny_policy, tmp_path, rows, max_steps=20, learning_rate=3e-4, per_device_train_batch_size=8, beta=0.0
    )
    trainer.train()
    apart = [entry["distillation/kl"] for entry in trainer.state.log_history if "distillation/kl" in entry]
    assert len(apart) == 20 and 0 < sum(apart[-8:]) / 8 < 0.5 * apart[0], apart


def test_what_cannot_be_distilled_is_refused(tiny_policy, rows, tmp_path):
    with pytest.raises(ValueError, match="the prompt is empty"):
        distilling(tiny_policy, tmp_path, rows, prompt=" ")

    def agent(row, base_url, api_key):
        return ""

    with pytest.raises(ValueError, match="a program renders its own conversations"):
        trainer_for(
            tiny_policy, tmp_path, rows, kind=PromptDistillationTrainer, environment=Program(agent),
            options={"prompt": PROMPT, "reward_funcs": lambda completions, **columns: [0.0] * len(completions)},
        )  # fmt: skip
