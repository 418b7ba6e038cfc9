"""The rules that choose the system prompts of a batch (eq 3, A.5), and [`select`]."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from .system_prompt import SystemPrompt

EXPLORATION = 2.0
"""λ of eq 3: the number of standard deviations of doubt that count in a prompt's favour."""


class Belief(Protocol):
    """The part of a [`Rating`] that a rule may read: mean and standard deviation of the skill."""

    @property
    def mu(self) -> float: ...
    @property
    def sigma(self) -> float: ...


class RatedPrompt(Protocol):
    """The part of a [`Member`] that a rule may read: the prompt and its current rating."""

    @property
    def prompt(self) -> SystemPrompt: ...
    @property
    def rating(self) -> Belief: ...


SelectionRule = Callable[[Sequence[RatedPrompt], int, random.Random], list[int]]
"""Gets the window, oldest first, k and a random generator; returns the positions of k different
members. k is at most their number."""


def optimistic_scores(
    members: Sequence[RatedPrompt], exploration: float = EXPLORATION
) -> list[float]:
    """Return score = μ + λσ of each member (eq 3)."""
    return [member.rating.mu + exploration * member.rating.sigma for member in members]


def top_plus_random(
    members: Sequence[RatedPrompt],
    k: int,
    rng: random.Random,
    exploration: float = EXPLORATION,
    temperature: float = 1.0,
) -> list[int]:
    """Draw the highest score and the others uniformly, as in the paper's runs (A.5).

    Of equally high scores the newest member is taken.
    """
    scores = optimistic_scores(members, exploration)
    top = max(range(len(scores)), key=lambda position: (scores[position], position))
    # Draw among the positions that are left if the top one is taken out.
    others = rng.sample(range(len(members) - 1), k - 1)
    # The positions after the top one move up by one.
    return [top, *(position + (position >= top) for position in others)]


def softmax(
    members: Sequence[RatedPrompt],
    k: int,
    rng: random.Random,
    exploration: float = EXPLORATION,
    temperature: float = 1.0,
) -> list[int]:
    """Draw one after another with p ∝ exp(score / T) among the rest (eq 3, Algorithm 1).

    If the exponentials of all remaining members underflow to 0, they are drawn uniformly.
    """
    # The largest exponent is 0, so none overflows.
    logits = [score / temperature for score in optimistic_scores(members, exploration)]
    max_logit = max(logits)
    weights = [math.exp(logit - max_logit) for logit in logits]

    # Draw without replacement: a drawn member has no weight any more.
    positions: list[int] = []
    for _ in range(k):
        # All weights that are left underflowed to 0.
        if not any(weights):
            weights = [float(position not in positions) for position in range(len(logits))]
        positions += rng.choices(range(len(weights)), weights)
        weights[positions[-1]] = 0.0
    return positions


def uniform(
    members: Sequence[RatedPrompt],
    k: int,
    rng: random.Random,
    exploration: float = EXPLORATION,
    temperature: float = 1.0,
) -> list[int]:
    """Draw every member with the same probability."""
    return rng.sample(range(len(members)), k)


SELECTION_RULES: dict[str, Callable[..., list[int]]] = {
    "top_plus_random": top_plus_random,
    "softmax": softmax,
    "uniform": uniform,
}
"""The shipped rules by name.

Each is a [`SelectionRule`] that takes λ and T of eq 3, too: [`selection_rule`] sets them.
"""


def selection_rule(
    rule: str | SelectionRule,
    exploration: float = EXPLORATION,
    temperature: float = 1.0,
    independent: bool = False,
) -> SelectionRule:
    """Return a rule by name with its parameters set. A function is returned unchanged.

    Args:
        rule (`str` or `Callable`): A name of `SELECTION_RULES`, or a function of your own.
        exploration (`float`, *optional*, defaults to `2.0`): λ of eq 3, at least 0.
        temperature (`float`, *optional*, defaults to `1.0`): T of eq 3, above 0; only `softmax` has
            one.
        independent (`bool`, *optional*, defaults to `False`): Whether the prompts are drawn
            independently.

    Raises:
        `ValueError`: There is no such rule, a parameter is out of range, or independent draws would
            all be the same.
    """
    if not (exploration >= 0 and temperature > 0):  # also for NaN
        raise ValueError(
            f"need exploration >= 0 and temperature > 0, got {exploration} and {temperature}"
        )
    # A rule of the user's own knows its parameters itself.
    if callable(rule):
        return rule

    # A shipped rule, with its parameters.
    if rule not in SELECTION_RULES:
        raise ValueError(
            f"no selection rule {rule!r}: choose one of {', '.join(SELECTION_RULES)}, or pass a "
            "function"
        )
    # A single draw by this rule is always the top prompt.
    if independent and rule == "top_plus_random":
        raise ValueError(
            f"independent draws by {rule!r} would all give the same prompt: use softmax or uniform"
        )
    return partial(SELECTION_RULES[rule], exploration=exploration, temperature=temperature)


def select(
    members: Sequence[RatedPrompt],
    k: int,
    rule: SelectionRule,
    rng: random.Random,
    independent: bool = False,
) -> list[int]:
    """Return the positions of `k` members.

    They are different as long as there are enough; else each occurs at least ⌊k / n⌋ times.

    Args:
        members (`Sequence[RatedPrompt]`): The window, oldest first, not empty.
        k (`int`): The number of members, at least 1.
        rule (`Callable`): One of the rules above.
        rng (`random.Random`): The random generator.
        independent (`bool`, *optional*, defaults to `False`): Draw each from all members, as
            Algorithm 1 reads, so one may be drawn twice.

    Raises:
        `ValueError`: There is no member, `k` is below 1, or the rule returns invalid positions.
    """
    if not members or k < 1:
        raise ValueError(
            f"cannot select {k} of {len(members)} prompts: both numbers must be at least 1"
        )
    # Independent draws are single ones.
    max_draws = 1 if independent else len(members)
    selected: list[int] = []
    while len(selected) < k:
        # One call of the rule draws different members; call it until there are k.
        count = min(k - len(selected), max_draws)
        positions = list(rule(members, count, rng))
        # A user's rule may return anything.
        valid_positions = set(positions) & set(range(len(members)))
        if len(positions) != count or len(valid_positions) != count:
            name = getattr(rule, "__name__", repr(rule))
            raise ValueError(
                f"the selection rule {name} must return {count} different positions below "
                f"{len(members)}, not {positions}"
            )
        selected += positions
    return selected
