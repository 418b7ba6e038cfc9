"""The inputs of TRL's loss: the model that it calls, a micro-batch, and the weights of its rows.

**The model.** Most of a multi-turn conversation is observation, and only the tokens that the agent
wrote are in the loss. TRL scores every token of a completion and multiplies the others by zero
afterwards. It labels the tokens and calls the model inside one method, which takes no argument for
the tokens to score. So the trainer passes it an adapter in the model's place:
[`ScoredTokensModel`] is called like the model, and labels all other tokens -100 on the way. TRL's
fused head skips positions with that label where Triton is available (on a GPU). On a CPU the head
would compute every position, prompt and padding included, so there the adapter shows it only the
hidden states of the scored positions. Loss and gradients are the same as without the adapter;
benchmarks/speed/training_step.py measures the saving.

**The rows.** A rollout of several token sequences has a row of the batch for each, and each
*rollout* has the same weight. TRL's loss types differ only in the weight of a token in a sum. This
weight is a column `loss_weights` of the batch. The mask is multiplied by it for TRL's sum (its
`dapo`), in which all tokens weigh the same otherwise; nothing else reads the weighted mask. Weights
in the advantages would not reach the KL term. With N_i tokens of rollout i in the loss, over all of
its sequences:

| `loss_type` | weight of a token |
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
from accelerate.utils import (
    DistributedType,
    extract_model_from_parallel,
    has_compiled_regions,
    is_compiled_module,
)
from peft import PeftModel
from transformers.modeling_outputs import BaseModelOutput

IGNORED_LABEL = -100  # the label of positions that are not scored; torch's and TRL's
# The fields of TRL's `FusedCausalLMOutput` that have a value for each token.
PER_TOKEN_FIELDS = (
    "log_probs",
    "entropy",
    "log_sum_sq_probs",
    "mean_logits",
    "is_top1",
    "label_mask",
)
# The loss types that weigh each rollout alike, whatever its length.
PER_ROLLOUT_LOSS_TYPES = ("grpo", "dr_grpo")


class ScoredTokensModel:
    """A model of which TRL's `_get_per_token_logps_and_entropies` scores only some tokens.

    It is called as the model is. TRL may call it several times, each with a slice of the rows.

    Args:
        model (`Callable`): The policy or the reference, wrapped or not.
        scored (`torch.Tensor`): 1 at the completion tokens that the agent wrote, 0 elsewhere, of
            shape `(batch, completion)`. Rows in the order of the calls.
    """

    def __init__(self, model: Callable[..., Any], scored: torch.Tensor):
        self.model = model
        self.scored = scored
        self._row = 0
        self._output: Any = None

    def __call__(self, *args: Any, labels: torch.Tensor, **kwargs: Any) -> Any:
        # TRL passes the rows in slices, in order: take the mask of this slice.
        scored = self.scored[self._row : self._row + len(labels)].to(labels.device)
        self._row += len(labels)
        # Ignore the tokens of completions that the agent did not write.
        labels = labels.clone()
        labels[:, -scored.shape[1] :].masked_fill_(scored == 0, IGNORED_LABEL)
        # On a CPU the head would score ignored positions, too: show it only the others, if
        # possible.
        backbone = selectable_backbone(self.model) if labels.device.type == "cpu" else None
        if backbone is None:
            self._output = self.model(*args, labels=labels, **kwargs)
        else:
            self._output = self._call_on_scored(backbone, args, labels, kwargs)
        return self._output

    def _call_on_scored(
        self,
        backbone: torch.nn.Module,
        args: tuple[Any, ...],
        labels: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the model with a head that sees only positions whose next token is scored."""
        # The hidden state at a position predicts the next token.
        next_tokens = labels[:, 1:]
        is_scored = next_tokens != IGNORED_LABEL

        def select_scored(
            module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: BaseModelOutput
        ) -> BaseModelOutput:
            output.last_hidden_state = output.last_hidden_state[:, :-1][is_scored].unsqueeze(0)
            return output

        # The head takes labels that are already shifted as they are, one for each hidden state.
        handle = backbone.register_forward_hook(select_scored)
        try:
            output = self.model(*args, shift_labels=next_tokens[is_scored].unsqueeze(0), **kwargs)
        finally:
            handle.remove()

        # The values per token go back to their positions; 0 elsewhere, as on a GPU.
        for name in PER_TOKEN_FIELDS:
            values = getattr(output, name)
            if values is not None:
                setattr(
                    output,
                    name,
                    values.new_zeros(is_scored.shape).masked_scatter(is_scored, values),
                )
        return output

    @property
    def logps(self) -> torch.Tensor:
        """The log-probabilities of the completions of the last call, without gradient."""
        return self._output.log_probs[:, -self.scored.shape[1] :].detach()


def selectable_backbone(model: Callable[..., Any]) -> torch.nn.Module | None:
    """Return the part of a model in front of its head.

    `None` if that part cannot pass on a selection of positions. Compiled code need not call hooks,
    and a prompt-learning adapter adds positions of its own.
    """
    if not isinstance(model, torch.nn.Module):
        return None
    if is_compiled_module(model) or has_compiled_regions(model):
        return None
    # Unwrap the model: first what distributes it, then its adapter.
    causal_lm = extract_model_from_parallel(model)
    if isinstance(causal_lm, PeftModel):
        if causal_lm.active_peft_config.is_prompt_learning:
            return None
        causal_lm = causal_lm.get_base_model()
    return causal_lm.base_model


