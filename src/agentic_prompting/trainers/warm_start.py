"""Supervised training before and after training on rewards.

[`warm_start`] imitates written conversations before it. [`distill_prompt`] is context distillation
after it: the weights learn to act without a system prompt as they act under it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOConfig, SFTConfig, SFTTrainer

from ..evolution import SystemPrompt
from ..rollout import ChatFormat, Rollout
from .loss_inputs import IGNORED_LABEL
from .one_line_progress import use_one_line_progress

# Training arguments that distillation takes over.
SHARED_ARGUMENTS = (
    "learning_rate",
    "lr_scheduler_type",
    "adam_beta2",
    "weight_decay",
    "max_grad_norm",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "bf16",
    "fp16",
    "use_cpu",
    "seed",
    "disable_tqdm",
)


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rollouts: Sequence[Rollout],
    output_dir: str | Path,
    **sft_arguments: Any,
) -> PreTrainedModel:
    """Train a model in place to imitate written conversations, before it learns from rewards.

    Only the agent's tokens of `rollouts` are learned; prompts and observations are context.

    Args:
        model (`PreTrainedModel`): The agent.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        rollouts (`Sequence[Rollout]`): The conversations, for example from
            [`rollout_from_trace`].
        output_dir (`str` or `Path`): Where TRL may write.
        **sft_arguments: Passed to [`~trl.SFTConfig`]: `max_steps`, `learning_rate`,
            `per_device_train_batch_size`, ... By default nothing is saved or reported.

    Returns:
        `PreTrainedModel`: The same model.

    Raises:
        `ValueError`: If `rollouts` is empty.
    """
    if not rollouts:
        raise ValueError("warm_start needs at least one rollout to imitate")

    # Label the agent's tokens, and only these.
    examples = []
    for rollout in rollouts:
        labels = [IGNORED_LABEL] * len(rollout.prompt_ids)
        for token, is_sampled in zip(rollout.ids, rollout.mask, strict=True):
            labels.append(token if is_sampled else IGNORED_LABEL)
        examples.append({"input_ids": rollout.context, "labels": labels})

    # The caller's options replace the defaults, but not those on which imitation depends.
    arguments: dict[str, Any] = {
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        **sft_arguments,
        # The tokens are exactly those of the rollouts, so TRL must not prepare or cut them again.
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "max_length": None,
        "packing": False,
    }
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(str(output_dir), **arguments),
        train_dataset=Dataset.from_list(examples),
        processing_class=tokenizer,
    )
    use_one_line_progress(trainer, "warm start steps")
    trainer.train()
    return model


def distill_prompt(
    prompt: SystemPrompt,
    rollouts: Sequence[Rollout],
    model: PreTrainedModel,
    chat_format: ChatFormat,
    args: GRPOConfig,
    **sft_arguments: Any,
) -> None:
    """Train a model on its own turns under a prompt, in the same conversations without it.

    This maximises the likelihood of the teacher's samples, which is the forward KL up to a
    constant.

    Args:
        prompt ([`SystemPrompt`]): The prompt to leave out.
        rollouts (`Sequence[Rollout]`): This process's rollouts under it; each `row` holds its
            rendered `prompt`.
        model (`PreTrainedModel`): The model that played them.
        chat_format ([`ChatFormat`]): Its chat template.
        args (`GRPOConfig`): The learning rate, the schedule and the batches, unless
            `sft_arguments` has others.
        **sft_arguments: Passed to [`~trl.SFTConfig`]. By default one epoch.
    """
    # Replace the prompt of each rollout by the same one without the system prompt.
    examples = []
    for rollout in rollouts:
        messages = prompt.left_out(rollout.row["prompt"])
        examples.append(replace(rollout, prompt_ids=chat_format.prompt_ids(messages)))

    # Train on the rollouts of all processes, as the agent was trained before.
    shared_arguments = {name: getattr(args, name) for name in SHARED_ARGUMENTS}
    warm_start(
        model,
        chat_format.tokenizer,
        gather_object(examples),
        Path(args.output_dir) / "distill",
        **{**shared_arguments, "num_train_epochs": 1, **sft_arguments},
    )
