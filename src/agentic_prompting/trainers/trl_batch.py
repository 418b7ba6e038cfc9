"""Which tokens TRL's losses work on, and rollouts as TRL's reward functions see them.

TRL's GRPO scores every token of a completion and multiplies those of the environment by zero afterwards. Its fused head
skips positions labelled -100 where Triton is at hand (on a GPU), and most of a multi-turn conversation is observation:
so label those -100 too. Loss and gradients stay the same; benchmarks/training_step.py measures what it saves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from accelerate import Accelerator

from ..rollout import Grammar, Rollout, TextFormat

IGNORED = -100  # the label of positions that are not scored; torch's and TRL's
LOGP_BOUND = 0.05
"""The mean `sampling/logp_difference` above which a warning is logged: ten times the largest mean of rounding.

Measured with nine families of tiny random models (tests/local/test_families.py), 480 tokens each, the engine against a
forward pass over the whole text: means up to 3e-6 in float32, and 4.5e-3 in bfloat16 (of the weights or of autocast).
The largest of all tokens is no measure: 3e-5 in float32, but up to 1.3 in bfloat16, where rounding may send a token of
a mixture of experts to another expert.
"""


def completion_of(rollout: Rollout, form: TextFormat) -> Any:
    """The rollout as TRL's reward functions get a completion.

    Args:
        rollout ([`Rollout`]): Finished; its row has the `prompt` that it began with.
        form ([`TextFormat`]): How it became tokens.

    Returns:
        `str` for a prompt that is text: everything after it. Else `list[dict]`: a message for each turn of the agent
        (`assistant`, with its `tool_calls` if it made some) and for each observation between them (`tool` with the
        `name` of the tool, or `user`).
    """
    decode = partial(form.tokenizer.decode, skip_special_tokens=True)
    if isinstance(rollout.row["prompt"], str):
        return decode(rollout.ids)
    # A turn is a run of the agent's own tokens: the chat template's stand between two of them.
    runs = groupby(zip(rollout.mask, rollout.ids, strict=True), key=itemgetter(0))
    spoken = [decode([token for _, token in run]) for own, run in runs if own]
    messages: list[dict[str, Any]] = []
    for number, text in enumerate(spoken):
        calls = tool_calls(rollout.turns[number].text, form.grammar)
        messages.append({"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})})
        if number + 1 < len(spoken):  # what came after the last turn is not in the rollout's tokens
            messages += _heard(rollout.observations[number].text, calls, form.grammar)
    return messages


def completions_of(rollouts: Sequence[Rollout], given: Sequence[Any], form: TextFormat) -> list[Any]:
    """The completions of a batch for reward functions: those that TRL has `given`, but for conversations of several
    turns, which TRL takes for one message."""
    both = zip(rollouts, given, strict=True)
    return [one if isinstance(one, str) or len(r.turns) < 2 else completion_of(r, form.of(r.row)) for r, one in both]


def tool_calls(text: str, grammar: Grammar) -> list[dict[str, Any]]:
    """The calls in a turn of a grammar that has them, as chat templates take them; of a broken one its text."""
    calls = []
    for body in getattr(grammar, "bodies", lambda text: [])(text):
        try:
            function = {"name": json.loads(body)["name"], "arguments": json.loads(body).get("arguments", {})}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            function = {"name": "", "arguments": body}
        calls.append({"type": "function", "function": function})
    return calls


def _heard(text: str, calls: Sequence[Mapping[str, Any]], grammar: Grammar) -> list[dict[str, Any]]:
    """An observation as messages: one for each call, or what a user says."""
    if not calls:
        return [{"role": "user", "content": text}]
    results = text.split(getattr(grammar, "separator", "")) if len(calls) > 1 else [text]
    names = (call["function"]["name"] for call in calls)
    return [{"role": "tool", "name": name, "content": one} for name, one in zip(names, results, strict=False)]


def prompt_format_of(*datasets: Any) -> str:
    """What the prompts of all data sets are: `text` where rows have a `prompt` that is a string, else `chat`.

    Args:
        *datasets (`Dataset`, `IterableDataset` or `None`): The first row of each is looked at.

    Raises:
        `ValueError`: Some are text and some are not, or rows have images, which would be ignored.
    """
    firsts: list[Mapping[str, Any]] = [next(iter(dataset), {}) for dataset in datasets if dataset is not None]
    for row in firsts:
        _refuse_images(row)
    formats = {"text" if isinstance(row.get("prompt"), str) else "chat" for row in firsts}
    if len(formats) > 1:
        raise ValueError(
            "some datasets have a column `prompt` of text, others messages or questions: give all of them one form"
        )
    return formats.pop() if formats else "chat"


def _refuse_images(row: Mapping[str, Any]) -> None:
    columns = [name for name in ("image", "images") if name in row]
    prompt = row.get("prompt")
    contents = [] if prompt is None or isinstance(prompt, str) else [message.get("content") for message in prompt]
    parts = [part for content in contents if not isinstance(content, str) for part in content or ()]
    if columns or any(part.get("type") not in (None, "text") for part in parts):
        where = f"a column `{columns[0]}`" if columns else "a `prompt` with images"
        raise ValueError(
            f"the dataset has {where}, and this trainer reads text alone: take the images out, or use trl.GRPOTrainer, "
            "which trains models that see"
        )


def check_experts(model: Any, weight: float | None) -> None:
    """Refuse a mixture of experts whose auxiliary loss TRL cannot compute.

    Args:
        model (`PreTrainedModel`): The policy.
        weight (`float`, *optional*): Of that loss, `router_aux_loss_coef`; by default the model's own.

    Raises:
        `ValueError`: TRL does not find the number of experts.
    """
    if has_aux_loss(model, weight) and not hasattr(model.config.get_text_config(), "num_experts"):
        raise ValueError(
            f"TRL cannot compute the auxiliary loss of {type(model).__name__}, whose configuration has no "
            "`num_experts`: set router_aux_loss_coef=0 to train without that loss"
        )


def has_aux_loss(model: Any, weight: float | None) -> bool:
    """Whether TRL adds the auxiliary loss of a mixture of experts. Arguments as [`check_experts`]'s."""
    config = model.config.get_text_config()
    weight = getattr(config, "router_aux_loss_coef", 0.0) if weight is None else weight
    return bool(weight) and hasattr(config, "output_router_logits")


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
    """How far the sampler's log-probabilities of the agent's tokens are from the trainer's, over all processes.

    Args:
        logps (`torch.Tensor`): The trainer's, of shape `(batch, completion)`.
        batch (`dict`): A micro-batch with what [`Batch.sampler_columns`] added.
        accelerator (`Accelerator`): The job's processes, each of which calls this.

    Returns:
        `dict`: The metrics `sampling/logp_difference/mean` and `/max`; empty where the sampler gave none.
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
