"""Counts the memory of live tensors while code runs, and answers for fake tensors, which hold no values.

torch's own MemTracker walks all modules at each operation and takes fourteen times as long. Here each storage counts
once, from the operation that creates it until Python frees it. Memory that a kernel uses inside is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten


class Memory(TorchDispatchMode):
    """Bytes of all live storages by part, and their largest sum in each moment.

    Args:
        chosen (`Callable`, *optional*): The number of rows of `x[mask]`, given the mask: a fake mask has no values.
        block (`int`, *optional*, defaults to `512`): Each storage is rounded up to a multiple of so many bytes, as
            CUDA's allocator does.

    Attributes:
        moment (`str`): The moment of the step that runs now.
        peaks (`dict[str, dict[str, int]]`): For each moment the bytes of each part when their sum was largest.
    """

    def __init__(self, chosen: Callable[[torch.Tensor], int] = torch.numel, block: int = 512):
        super().__init__()
        self.chosen, self.block, self.moment = chosen, block, ""
        self.peaks: dict[str, dict[str, int]] = {}
        self.parts = {"activations": 0}
        self._most: dict[str, int] = {}
        self._paused = False
        self._seen: Any = WeakIdKeyDictionary()  # storage: [its bytes, its part]

    @property
    def now(self) -> int:
        """Bytes of all live storages."""
        return sum(self.parts.values())

    def see(self, tensors: Iterable[torch.Tensor], part: str = "activations") -> None:
        """Count the storages of some tensors as one part; those that are counted already change to it."""
        for tensor in tensors:
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            known = self._seen.get(storage)
            if known is None:
                known = self._seen[storage] = [0, part]
                weakref.finalize(storage, self._resized, known, 0)
            elif known[1] != part:
                self.parts[known[1]] -= known[0]
                self.parts[part] = self.parts.get(part, 0) + known[0]
                known[1] = part
            self._resized(known, storage.nbytes())

    def _resized(self, known: list[Any], size: int) -> None:
        size = -(-size // self.block) * self.block
        if size == known[0]:
            return
        self.parts[known[1]] = self.parts.get(known[1], 0) + size - known[0]
        known[0] = size
        if self.now > self._most.get(self.moment, -1):
            self._most[self.moment], self.peaks[self.moment] = self.now, dict(self.parts)

    @contextmanager
    def during(self, moment: str) -> Iterator[None]:
        """A context whose peaks are those of this moment."""
        before, self.moment = self.moment, moment
        try:
            yield
        finally:
            self.moment = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(one.__name__ == "DTensor" for one in types):
            return NotImplemented  # it calls again with its local tensors
        fake = any(isinstance(one, torch._subclasses.FakeTensor) for one in args[:1])
        if fake and func is aten._local_scalar_dense.default:  # item(), bool(), float()
            kind = args[0].dtype
            return False if kind == torch.bool else 1.0 if kind.is_floating_point else 1
        if fake and func is aten.index.Tensor and _is_mask(args[1]):  # x[mask]
            (mask,) = args[1]
            rows = torch.zeros(self.chosen(mask), dtype=torch.long)
            args = args[0].reshape(-1, *args[0].shape[mask.dim() :]), [rows]
        out = func(*args, **(kwargs or {}))
        if not self._paused:
            made = (out,) if isinstance(out, torch.Tensor) else tree_leaves(out)
            for one in made:
                if isinstance(one, torch.Tensor) and one.untyped_storage() not in self._seen:
                    self.see((one,))
        return out

    @contextmanager
    def counting(self) -> Iterator[Memory]:
        """A context in which storages are counted, those that FSDP empties and fills in place included."""
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        resize, shapes = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

        def resized(storage: Any, size: int) -> None:
            resize(storage, size)
            if storage in self._seen:
                self._resized(self._seen[storage], storage.nbytes())

        def uncounted(*args: Any, **kwargs: Any) -> Any:  # fake tensors of the whole, to work out shapes
            self._paused = True
            try:
                return shapes(*args, **kwargs)
            finally:
                self._paused = False

        with (
            mock.patch.object(torch.UntypedStorage, "resize_", resized),
            mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", uncounted),
            self,
        ):
            yield self


def _is_mask(indices: Any) -> bool:
    return len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.bool
