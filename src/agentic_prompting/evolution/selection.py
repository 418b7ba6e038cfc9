"""Which prompts play in the next batch: rules as small functions (3.2 and A.5).

A rule gets the members of the window, oldest first, and returns the positions of `k` different ones. It never has to
care for windows that hold fewer than `k`: [`select`] does. Randomness is the `random.Random` that is passed in.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from .ratings import Rating

EXPLORATION = 2.0
"""λ of eq 3: how many standard deviations of doubt count in a prompt's favour."""


class Rated(Protocol):
    """What a rule may look at.

    Attributes:
        rating ([`Rating`]): The current belief.
    """

    @property
    def rating(self) -> Rating: ...


SelectionRule = Callable[[Sequence[Rated], int, random.Random], list[int]]


def optimistic_scores(members: Sequence[Rated], exploration: float = EXPLORATION) -> list[float]:
    """score = μ + λσ of each (eq 3)."""
    return [member.rating.mu + exploration * member.rating.sigma for member in members]


def top_plus_random(
    members: Sequence[Rated], k: int, rng: random.Random, exploration: float = EXPLORATION
) -> list[int]:
    """The highest score always, the others uniformly: what the paper's own runs did (A.5)."""
    top = _highest(optimistic_scores(members, exploration), 1)[0]
    others = rng.sample(range(len(members) - 1), k - 1)
    return [top, *(position + (position >= top) for position in others)]


def softmax(
    members: Sequence[Rated],
    k: int,
    rng: random.Random,
    exploration: float = EXPLORATION,
    temperature: float = 1.0,
) -> list[int]:
    """One after another with p ∝ exp(score / T) among those not drawn yet (eq 3, Algorithm 1)."""
    scores = optimistic_scores(members, exploration)
    top = max(scores)
    return _draw([math.exp((score - top) / temperature) for score in scores], k, rng)


def ucb(members: Sequence[Rated], k: int, rng: random.Random, exploration: float = EXPLORATION) -> list[int]:
    """The k highest scores; of equal ones the younger. Nothing is random."""
    return _highest(optimistic_scores(members, exploration), k)


def lucb(members: Sequence[Rated], k: int, rng: random.Random, exploration: float = EXPLORATION) -> list[int]:
    """The highest mean, and as its challengers the highest scores among the others (Kalyanakrishnan et al. 2012).

    The released code has a rule of this name that is another: see docs/fidelity.md.
    """
    leader = _highest([member.rating.mu for member in members], 1)[0]
    by_score = _highest(optimistic_scores(members, exploration), k)
    return [leader, *(position for position in by_score if position != leader)][:k]


def uniform(members: Sequence[Rated], k: int, rng: random.Random) -> list[int]:
    """Each with the same probability."""
    return rng.sample(range(len(members)), k)


RULES: dict[str, Callable[..., list[int]]] = {
    "top_plus_random": top_plus_random,
    "softmax": softmax,
    "ucb": ucb,
    "lucb": lucb,
    "uniform": uniform,
}
"""The shipped rules by name."""


def selection_rule(
    rule: str | SelectionRule, exploration: float = EXPLORATION, temperature: float = 1.0
) -> SelectionRule:
    """A rule by name with its parameters set; an object of one's own comes back as it is.

    Args:
        rule (`str` or `Callable`): One of `top_plus_random`, `softmax`, `ucb`, `lucb`, `uniform`.
        exploration (`float`, *optional*, defaults to `2.0`): λ of eq 3, at least 0.
        temperature (`float`, *optional*, defaults to `1.0`): T of eq 3, above 0; only `softmax` has one.

    Raises:
        `ValueError`: There is no such rule, or a parameter is out of range.
    """
    if exploration < 0 or temperature <= 0:
        raise ValueError(f"need exploration >= 0 and temperature > 0, got {exploration} and {temperature}")
    if callable(rule):
        return rule
    if rule not in RULES:
        raise ValueError(f"no selection rule {rule!r}: choose one of {', '.join(RULES)}, or pass a function")
    if rule == "softmax":
        return partial(softmax, exploration=exploration, temperature=temperature)
    return RULES[rule] if rule == "uniform" else partial(RULES[rule], exploration=exploration)


def check_independent(rule: str | SelectionRule) -> None:
    """Raises `ValueError` for a shipped rule whose independent draws would all be the same prompt."""
    if isinstance(rule, str) and rule not in ("softmax", "uniform"):
        raise ValueError(f"independent draws by {rule!r} would all give the same prompt: use softmax or uniform")


def select(
    members: Sequence[Rated],
    k: int,
    rule: SelectionRule,
    rng: random.Random,
    include_newest: bool = False,
    independent: bool = False,
) -> list[int]:
    """Positions of `k` members: different ones, as long as there are enough; else each at least ⌊k / n⌋ times.

    Args:
        members (`Sequence[Rated]`): The window, oldest first, not empty.
        k (`int`): How many, at least 1.
        rule (`Callable`): One of the rules above.
        rng (`random.Random`): The randomness.
        include_newest (`bool`, *optional*, defaults to `False`): The newest always plays; the rule chooses the others.
        independent (`bool`, *optional*, defaults to `False`): Draw one after another from all, as Algorithm 1 reads:
            the same one may come again.

    Raises:
        `ValueError`: There is no member, or `k` is below 1.
    """
    if not members or k < 1:
        raise ValueError(f"cannot select {k} of {len(members)} prompts: both numbers must be at least 1")
    if independent:
        fixed = [len(members) - 1] if include_newest else []
        return [*fixed, *(rule(members, 1, rng)[0] for _ in range(k - len(fixed)))]
    chosen: list[int] = []
    while len(chosen) < k:
        chosen += _distinct(members, min(k - len(chosen), len(members)), rule, rng, include_newest)
    return chosen


def _distinct(
    members: Sequence[Rated], k: int, rule: SelectionRule, rng: random.Random, include_newest: bool
) -> list[int]:
    if not include_newest:
        return rule(members, k, rng)
    newest = len(members) - 1
    return [newest] if k == 1 else [newest, *rule(members[:-1], k - 1, rng)]


def _highest(values: Sequence[float], k: int) -> list[int]:
    """Positions of the k highest values, highest first; of equal ones the younger."""
    best = heapq.nlargest(k, zip(values, range(len(values)), strict=True))
    return [position for _, position in best]


def _draw(weights: list[float], k: int, rng: random.Random) -> list[int]:
    """k different positions, one after another with p ∝ weight; uniformly where only weights of 0 are left."""
    weights = list(weights)
    left = list(range(len(weights)))
    chosen: list[int] = []
    for _ in range(k):
        total = math.fsum(weights)
        place = rng.choices(range(len(left)), weights if total > 0 else None)[0]
        chosen.append(left.pop(place))
        weights.pop(place)
    return chosen
