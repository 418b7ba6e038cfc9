"""The order of a run's rows: that of TRL's sampler, as a function of seed and epoch, so that it needs no state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Sampler


def epoch_order(count: int, seed: int | None, epoch: int) -> torch.Tensor:
    """The order of `count` rows in an epoch. That of the first epoch is TRL's own. Without a seed rows are not
    shuffled."""
    if seed is None:
        return torch.arange(count)
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))


@dataclass(eq=False)
class EpochSampler(Sampler):
    """The positions of an epoch's rows, each repeated for its rollouts and for the uses of its batch.

    Args:
        count (`int`): Rows of the data set. Those that fill no batch are left out.
        rows (`int`): Rows of a batch.
        rollouts (`int`): Rollouts of a row, one after another.
        uses (`int`): How often a whole batch is repeated.
        seed (`int`, *optional*): The run's; `None` does not shuffle.
        epoch (`Callable`): Returns the number of the epoch that begins.
    """

    count: int
    rows: int
    rollouts: int
    uses: int
    seed: int | None
    epoch: Callable[[], int]

    def __iter__(self) -> Iterator[int]:
        order = epoch_order(self.count, self.seed, self.epoch()).tolist()
        for first in range(0, self.count - self.rows + 1, self.rows):
            for _ in range(self.uses):
                for place in order[first : first + self.rows]:
                    yield from [place] * self.rollouts

    def __len__(self) -> int:
        return self.count // self.rows * self.rows * self.rollouts * self.uses


@dataclass(frozen=True)
class RowStream:
    """The rows of a run in the same order, epoch after epoch.

    Args:
        rows (`Sequence`): The training rows.
        seed (`int`): The run's seed.
        shuffle (`bool`): Whether each epoch has an order of its own.
        groups_per_batch (`int`): Rows of a batch, all processes together. The rest of an epoch is left out.
    """

    rows: Sequence[Any]
    seed: int
    shuffle: bool
    groups_per_batch: int

    def __getitem__(self, number: int) -> dict[str, Any]:
        epoch, place = divmod(number, len(self.rows) // self.groups_per_batch * self.groups_per_batch)
        order = epoch_order(len(self.rows), self.seed if self.shuffle else None, epoch)
        return dict(self.rows[int(order[place])])
