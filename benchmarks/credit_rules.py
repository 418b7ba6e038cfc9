"""Credit per turn, for benchmarks/credit.py: a trainer whose tokens learn from the advantage of their turn.

No rule here has taught faster than GRPO in the sandbox (docs/lab/credit.md), so the package has none of them. A turn's
return is its reward and what follows, G_t = r_t + discount * G_{t+1}. Its advantage is the return minus a baseline:

- `turn`: the mean of G_t over the group. A rollout that ended before turn t takes part with its last turn.
- `state`: the mean over those turns of the group that were taken in the same conversation so far (GiGPO's step-level
  term, arXiv 2505.10978), added to the advantage of the whole rollout. A turn that is alone has none.

One process, and reward functions of numbers only: those of the turns are given to the trainer beside them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from agentic_prompting import MultiTurnGRPOTrainer

_EPSILON = 1e-4  # TRL's, added to each standard deviation

Group = Sequence[Sequence[float]]
"""Rewards or returns by turn of each rollout of a group."""


def returns_of(rewards: Sequence[float], discount: float) -> list[float]:
    """The return of each turn: G_t = r_t + discount * G_{t+1}."""
    returns, following = [], 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]


def turn_advantages(group: Group, discount: float) -> list[list[float]]:
    """The advantage of each turn against the turns of the same position, in the shape of `group`."""
    returns = [returns_of(one, discount) for one in group]
    values = [[one[min(turn, len(one) - 1)] for one in returns] for turn in range(max(map(len, returns)))]
    return [[_scaled(own, values[turn]) for turn, own in enumerate(one)] for one in returns]


def state_advantages(group: Group, states: Sequence[Sequence[Hashable]], discount: float) -> list[list[float]]:
    """The advantage of each turn against the turns that were taken in the same state.

    Args:
        group (`Sequence`): As in [`turn_advantages`].
        states (`Sequence`): The state of each turn. Equal states are compared.
        discount (`float`): Weight of the next turn's return.
    """
    returns, values = [returns_of(one, discount) for one in group], defaultdict[Hashable, list[float]](list)
    for one, of_rollout in zip(returns, states, strict=True):
        for value, state in zip(one, of_rollout, strict=False):  # one value and no state where there is no turn
            values[state].append(value)
    return [
        [_scaled(own, values[state]) for own, state in zip(one, of_rollout, strict=False)]
        for one, of_rollout in zip(returns, states, strict=True)
    ]


def _scaled(own: float, values: Sequence[float]) -> float:
    """A return minus the mean of the values that it is one of, over their standard deviation, as TRL scales rewards."""
    return 0.0 if len(values) < 2 else (own - float(np.mean(values))) / (float(np.std(values, ddof=1)) + _EPSILON)


def starts_of(mask: Sequence[int]) -> list[int]:
    """The places of the turns' first tokens; between two turns there are tokens that the agent did not write."""
    places = groupby(range(len(mask)), key=lambda place: mask[place])
    return [next(run) for is_own, run in places if is_own]


class CreditTrainer(MultiTurnGRPOTrainer):
    """GRPO with an advantage for each turn.

    Args:
        *args, **kwargs: As [`MultiTurnGRPOTrainer`]'s.
        by_turn (`Callable`): From a rollout to the rewards of its turns.
        rule (`str`): `rollout` (GRPO), `turn` or `state`.
        discount (`float`, *optional*, defaults to `1.0`): Weight of the next turn's return.
    """

    def __init__(
        self, *args: Any, by_turn: Callable[[Any], list[float]], rule: str, discount: float = 1.0, **kwargs: Any
    ):
        self.by_turn, self.rule, self.discount = by_turn, rule, discount
        super().__init__(*args, **kwargs)

    def _after_rewards(self, batch: Any, totals: torch.Tensor) -> None:
        self._played = batch.rollouts

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        scored = super()._generate_and_score_completions(inputs)
        if self.rule == "rollout":
            return scored
        whole = scored["advantages"].unsqueeze(1)
        of_turns = torch.zeros(scored["completion_ids"].shape, dtype=whole.dtype, device=whole.device)
        size = self.num_generations
        groups = [self._played[start : start + size] for start in range(0, len(self._played), size)]
        advantages = [one for group in groups for one in self._advantages(group)]
        for row, rollout, turns in zip(of_turns, self._played, advantages, strict=True):
            for start, advantage in zip(starts_of(rollout.mask), turns, strict=False):
                row[start:] = advantage
        scored["advantages"] = of_turns if self.rule == "turn" else whole + of_turns
        return scored

    def _advantages(self, group: Sequence[Any]) -> list[list[float]]:
        rewards = [self.by_turn(one) or [0.0] for one in group]
        if self.rule == "turn":
            return turn_advantages(rewards, self.discount)
        states = [[(*one.prompt_ids, *one.ids[:start]) for start in starts_of(one.mask)] for one in group]
        return state_advantages(rewards, states, self.discount)
