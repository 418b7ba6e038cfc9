"""A reward for saving calls: minus what a rollout's calls to the large LLM cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..rollout import Rollout
from .qa import is_scorable


@dataclass(frozen=True)
class CostReward:
    """A reward function that returns minus `weight` for each unit of cost of a rollout's calls.

    Pass it beside the reward of the answer. A reply costs its full price even if it was recorded or
    shared, so that the reward depends on the rollout alone.

    Args:
        weight (`float`): Reward per unit, at least 0 and finite.
        unit (`str`, *optional*, defaults to `"usd"`): `usd`, US dollars by the models' prices; or
            `calls`.

    Raises:
        `ValueError`: If `weight` is negative or not finite, or `unit` is not known.
    """

    weight: float
    unit: str = "usd"

    def __post_init__(self) -> None:
        if not 0 <= self.weight < math.inf:
            raise ValueError(f"weight must be finite and at least 0, got {self.weight}")
        if self.unit not in ("usd", "calls"):
            raise ValueError(f"unit must be usd or calls, got {self.unit!r}")

    @property
    def __name__(self) -> str:
        """The name of this reward in TRL's logs."""
        return "cost_reward"

    def __call__(self, rollout: Sequence[Rollout], **_: object) -> list[float | None]:
        """Return the reward of each rollout, 0 or below.

        `None` if there is nothing of the agent's to score.
        """
        rewards: list[float | None] = []
        for episode in rollout:
            rewards.append(-self.weight * self.cost(episode) if is_scorable(episode) else None)
        return rewards

    def cost(self, rollout: Rollout) -> float:
        """Return the price of a rollout's calls, in units."""
        if self.unit == "calls":
            return float(len(rollout.replies))
        return sum(reply.worth.cost_usd for reply in rollout.replies)
