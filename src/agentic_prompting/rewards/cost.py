"""A price in the reward: accuracy against what the large LLM's calls cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..rollout import Rollout
from .qa import scorable


@dataclass(frozen=True)
class CostReward:
    """Minus `weight` for each unit of a rollout's calls, to be added to the reward of the answer.

    A reply costs its full price even if it was recorded or shared, so that the reward depends on the episode alone.

    Args:
        weight (`float`): Reward per unit, at least 0 and finite.
        unit (`str`, *optional*, defaults to `"usd"`): `usd`, US dollars by the models' prices; or `calls`.

    Raises:
        `ValueError`: For another weight or unit.
    """

    weight: float
    unit: str = "usd"

    def __post_init__(self) -> None:
        if not 0 <= self.weight < math.inf or self.unit not in ("usd", "calls"):
            raise ValueError(
                f"a cost has a finite weight of at least 0 and a unit, usd or calls: {self}"
            )

    @property
    def __name__(self) -> str:
        """The name of this reward in TRL's logs."""
        return "cost_reward"

    def __call__(self, rollout: Sequence[Rollout], **kwargs: Any) -> list[float | None]:
        """The reward of each rollout, 0 or below; `None` where there is nothing of the agent's to score."""
        return [-self.weight * self.cost(one) if scorable(one) else None for one in rollout]

    def cost(self, rollout: Rollout) -> float:
        """The price of the calls of a rollout, in units."""
        if self.unit == "calls":
            return float(len(rollout.replies))
        return sum(reply.worth.cost_usd for reply in rollout.replies)
