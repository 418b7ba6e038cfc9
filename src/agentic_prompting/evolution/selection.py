"""Which prompts the next batch plays under (eq 3, A.5): the shipped rules, and [`select`], which draws by any rule."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from .ratings import EXPLORATION, Rating
from .system_prompt import SystemPrompt


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
    members: Sequence[Rated],
    k: int,
    rng: random.Random,
    exploration: float = EXPLORATION,
    temperature: float = 1.0,
) -> list[int]:
    """Always the highest score (of equal ones the newest), and the others uniformly, as in the paper's runs (A.5)."""
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
    members: Sequence[Rated],
    k: int,
    rng: random.Random,
    exploration: float = EXPLORATION,
    temperature: float = 1.0,
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
    rule: str | SelectionRule,
    exploration: float = EXPLORATION,
    temperature: float = 1.0,
    independent: bool = False,
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
        raise ValueError(
            f"need exploration >= 0 and temperature > 0, got {exploration} and {temperature}"
        )
    if callable(rule):
        return rule
    if rule not in RULES:
        raise ValueError(
            f"no selection rule {rule!r}: choose one of {', '.join(RULES)}, or pass a function"
        )
    if independent and rule == "top_plus_random":
        raise ValueError(
            f"independent draws by {rule!r} would all give the same prompt: use softmax or uniform"
        )
    return partial(RULES[rule], exploration=exploration, temperature=temperature)


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
        rng (`random.Random`): The random generator.
        independent (`bool`, *optional*, defaults to `False`): Draw each from all members, as Algorithm 1 reads, so that
            one may be drawn twice.

    Raises:
        `ValueError`: There is no member, `k` is below 1, or the rule draws something else.
    """
    if not members or k < 1:
        raise ValueError(
            f"cannot select {k} of {len(members)} prompts: both numbers must be at least 1"
        )
    most = 1 if independent else len(members)
    chosen: list[int] = []
    while (left := min(k - len(chosen), most)) > 0:
        places = list(rule(members, left, rng))
        if len(places) != left or len(set(places) & set(range(len(members)))) != left:
            name, wanted = (
                getattr(rule, "__name__", repr(rule)),
                f"{left} different positions below {len(members)}",
            )
            raise ValueError(f"the selection rule {name} must return {wanted}, not {places}")
        chosen += places
    return chosen
