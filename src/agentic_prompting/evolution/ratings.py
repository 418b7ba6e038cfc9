"""How good each prompt is believed to be (TrueSkill: 3.2, Appendix B), and which prompts the next batch plays under
(eq 3, A.5).

A rating changes only by comparisons within a batch, never by the reward itself, because rewards under different weights
cannot be compared. The update is that of the `trueskill` package; the ties and the ratings of children are ours.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import NormalDist
from typing import Any, Protocol

from .results import ROUNDING
from .system_prompt import SystemPrompt

MU, SIGMA = 25.0, 25.0 / 3
BETA, TAU, DRAW_PROBABILITY = 25.0 / 6, 25.0 / 300, 0.10
EXPLORATION = 2.0
"""λ of eq 3: how many standard deviations of doubt count in a prompt's favour."""


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
    """The ratings after one batch in which every prompt is compared with every other (Appendix B).

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
    if not all(map(math.isfinite, scores)) or tie_tolerance < 0:
        raise ValueError(
            f"scores must be finite and tie_tolerance must not be negative: {list(scores)}, {tie_tolerance}"
        )
    places = [0] * len(scores)
    place, first = -1, math.inf
    for index in sorted(range(len(scores)), key=lambda i: -scores[i]):
        if first - scores[index] > tie_tolerance + ROUNDING:
            place, first = place + 1, scores[index]
        places[index] = place
    return places


def mutation_rating(parent: Rating, delta_sigma: float = 1.0) -> Rating:
    """The first rating of a mutated child: its parent's mean, less certain, sqrt(sigma² + delta_sigma²) (Appendix B).

    Algorithm 1 prints sigma + delta_sigma. We follow the appendix, which derives its formula.
    """
    return Rating(parent.mu, math.hypot(parent.sigma, delta_sigma))


def crossover_rating(parents: Sequence[Rating], delta_sigma: float = 1.0) -> Rating:
    """The first rating of a crossed child: the parents' precision-weighted mean, with
    sigma² = 1 / Σ 1/sigma_i² + delta_sigma² (Appendix B).

    Raises:
        `ValueError`: There is no parent.
    """
    if not parents:
        raise ValueError("a crossed child needs at least one parent")
    precisions = [rating.sigma**-2 for rating in parents]
    total = sum(precisions)
    centre = sum(rating.mu * precision for rating, precision in zip(parents, precisions, strict=True)) / total
    return Rating(centre, math.sqrt(1 / total + delta_sigma**2))


@lru_cache(maxsize=1)
def _environment() -> Any:
    """TrueSkill with its defaults, on Python's own normal distribution: the package's built-in one is good to 1e-7."""
    from trueskill import TrueSkill

    normal = NormalDist()
    return TrueSkill(MU, SIGMA, BETA, TAU, DRAW_PROBABILITY, backend=(_cdf, normal.pdf, normal.inv_cdf))


def _cdf(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2  # exact in the lower tail, where NormalDist's `1 + erf` is not


# Selection ------------------------------------------------------------------------------------------------------------


class Rated(Protocol):
    """The part of a [`Member`] that a rule may read: the prompt and its current rating."""

    @property
    def prompt(self) -> SystemPrompt: ...
    @property
    def rating(self) -> Rating: ...


SelectionRule = Callable[[Sequence[Rated], int, random.Random], list[int]]
"""Gets the window, oldest first, k and a random generator; returns the positions of k different members. k is at most
their number."""


def optimistic_scores(members: Sequence[Rated], exploration: float = EXPLORATION) -> list[float]:
    """score = μ + λσ of each (eq 3)."""
    return [member.rating.mu + exploration * member.rating.sigma for member in members]


def top_plus_random(
    members: Sequence[Rated], k: int, rng: random.Random, exploration: float = EXPLORATION, temperature: float = 1.0
) -> list[int]:
    """Always the highest score (of equal ones the newest), and the others uniformly, as in the paper's runs (A.5)."""
    scores = optimistic_scores(members, exploration)
    top = max(range(len(scores)), key=lambda position: (scores[position], position))
    others = rng.sample(range(len(members) - 1), k - 1)
    return [top, *(position + (position >= top) for position in others)]


def softmax(
    members: Sequence[Rated], k: int, rng: random.Random, exploration: float = EXPLORATION, temperature: float = 1.0
) -> list[int]:
    """One after another with p ∝ exp(score / T) among those not drawn yet (eq 3, Algorithm 1).

    If the exponentials of all that are left underflow to 0, they are drawn uniformly.
    """
    logits = [score / temperature for score in optimistic_scores(members, exploration)]
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    chosen: list[int] = []
    for _ in range(k):
        if not any(weights):
            weights = [float(place not in chosen) for place in range(len(logits))]
        chosen += rng.choices(range(len(weights)), weights)
        weights[chosen[-1]] = 0.0
    return chosen


def uniform(
    members: Sequence[Rated], k: int, rng: random.Random, exploration: float = EXPLORATION, temperature: float = 1.0
) -> list[int]:
    """Every member with the same probability."""
    return rng.sample(range(len(members)), k)


RULES: dict[str, Callable[..., list[int]]] = {
    "top_plus_random": top_plus_random,
    "softmax": softmax,
    "uniform": uniform,
}
"""The shipped rules by name."""


def selection_rule(
    rule: str | SelectionRule, exploration: float = EXPLORATION, temperature: float = 1.0, independent: bool = False
) -> SelectionRule:
    """A rule by name with its parameters set. A function is returned as it is.

    Args:
        rule (`str` or `Callable`): One of `top_plus_random`, `softmax`, `uniform`.
        exploration (`float`, *optional*, defaults to `2.0`): λ of eq 3, at least 0.
        temperature (`float`, *optional*, defaults to `1.0`): T of eq 3, above 0; only `softmax` has one.
        independent (`bool`, *optional*, defaults to `False`): Whether the prompts are drawn independently.

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
    return partial(RULES[rule], exploration=exploration, temperature=temperature)


def select(
    members: Sequence[Rated], k: int, rule: SelectionRule, rng: random.Random, independent: bool = False
) -> list[int]:
    """Positions of `k` members: different ones, as long as there are enough; else each at least ⌊k / n⌋ times.

    Args:
        members (`Sequence[Rated]`): The window, oldest first, not empty.
        k (`int`): How many, at least 1.
        rule (`Callable`): One of the rules above.
        rng (`random.Random`): The random generator.
        independent (`bool`, *optional*, defaults to `False`): Draw each from all members, as Algorithm 1 reads, so that
            one may be drawn twice.

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
