"""Keys and values, attention masks, and the architectures that [`TransformersEngine`] can run.

Keys and values lie in a [`Slab`]: one tensor per layer and side, a row per conversation, a column
per position.
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

Masks = torch.Tensor | dict[str, torch.Tensor]
"""An attention mask, or one for each type of layer, of shape (rows, 1, tokens, columns)."""

# A slab grows in these steps, not at every token.
ROW_STEP = 16
COLUMN_STEP = 64


class Slab(Cache):
    """Keys and values of all rows in the batch, as the model's cache.

    Call `prepare` before each pass.
    """

    def __init__(self) -> None:
        # Keys and values of each layer, each of shape (rows, heads, columns, size).
        self.layers: Any = []

    def prepare(self, first_row: int, columns: torch.Tensor, rows: int, width: int) -> None:
        """Set where the next pass writes and what it reads.

        Args:
            first_row (`int`): The pass is over this row and the ones after it.
            columns (`Tensor`): Where it writes, of shape (rows, tokens).
            rows (`int`): Rows that the slab must have.
            width (`int`): It reads the columns up to this one; the slab must have as many.
        """
        last_row = first_row + len(columns)
        self._rows = slice(first_row, last_row)
        self._row_indices = torch.arange(first_row, last_row, device=columns.device).unsqueeze(1)
        self._columns = columns
        self._needed_rows = rows
        self._width = width

    def update(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of a pass, and return all that it reads."""
        if layer_idx == len(self.layers):
            self.layers.append([_empty_block(keys), _empty_block(values)])
        layer = self.layers[layer_idx]
        for side, new_states in enumerate((keys, values)):
            # Under autocast the model's keys and values may differ in dtype from its weights, and
            # from each other.
            block = _grow(layer[side], self._needed_rows, self._width).to(new_states.dtype)
            block[self._row_indices, :, self._columns] = new_states.transpose(1, 2)
            layer[side] = block
        key_block, value_block = layer
        return key_block[self._rows, :, : self._width], value_block[self._rows, :, : self._width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._width

    def copy_row(self, row: int, length: int) -> Layers:
        """Return a copy of the keys and values of the first tokens of a row."""
        return [
            (keys[row, :, :length].clone(), values[row, :, :length].clone())
            for keys, values in self.layers
        ]

    def write_row(self, row: int, cached: Layers, rows: int, width: int) -> None:
        """Write the keys and values that `copy_row` returned.

        Args:
            row (`int`): The row.
            cached (`Layers`): Its keys and values.
            rows (`int`): Rows that the slab must have.
            width (`int`): Columns that the slab must have.
        """
        if not self.layers:
            for keys, values in cached:
                self.layers.append(
                    [_empty_block(keys.unsqueeze(0)), _empty_block(values.unsqueeze(0))]
                )
        for layer, cached_layer in zip(self.layers, cached, strict=True):
            for side, cached_block in enumerate(cached_layer):
                layer[side] = _grow(layer[side], rows, width)
                layer[side][row, :, : cached_block.shape[1]] = cached_block

    def move_row(self, source: int, target: int, length: int) -> None:
        for layer in self.layers:
            for block in layer:
                block[target, :, :length] = block[source, :, :length]

    def bytes(self, rows: int, width: int) -> float:
        """Return the bytes of `rows` rows and `width` columns; 0 before the first pass."""
        bytes_per_token = 0
        for layer in self.layers:
            for block in layer:
                bytes_per_token += block.shape[1] * block.shape[3] * block.element_size()
        return bytes_per_token * rows * width

    def grown_bytes(self, rows: int, width: int) -> float:
        """Return the memory of a slab that has grown, in its steps, to at least this size."""
        return self.bytes(_round_up(rows, ROW_STEP), _round_up(width, COLUMN_STEP))


def _empty_block(states: torch.Tensor) -> torch.Tensor:
    """Return a block without rows and columns for states of shape (rows, heads, tokens, size)."""
    return states.new_zeros(0, states.shape[1], 0, states.shape[3])


def _grow(block: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return a block with at least `rows` rows and `columns` columns."""
    if rows <= block.shape[0] and columns <= block.shape[2]:
        return block
    new_rows = max(block.shape[0], _round_up(rows, ROW_STEP))
    new_columns = max(block.shape[2], _round_up(columns, COLUMN_STEP))
    grown = block.new_zeros(new_rows, block.shape[1], new_columns, block.shape[3])
    grown[: block.shape[0], :, : block.shape[2]] = block
    return grown


def _round_up(number: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `number`."""
    return -(-number // step) * step


def bytes_of(layers: Layers) -> int:
    """Return the memory of cached keys and values, in bytes."""
    return sum(keys.nbytes + values.nbytes for keys, values in layers)


# ---- architectures ----


def masks_of(model: PreTrainedModel, columns: torch.Tensor, width: int) -> Masks:
    """Return the attention mask, or one for each type of layer.

    A token attends to its own column and those before it. Later columns are not written yet, or
    contain padding that will be overwritten.

    Args:
        model (`PreTrainedModel`): The model.
        columns (`Tensor`): The columns of the tokens, of shape (rows, tokens).
        width (`int`): Number of columns.
    """
    config = model.config.get_text_config()
    all_columns = torch.arange(width, device=columns.device)
    token_columns = columns.unsqueeze(-1)
    full = (all_columns <= token_columns).unsqueeze(1)
    masks = dict.fromkeys(_layer_types(model), full)
    if "sliding_attention" in masks:
        in_window = (all_columns > token_columns - config.sliding_window).unsqueeze(1)
        masks["sliding_attention"] = full & in_window

    # Eager attention adds the mask to the scores.
    if config._attn_implementation == "eager":
        lowest_score = torch.finfo(model.dtype).min
        for layer_type, mask in masks.items():
            scores = torch.zeros_like(mask, dtype=model.dtype)
            masks[layer_type] = scores.masked_fill(~mask, lowest_score)

    if getattr(config, "layer_types", None) and len(masks) > 1:
        return masks
    return next(iter(masks.values()))


def _layer_types(model: PreTrainedModel) -> set[str]:
    """Return the types of the model's layers; one type if its configuration names none."""
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return set(layer_types)
    has_window = bool(getattr(config, "sliding_window", None))
    return {"sliding_attention" if has_window else "full_attention"}


@contextmanager
def attention_with_masks(model: PreTrainedModel) -> Iterator[None]:
    """Give the model an attention that takes a mask, which flash attention does not."""
    config = model.config.get_text_config()
    original = config._attn_implementation
    if original not in ("sdpa", "eager"):
        # Models with attention sinks (gpt-oss) or soft-capped scores (Gemma 2) would lose them
        # under sdpa.
        config._attn_implementation = "sdpa" if model._supports_sdpa else "eager"
    try:
        yield
    finally:
        config._attn_implementation = original


def can_slab(model: PreTrainedModel) -> bool:
    """Return whether [`TransformersEngine`] can run a model.

    Its whole state must be keys and values, its layers must attend to everything or to a window,
    and it must take positions and masks from its caller.
    """
    return _find_obstacle(model) is None


def check_runs(model: PreTrainedModel) -> None:
    """Raise a `ValueError` that names the architecture if [`TransformersEngine`] cannot run it."""
    obstacle = _find_obstacle(model)
    if obstacle is not None:
        name = type(_base_model(model)).__name__
        raise ValueError(
            f"TransformersEngine cannot run {name}, which {obstacle}: use local_policy, which runs "
            "batches"
        )


def _find_obstacle(model: PreTrainedModel) -> str | None:
    """Return why the engine cannot run a model, as the end of a sentence; `None` if it can."""
    unsupported_types = _layer_types(model) - {"full_attention", "sliding_attention"}
    if model._is_stateful or unsupported_types:
        layers = " and ".join(sorted(unsupported_types)) or "recurrent"
        return f"has {layers} layers, whose state is more than keys and values"
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return "has a prompt-learning adapter, which adds tokens of its own in front of the context"
    parameters = inspect.signature(_base_model(model).forward).parameters
    missing = {"position_ids", "past_key_values", "attention_mask"} - set(parameters)
    if missing:
        return f"takes no {' and no '.join(sorted(missing))}"
    return None


def _base_model(model: PreTrainedModel) -> torch.nn.Module:
    """Return the model inside a PEFT model, whose `forward` hides the parameters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
