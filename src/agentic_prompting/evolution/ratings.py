"""How good a system prompt is believed to be, and which prompts play next (3.2, A.5, Appendix B).

Ratings are TrueSkill over the batches in which prompts met: only who did better in the same batch counts, never the
reward itself, as rewards under different weights cannot be compared. The update is the `trueskill` package's; what is
tied and what a child starts with is ours.

A selection rule gets the members of the window, oldest first, and returns the positions of `k` different ones. It never
has to care for windows that hold fewer: [`select`] does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import NormalDist
from typing import Any, Protocol

MU, SIGMA = 25.0, 25.0 / 3
BETA, TAU, DRAW_PROBABILITY = 25.0 / 6, 25.0 / 300, 0.10
EXPLORATION = 2.0
"""λ of eq 3: how many standard deviations of doubt count in a prompt's favour."""
_ROUNDING = 1e-9  # .52 - .51 is a little more than .01 in floating point


@dataclass(frozen=True)
class Rating:
    """A belief about the skill of a prompt: a normal distribution.

    Args:
        mu (`float`, *optional*, defaults to `25.0`): Its mean.
        sigma (`float`, *optional*, defaults to `25 / 3`): Its standard deviation, above 0.

    Raises:
        `ValueError`: `sigma` is not positive, or one of the two is not finite.
    """

    mu: float = MU
    sigma: float = SIGMA

    def __post_init__(self):
        if not (math.isfinite(self.mu) and math.isfinite(self.sigma) and self.sigma > 0):
            raise ValueError(f"a rating needs finite numbers and sigma > 0, got mu={self.mu}, sigma={self.sigma}")


def rate(ratings: Sequence[Rating], scores: Sequence[float], tie_tolerance: float = 0.01) -> list[Rating]:
    """The ratings after one batch in which every prompt played against every other (Appendix B).

    Args:
        ratings (`Sequence[Rating]`): One per prompt.
        scores (`Sequence[float]`): V_i, its mean reward on the batch. Finite; leave out prompts that have none.
        tie_tolerance (`float`, *optional*, defaults to `0.01`): See [`ranks`].

    Returns:
        `list[Rating]`: In the order given. Fewer than two prompts are no comparison: their ratings stay.

    Raises:
        `ValueError`: The lengths differ, a score is not finite, or the tolerance is negative.

    Example:

        >>> [f"{new.mu:.3f} {new.sigma:.3f}" for new in rate([Rating()] * 3, [0.9, 0.4, 0.4])]
        ['30.109 6.735', '22.443 5.972', '22.448 5.974']
    """
    if len(ratings) != len(scores):
        raise ValueError(f"{len(ratings)} ratings but {len(scores)} scores")
    places = ranks(scores, tie_tolerance)
    if len(ratings) < 2:
        return list(ratings)
    environment = _environment()
    players = [(environment.create_rating(rating.mu, rating.sigma),) for rating in ratings]
    return [Rating(new.mu, new.sigma) for (new,) in environment.rate(players, ranks=places)]


def ranks(scores: Sequence[float], tie_tolerance: float = 0.01) -> list[int]:
    """Places from 0 (best). Scores within the tolerance of the *first* of a group share its place.

    Ties do not chain: .52 .515 .508 .50 are two groups of two at a tolerance of .01, because .508 is .012 below .52.

    Raises:
        `ValueError`: A score is not finite, or the tolerance is negative.
    """
    if not all(math.isfinite(score) for score in scores):
        raise ValueError(f"scores must be finite, got {list(scores)}: leave out prompts that have no score")
    if tie_tolerance < 0:
        raise ValueError(f"tie_tolerance must not be negative, got {tie_tolerance}")
    places = [0] * len(scores)
    place, first = -1, math.inf
    for index in sorted(range(len(scores)), key=lambda i: -scores[i]):
        if first - scores[index] > tie_tolerance + _ROUNDING:
            place, first = place + 1, scores[index]
        places[index] = place
    return places


def mutation_rating(parent: Rating, delta_sigma: float = 1.0) -> Rating:
    """What a mutated child starts with: its parent's mean, less certain: sqrt(sigma² + delta_sigma²) (Appendix B).

    Algorithm 1 prints sigma + delta_sigma; the appendix, which derives it, is followed here.
    """
    return Rating(parent.mu, math.hypot(parent.sigma, delta_sigma))


