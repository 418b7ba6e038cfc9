"""The keys and values of the rows that [`TransformersEngine`] samples: one tensor per layer and side, a row per
conversation, a column per position."""

from __future__ import annotations

from typing import Any

import torch
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
        self.at = torch.arange(first, first + len(columns), device=columns.device).unsqueeze(1), columns
        self.needed = rows, width

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
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
        return [(keys[row, :, :length].clone(), values[row, :, :length].clone()) for keys, values in self.layers]

    def put(self, row: int, kept: Layers, rows: int, width: int) -> None:
        """Write the keys and values that `cut` returned."""
        if not self.layers:
            self.layers = [[t.new_zeros(0, t.shape[0], 0, t.shape[2]) for t in layer] for layer in kept]
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
            block.shape[1] * block.shape[3] * block.element_size() for layer in self.layers for block in layer
        )
        return per_token * rows * width


def _at_least(block: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    if rows <= block.shape[0] and columns <= block.shape[2]:
        return block
    rows, columns = max(block.shape[0], round_up(rows, ROWS)), max(block.shape[2], round_up(columns, COLUMNS))
    grown = block.new_zeros(rows, block.shape[1], columns, block.shape[3])
    grown[: block.shape[0], :, : block.shape[2]] = block
    return grown


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def bytes_of(layers: Layers) -> int:
    return sum(tensor.nbytes for layer in layers for tensor in layer)
