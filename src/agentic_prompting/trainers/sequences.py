"""Rollouts of several token sequences in TRL's batch: a row for each, in a loss where each *rollout* counts the same.

TRL's loss types differ in one thing, the weight of a token in a sum. So what a token counts is put into the mask, and
TRL computes the sum (its `dapo`), in which each token has the same weight otherwise. Weights in the advantages would
miss the KL term. With N_i tokens of rollout i in the loss, over all of its sequences:

| `loss_type` | a token counts |
|---|---|
| `dapo`, `cispo` | 1: a mean over tokens does not see where a sequence ends |
| `grpo` | tokens / rollouts / N_i |
| `dr_grpo` | tokens / rollouts / `max_completion_length` |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object

from ..rollout import Rollout, TokenSequence
from .config import MultiTurnGRPOConfig

_SUMS = ("dapo", "cispo")
PER_ROLLOUT = ("grpo", "dr_grpo")


def check_settings(args: MultiTurnGRPOConfig, has_aux_loss: bool, prompt_format: str) -> None:
    """Refuse what cannot be right, or is not there yet, where rollouts are made by a program.

    Args:
        args ([`MultiTurnGRPOConfig`]): The run's.
        has_aux_loss (`bool`): Whether TRL adds the auxiliary loss of a mixture of experts.
        prompt_format (`str`): `chat` or `text`.

    Raises:
        `ValueError`: Names the setting, and what to do.
    """
    ratios = args.vllm_importance_sampling_mode
    wrong = {
        f"loss_type={args.loss_type!r} (use dapo, grpo, dr_grpo or cispo)": args.loss_type not in _SUMS + PER_ROLLOUT,
        "importance_sampling_level='sequence' (use 'token')": args.importance_sampling_level != "token",
        "top_entropy_quantile (leave it at 1.0)": args.top_entropy_quantile < 1.0,
        "entropy_coef (leave it at 0)": bool(args.entropy_coef) or bool(args.use_adaptive_entropy),
        "off_policy_mask_threshold (leave it out)": args.off_policy_mask_threshold is not None,
        "mask_truncated_completions (leave it off)": args.mask_truncated_completions,
        f"vllm_importance_sampling_mode={ratios!r} (use 'token_truncate' or 'token_mask')": (
            (args.use_vllm or args.async_lead > 0)
            and args.vllm_importance_sampling_correction
            and not ratios.startswith("token")
        ),
        "the auxiliary loss of a mixture of experts (set router_aux_loss_coef=0)": has_aux_loss,
        "full_determinism (leave it off)": args.full_determinism,
        "prompts that are text (a program's calls are conversations)": prompt_format != "chat",
    }
    if found := [what for what, is_wrong in wrong.items() if is_wrong]:
        raise ValueError(
            "with a program as environment a rollout may have several token sequences, for which there is no "
            + "; no ".join(found)
        )


def sequences_of(rollout: Rollout) -> list[TokenSequence]:
    """The rows of a rollout: those of its sequences that have a token in the loss; at least one row."""
    if rollout.status == "failed" or not rollout.others:
        return [rollout]
    return [one for one in rollout.sequences if any(one.mask)] or [rollout]


def padded_rows(rows: int, parts: int) -> int:
    """As many rows as the process with the most needs, in equal parts: TRL gathers lengths from all processes by row,
    cuts a batch into so many parts, and drops what is left over. Called on every process."""
    most = max(gather_object([rows]))
    return -(-most // parts) * parts


def filler(end_ids: Sequence[int]) -> TokenSequence:
    """A row without a token in the loss."""
    return TokenSequence([end_ids[0]], ids=[end_ids[0]], mask=[0], logprobs=[0.0])


def spread(
    scored: Mapping[str, Any], owners: Sequence[int], loss_type: str, longest: int, processes: int
) -> dict[str, Any]:
    """From a batch whose advantages are those of rollouts to one of rows, with what each token counts in its mask.

    Args:
        scored (`dict`): What TRL's `_generate_and_score_completions` returns.
        owners (`Sequence[int]`): For each row the number of its rollout on this process, -1 for a filler.
        loss_type (`str`): TRL's.
        longest (`int`): `max_completion_length`, the constant of `dr_grpo`.
        processes (`int`): Processes of the job; each has as many rollouts.
    """
    advantages, mask = scored["advantages"], scored["tool_mask"] * scored["completion_mask"]
    owner = torch.tensor(owners, device=advantages.device)
    own, is_filler = owner.clamp(min=0), owner < 0
    spreads = {"advantages": advantages[own].masked_fill(is_filler, 0.0)}
    if loss_type in PER_ROLLOUT:
        tokens = torch.zeros(len(advantages), dtype=torch.float64, device=mask.device)
        tokens.index_add_(0, own, mask.sum(1).double())  # a filler adds none
        share = scored["num_items_in_batch"].double() / (len(advantages) * processes)
        counts = tokens.clamp(min=1.0) if loss_type == "grpo" else torch.full_like(tokens, longest)
        weights = share / counts[own]
        spreads["tool_mask"] = scored["tool_mask"] * weights.to(torch.float32).unsqueeze(1)
    return {**scored, **spreads}


def loss_in_slices(
    loss_of: Callable[[Mapping[str, Any]], torch.Tensor],
    inputs: Mapping[str, Any],
    most: int,
    accelerator: Accelerator,
    model: torch.nn.Module,
) -> torch.Tensor:
    """The loss of a micro-batch, with so many rows at most in a forward and backward pass. It is a sum over rows.

    All slices but the last have their backward pass here. DeepSpeed counts backward passes, so there the micro-batch
    stays whole, and memory grows with the sequences of a rollout.

    Args:
        loss_of (`Callable`): The loss of some rows.
        inputs (`dict`): All of them, as many on every process.
        most (`int`): Rows of a pass.
        accelerator (`Accelerator`): The job's processes.
        model (`torch.nn.Module`): The policy, as it is wrapped for the job.
    """
    rows = len(inputs["prompt_ids"])
    if rows <= most or accelerator.distributed_type == DistributedType.DEEPSPEED:
        return loss_of(inputs)
    *earlier, last = (
        {name: one[first : first + most] if getattr(one, "ndim", 0) else one for name, one in inputs.items()}
        for first in range(0, rows, most)
    )
    total = torch.zeros((), device=accelerator.device)
    for part in earlier:
        with accelerator.no_sync(model):
            loss = loss_of(part)
            if loss.requires_grad:  # in training
                accelerator.backward(loss)
        total += loss.detach()
    return loss_of(last) + total
