"""How good each prompt is believed to be: [`Ratings`], and TrueSkill, the paper's (3.2, Appendix B).

A rating changes only by comparisons within a batch, never by the reward itself, because rewards under different weights
cannot be compared. The update is that of the `trueskill` package; the ties and the ratings of children are ours.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Protocol

from .results import ROUNDING, Row, common_means
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


class Rated(Protocol):
    """The part of a [`Member`] that a rule may read: the prompt and its current rating."""

    @property
    def prompt(self) -> SystemPrompt: ...
    @property
    def rating(self) -> Rating: ...


class Ratings(Protocol):
    """How the prompts of a population are rated. A prompt is named by its id."""

    name: str

    def believe(self, prompt: int, parents: Mapping[int, Rating]) -> Rating:
        """The first rating of a new prompt, given those that its parents had when it was made."""

    def rate(
        self, ratings: Mapping[int, Rating], rows: Mapping[int, Row], slots: Mapping[int, int]
    ) -> Mapping[int, Rating]:
        """The ratings that change by a batch: those of the prompts in it, `ratings` being their present ones.

        Args:
            rows: By prompt its mean reward on each problem, `None` where there is none; some of each.
            slots: By prompt how often it was drawn.
        """

    def parent(self, values: Mapping[int, float]) -> int:
        """The prompt of a batch that mutates, given the V_i of those that have one."""

    def draw(self, members: Sequence[Rated], rng: random.Random) -> list[float]:
        """A skill for each, drawn from the belief about all of them."""

    def unchanged(self) -> None:
        """Called when a reflection had no new prompt to offer."""

    def state_dict(self) -> dict[str, Any]:
        """Its state beside the ratings, as plain JSON."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""


class TrueSkillRatings:
    """[`Ratings`] of the paper: each prompt's skill on its own, by the order of the V_i alone.

    Args:
        delta_sigma (`float`, *optional*, defaults to `1.0`): See [`mutation_rating`].
        tie_tolerance (`float`, *optional*, defaults to `0.01`): See [`ranks`].
    """

    name = "trueskill"

    def __init__(self, delta_sigma: float = 1.0, tie_tolerance: float = 0.01):
        self.delta_sigma, self.tie_tolerance = delta_sigma, tie_tolerance

    def believe(self, prompt: int, parents: Mapping[int, Rating]) -> Rating:
        """[`mutation_rating`] of one parent, [`crossover_rating`] of several; a fresh rating without parents."""
        known = list(parents.values())
        if len(known) == 1:
            return mutation_rating(known[0], self.delta_sigma)
        return crossover_rating(known, self.delta_sigma) if known else Rating()

    def rate(
        self, ratings: Mapping[int, Rating], rows: Mapping[int, Row], slots: Mapping[int, int]
    ) -> dict[int, Rating]:
        """[`rate`]. Nothing changes where no problem has a reward under every prompt."""
        values = [value for value in common_means(list(rows.values())) if value is not None]
        if len(values) < len(rows):
            return {}
        return dict(zip(rows, rate([ratings[one] for one in rows], values, self.tie_tolerance), strict=True))

    def parent(self, values: Mapping[int, float]) -> int:
        """The one with the highest V_i, of equal ones the first (eq 4)."""
        return max(values, key=lambda prompt: values[prompt])

    def draw(self, members: Sequence[Rated], rng: random.Random) -> list[float]:
        """[`draw_independently`]."""
        return draw_independently(members, rng)

    def unchanged(self) -> None:
        """Nothing: ratings come from comparisons alone."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing: the ratings are all there is."""


def draw_independently(members: Sequence[Rated], rng: random.Random) -> list[float]:
    """A skill for each, from its own normal distribution."""
    return [rng.gauss(member.rating.mu, member.rating.sigma) for member in members]
