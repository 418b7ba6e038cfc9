"""The variants of the conductor's run: what each changes in the world, the warm start and the
training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentic_prompting.rewards import CostReward
from agentic_prompting.rollout import Limits, Rollout
from agentic_prompting.sandbox.world import ANSWER
from benchmarks.learning.conductor_baselines import (
    BASELINES,
    BUDGET_BASELINES,
    OUTAGE_BASELINES,
    Script,
)
from benchmarks.learning.conductor_world import (
    DESCRIPTION,
    OTHER_WORDING,
    WORDINGS,
    Facts,
    SandboxWorkers,
    ScriptedWorker,
    make_environment,
)

LETTERS = tuple("ABCDEF")
MANY_NAMES = tuple(f"worker-{number}" for number in range(1, 41))
TRAINING_NAMES = MANY_NAMES[:30]
HELD_OUT_NAMES = MANY_NAMES[30:]
BUDGETS = ("low", "high")
DOWN = 0.5


@dataclass(frozen=True)
class Variant:
    """The differences of a run from the one with references.

    Args:
        retypes (`bool`): Whether the warm start types values again, instead of handing them on by
            reference.
        names (`Sequence[str]`): Names of the workers in warm start and training.
        wordings (`Sequence[str]`): Wordings of the workers in warm start and training.
        has_twin (`bool`): Whether `facts` has a cheap and noisy twin, and each row a budget.
        twin_shares (`Mapping[str, float]`): How often the traces ask the twin under each budget.
        twin_comes_late (`bool`): Whether the warm start begins without the twin.
        down (`float`): The share of calls to `numbers` that fail.
        unavailable (`str`): As in [`Workers`].
        max_turns (`int`): Turns of an episode.
        steps (`int`): Steps of training.
        first_cost_step (`int`): The step from which costs count, where rows have budgets.
        budget_weights (`Mapping[str, float]`): The reward that a dollar takes away, by budget.
        min_rounds (`int`): Rounds of imitation at least.
        max_rounds (`int`): Rounds of imitation at most, until calls go to the worker of their kind.
    """

    retypes: bool = False
    names: Sequence[str] = LETTERS
    wordings: Sequence[str] = WORDINGS
    has_twin: bool = False
    twin_shares: Mapping[str, float] = field(default_factory=lambda: {"low": 0.5, "high": 0.5})
    twin_comes_late: bool = False
    down: float = 0.0
    unavailable: Literal["failed", "visible"] = "failed"
    max_turns: int = 6
    steps: int = 64
    first_cost_step: int = 0
    budget_weights: Mapping[str, float] = field(default_factory=lambda: {"low": 120.0, "high": 0.0})
    min_rounds: int = 1
    max_rounds: int = 6

    @property
    def limits(self) -> Limits:
        return Limits(max_turns=self.max_turns, max_turn_tokens=96, max_tokens=560)

    @property
    def retries(self) -> bool:
        """Whether the traces ask a worker again that is unavailable."""
        return self.down > 0 and self.unavailable == "visible"

    def environment(
        self,
        facts: Facts,
        /,
        names: Sequence[str] | None = None,
        down: float | None = None,
        **changed: ScriptedWorker,
    ) -> SandboxWorkers:
        """The workers of this variant.

        Args:
            facts ([`Facts`]): Their knowledge.
            names (`Sequence[str]`, *optional*): Other names than in training.
            down (`float`, *optional*): Another share of calls to `numbers` that fail.
            **changed ([`ScriptedWorker`]): Workers that replace the usual ones, by their names in
                the pool.
        """
        workers = {
            name: ScriptedWorker(facts, name, wordings=self.wordings) for name in DESCRIPTION
        }
        workers["numbers"].down = self.down if down is None else down
        return make_environment(
            facts,
            names=self.names if names is None else names,
            unavailable=self.unavailable,
            has_twin=self.has_twin,
            **{**workers, **changed},
        )

    def with_budgets(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Rows with a budget each, by turns, where the variant has budgets."""
        if not self.has_twin:
            return [dict(row) for row in rows]
        return [
            {**row, "budget": BUDGETS[number % len(BUDGETS)]} for number, row in enumerate(rows)
        ]

    @property
    def words(self) -> list[str]:
        """Texts whose words the tokenizer needs beside those of the run with references."""
        texts = []
        if self.names != LETTERS:
            texts += MANY_NAMES
        if self.wordings != (ANSWER,):
            texts += [wording.replace("{value}", "") for wording in self.wordings]
        if self.has_twin:
            texts.append("rumours")
        if self.retries:
            texts.append("again")
        return texts


VARIANTS: Mapping[str, Variant] = {
    "references": Variant(),
    "unchecked": Variant(wordings=(ANSWER,), max_rounds=1, steps=32),
    "retyping": Variant(retypes=True),
    "names": Variant(names=TRAINING_NAMES),
    "budget": Variant(has_twin=True, first_cost_step=32),
    "outages": Variant(down=DOWN, unavailable="visible", max_turns=8),
    "outages-failed": Variant(down=DOWN),
    "names-longer": Variant(names=TRAINING_NAMES, min_rounds=2),
    "budget-early": Variant(
        has_twin=True,
        twin_comes_late=True,
        twin_shares={"low": 0.7, "high": 0.3},
        budget_weights={"low": 200.0, "high": 0.0},
    ),
    "outages-longer": Variant(down=DOWN, unavailable="visible", max_turns=8, min_rounds=2),
}


@dataclass(frozen=True)
class Trial:
    """Held-out questions under other conditions than those of `before` and `after`.

    Args:
        environment ([`SandboxWorkers`]): The workers.
        columns (`Mapping[str, Any]`, *optional*): Columns that replace those of the rows.
        untrained (`bool`, *optional*): Whether the untrained conductor is tried, too.
    """

    environment: SandboxWorkers
    columns: Mapping[str, Any]
    untrained: bool = False


def make_trials(name: str, facts: Facts) -> dict[str, Trial]:
    """The trials of a variant, by name."""
    variant = VARIANTS[name]
    if name in ("references", "unchecked", "retyping"):
        replacement = ScriptedWorker(facts, "numbers", noise=0.1, wordings=(OTHER_WORDING,))
        return {"replaced": Trial(variant.environment(facts, numbers=replacement), {})}
    if variant.names == TRAINING_NAMES:
        renamed = variant.environment(facts, names=HELD_OUT_NAMES)
        return {"held-out names": Trial(renamed, {}, untrained=True)}
    if variant.has_twin:
        return {"low": Trial(variant.environment(facts), {"budget": "low"}, untrained=True)}
    return {"no outages": Trial(variant.environment(facts, down=0.0), {})}


def scripts_of(name: str) -> Mapping[str, Script]:
    """The scripted conductors that a variant is compared with."""
    if VARIANTS[name].has_twin:
        return BUDGET_BASELINES
    if VARIANTS[name].retries:
        return OUTAGE_BASELINES
    return BASELINES


class LateCost:
    """[`CostReward`] from a step on, when the answers are good; 0 before it.

    Args:
        weights (`Mapping[str, float]`): The weight of each budget.
        first_step (`int`): The first step with costs.
    """

    __name__ = "late_cost"

    def __init__(self, weights: Mapping[str, float], first_step: int):
        self.reward = CostReward(weights)
        self.first_step = first_step

    def __call__(
        self, rollout: Sequence[Rollout], trainer_state: Any, **columns: Any
    ) -> list[float | None]:
        costs = self.reward(rollout)
        if trainer_state.global_step >= self.first_step:
            return costs
        return [None if cost is None else 0.0 for cost in costs]
