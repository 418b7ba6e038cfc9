"""One batch of rollouts on its way through TRL's hooks, and its place in the run.

TRL's hooks pass on little: prompts in, token ids out, rows to the reward functions. So a trainer keeps the current
batch as one object, from which every hook reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

import torch
from accelerate.utils import gather_object
from torch.nn.utils.rnn import pad_sequence

from ..rollout import Grammar, Rollout, TextFormat, TokenSequence, rollout_seed


@dataclass(frozen=True)
class Place:
    """The position of a batch in a run. Every seed is a function of it, so a resumed run needs no random state.

    Args:
        seed (`int`): The run's seed.
        mode (`str`): `train` or `eval`.
        step (`int`): Updates of the weights before the batch.
        part (`int`, *optional*, defaults to `0`): Training: which batch of the step, where gradients are accumulated.
            Evaluation: which batch of this evaluation.
        number (`int`, *optional*, defaults to `0`): Training batches generated before this one in the run.
        last (`int`, *optional*, defaults to `0`): Training batches of the whole run.
        group (`int`, *optional*, defaults to `1`): Rollouts of a group in this batch.
    """

    seed: int
    mode: Literal["train", "eval"]
    step: int
    part: int = 0
    number: int = 0
    last: int = 0
    group: int = 1

    @property
    def trains(self) -> bool:
        return self.mode == "train"

    def rollout_seed(self, index: int) -> int:
        """The seed of the rollout at this position of the global batch. Every evaluation draws the same."""
        step = [self.step] if self.trains else []
        return rollout_seed(self.seed, self.mode, *step, self.part, index)

    @property
    def what(self) -> str:
        """The name of the work, for messages."""
        return f"the rollouts of step {self.step}" if self.trains else f"an evaluation at step {self.step}"

    @property
    def share_key(self) -> str:
        """Rollouts with the same key may share replies (`share_replies`). With an empty one, that of evaluations, none
        may."""
        return f"{self.seed}.{self.step}.{self.part}" if self.trains else ""


@dataclass
class Batch:
    """The rollouts of one batch on this process, with everything that TRL, rewards, logs and ratings need.

    Args:
        place ([`Place`]): The position of the batch in the run.
        rows (`list[dict]`): One per rollout, its `prompt` rendered. TRL hands these dicts to reward functions.
        metadata (`list[dict]`): The [`Prompts.metadata`] of each rollout, for its record.
        rollouts (`list[Rollout]`): Played to their ends.
        off_policy (`bool`, *optional*, defaults to `False`): Older weights sampled some of the tokens, so the loss
            needs the importance ratio.
        metrics (`Mapping[str, float]`, *optional*): The source's own numbers about the batch, for the logs.
    """

    place: Place
    rows: list[dict[str, Any]]
    metadata: list[dict[str, Any]]
    rollouts: list[Rollout]
    off_policy: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    scored: torch.Tensor | None = None  # these three are set by `for_trl`
    sequences: list[TokenSequence] = field(default_factory=list)  # of TRL's rows
    owners: list[int] = field(default_factory=list)  # for each row the number of its rollout, -1 for a filler

    def for_trl(self, end_ids: Sequence[int], with_logprobs: bool, parts: int | None = None) -> dict[str, Any]:
        """The batch as TRL's `rollout_func` returns it.

        Args:
            end_ids (`Sequence[int]`): Tokens that end a sequence for TRL.
            with_logprobs (`bool`): Whether TRL gets the sampler's log-probabilities for its importance ratio.
            parts (`int`, *optional*): Rollouts may have several token sequences, and TRL cuts the batch into this many
                parts; see [`padded_rows`]. All processes pass it, or none.

        Returns:
            `dict`: For each token sequence `prompt_ids`, `completion_ids`, `logprobs` and `env_mask` (1: in the loss);
            for each rollout `rollout`. No token of a failed rollout is in the loss: an advantage of 0 would leave it
            the KL and entropy terms.
        """
        output: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
        rows = [(i, one) for i, rollout in enumerate(self.rollouts) for one in sequences_of(rollout)]
        if parts is not None:
            rows += [(-1, filler(end_ids))] * (padded_rows(len(rows), parts) - len(rows))
        self.owners, self.sequences = [owner for owner, _ in rows], [one for _, one in rows]
        for owner, row in rows:
            rollout = self.rollouts[owner]
            # TRL counts a completion without an end token as truncated and cannot handle an empty one. A turn stopped
            # at its tag has no end token, and neither has a prompt that fills the context.
            stopped = rollout.status != "truncated" and row.ids and row.ids[-1] not in end_ids
            end = [end_ids[0]] if stopped or not row.ids else []
            mask = [0] * len(row.mask) if rollout.status == "failed" else row.mask
            output["prompt_ids"].append(row.prompt_ids)
            output["completion_ids"].append([*row.ids, *end])
            output["logprobs"].append([*(row.logprobs or [0.0] * len(row.ids)), *(0.0 for _ in end)])
            output["env_mask"].append([*mask, *(0 for _ in end)])
        masks = [torch.tensor(mask) for mask in output["env_mask"]]
        self.scored = pad_sequence(masks, batch_first=True)
        return {**output, "logprobs": output["logprobs"] if with_logprobs else None, "rollout": list(self.rollouts)}

    def by_rollout(self, of_rows: Sequence[Any]) -> list[Any]:
        """One value for each rollout, that of its first row, given a value for each of TRL's rows."""
        return [of_rows[self.owners.index(number)] for number in range(len(self.rollouts))]

    def sampler_columns(self, completion_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Further columns for [`logp_difference`], which TRL shuffles and splits with its own.

        Args:
            completion_ids (`torch.Tensor`): As TRL has padded them.

        Returns:
            `dict`: `sampler_logps`, in the same shape: the sampler's log-probabilities, NaN where it returned none. And
            `sampled_at`: the number of updates of the weights before the batch was sampled.
        """
        logps = torch.full(completion_ids.shape, torch.nan)
        for row, sequence in zip(logps, self.sequences, strict=True):
            known = sequence.logprobs or []
            row[: len(known)] = torch.tensor(known)
        return {"sampler_logps": logps.to(completion_ids.device), "sampled_at": torch.tensor(self.place.step)}


# --- rows for TRL ----------------------------------------------------------------------------------------------------


def sequences_of(rollout: Rollout) -> list[TokenSequence]:
    """The rows of a rollout: those of its sequences that have a token in the loss; at least one row."""
    if rollout.status == "failed" or not rollout.others:
        return [rollout]
    return [one for one in rollout.sequences if any(one.mask)] or [rollout]


def padded_rows(rows: int, parts: int) -> int:
    """The number of rows that every process must have, given its own: the largest of all, as a multiple of `parts`. TRL
    gathers lengths from all processes by row, cuts a batch into parts, and drops the remainder. Called on every
    process."""
    most = max(gather_object([rows]))
    return -(-most // parts) * parts


def filler(end_ids: Sequence[int]) -> TokenSequence:
    """A row without a token in the loss."""
    return TokenSequence([end_ids[0]], ids=[end_ids[0]], mask=[0], logprobs=[0.0])


# --- completions for reward functions --------------------------------------------------------------------------------


def completion_of(rollout: Rollout, form: TextFormat) -> Any:
    """The rollout as TRL's reward functions get a completion.

    Args:
        rollout ([`Rollout`]): Finished; its row has the `prompt` that it began with.
        form ([`TextFormat`]): Its tokenizer and grammar.

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
            messages += _observed_messages(rollout.observations[number].text, calls, form.grammar)
    return messages


def completions_of(rollouts: Sequence[Rollout], given: Sequence[Any], form: TextFormat) -> list[Any]:
    """The completions of a batch for reward functions: TRL's own (`given`), except for conversations of several turns,
    which TRL reads as one message."""
    both = zip(rollouts, given, strict=True)
    return [one if isinstance(one, str) or len(r.turns) < 2 else completion_of(r, form.of(r.row)) for r, one in both]


def tool_calls(text: str, grammar: Grammar) -> list[dict[str, Any]]:
    """The tool calls in a turn, in the form of chat templates. A broken call has its text as `arguments`."""
    calls = []
    for body in getattr(grammar, "bodies", lambda text: [])(text):
        try:
            function = {"name": json.loads(body)["name"], "arguments": json.loads(body).get("arguments", {})}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            function = {"name": "", "arguments": body}
        calls.append({"type": "function", "function": function})
    return calls


def _observed_messages(text: str, calls: Sequence[Mapping[str, Any]], grammar: Grammar) -> list[dict[str, Any]]:
    """An observation as messages: one of a tool for each call, or one of the user."""
    if not calls:
        return [{"role": "user", "content": text}]
    results = text.split(getattr(grammar, "separator", "")) if len(calls) > 1 else [text]
    names = (call["function"]["name"] for call in calls)
    return [{"role": "tool", "name": name, "content": one} for name, one in zip(names, results, strict=False)]
