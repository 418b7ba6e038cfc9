"""The order in which the rows of a dataset are trained on: that of TRL's sampler.

It is a function of seed and epoch, so a resumed run needs no random state, and rollouts can be
played ahead of their step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Sampler


def order_rows(row_count: int, seed: int | None, epoch: int) -> torch.Tensor:
    """Return the order of the rows in an epoch. In the first epoch it is that of TRL's sampler.

    Without a seed the rows are not shuffled.
    """
    if seed is None:
        return torch.arange(row_count)
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(row_count, generator=generator)


@dataclass(eq=False)
class EpochSampler(Sampler):
    """Yields the row indices of an epoch in the pattern of TRL's sampler.

    The order is a function of seed and epoch, so that a resumed run needs no random state.

    Args:
        row_count (`int`): Number of rows in the dataset. Rows that do not fill a batch are skipped.
        rows_per_batch (`int`): Number of different rows in a batch.
        rollouts_per_row (`int`): Number of times that a row is repeated in succession.
        batch_repeats (`int`): Number of times that a whole batch is repeated.
        seed (`int`, *optional*): The run's seed. `None` disables shuffling.
        get_epoch (`Callable`): Returns the number of the epoch that starts.
    """

    row_count: int
    rows_per_batch: int
    rollouts_per_row: int
    batch_repeats: int
    seed: int | None
    get_epoch: Callable[[], int]

    def __iter__(self) -> Iterator[int]:
        row_indices = order_rows(self.row_count, self.seed, self.get_epoch()).tolist()
        # Only whole batches: rows that would not fill one are left out.
        last_start = self.row_count - self.rows_per_batch
        for start in range(0, last_start + 1, self.rows_per_batch):
            batch = row_indices[start : start + self.rows_per_batch]
            for _ in range(self.batch_repeats):
                # TRL reads neighbours as the rollouts of one group.
                for row_index in batch:
                    yield from [row_index] * self.rollouts_per_row

    def __len__(self) -> int:
        rows_used = self.row_count // self.rows_per_batch * self.rows_per_batch
        return rows_used * self.rollouts_per_row * self.batch_repeats


@dataclass(frozen=True)
class RowStream:
    """The rows of a whole run in the order of [`EpochSampler`], epoch after epoch.

    Args:
        rows (`Sequence`): The training rows.
        seed (`int`): The run's seed.
        shuffle (`bool`): Whether each epoch has its own order.
        groups_per_batch (`int`): Rows in a batch over all processes. Rows that do not fill a
            batch are skipped.
    """

    rows: Sequence[Any]
    seed: int
    shuffle: bool
    groups_per_batch: int

    def __getitem__(self, group_number: int) -> dict[str, Any]:
        # As in the sampler, rows that do not fill a batch are left out of the epoch.
        groups_per_epoch = len(self.rows) // self.groups_per_batch * self.groups_per_batch
        epoch, position = divmod(group_number, groups_per_epoch)
        seed = self.seed if self.shuffle else None
        row_indices = order_rows(len(self.rows), seed, epoch)
        return dict(self.rows[int(row_indices[position])])
