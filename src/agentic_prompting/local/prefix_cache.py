"""Keys and values kept between the turns of a conversation, so that a turn reads only what is new.

A conversation's context is append-only: the next turn's begins with this one's, the sampled tokens and the reply. What
the model has computed for those tokens stays right as long as its weights do, so whoever changes the weights must
[`PrefixCache.clear`].

Memory per kept token is 2 x layers x key-value heads x head size x bytes per number: 147 KB for Qwen3-4B in bf16,
1.2 GB for a conversation of 8k tokens. The store is bounded, and the conversation that was kept first goes first; what
is not kept is read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from ..rollout import SampleRequest

LayerCache = list[tuple[torch.Tensor, torch.Tensor]]
"""Per layer keys and values; of one row: heads x tokens x size, of a batch: rows x heads x columns x size."""


@dataclass
class Prefix:
    """What is kept of one conversation: its first tokens, and their keys and values."""

    ids: list[int]
    layers: LayerCache

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)


class PrefixCache:
    """A bounded store of [`Prefix`]es by [`SampleRequest.conversation`].

    Args:
        max_mb (`float`): Its size in MB (10^6 bytes); 0 keeps nothing.

    Attributes:
        bytes (`int`): What is kept now.
        read (`int`): Tokens of contexts that had to be computed so far.
        reused (`int`): Tokens of contexts that had not.
    """

    def __init__(self, max_mb: float):
        self.max_bytes = max_mb * 1e6
        self.bytes = self.read = self.reused = 0
        self._kept: dict[int, Prefix] = {}

    def take(self, request: SampleRequest) -> Prefix | None:
        """The prefix of this request's conversation, removed from the store; `None` if there is none, or the
        context does not begin with it. At least one token of the context is left to read."""
        prefix = self._kept.pop(request.conversation, None) if request.conversation is not None else None
        if prefix is not None:
            self.bytes -= prefix.size
            if len(prefix.ids) >= len(request.context) or request.context[: len(prefix.ids)] != prefix.ids:
                prefix = None
        known = len(prefix.ids) if prefix is not None else 0
        self.reused += known
        self.read += len(request.context) - known
        return prefix

    def wants(self, request: SampleRequest) -> bool:
        """Whether it is worth cutting this request's keys and values out of the batch."""
        return self.max_bytes > 0 and request.conversation is not None

    def keep(self, request: SampleRequest, prefix: Prefix) -> None:
        if prefix.size > self.max_bytes or request.conversation is None:
            return
        self._kept[request.conversation] = prefix
        self.bytes += prefix.size
        while self.bytes > self.max_bytes:
            oldest = next(iter(self._kept))
            self.bytes -= self._kept.pop(oldest).size

    def clear(self) -> None:
        """Forget everything: the weights are about to change, or the conversations are over."""
        self._kept.clear()
        self.bytes = 0


@dataclass
class Layout:
    """A batch in columns: kept tokens right-aligned in the first `past`, the others right-aligned in the rest.

    What stands in a padded column is the row's own first token, so that a repetition penalty counts nothing that the
    row does not hold. It is masked, and positions count attended tokens only, so a gap between the two blocks is none
    to the model.

    Attributes:
        ids, mask (`Tensor`): Rows x columns.
        known (`list[int]`): Tokens per row that are in the cache already.
        past (`int`): Columns of the first block.
        cache (`DynamicCache`, *optional*): Of the first block.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    known: list[int]
    past: int
    cache: DynamicCache | None

    @classmethod
    def of(cls, requests: Sequence[SampleRequest], prefixes: Sequence[Prefix | None], device: torch.device) -> Layout:
        known = [len(prefix.ids) if prefix is not None else 0 for prefix in prefixes]
        past = max(known)
        width = past + max(len(request.context) - k for request, k in zip(requests, known, strict=True))
        ids = torch.tensor([request.context[0] for request in requests]).unsqueeze(1).repeat(1, width)
        mask = torch.zeros_like(ids)
        for row, (request, k) in enumerate(zip(requests, known, strict=True)):
            rest = len(request.context) - k
            ids[row, past - k : past] = torch.tensor(request.context[:k])
            ids[row, width - rest :] = torch.tensor(request.context[k:])
            mask[row, past - k : past] = 1
            mask[row, width - rest :] = 1
        return cls(ids.to(device), mask.to(device), known, past, _batched(prefixes, past) if past else None)

    def prefix_of(self, row: int, request: SampleRequest, sampled: list[int], layers: LayerCache) -> Prefix:
        """Cut a row's keys and values out of the batch's: its context and all it sampled but the last token, which may
        not have been read by the model."""
        width, known = self.ids.shape[1], self.known[row]
        first = width - (len(request.context) - known)
        last = width + len(sampled) - 1

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            own = tensor[row]
            return torch.cat([own[:, self.past - known : self.past], own[:, first:last]], dim=1)

        return Prefix(request.context + sampled[:-1], [(cut(keys), cut(values)) for keys, values in layers])


def _batched(prefixes: Sequence[Prefix | None], past: int) -> DynamicCache:
    """The prefixes side by side, right-aligned in `past` columns."""
    example = next(prefix for prefix in prefixes if prefix is not None)
    # Without a config every layer keeps everything, which is what `can_reuse` made sure the model wants.
    cache = DynamicCache()
    for number, layer in enumerate(example.layers):
        sides = []
        for side, like in enumerate(layer):
            heads, _, size = like.shape
            block = like.new_zeros(len(prefixes), heads, past, size)
            for row, prefix in enumerate(prefixes):
                if prefix is not None:
                    block[row, :, past - len(prefix.ids) :] = prefix.layers[number][side]
            sides.append(block)
        cache.update(sides[0], sides[1], number)
    return cache


def layers_of(cache: DynamicCache) -> LayerCache:
    return [(layer.keys, layer.values) for layer in cache.layers]


def read(contexts: Sequence[list[int]], model: PreTrainedModel) -> list[Prefix]:
    """Compute the keys and values of whole contexts, in one pass."""
    requests = [SampleRequest(context, 1, 0) for context in contexts]
    layout = Layout.of(requests, [None] * len(requests), model.device)
    positions = (layout.mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache()
    model(
        input_ids=layout.ids,
        attention_mask=layout.mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    # As if the token after it had been sampled: `prefix_of` leaves the last one out.
    return [
        layout.prefix_of(row, request, [request.context[-1]], layers_of(cache)) for row, request in enumerate(requests)
    ]


def can_reuse(model: PreTrainedModel) -> bool:
    """Whether all layers attend to the whole context. A sliding window counts columns, and a recurrent layer has no
    keys and values."""
    config = model.config.get_text_config()
    if getattr(config, "layer_types", None):
        return set(config.layer_types) == {"full_attention"}
    return not getattr(model, "_is_stateful", False) and not getattr(config, "sliding_window", None)
