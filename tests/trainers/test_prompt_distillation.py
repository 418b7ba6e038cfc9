"""On-policy distillation of a system prompt: what a token learns from, and that the student comes closer."""

import pytest
import torch

from agentic_prompting import Program
from agentic_prompting.rollout import BatchEngine
from agentic_prompting.trainers.prompt_distillation import PromptDistillationTrainer
from support.training import Acts, one_batch, trainer_for

PROMPT = "Answer .\n[G0]. Ask first ."


def distilling(tiny_policy, folder, rows, prompt=PROMPT, **changes):
    options = {"prompt": prompt, "reward_funcs": lambda completions, **columns: [0.0] * len(completions)}
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


def test_the_student_comes_closer_to_the_teacher(tiny_policy, rows, tmp_path):
    trainer = distilling(
        tiny_policy, tmp_path, rows, max_steps=16, learning_rate=3e-3, per_device_train_batch_size=8, beta=0.0
    )
    trainer.train()
    apart = [entry["distillation/kl"] for entry in trainer.state.log_history if "distillation/kl" in entry]
    assert len(apart) == 16 and 0 < sum(apart[-4:]) < 0.5 * sum(apart[:4]), apart


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