def prepare_loss_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a micro-batch for TRL's loss.

    Earlier log-probabilities are 0 outside of the loss, as the new ones will be. Otherwise a ratio
    such as exp(0 - (-100)) would overflow, and infinity times the mask's 0 is not 0. The mask has
    the weight of each token.
    """
    loss_inputs = dict(inputs)
    is_outside = inputs["tool_mask"] == 0
    for name in ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"):
        if inputs.get(name) is not None:
            loss_inputs[name] = inputs[name].masked_fill(is_outside, 0)
    if "loss_weights" in inputs:
        loss_inputs["tool_mask"] = inputs["tool_mask"] * inputs["loss_weights"]
    return loss_inputs


# --- the rows of rollouts ----------------------------------------------------------------------


class SingleSequenceRows:
    """The rows of the native loop: one token sequence, and so one row of the batch, per rollout.

    TRL's numbers of rows, masks and loss types apply unchanged.

    Args:
        loss_type (`str`): The `loss_type` of the configuration.
    """

    def __init__(self, loss_type: str):
        self.trl_loss_type = loss_type

    def row_multiple(self, micro_batches: int) -> int | None:
        """Return `None`: a batch that TRL splits into this many micro-batches needs no padding."""
        return None

    def weigh_rows(
        self, scored: Mapping[str, Any], rollout_indices: Sequence[int]
    ) -> dict[str, Any]:
        """Return the batch unchanged."""
        return dict(scored)

    def split_rows(
        self, inputs: Mapping[str, Any], max_rows: int, accelerator: Accelerator
    ) -> list[Mapping[str, Any]]:
        """Return the micro-batch as a single slice: TRL has made it small enough for one pass."""
        return [inputs]


class MultiSequenceRows:
    """The rows of programs: one per token sequence, several per rollout, weighted by rollout.

    Args:
        loss_type (`str`): The `loss_type` of the configuration: `dapo`, `cispo`, `grpo` or
            `dr_grpo`.
        max_completion_length (`int`): The constant by which `dr_grpo` divides.
        num_processes (`int`): Processes of the job. Each has the same number of rollouts.

    Attributes:
        trl_loss_type (`str`): The loss type by which TRL sums over the weighted tokens.
    """

    def __init__(self, loss_type: str, max_completion_length: int, num_processes: int):
        self.loss_type = loss_type
        self.max_completion_length = max_completion_length
        self.num_processes = num_processes
        self.trl_loss_type = "dapo" if loss_type in PER_ROLLOUT_LOSS_TYPES else loss_type

    def row_multiple(self, micro_batches: int) -> int | None:
        """Return the number by which the number of rows has to be divisible."""
        return micro_batches

    def weigh_rows(
        self, scored: Mapping[str, Any], rollout_indices: Sequence[int]
    ) -> dict[str, Any]:
        """Return the batch with an advantage for each row, and a weight for its tokens.

        Args:
            scored (`dict`): The return value of TRL's `_generate_and_score_completions`, whose
                advantages are those of rollouts.
            rollout_indices (`Sequence[int]`): The index of each row's rollout, negative for
                padding rows.
        """
        # Give each row the advantage of its rollout, and padding rows none.
        advantages = scored["advantages"]
        indices = torch.tensor(rollout_indices, device=advantages.device)
        is_padding = indices < 0
        indices = indices.clamp(min=0)
        weighted = dict(scored)
        weighted["advantages"] = advantages[indices].masked_fill(is_padding, 0.0)
        if self.loss_type not in PER_ROLLOUT_LOSS_TYPES:
            return weighted

        # Count the tokens of each rollout over all of its rows. Padding rows have none.
        loss_mask = scored["tool_mask"] * scored["completion_mask"]
        token_counts = torch.zeros(len(advantages), dtype=torch.float64, device=loss_mask.device)
        token_counts.index_add_(0, indices, loss_mask.sum(1).double())

        # Weigh tokens so that TRL's mean over all tokens becomes a mean over rollouts.
        if self.loss_type == "grpo":
            divisors = token_counts.clamp(min=1.0)
        else:  # dr_grpo
            divisors = torch.full_like(token_counts, self.max_completion_length)
        tokens_per_rollout = scored["num_items_in_batch"].double() / (
            len(advantages) * self.num_processes
        )
        weights = (tokens_per_rollout / divisors[indices]).to(torch.float32)
        weighted["loss_weights"] = weights.unsqueeze(1)  # of shape (rows, 1)
        return weighted

    def split_rows(
        self, inputs: Mapping[str, Any], max_rows: int, accelerator: Accelerator
    ) -> list[Mapping[str, Any]]:
        """Return the slices of a micro-batch for which forward and backward passes are made.

        With DeepSpeed, which counts backward passes, there is one slice, and memory grows with the
        number of sequences in a rollout.

        Args:
            inputs (`dict`): The micro-batch, with as many rows on every process.
            max_rows (`int`): The largest number of rows in a slice.
            accelerator (`Accelerator`): The processes of the job.
        """
        row_count = len(inputs["prompt_ids"])
        if row_count <= max_rows or accelerator.distributed_type == DistributedType.DEEPSPEED:
            return [inputs]
        # Slice the tensors with a value per row; scalars belong to every slice.
        slices: list[Mapping[str, Any]] = []
        for start in range(0, row_count, max_rows):
            columns = {}
            for name, column in inputs.items():
                is_per_row = getattr(column, "ndim", 0) > 0
                columns[name] = column[start : start + max_rows] if is_per_row else column
            slices.append(columns)
        return slices
