"""Where training batches come from: played within the step (here), or ahead of it (`ahead.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..rollout import Rollout
from .batch import Batch, Place
from .player import Player
from .prompts import Prompts


class Source(Protocol):
    """Makes the next batch of this process."""

    def next(self, rows: Sequence[dict[str, Any]], place: Place) -> Batch:
        """A batch of finished rollouts, as many as `rows`.

        Raises:
            [`PolicyUnreachable`]: On every process, if the policy's server is gone.
        """


class OnPolicy:
    """Rollouts that begin and end within the step that learns from them.

    Args:
        prompts ([`Prompts`]): Renders the rows.
        player ([`Player`]): Plays the rollouts.
        group_size (`Callable`): Rollouts of a group now; some trainers change it after they were made.
    """

    def __init__(self, prompts: Prompts, player: Player, group_size: Callable[[], int]):
        self.prompts, self.player, self.group_size = prompts, player, group_size

    def next(self, rows: Sequence[dict[str, Any]], place: Place) -> Batch:
        """Render the rows that TRL gives and play a rollout of each."""
        first = self.player.accelerator.process_index * len(rows)
        metadata = [self.prompts.metadata(first + i, place.trains) for i in range(len(rows))]
        rendered = [
            {**row, "prompt": self.player.prompt(self.prompts.messages(row, one))}
            for row, one in zip(rows, metadata, strict=True)
        ]
        rendered = self.player.reset(rendered)
        rollouts = [self._rollout(first + i, row, place) for i, row in enumerate(rendered)]
        self.player.play(rollouts, place.what)
        return Batch(place, rendered, metadata, rollouts)

    def _rollout(self, index: int, row: dict[str, Any], place: Place) -> Rollout:
        ids, group = self.player.prompt_ids(row), index // self.group_size()
        return Rollout(ids, row=dict(row), seed=place.rollout_seed(index), batch=place.share_key, group=group)
