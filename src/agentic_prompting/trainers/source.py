"""The sources of training batches: [`Prompts`] renders the rows, and [`OnPolicy`] plays rollouts within the step that
learns from them. `ahead.py` plays them before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..rollout import AgentSpec, Rollout
from .batch import Batch, Place
from .player import Player


class Prompts(Protocol):
    """Renders the rows of a batch. E-SPL brings its own, which draws a system prompt per slot.

    Attributes:
        rollouts_per_row (`int`): How often the sampler repeats each training row.
    """

    @property
    def rollouts_per_row(self) -> int: ...

    def new_batch(self, step: int) -> None:
        """Begin a training batch of this step. Called on every process alike, before the batch's rows are rendered."""

    def metadata(self, index: int, training: bool) -> dict[str, Any]:
        """The metadata of the rollout at this position of the global batch: plain JSON for its record, from which
        [`Prompts.messages`] can render the row again."""

    def messages(self, row: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[Any]:
        """The prompt messages of a row.

        Raises:
            `LookupError`: `metadata` names something that does not exist.
        """


class RowPrompts:
    """Each row under the agent's own template.

    Args:
        spec ([`AgentSpec`]): How the agent is asked.
        rollouts_per_row (`int`): Rollouts of a group.
    """

    def __init__(self, spec: AgentSpec, rollouts_per_row: int):
        self.spec, self.rollouts_per_row = spec, rollouts_per_row

    def new_batch(self, step: int) -> None:
        """Nothing changes between batches."""

    def metadata(self, index: int, training: bool) -> dict[str, Any]:
        """Nothing: all rollouts of a row are alike."""
        return {}

    def messages(self, row: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[Any]:
        """The row's messages, as [`AgentSpec.messages`] renders them."""
        return [dict(message) for message in self.spec.messages(row)]


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
    """

    def __init__(self, prompts: Prompts, player: Player):
        self.prompts, self.player = prompts, player

    def next(self, rows: Sequence[dict[str, Any]], place: Place) -> Batch:
        """Render the rows that TRL passes and play a rollout of each."""
        first = self.player.accelerator.process_index * len(rows)
        metadata = [self.prompts.metadata(first + i, place.trains) for i in range(len(rows))]
        rendered = [
            {**row, "prompt": self.player.chat_format.prompt(self.prompts.messages(row, one))}
            for row, one in zip(rows, metadata, strict=True)
        ]
        rendered = self.player.reset(rendered)
        rollouts = [self._rollout(first + i, row, place) for i, row in enumerate(rendered)]
        self.player.play(rollouts, place.what)
        return Batch(place, rendered, metadata, rollouts)

    def _rollout(self, index: int, row: dict[str, Any], place: Place) -> Rollout:
        ids, seed = self.player.chat_format.of(row).prompt_ids(row["prompt"]), place.rollout_seed(index)
        return Rollout(ids, row=dict(row), seed=seed, batch=place.share_key, group=index // place.group)
