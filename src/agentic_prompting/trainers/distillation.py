"""Context distillation: the weights learn to act without a system prompt as they act under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from trl import GRPOConfig

from ..evolution import SystemPrompt
from ..rollout import ChatFormat, Rollout
from .warm_start import warm_start

_SFT_ARGUMENTS = (  # that distillation has in common with training
    "learning_rate", "lr_scheduler_type", "adam_beta2", "weight_decay", "max_grad_norm", "per_device_train_batch_size",
    "gradient_accumulation_steps", "gradient_checkpointing", "bf16", "fp16", "use_cpu", "seed", "disable_tqdm",
)  # fmt: skip


def imitate_without(
    prompt: SystemPrompt, rollouts: Sequence[Rollout], model: Any, chat_format: ChatFormat, args: GRPOConfig, **sft: Any
) -> None:
    """Train a model on its own turns under a prompt, in the same conversations without that prompt.

    This maximises the likelihood of the teacher's samples, which is the forward KL up to a constant.

    Args:
        prompt ([`SystemPrompt`]): The prompt that is left out.
        rollouts (`Sequence[Rollout]`): This process's rollouts under it, each `row` with its rendered `prompt`.
        model (`PreTrainedModel`): The model that played them.
        chat_format ([`ChatFormat`]): Its chat template.
        args (`GRPOConfig`): The learning rate, the schedule and the batches, unless `sft` has others.
        **sft: Of [`~trl.SFTConfig`]. By default one epoch.
    """
    bare = [chat_format.prompt_ids(prompt.left_out(rollout.row["prompt"])) for rollout in rollouts]
    examples = [replace(rollout, prompt_ids=ids) for rollout, ids in zip(rollouts, bare, strict=True)]
    same = {name: getattr(args, name) for name in _SFT_ARGUMENTS}
    folder = Path(args.output_dir) / "distill"
    sft = {**same, "num_train_epochs": 1, **sft}
    warm_start(model, chat_format.tokenizer, gather_object(examples), folder, **sft)
