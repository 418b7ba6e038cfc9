"""A reward for saving calls: minus what a rollout's calls to the large LLM cost."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..rollout import Rollout
from .qa import is_scorable


@dataclass(frozen=True)
class CostReward:
    """A reward function that returns minus `weight` for each unit of cost of a rollout's calls.

    Pass it beside the reward of the answer. A reply costs its full price even if it was recorded or
    shared, so the reward depends on the rollout alone.

    A row may state a budget in the column `budget`, which [`Workers`] shows the agent. With a
    mapping as `weight` a budget that is a key (`low`, `high`) chooses its weight. A budget that is
    a number is an amount in dollars: only the cost above it counts.

    Args:
        weight (`float` or `Mapping[str, float]`): Reward per unit, at least 0 and finite; or the
            weight of each budget. The key `""` is for rows without a budget and for amounts.
        unit (`str`, *optional*, defaults to `"usd"`): `usd`, US dollars by the models' prices; or
            `calls`.

    Raises:
        `ValueError`: If a weight is negative or not finite, or `unit` is not known. When it scores,
            if there is no weight for the budget of a row.

    Example:

        >>> reward = CostReward({"low": 100.0, "high": 5.0})
    """

    weight: float | Mapping[str, float]
    unit: str = "usd"

    def __post_init__(self) -> None:
        weights = self.weight.values() if isinstance(self.weight, Mapping) else [self.weight]
        if not all(0 <= weight < math.inf for weight in weights):
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
            rewards.append(self.score(episode) if is_scorable(episode) else None)
        if self.unit == "usd" and self.weight:
            _warn_without_prices(rollout)
        return rewards

    def score(self, rollout: Rollout) -> float:
        """Return the reward of a rollout: minus its weighted cost."""
        budget = rollout.row.get("budget")
        if isinstance(budget, float) and math.isnan(budget):
            # An empty cell of a spreadsheet, among numbers.
            budget = None
        cost = self.cost(rollout)
        if isinstance(budget, int | float) and self.unit == "usd":
            cost = max(0.0, cost - budget)
        if not isinstance(self.weight, Mapping):
            return -self.weight * cost
        name = budget if isinstance(budget, str) else ""
        if name not in self.weight:
            known = ", ".join(map(repr, self.weight))
            raise ValueError(f"CostReward has no weight for the budget {name!r}, only for {known}")
        return -self.weight[name] * cost

    def cost(self, rollout: Rollout) -> float:
        """Return the price of a rollout's calls, in units."""
        if self.unit == "calls":
            return float(len(rollout.replies))
        return sum(reply.worth.cost_usd for reply in rollout.replies)


def _warn_without_prices(rollouts: Sequence[Rollout]) -> None:
    """Warn if none of the calls of a batch has a price, so that no call costs any reward."""
    calls = [reply for rollout in rollouts for reply in rollout.replies]
    if calls and not any(reply.worth.cost_usd for reply in calls):
        # Python shows a warning once for each place that it comes from.
        warnings.warn(
            f"CostReward(unit='usd') is 0 for all {len(calls)} calls of a batch, because none has "
            "a price: give OpenAIChat `price`, or Worker `usd`, or use unit='calls'",
            stacklevel=3,
        )
