"""What rows begin with: the prompt messages of each rollout of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ..rollout import AgentSpec


class Prompts(Protocol):
    """Renders the rows of a batch. E-SPL brings its own, which draws a system prompt per slot.

    Attributes:
        rollouts_per_row (`int`): How often the sampler repeats each training row.
    """

    @property
    def rollouts_per_row(self) -> int: ...

    def new_batch(self) -> None:
        """A training batch begins. Called on every process alike, before the batch's rows are rendered."""

    def metadata(self, index: int, training: bool) -> dict[str, Any]:
        """What the record of the rollout at this place of the global batch says besides its rewards: plain JSON from
        which [`Prompts.messages`] can render the row again."""

    def messages(self, row: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The conversation that a row begins with.

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

    def new_batch(self) -> None:
        """Nothing changes between batches."""

    def metadata(self, index: int, training: bool) -> dict[str, Any]:
        """Nothing: all rollouts of a row are alike."""
        return {}

    def messages(self, row: Mapping[str, Any], metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The row's messages, as [`AgentSpec.messages`] renders them."""
        return [dict(message) for message in self.spec.messages(row)]
