"""The model's side of [`TransformersEngine`]: keys and values, attention masks, and which architectures it can run.

Keys and values lie in a [`Slab`]: one tensor per layer and side, a row per conversation, a column per position.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of one row, for each layer, of shape (heads, tokens, size)."""

ROWS, COLUMNS = 16, 64  # a slab grows in these steps, not at every token


class Slab(Cache):
    """Keys and values of all rows in the batch, as the model's cache. `look` prepares the next pass."""

    def __init__(self) -> None:
        self.layers: Any = []  # of [keys, values], each rows x heads x columns x size

    def look(self, first: int, columns: torch.Tensor, rows: int, width: int) -> None:
        """Let the next pass write the tokens of rows `first`, ... at `columns` (rows x tokens), and read columns up to
        `width`."""
        self.rows = slice(first, first + len(columns))
        self.at = (
            torch.arange(first, first + len(columns), device=columns.device).unsqueeze(1),
            columns,
        )
        self.needed = rows, width

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        if layer_idx == len(self.layers):
            self.layers.append([t.new_zeros(0, t.shape[1], 0, t.shape[3]) for t in (keys, values)])
        layer, (rows, width) = self.layers[layer_idx], self.needed
        for side, new in enumerate((keys, values)):
            # Under autocast the model's keys and values may differ in dtype from its weights, and from each other.
            layer[side] = _at_least(layer[side], rows, width).to(new.dtype)
            layer[side][self.at[0], :, self.at[1]] = new.transpose(1, 2)
        return tuple(block[self.rows, :, :width] for block in layer)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.needed[1]

    def cut(self, row: int, length: int) -> Layers:
        """A copy of the first tokens of a row."""
        return [
            (keys[row, :, :length].clone(), values[row, :, :length].clone())
            for keys, values in self.layers
        ]

    def put(self, row: int, kept: Layers, rows: int, width: int) -> None:
        """Write the keys and values that `cut` returned."""
        if not self.layers:
            self.layers = [
                [t.new_zeros(0, t.shape[0], 0, t.shape[2]) for t in layer] for layer in kept
            ]
        for layer, blocks in zip(self.layers, kept, strict=True):
            for side, block in enumerate(blocks):
                layer[side] = _at_least(layer[side], rows, width)
                layer[side][row, :, : block.shape[1]] = block

    def move(self, source: int, target: int, length: int) -> None:
        for layer in self.layers:
            for block in layer:
                block[target, :, :length] = block[source, :, :length]

    def bytes(self, rows: int, width: int) -> float:
        """The memory of so many rows and columns, in bytes; 0 before the first pass."""
        per_token = sum(
            block.shape[1] * block.shape[3] * block.element_size()
            for layer in self.layers
            for block in layer
        )
        return per_token * rows * width

    def grown_bytes(self, rows: int, width: int) -> float:
        """The memory of a slab that has grown, in its steps, to hold so many rows and columns."""
        return self.bytes(_round_up(rows, ROWS), _round_up(width, COLUMNS))


def _at_least(block: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    if rows <= block.shape[0] and columns <= block.shape[2]:
        return block
    rows, columns = (
        max(block.shape[0], _round_up(rows, ROWS)),
        max(block.shape[2], _round_up(columns, COLUMNS)),
    )
    grown = block.new_zeros(rows, block.shape[1], columns, block.shape[3])
    grown[: block.shape[0], :, : block.shape[2]] = block
    return grown


def _round_up(number: int, step: int) -> int:
    """The least multiple of `step` that is not below `number`."""
    return -(-number // step) * step


def bytes_of(layers: Layers) -> int:
    """The memory of cached keys and values."""
    return sum(tensor.nbytes for layer in layers for tensor in layer)


# Architectures --------------------------------------------------------------------------------------------------------


def masks_of(model: PreTrainedModel, columns: torch.Tensor, width: int) -> Any:
    """The attention mask, or one for each kind of layer: a token attends to its own column and those before it. Later
    columns are not written yet, or hold padding that will be overwritten."""
    config = model.config.get_text_config()
    at = torch.arange(width, device=columns.device)
    full = (at <= columns.unsqueeze(-1)).unsqueeze(1)  # rows x 1 x tokens x columns
    masks = dict.fromkeys(_kinds(model), full)
    if "sliding_attention" in masks:
        masks["sliding_attention"] = full & (
            at > columns.unsqueeze(-1) - config.sliding_window
        ).unsqueeze(1)
    if config._attn_implementation == "eager":  # eager attention adds the mask to the scores
        masks = {
            kind: torch.zeros_like(mask, dtype=model.dtype).masked_fill(
                ~mask, torch.finfo(model.dtype).min
            )
            for kind, mask in masks.items()
        }
    return (
        masks
        if getattr(config, "layer_types", None) and len(masks) > 1
        else next(iter(masks.values()))
    )


def _kinds(model: PreTrainedModel) -> set[str]:
    """The kinds of the model's layers, one if its configuration names none."""
    config = model.config.get_text_config()
    one = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return set(getattr(config, "layer_types", None) or [one])


@contextmanager
def attention_with_masks(model: PreTrainedModel) -> Iterator[None]:
    """The model with an attention that takes a mask from its caller, which flash attention does not."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    if before not in ("sdpa", "eager"):
        # Models with attention sinks (gpt-oss) or soft-capped scores (Gemma 2) would lose them under sdpa.
        config._attn_implementation = "sdpa" if model._supports_sdpa else "eager"
    try:
        yield
    finally:
        config._attn_implementation = before


def can_slab(model: PreTrainedModel) -> bool:
    """Whether [`TransformersEngine`] can run a model: its whole state is keys and values, its layers attend to
    everything or to a window, and it takes positions and masks from its caller."""
    return _obstacle(model) is None


def check_runs(model: PreTrainedModel) -> None:
    """Raise a `ValueError` that names the architecture, if [`TransformersEngine`] cannot run it."""
    obstacle = _obstacle(model)
    if obstacle is not None:
        name = type(model.get_base_model() if hasattr(model, "get_base_model") else model).__name__
        raise ValueError(
            f"TransformersEngine cannot run {name}, which {obstacle}: use local_policy, which runs batches"
        )


def _obstacle(model: PreTrainedModel) -> str | None:
    """Why the engine cannot run a model, as the end of a sentence; `None` where it can."""
    kinds = _kinds(model) - {"full_attention", "sliding_attention"}
    if model._is_stateful or kinds:
        layers = " and ".join(sorted(kinds)) or "recurrent"
        return f"has {layers} layers, whose state is more than keys and values"
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return "has a prompt-learning adapter, which adds tokens of its own in front of the context"
    base = (
        model.get_base_model() if hasattr(model, "get_base_model") else model
    )  # PEFT's forward hides its parameters
    missing = {"position_ids", "past_key_values", "attention_mask"} - set(
        inspect.signature(base.forward).parameters
    )
    if missing:
        return f"takes no {' and no '.join(sorted(missing))}"
    return None
