"""Counts the memory of live tensors while code runs, and answers for fake tensors, which hold no
values.

torch's own MemTracker walks all modules at each operation and takes fourteen times as long. Here
each storage counts once, from the operation that creates it until Python frees it. Memory that a
kernel uses internally is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from .fake_gpu import patched

aten = torch.ops.aten


@dataclass
class CountedStorage:
    """A storage that is counted.

    Args:
        size (`int`): Its bytes, rounded up as the allocator does.
        part (`str`): The part of the memory that it belongs to.
    """

    size: int
    part: str


class MemoryCounter(TorchDispatchMode):
    """Counts the bytes of all live storages by part, and their largest sum in each moment.

    Args:
        count_selected (`Callable`, *optional*): Returns the number of rows of `x[mask]` for a mask,
            because a fake mask has no values. Defaults to all of them.
        block (`int`, *optional*, defaults to `512`): Each storage is rounded up to a multiple of
            this many bytes, as CUDA's allocator does.

    Attributes:
        moment (`str`): The current moment of the step.
        peaks (`dict[str, dict[str, int]]`): For each moment the bytes by part when their sum was
            largest.
        parts (`dict[str, int]`): The current bytes by part.
    """

    def __init__(
        self, count_selected: Callable[[torch.Tensor], int] = torch.numel, block: int = 512
    ):
        super().__init__()
        self.count_selected = count_selected
        self.block = block
        self.moment = ""
        self.peaks: dict[str, dict[str, int]] = {}
        self.parts = {"activations": 0}
        self._largest_sums: dict[str, int] = {}
        self._is_paused = False
        self._storages: Any = WeakIdKeyDictionary()  # storage -> CountedStorage

    @property
    def total(self) -> int:
        """Bytes of all live storages."""
        return sum(self.parts.values())

    def count(self, tensors: Iterable[torch.Tensor], part: str = "activations") -> None:
        """Count the storages of tensors as one part.

        Storages that are counted already change to it.
        """
        for tensor in tensors:
            # This process holds only its own part of a sharded tensor.
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            counted = self._storages.get(storage)
            if counted is None:
                counted = CountedStorage(0, part)
                self._storages[storage] = counted
                # When Python frees the storage, its size becomes 0.
                weakref.finalize(storage, self._resize, counted, 0)
            elif counted.part != part:
                # A storage that changes its part, such as a gradient that was counted as an
                # activation.
                self.parts[counted.part] -= counted.size
                self.parts[part] = self.parts.get(part, 0) + counted.size
                counted.part = part
            self._resize(counted, storage.nbytes())

    def _resize(self, counted: CountedStorage, size: int) -> None:
        """Set the size of a storage, and remember the peak of the current moment."""
        # Rounded up to whole blocks.
        size = -(-size // self.block) * self.block
        if size == counted.size:
            return
        self.parts[counted.part] = self.parts.get(counted.part, 0) + size - counted.size
        counted.size = size
        if self.total > self._largest_sums.get(self.moment, -1):
            self._largest_sums[self.moment] = self.total
            self.peaks[self.moment] = dict(self.parts)

    @contextmanager
    def during(self, moment: str) -> Iterator[None]:
        """Attribute the peaks within the context to this moment."""
        previous = self.moment
        self.moment = moment
        try:
            yield
        finally:
            self.moment = previous

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(tensor_type.__name__ == "DTensor" for tensor_type in types):
            return NotImplemented  # torch calls again with the local tensors

        # Operations that need the values of a fake tensor.
        is_fake = bool(args) and isinstance(args[0], torch._subclasses.FakeTensor)
        if is_fake and func is aten._local_scalar_dense.default:  # item(), bool(), float()
            return placeholder_value(args[0].dtype)
        if is_fake and func is aten.index.Tensor and is_mask(args[1]):  # x[mask]
            (mask,) = args[1]
            row_indices = torch.zeros(self.count_selected(mask), dtype=torch.long)
            flattened = args[0].reshape(-1, *args[0].shape[mask.dim() :])
            args = (flattened, [row_indices])

        result = func(*args, **(kwargs or {}))
        # Count what the operation created. A view shares a storage that is counted already.
        if not self._is_paused:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.untyped_storage() not in self._storages:
                    self.count([leaf])
        return result

    @contextmanager
    def counting(self) -> Iterator[MemoryCounter]:
        """Count storages within the context, including those that FSDP empties and fills in
        place."""
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        # FSDP resizes storages instead of creating new ones.
        resize_storage = torch.UntypedStorage.resize_
        propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> None:
            resize_storage(storage, size)
            if storage in self._storages:
                self._resize(self._storages[storage], storage.nbytes())

        def propagate_uncounted(*args: Any, **kwargs: Any) -> Any:
            # Works out shapes with fake tensors of the whole weights, which never exist.
            self._is_paused = True
            try:
                return propagate(*args, **kwargs)
            finally:
                self._is_paused = False

        with (
            patched(torch.UntypedStorage, "resize_", resize_and_count),
            patched(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_uncounted),
            self,
        ):
            yield self


def placeholder_value(dtype: torch.dtype) -> bool | float | int:
    """Return the value that a fake scalar is taken to have."""
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


def is_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    """Return whether the arguments of an indexing operation are a single boolean mask."""
    if len(indices) != 1 or indices[0] is None:
        return False
    return indices[0].dtype == torch.bool
