"""A run that resumes with another adapter than its checkpoint has."""

import pytest
from peft import LoraConfig

from support.training import trainer_for

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def train(policy, rows, folder, steps, lora=None):
    options = {"peft_config": LoraConfig(**lora)} if lora else {}
    trainer = trainer_for(
        policy, folder, rows, max_steps=steps, save_strategy="steps", save_steps=1, options=options
    )
    trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        (LORA, None, "peft_config"),
        (None, LORA, "peft_config"),
        (LORA, {**LORA, "r": 8}, "r 4 -> 8"),
        (LORA, {**LORA, "lora_alpha": 16}, "lora_alpha 8 -> 16"),
        (LORA, {**LORA, "target_modules": ["q_proj"]}, "target_modules"),
    ],
    ids=["none any more", "a new one", "another rank", "another scale", "other modules"],
)
def test_another_adapter_is_refused(tiny_policy, rows, tmp_path, before, now, named):
    train(tiny_policy, rows, tmp_path, 1, before)
    with pytest.raises(ValueError, match="adapter") as refused:
        train(tiny_policy, rows, tmp_path, 2, now)
    assert "checkpoint-1" in str(refused.value)
    assert named in str(refused.value)
    # The run itself goes on.
    train(tiny_policy, rows, tmp_path, 2, before)
