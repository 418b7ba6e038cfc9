"""Rollouts as TRL takes them, for GRPO and for a supervised warm start, and which tokens its losses work on.

TRL's GRPO scores every token of a completion and multiplies those of the environment by zero afterwards. Its fused head
skips positions labelled -100 where Triton is at hand (on a GPU), and most of a multi-turn conversation is observation:
so label those -100 too. Loss and gradients stay the same; benchmarks/training_step.py measures what it saves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel
from trl import SFTConfig, SFTTrainer
from trl.trainer.utils import pad

from ..rollout import Grammar, Rollout, TextFormat
from .callbacks import one_line_progress

IGNORED = -100  # the label of positions that are not scored; torch's and TRL's


def to_trl_batch(rollouts: Sequence[Rollout], end_ids: Sequence[int], with_logprobs: bool) -> dict[str, Any]:
    """What TRL takes of a batch of finished rollouts.

    Args:
        rollouts (`Sequence[Rollout]`): In the order of the prompts.
        end_ids (`Sequence[int]`): Tokens that end a sequence for TRL.
        with_logprobs (`bool`): Whether TRL is to get the sampler's log-probabilities (it corrects vLLM's by them).

    Returns:
        `dict`: `prompt_ids`, `completion_ids`, `logprobs`, `env_mask` (1: in the loss), and `rollout` for rewards. Of a
        failed rollout, or one that counts 0, no token is in the loss: an advantage of 0 would still leave it the KL and
        entropy terms.
    """
    batch: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
    for rollout in rollouts:
        # TRL takes a completion without an end for truncated, and cannot take an empty one: a turn that was stopped at
        # its tag has none, and neither has a prompt that filled the context by itself.
        stopped = rollout.status != "truncated" and rollout.ids and rollout.ids[-1] not in end_ids
        end = [end_ids[0]] if stopped or not rollout.ids else []
        out = rollout.status == "failed" or rollout.weight == 0
        mask = [0] * len(rollout.mask) if out else rollout.mask
        batch["prompt_ids"].append(rollout.prompt_ids)
        batch["completion_ids"].append([*rollout.ids, *end])
        batch["logprobs"].append([*(rollout.logprobs or [0.0] * len(rollout.ids)), *(0.0 for _ in end)])
        batch["env_mask"].append([*mask, *(0 for _ in end)])
    return {**batch, "logprobs": batch["logprobs"] if with_logprobs else None, "rollout": list(rollouts)}


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
    return [one if isinstance(one, str) or len(r.turns) < 2 else completion_of(r, form) for r, one in both]


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


def reward_columns(rollouts: Sequence[Rollout], form: TextFormat) -> dict[str, Any]:
    """What a reward function is called with, beside what TRL alone has to give."""
    columns: dict[str, Any] = {name: [one.row[name] for one in rollouts] for name in rollouts[0].row}
    prompts, completions = columns.pop("prompt"), [completion_of(one, form) for one in rollouts]
    ids = [one.ids for one in rollouts]
    return {**columns, "prompts": prompts, "completions": completions, "completion_ids": ids, "rollout": rollouts}


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


def padded_mask(masks: Sequence[Sequence[int]], pad_to_multiple_of: int | None = None) -> torch.Tensor:
    """The masks of a batch's completions, padded as TRL pads the completions."""
    return pad([torch.tensor(mask) for mask in masks], 0, "right", pad_to_multiple_of)


def scored_only(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A batch for TRL's loss in which earlier log-probabilities are 0 wherever the new ones will be.

    A ratio of exp(0 - (-100)) would overflow, and infinity times the mask's 0 is not 0.
    """
    outside = inputs["tool_mask"] == 0
    earlier = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")
    known = [name for name in earlier if inputs.get(name) is not None]
    return {**inputs, **{name: inputs[name].masked_fill(outside, 0) for name in known}}


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
