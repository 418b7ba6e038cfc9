"""Supervised training: a warm start on written conversations, before training on rewards; and context distillation
after it, in which the weights learn to act without a system prompt as they act under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset
from transformers import PreTrainedModel
from trl import GRPOConfig, SFTConfig, SFTTrainer

from ..evolution import SystemPrompt
from ..rollout import ChatFormat, Rollout
from .callbacks import one_line_progress
from .loss import IGNORED

_SFT_ARGUMENTS = (  # those that distillation takes over from training
    "learning_rate", "lr_scheduler_type", "adam_beta2", "weight_decay", "max_grad_norm", "per_device_train_batch_size",
    "gradient_accumulation_steps", "gradient_checkpointing", "bf16", "fp16", "use_cpu", "seed", "disable_tqdm",
)  # fmt: skip


def warm_start(
    model: PreTrainedModel,
    tokenizer: Any,
    rollouts: Sequence[Rollout],
    output_dir: str | Path,
    **sft_arguments: Any,
) -> PreTrainedModel:
    """Imitate written conversations before learning from reward: train `model` in place on the agent's tokens of
    `rollouts`; prompts and observations are context only.

    Args:
        model (`PreTrainedModel`): The agent.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        rollouts (`Sequence[Rollout]`): The conversations, for example from [`rollout_from_trace`].
        output_dir (`str` or `Path`): Where TRL may write.
        **sft_arguments: Those of [`~trl.SFTConfig`]: `max_steps`, `learning_rate`, `per_device_train_batch_size`, ...
            By default nothing is saved or reported.

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
        labels = [
            token if own else IGNORED for token, own in zip(rollout.ids, rollout.mask, strict=True)
        ]
        examples.append(
            {"input_ids": rollout.context, "labels": [IGNORED] * len(rollout.prompt_ids) + labels}
        )
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(str(output_dir), **{**quiet, **sft_arguments, **fixed}),
        train_dataset=Dataset.from_list(examples),
        processing_class=tokenizer,
    )
    one_line_progress(trainer, "warm start steps")
    trainer.train()
    return model


def imitate_without(
    prompt: SystemPrompt,
    rollouts: Sequence[Rollout],
    model: Any,
    chat_format: ChatFormat,
    args: GRPOConfig,
    **sft: Any,
) -> None:
    """Train a model on its own turns under a prompt, in the same conversations without that prompt.

    This maximises the likelihood of the teacher's samples, which is the forward KL up to a constant.

    Args:
        prompt ([`SystemPrompt`]): The prompt that is left out.
        rollouts (`Sequence[Rollout]`): This process's rollouts under it, each `row` with its rendered `prompt`.
        model (`PreTrainedModel`): The model that played them.
        chat_format ([`ChatFormat`]): Its chat template.
        args (`GRPOConfig`): The learning rate, the schedule and the batches, unless `sft` has others.
        **sft: Arguments of [`~trl.SFTConfig`]. By default one epoch.
    """
    bare = [chat_format.prompt_ids(prompt.left_out(rollout.row["prompt"])) for rollout in rollouts]
    examples = [
        replace(rollout, prompt_ids=ids) for rollout, ids in zip(rollouts, bare, strict=True)
    ]
    same = {name: getattr(args, name) for name in _SFT_ARGUMENTS}
    folder = Path(args.output_dir) / "distill"
    sft = {**same, "num_train_epochs": 1, **sft}
    warm_start(model, chat_format.tokenizer, gather_object(examples), folder, **sft)
