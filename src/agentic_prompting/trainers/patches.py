"""The places where TRL, transformers, DeepSpeed and PyTorch have no seam, and are patched.

Each function here replaces one thing, and restores it if it is a context manager. Its docstring
says why no argument and no override does the same. No other file of this folder patches anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from huggingface_hub import HfApi
from torch.distributed.fsdp import FSDPModule
from transformers import trainer as transformers_trainer
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

# --- TRL ---------------------------------------------------------------------------------------


@contextmanager
def replace_vllm_generation(factory: Callable[..., VLLMGeneration]) -> Iterator[None]:
    """Within this context, TRL's trainer creates its `vllm_generation` with a function of ours.

    Why: the constructor of `GRPOTrainer` names the class, and at once connects to the server, which
    needs NCCL. An object that is replaced after the constructor comes too late.
    """
    original = grpo_trainer.VLLMGeneration
    grpo_trainer.VLLMGeneration = factory
    try:
        yield
    finally:
        grpo_trainer.VLLMGeneration = original


@contextmanager
def mute_missing_reward_warning(is_muted: bool) -> Iterator[None]:
    """Within this context, TRL does not warn that "All reward functions returned None".

    If rollouts failed, the warning would mislead, and print the row; [`FailureWatch`] reports the
    failure.

    Why: it is logged in the middle of `GRPOTrainer._calculate_rewards`.

    Args:
        is_muted (`bool`): `False`: the context has no effect.
    """
    logger = logging.getLogger(GRPOTrainer.__module__)

    def filter_record(record: logging.LogRecord) -> bool:
        is_warning = "All reward functions returned None" in record.getMessage()
        return not (is_muted and is_warning)

    logger.addFilter(filter_record)
    try:
        yield
    finally:
        logger.removeFilter(filter_record)


@contextmanager
def compute_importance_ratio(trainer: GRPOTrainer) -> Iterator[None]:
    """Within this context, TRL corrects the loss for tokens that older weights sampled.

    It multiplies them by the ratio of the trainer's to the sampler's probability.

    Why: TRL does this for vLLM only. `use_vllm` is its only switch, and several of its methods read
    it. It would also push the weights, but the trainer has set `_last_loaded_step`, which says that
    this has been done.
    """
    previous = trainer.use_vllm
    trainer.use_vllm = True
    try:
        yield
    finally:
        trainer.use_vllm = previous


# --- transformers ------------------------------------------------------------------------------


@contextmanager
def publish_only(folder: Path, patterns: Sequence[str]) -> Iterator[None]:
    """Within this context, transformers uploads from `folder` only files that match a pattern.

    A checkpoint is uploaded whole, if `hub_strategy` asks for it.

    Why: `push_to_hub` and `_push_from_checkpoint` call `hf_api().upload_folder` without
    `allow_patterns`. To override them would mean to copy 100 lines on tags, commits and uploads in
    the background.
    """
    original = transformers_trainer.hf_api
    transformers_trainer.hf_api = lambda: _SelectiveApi(original(), folder, patterns)
    try:
        yield
    finally:
        transformers_trainer.hf_api = original


class _SelectiveApi:
    """An `HfApi` whose `upload_folder` uploads only some files of one folder."""

    def __init__(self, api: HfApi, folder: Path, patterns: Sequence[str]):
        self._api = api
        self._folder = folder
        self._patterns = patterns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def upload_folder(self, *, folder_path: str | Path, **options: Any) -> Any:
        # Other folders, such as those of checkpoints, are uploaded whole.
        if Path(folder_path) == self._folder:
            options["allow_patterns"] = list(self._patterns)
        return self._api.upload_folder(folder_path=folder_path, **options)


# --- accelerate --------------------------------------------------------------------------------


def skip_backward_of_constants(accelerator: Accelerator) -> None:
    """Make `accelerator.backward` do nothing for a loss without a gradient.

    A batch with nothing to learn from has a constant loss. torch would raise for it, and
    DeepSpeed's engine would step.

    Why: the call is in the middle of `Trainer.training_step`, which would have to be copied to
    leave it out.
    """
    run_backward = accelerator.backward

    def run_backward_if_needed(loss: torch.Tensor, **kwargs: Any) -> None:
        if loss.requires_grad:
            run_backward(loss, **kwargs)

    accelerator.backward = run_backward_if_needed


# --- DeepSpeed and FSDP2 -----------------------------------------------------------------------


@contextmanager
def remove_zero3_start_hook(engine: Any) -> Iterator[None]:
    """Within this context, ZeRO-3 lacks its start-of-forward hook. Does nothing for other engines.

    Why: TRL's `unwrap_model_for_generation` removes the other hooks, but leaves this one. After a
    forward pass that DeepSpeed has not seen before, it would trigger a collective and deadlock,
    because processes differ in how often they sample.

    Args:
        engine (`deepspeed.DeepSpeedEngine` or `torch.nn.Module`): The wrapped model.
    """
    offload = getattr(getattr(engine, "optimizer", None), "parameter_offload", None)
    if offload is None:
        yield
        return
    # DeepSpeed keeps the handle, by whose id the hook is found.
    hooks = offload.module._forward_pre_hooks
    hook_id = offload.fwd_pre_hook.id
    hook = hooks.pop(hook_id)
    try:
        yield
    finally:
        hooks[hook_id] = hook


@contextmanager
def keep_unsharded(module: FSDPModule) -> Iterator[None]:
    """Within this context, an FSDP2 unit keeps its gathered parameters through forward passes.

    Why: PyTorch can set whether a unit is resharded after a forward pass, but not tell it. The
    root and the head are not resharded, the layers are, so the private values are restored.
    """
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.12 has one group, or none
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    # `set_reshard_after_forward` overwrites how a unit is resharded, so note it before.
    meshes = [group.post_forward_mesh_info for group in groups]
    module.set_reshard_after_forward(False, recurse=False)
    module.unshard()
    try:
        yield
    finally:
        for group, mesh in zip(groups, meshes, strict=True):
            group.post_forward_mesh_info = mesh
        module.reshard()
