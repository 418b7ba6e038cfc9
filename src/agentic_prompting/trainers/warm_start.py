"""A supervised warm start: imitate written conversations before learning from reward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel
from trl import SFTConfig, SFTTrainer

from ..rollout import Rollout
from .callbacks import one_line_progress
from .trl_batch import IGNORED


def warm_start(
    model: PreTrainedModel, tokenizer: Any, rollouts: Sequence[Rollout], output_dir: str | Path, **sft_arguments: Any
) -> PreTrainedModel:
    """Imitate written conversations before learning from reward: train `model` in place on the agent's tokens of
    `rollouts`; prompts and observations are context only.

    Args:
        model (`PreTrainedModel`): The agent.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        rollouts (`Sequence[Rollout]`): What to imitate, for example from [`rollout_from_trace`].
        output_dir (`str` or `Path`): Where TRL may write.
        **sft_arguments: Of [`~trl.SFTConfig`]: `max_steps`, `learning_rate`, `per_device_train_batch_size`, ... Nothing
            is saved or reported unless asked for here.

    Returns:
        `PreTrainedModel`: The same model.

    Raises:
        `ValueError`: If `rollouts` is empty.
    """
    if not rollouts:
        raise ValueError("warm_start needs at least one rollout to imitate")
    quiet = {"save_strategy": "no", "logging_strategy": "no", "report_to": []}
    # The tokens are exactly those of the rollouts, so TRL must not prepare or cut them again.
    fixed = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None, "packing": False}
    examples = []
    for rollout in rollouts:
        labels = [token if own else IGNORED for token, own in zip(rollout.ids, rollout.mask, strict=True)]
        examples.append({"input_ids": rollout.context, "labels": [IGNORED] * len(rollout.prompt_ids) + labels})
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(str(output_dir), **{**quiet, **sft_arguments, **fixed}),
        train_dataset=Dataset.from_list(examples),
        processing_class=tokenizer,
    )
    one_line_progress(trainer, "warm start steps")
    trainer.train()
    return model