def crossover_rating(parents: Sequence[Rating], delta_sigma: float = 1.0) -> Rating:
    """What a crossed child starts with: the parents' precision-weighted mean, sigma² = 1 / Σ 1/sigma_i² + delta_sigma².

    Raises:
        `ValueError`: There is no parent.
    """
    if not parents:
        raise ValueError("a crossed child needs at least one parent")
    precisions = [rating.sigma**-2 for rating in parents]
    total = sum(precisions)
    mean = sum(rating.mu * precision for rating, precision in zip(parents, precisions, strict=True)) / total
    return Rating(mean, math.sqrt(1 / total + delta_sigma**2))


@lru_cache(maxsize=1)
def _environment() -> Any:
    """TrueSkill with its defaults, on Python's own normal distribution: the package's built-in one is good to 1e-7."""
    from trueskill import TrueSkill

    return TrueSkill(MU, SIGMA, BETA, TAU, DRAW_PROBABILITY, backend=(_cdf, _pdf, NormalDist().inv_cdf))


def _cdf(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def _pdf(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


# Who plays -----------------------------------------------------------------------------------------------------------


class Rated(Protocol):
    """What a rule may look at: the current belief."""

    @property
    def rating(self) -> Rating: ...


SelectionRule = Callable[[Sequence[Rated], int, random.Random], list[int]]


def optimistic_scores(members: Sequence[Rated], exploration: float = EXPLORATION) -> list[float]:
    """score = μ + λσ of each (eq 3)."""
    return [member.rating.mu + exploration * member.rating.sigma for member in members]


def top_plus_random(
    members: Sequence[Rated], k: int, rng: random.Random, exploration: float = EXPLORATION
) -> list[int]:
    """The highest score always (of equal ones the youngest), the others uniformly: the paper's own runs (A.5)."""
    scores = optimistic_scores(members, exploration)
    top = max(range(len(scores)), key=lambda position: (scores[position], position))
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


def uniform(members: Sequence[Rated], k: int, rng: random.Random) -> list[int]:
    """Each with the same probability."""
    return rng.sample(range(len(members)), k)


RULES: dict[str, Callable[..., list[int]]] = {
    "top_plus_random": top_plus_random,
    "softmax": softmax,
    "uniform": uniform,
}
"""The shipped rules by name."""


def selection_rule(
    rule: str | SelectionRule,
    exploration: float = EXPLORATION,
    temperature: float = 1.0,
    independent: bool = False,
) -> SelectionRule:
    """A rule by name with its parameters set; an object of one's own comes back as it is.

    Args:
        rule (`str` or `Callable`): One of `top_plus_random`, `softmax`, `uniform`.
        exploration (`float`, *optional*, defaults to `2.0`): λ of eq 3, at least 0.
        temperature (`float`, *optional*, defaults to `1.0`): T of eq 3, above 0; only `softmax` has one.
        independent (`bool`, *optional*, defaults to `False`): It is for independent draws.

    Raises:
        `ValueError`: There is no such rule, a parameter is out of range, or independent draws would all be the same.
    """
    if exploration < 0 or temperature <= 0:
        raise ValueError(f"need exploration >= 0 and temperature > 0, got {exploration} and {temperature}")
    if callable(rule):
        return rule
    if rule not in RULES:
        raise ValueError(f"no selection rule {rule!r}: choose one of {', '.join(RULES)}, or pass a function")
    if independent and rule == "top_plus_random":
        raise ValueError(f"independent draws by {rule!r} would all give the same prompt: use softmax or uniform")
    if rule == "softmax":
        return partial(softmax, exploration=exploration, temperature=temperature)
    return RULES[rule] if rule == "uniform" else partial(RULES[rule], exploration=exploration)


def select(
    members: Sequence[Rated],
    k: int,
    rule: SelectionRule,
    rng: random.Random,
    independent: bool = False,
) -> list[int]:
    """Positions of `k` members: different ones, as long as there are enough; else each at least ⌊k / n⌋ times.

    Args:
        members (`Sequence[Rated]`): The window, oldest first, not empty.
        k (`int`): How many, at least 1.
        rule (`Callable`): One of the rules above.
        rng (`random.Random`): The randomness.
        independent (`bool`, *optional*, defaults to `False`): Draw one after another from all, as Algorithm 1 reads:
            the same one may come again.

    Raises:
        `ValueError`: There is no member, or `k` is below 1.
    """
    if not members or k < 1:
        raise ValueError(f"cannot select {k} of {len(members)} prompts: both numbers must be at least 1")
    if independent:
        return [rule(members, 1, rng)[0] for _ in range(k)]
    chosen: list[int] = []
    while len(chosen) < k:
        chosen += rule(members, min(k - len(chosen), len(members)), rng)
    return chosen


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
