"""Which tokens TRL's losses work on, and rollouts as TRL's reward functions see them.

TRL's GRPO scores every token of a completion and multiplies those of the environment by zero afterwards. Its fused head
skips positions labelled -100 where Triton is at hand (on a GPU), and most of a multi-turn conversation is observation:
so label those -100 too. Loss and gradients stay the same; benchmarks/training_step.py measures what it saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from ..rollout import Rollout, transcript

IGNORED = -100  # the label of positions that are not scored; torch's and TRL's


def as_message(rollout: Rollout) -> list[dict[str, str]]:
    """What was said, as TRL has the completion of a conversation."""
    return [{"role": "assistant", "content": transcript(rollout)}]


def reward_columns(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """What a reward function is called with, beside what TRL alone has to give."""
    columns: dict[str, Any] = {name: [one.row[name] for one in rollouts] for name in rollouts[0].row}
    prompts, completions = columns.pop("prompt"), [as_message(one) for one in rollouts]
    ids = [one.ids for one in rollouts]
    return {**columns, "prompts": prompts, "completions": completions, "completion_ids": ids, "rollout": rollouts}


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

    def __call__(self, *args: Any, labels: torch.Tensor, **kwargs: Any) -> Any:
        scored = self.scored[self._row : self._row + len(labels)].to(labels.device)
        self._row += len(labels)
        labels = labels.clone()
        labels[:, -scored.shape[1] :].masked_fill_(scored == 0, IGNORED)
        return self.model(*args, labels=labels, **kwargs)


def scored_only(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A batch for TRL's loss in which earlier log-probabilities are 0 wherever the new ones will be.

    A ratio of exp(0 - (-100)) would overflow, and infinity times the mask's 0 is not 0.
    """
    outside = inputs["tool_mask"] == 0
    earlier = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")
    known = [name for name in earlier if inputs.get(name) is not None]
    return {**inputs, **{name: inputs[name].masked_fill(outside, 0) for name in known}}


def clipped_share(batch: Mapping[str, torch.Tensor], args: Any, accelerator: Accelerator) -> float:
    """The share of tokens (of sequences, where ratios are theirs) of a batch whose importance ratio is out of bounds,
    over all processes.

    Args:
        batch (`dict`): What TRL's `_generate_and_score_completions` returns.
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
