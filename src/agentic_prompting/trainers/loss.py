"""The inputs of TRL's loss: which tokens it scores, and the weight of each.

TRL's GRPO scores every token of a completion and multiplies those of the environment by zero afterwards. Its fused head
skips positions labelled -100 where Triton is available (on a GPU). Most of a multi-turn conversation is observation, so
those tokens are labelled -100, too. Loss and gradients stay the same
(benchmarks/speed/training_step.py measures the saving).

Rollouts of several token sequences have a row of the batch for each, and each *rollout* has the same weight. TRL's loss
types differ in one thing, the weight of a token in a sum. So this weight is put into the mask, and TRL computes the sum
(its `dapo`), in which all tokens weigh the same otherwise. Weights in the advantages would not reach the KL term. With
N_i tokens of rollout i in the loss, over all of its sequences:

| `loss_type` | weight of a token |
|---|---|
| `dapo`, `cispo` | 1: a mean over tokens does not see where a sequence ends |
| `grpo` | tokens / rollouts / N_i |
| `dr_grpo` | tokens / rollouts / `max_completion_length` |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

IGNORED = -100  # the label of positions that are not scored; torch's and TRL's
LOGP_BOUND = 0.05
"""The mean `sampling/logp_difference` above which a warning is logged: ten times the largest mean of rounding.

Measured with nine families of tiny random models (tests/local/test_families.py), 480 tokens each, the engine against a
forward pass over the whole text: means up to 3e-6 in float32, and 4.5e-3 in bfloat16 (of the weights or of autocast).
The largest difference of a token is no measure: 3e-5 in float32, but up to 1.3 in bfloat16, where rounding may send a
token of a mixture of experts to another expert.
"""
PER_ROLLOUT = ("grpo", "dr_grpo")


class ScoredTokens:
    """Stands in for the model in TRL's `_get_per_token_logps_and_entropies`, which may call it in several slices.

    Args:
        model (`Callable`): The policy or the reference, wrapped or not.
        scored (`torch.Tensor`): 1 at the completion tokens that the agent wrote, 0 elsewhere, of shape
            `(batch, completion)`. Rows in the order of the calls.
    """

    def __init__(self, model: Callable[..., Any], scored: torch.Tensor):
        self.model, self.scored = model, scored
        self._row = 0
        self._output: Any = None

    def __call__(self, *args: Any, labels: torch.Tensor, **kwargs: Any) -> Any:
        scored = self.scored[self._row : self._row + len(labels)].to(labels.device)
        self._row += len(labels)
        labels = labels.clone()
        labels[:, -scored.shape[1] :].masked_fill_(scored == 0, IGNORED)
        self._output = self.model(*args, labels=labels, **kwargs)
        return self._output

    @property
    def logps(self) -> torch.Tensor:
        """The log-probabilities of the completions of the last call, without gradient."""
        return self._output.log_probs[:, -self.scored.shape[1] :].detach()


def scored_only(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A batch for TRL's loss in which earlier log-probabilities are 0 wherever the new ones will be.

    A ratio of exp(0 - (-100)) would overflow, and infinity times the mask's 0 is not 0.
    """
    outside = inputs["tool_mask"] == 0
    earlier = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")
    known = [name for name in earlier if inputs.get(name) is not None]
    return {**inputs, **{name: inputs[name].masked_fill(outside, 0) for name in known}}


def logp_difference(
    logps: torch.Tensor, batch: Mapping[str, torch.Tensor], accelerator: Accelerator
) -> dict[str, float]:
    """The difference of the sampler's log-probabilities of the agent's tokens from the trainer's, over all processes.

    Args:
        logps (`torch.Tensor`): The trainer's, of shape `(batch, completion)`.
        batch (`dict`): A micro-batch with what [`Batch.sampler_columns`] added.
        accelerator (`Accelerator`): The job's processes, each of which calls this.

    Returns:
        `dict`: The metrics `sampling/logp_difference/mean` and `/max`; empty if the sampler returned none.
    """
    known = (batch["completion_mask"] * batch["tool_mask"]).bool() & ~batch["sampler_logps"].isnan()
    apart = (logps - batch["sampler_logps"])[known].abs().float()
    own = torch.stack([apart.sum(), known.sum().float(), torch.cat([apart, apart.new_zeros(1)]).max()])
    total, tokens, largest = accelerator.gather(own.unsqueeze(0)).unbind(1)
    if not tokens.any():
        return {}
    mean = (total.sum() / tokens.sum()).item()
    return {"sampling/logp_difference/mean": mean, "sampling/logp_difference/max": largest.max().item()}


def clipped_share(batch: Mapping[str, torch.Tensor], args: Any, accelerator: Accelerator) -> float:
    """The share of tokens (of sequences, where ratios are theirs) of a batch whose importance ratio is out of bounds,
    over all processes.

    Args:
        batch (`dict`): The return value of TRL's `_generate_and_score_completions`.
        args (`GRPOConfig`): Its `vllm_importance_sampling_*` settings.
        accelerator (`Accelerator`): The job's processes.
    """
    mask = batch["completion_mask"] * batch["tool_mask"]
    log_ratio = ((batch["old_per_token_logps"] - batch["sampling_per_token_logps"]) * mask).nan_to_num(0.0)
    if args.vllm_importance_sampling_mode.startswith("sequence"):
        log_ratio, mask = log_ratio.sum(1), (mask.sum(1) > 0).long()
    high, low = args.vllm_importance_sampling_clip_max, args.vllm_importance_sampling_clip_min
    outside = (log_ratio.exp() > (math.inf if high is None else high)) | (log_ratio.exp() < (low or 0.0))
    clipped, tokens = accelerator.reduce(torch.stack([(outside * mask).sum(), mask.sum()]).double()).tolist()
    return clipped / max(tokens, 1.0)


# --- rollouts of several sequences -----------------------------------------------------------------------------------


def spread(
    scored: Mapping[str, Any], owners: Sequence[int], loss_type: str, longest: int, processes: int
) -> dict[str, Any]:
    """A batch with an advantage for each row and the weight of each token in its mask, given advantages of rollouts.

    Args:
        scored (`dict`): The return value of TRL's `_generate_and_score_completions`.
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
    """The loss of a micro-batch, a sum over rows, with at most `most` of them in a forward and backward pass.

    All slices but the last have their backward pass here. DeepSpeed counts backward passes, so there the micro-batch
    stays whole, and memory grows with the sequences of a rollout.

    Args:
        loss_of (`Callable`): The loss of some rows.
        inputs (`dict`): All of them, as many on every process.
        most (`int`): The most rows of a pass.
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
