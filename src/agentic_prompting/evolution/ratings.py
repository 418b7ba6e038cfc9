"""How good each prompt is believed to be: TrueSkill (3.2, Appendix B).

A rating changes only by comparisons within a batch, never by the reward itself, because rewards under different weights
cannot be compared. The update is that of the `trueskill` package; the ties and the ratings of children are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

from .results import ROUNDING

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
            raise ValueError(
                f"a rating needs finite numbers and sigma > 0, got mu={self.mu}, sigma={self.sigma}"
            )


def rate(
    ratings: Sequence[Rating], scores: Sequence[float], tie_tolerance: float = 0.01
) -> list[Rating]:
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


def child_rating(parents: Sequence[Rating], delta_sigma: float = 1.0) -> Rating:
    """[`mutation_rating`] of one parent, [`crossover_rating`] of several; a fresh rating without parents."""
    if len(parents) == 1:
        return mutation_rating(parents[0], delta_sigma)
    return crossover_rating(parents, delta_sigma) if parents else Rating()


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
    centre = (
        sum(rating.mu * precision for rating, precision in zip(parents, precisions, strict=True))
        / total
    )
    return Rating(centre, math.sqrt(1 / total + delta_sigma**2))


@lru_cache(maxsize=1)
def _environment() -> Any:
    """TrueSkill with its defaults, on Python's own normal distribution: the package's built-in one is good to 1e-7."""
    from trueskill import TrueSkill

    normal = NormalDist()
    return TrueSkill(
        MU, SIGMA, BETA, TAU, DRAW_PROBABILITY, backend=(_cdf, normal.pdf, normal.inv_cdf)
    )


def _cdf(x: float) -> float:
    return (
        math.erfc(-x / math.sqrt(2)) / 2
    )  # exact in the lower tail, where NormalDist's `1 + erf` is not
