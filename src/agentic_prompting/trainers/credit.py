"""Which turn of a rollout earned what: the arithmetic of `credit`, without a trainer and without tensors.

A rollout's rewards are numbers by turn; a reward for the whole rollout is its last turn's. The return of a turn is its
reward and what follows, G_t = r_t + discount * G_{t+1}. A turn's advantage is its return minus a baseline:

- `turn`: the mean of G_t over the group. A rollout that ended before turn t takes part with its last turn.
- `state`: the mean over those turns of the group that were taken in the same conversation so far (GiGPO's step-level
  term, arXiv 2505.10978). A turn that is alone has no advantage. The sum with the rollout's is made by the caller.

With a discount of 1 and all reward on the last turn every return of a rollout is its reward, so `turn` is GRPO.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import numpy as np

_EPSILON = 1e-4  # TRL's, added to each standard deviation

Given = float | list[float | None] | None
"""What one function says of a rollout: a number, a list of them, one for each turn, or nothing."""


def add_up(given: Given) -> float | None:
    """The reward of the whole rollout: the sum of its turns', `None` where no turn was judged."""
    if not isinstance(given, list):
        return given
    known = [one for one in given if one is not None and one == one]
    return float(sum(known)) if known else None


def turn_rewards(by_function: Sequence[Given], weights: Sequence[float], turns: int) -> list[float] | None:
    """The rewards of a rollout's turns; `None` where no function gave any.

    Args:
        by_function (`Sequence`): What each reward function says of the rollout. `None` and NaN are nothing.
        weights (`Sequence[float]`): Weights of the functions.
        turns (`int`): Turns of the rollout. One without a turn counts as if it had one.
    """
    rewards, is_judged = [0.0] * max(turns, 1), False
    for given, weight in zip(by_function, weights, strict=True):
        of_turns = given if isinstance(given, list) else [*[None] * (len(rewards) - 1), given]
        for turn, reward in enumerate(of_turns):
            if reward is not None and reward == reward:
                rewards[turn] += weight * reward
                is_judged = True
    return rewards if is_judged else None


def returns_of(rewards: Sequence[float], discount: float) -> list[float]:
    """The return of each turn: G_t = r_t + discount * G_{t+1}."""
    returns, following = [], 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]


def turn_advantages(
    groups: Sequence[Sequence[list[float] | None]], discount: float, scale: str
) -> list[list[list[float]]]:
    """The advantage of each turn against the turns of the same position in its group.

    Args:
        groups (`Sequence`): For each group its rollouts' rewards by turn ([`turn_rewards`]); `None` for a rollout
            without reward, which is in no baseline.
        discount (`float`): Weight of a later turn's reward, in (0, 1].
        scale (`str`): What advantages are divided by, TRL's `scale_rewards`. `group`: the standard deviation over what
            the baseline is a mean of; `batch`: that of the returns of all first turns; `none`: nothing.

    Returns:
        `list`: In the shape of `groups`; an empty list for a rollout without reward.
    """
    batch = _batch_deviation(groups, discount) if scale == "batch" else None
    advantages = []
    for group in groups:
        returns = [None if one is None else returns_of(one, discount) for one in group]
        known = [one for one in returns if one is not None]
        values = [[one[min(turn, len(one) - 1)] for one in known] for turn in range(max(map(len, known), default=0))]
        advantages.append(
            [
                [] if one is None else [_scaled(own, values[turn], scale, batch) for turn, own in enumerate(one)]
                for one in returns
            ]
        )
    return advantages


def state_advantages(
    groups: Sequence[Sequence[list[float] | None]],
    states: Sequence[Sequence[Sequence[Hashable]]],
    discount: float,
    scale: str,
) -> list[list[list[float]]]:
    """The advantage of each turn against the turns of its group that were taken in the same state.

    Args:
        groups (`Sequence`), discount (`float`), scale (`str`): As in [`turn_advantages`].
        states (`Sequence`): For each group and rollout the state of each turn. Equal states are compared.

    Returns:
        `list`: As [`turn_advantages`]. 0 for a turn that nothing can be compared with.
    """
    batch = _batch_deviation(groups, discount) if scale == "batch" else None
    advantages = []
    for group, of_group in zip(groups, states, strict=True):
        returns = [[] if one is None else returns_of(one, discount) for one in group]
        values: dict[Hashable, list[float]] = defaultdict(list)
        for one, of_rollout in zip(returns, of_group, strict=True):
            for value, state in zip(one, of_rollout, strict=False):  # one value and no state where there is no turn
                values[state].append(value)
        advantages.append(
            [
                [_scaled(own, values[state], scale, batch) for own, state in zip(one, of_rollout, strict=False)]
                for one, of_rollout in zip(returns, of_group, strict=True)
            ]
        )
    return advantages


def shared_states(states: Sequence[Sequence[Sequence[Hashable]]]) -> float:
    """The share of turns whose state is also that of another turn of the group; arguments as [`state_advantages`]'s."""
    counts = [Counter(state for one in group for state in one) for group in states]
    turns = sum(count.total() for count in counts)
    return sum(n for count in counts for n in count.values() if n > 1) / max(turns, 1)


def _scaled(own: float, values: Sequence[float], scale: str, batch: float | None) -> float:
    """A return minus the mean of the values that it is one of, scaled."""
    if len(values) < 2:
        return 0.0
    advantage = own - float(np.mean(values))
    if scale == "none":
        return advantage
    deviation = float(np.std(values, ddof=1)) if batch is None else batch
    return advantage / (deviation + _EPSILON)


def _batch_deviation(groups: Sequence[Sequence[list[float] | None]], discount: float) -> float:
    firsts = [returns_of(one, discount)[0] for group in groups for one in group if one is not None]
    return float(np.std(firsts, ddof=1)) if len(firsts) > 1 else 0.0
