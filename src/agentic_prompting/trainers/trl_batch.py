"""Rollouts in the shape that TRL's `rollout_func` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..rollout import Rollout


def to_trl_batch(rollouts: Sequence[Rollout], end_ids: Sequence[int], with_logprobs: bool) -> dict[str, Any]:
    """What TRL takes of a batch of finished rollouts.

    Args:
        rollouts (`Sequence[Rollout]`): In the order of the prompts.
        end_ids (`Sequence[int]`): Tokens that end a sequence for TRL.
        with_logprobs (`bool`): Whether TRL is to get the sampler's log-probabilities (it corrects vLLM's by them).

    Returns:
        `dict`: `prompt_ids`, `completion_ids`, `logprobs`, `env_mask` (1: in the loss), and `rollout` for rewards. Of a
        failed rollout no token is in the loss: an advantage of 0 would still leave it the KL and entropy terms.
    """
    ends = [_missing_end(rollout, end_ids) for rollout in rollouts]
    paired = list(zip(rollouts, ends, strict=True))
    masks = [[0] * len(rollout.mask) if rollout.status == "failed" else rollout.mask for rollout in rollouts]
    logprobs = [[*(rollout.logprobs or [0.0] * len(rollout.ids)), *(0.0 for _ in end)] for rollout, end in paired]
    return {
        "prompt_ids": [rollout.prompt_ids for rollout in rollouts],
        "completion_ids": [[*rollout.ids, *end] for rollout, end in paired],
        "logprobs": logprobs if with_logprobs else None,
        "env_mask": [[*mask, *(0 for _ in end)] for mask, end in zip(masks, ends, strict=True)],
        "rollout": list(rollouts),
    }


def _missing_end(rollout: Rollout, end_ids: Sequence[int]) -> list[int]:
    """The end-of-sequence token for TRL to see, masked out of the loss.

    TRL takes a completion without one for truncated, and cannot take an empty one: a turn that was stopped at its tag
    has none, and neither has a prompt that filled the context by itself.
    """
    stopped = rollout.status != "truncated" and rollout.ids and rollout.ids[-1] not in end_ids
    return [end_ids[0]] if stopped or not rollout.ids else []
