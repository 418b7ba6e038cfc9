"""How prompts did on a batch (eq 9), what is believed of them because of it (TrueSkill: 3.2, Appendix B), and who plays
next (eq 3, A.5).

Only who did better in the same batch counts for a rating, never the reward itself: rewards under different weights
cannot be compared. The update is the `trueskill` package's; what is tied and what a child starts with is ours.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import NormalDist, fmean
from typing import Any, Protocol

from .system_prompt import SystemPrompt

MU, SIGMA = 25.0, 25.0 / 3
BETA, TAU, DRAW_PROBABILITY = 25.0 / 6, 25.0 / 300, 0.10
EXPLORATION = 2.0
"""λ of eq 3: how many standard deviations of doubt count in a prompt's favour."""
_ROUNDING = 1e-9  # .52 - .51 is a little more than .01 in floating point

Row = Sequence[float | None]
"""Mean rewards of one prompt, a number per problem; `None` where all attempts failed for outside reasons."""


@dataclass(frozen=True)
class Attempt:
    """One rollout as the reference LLM gets to read it.

    Args:
        text (`str`): Everything the policy wrote and was answered, in order.
        reward (`float`, *optional*): `None` if it failed through no fault of the policy: it is then no evidence.
    """

    text: str
    reward: float | None


@dataclass(frozen=True)
class ProblemResult:
    """The rollouts of one problem under one system prompt.

    Args:
        question (`str`): The problem.
        truth (`str`): The accepted answer(s), for the reference LLM only.
        attempts (`tuple[Attempt, ...]`): The N rollouts.
    """

    question: str
    truth: str
    attempts: tuple[Attempt, ...] = ()

    @property
    def scored(self) -> list[tuple[str, float]]:
        """Text and reward of the attempts that have one."""
        return [(attempt.text, attempt.reward) for attempt in self.attempts if attempt.reward is not None]

    @property
    def value(self) -> float | None:
        """V_{i,κ}: the mean reward; `None` where every rollout failed."""
        return mean([attempt.reward for attempt in self.attempts])

    def instructive(self, reflect_on: str = "mixed") -> bool:
        """Whether the problem is worth reflecting on.

        `mixed`: the rewards differ, 0 < V < 1 for rewards of 0 and 1 (A.2). `imperfect`: some reward is below 1.0:
        what the policy does not know at all shows only where every attempt failed.
        """
        rewards = [reward for _, reward in self.scored]
        if not rewards:
            return False
        top = max(rewards) if reflect_on == "mixed" else 1.0
        return min(rewards) < top - _ROUNDING


@dataclass(frozen=True)
class PromptResult:
    """One system prompt and how it did on the batch.

    Args:
        prompt ([`SystemPrompt`]): The prompt, with its id.
        problems (`tuple[ProblemResult, ...]`): One per problem, in the same order for every prompt of the batch.
    """

    prompt: SystemPrompt
    problems: tuple[ProblemResult, ...]

    @property
    def attempts(self) -> list[Attempt]:
        """All its rollouts, problem by problem."""
        return [attempt for problem in self.problems for attempt in problem.attempts]

    @property
    def row(self) -> list[float | None]:
        """The prompt's row of the matrix of mean rewards (eq 9)."""
        return [problem.value for problem in self.problems]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; [`PromptResult.from_json`] gives an equal result back."""
        problems = [
            [problem.question, problem.truth, [[attempt.text, attempt.reward] for attempt in problem.attempts]]
            for problem in self.problems
        ]
        return {"prompt": self.prompt.to_json(), "evidence": problems}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> PromptResult:
        """The inverse of [`PromptResult.to_json`]."""
        problems = tuple(
            ProblemResult(question, truth, tuple(Attempt(text, reward) for text, reward in attempts))
            for question, truth, attempts in saved["evidence"]
        )
        return cls(SystemPrompt.from_json(saved["prompt"]), problems)


def merge_results(results: Sequence[PromptResult]) -> list[PromptResult]:
    """One result per prompt: those of a prompt that was drawn twice are put together, problem by problem.

    Raises:
        `ValueError`: The results are not over the same problems.
    """
    if len({tuple(problem.question for problem in result.problems) for result in results}) > 1:
        raise ValueError("the results of a batch must be over the same problems in the same order")
    merged: dict[int | None, PromptResult] = {}
    for result in results:
        first = merged.get(result.prompt.id)
        if first is not None:
            both = zip(first.problems, result.problems, strict=True)
            together = (ProblemResult(a.question, a.truth, a.attempts + b.attempts) for a, b in both)
            result = PromptResult(result.prompt, tuple(together))
        merged[result.prompt.id] = result
    return list(merged.values())


def best_result(results: Sequence[PromptResult], values: Row) -> PromptResult | None:
    """The result of the prompt with the highest of the V_i that [`Population.record`] returns; `None` without any."""
    scored = [(value, result) for value, result in zip(values, results, strict=True) if value is not None]
    return max(scored, key=lambda pair: pair[0])[1] if scored else None


def scores_of(results: Iterable[PromptResult]) -> dict[int, list[float | None]]:
    """By prompt id its row of mean rewards; of a prompt that was drawn twice the first."""
    scores: dict[int, list[float | None]] = {}
    for result in results:
        if result.prompt.id is not None:
            scores.setdefault(result.prompt.id, result.row)
    return scores


def question_of(row: Mapping[str, Any]) -> str:
    """The problem of a dataset row as the reference LLM reads it: its `question`, else its `prompt` without system
    messages."""
    if row.get("question"):
        return str(row["question"])
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(message["content"] for message in prompt if message["role"] != "system")


def truth_of(row: Mapping[str, Any]) -> str:
    """Its accepted answers in one line."""
    answers = row.get("answers") or ()
    return answers if isinstance(answers, str) else " | ".join(map(str, answers))


# The matrix ----------------------------------------------------------------------------------------------------------


def mean(values: Row) -> float | None:
    """The mean of what there is; `None` if there is nothing."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def cell_means(rows: Sequence[Row]) -> list[float | None]:
    """Several rows of one prompt as one: per problem the mean of those that have a score."""
    return [mean(column) for column in zip(*rows, strict=True)]


def common_means(rows: Sequence[Row]) -> list[float | None]:
    """V_i of each prompt: its mean over the problems on which every prompt that has a score at all has one, so that
    conditions are matched; `None` for a prompt without any, and for all that have no problem in common."""
    columns = _complete([row for row in rows if mean(row) is not None])
    return [mean([row[column] for column in columns]) for row in rows]


def sole_wins(rows: Sequence[Row]) -> list[list[int]]:
    """For each prompt the problems on which it alone did best (ρ_i of Algorithm 2).

    Ties are nobody's win, and neither is a problem on which one of the prompts has no score.
    """
    wins: list[list[int]] = [[] for _ in rows]
    for column in _complete(rows):
        values = [row[column] or 0.0 for row in rows]
        holders = [index for index, value in enumerate(values) if value >= max(values) - _ROUNDING]
        if len(holders) == 1:
            wins[holders[0]].append(column)
    return wins


def _complete(rows: Sequence[Row]) -> list[int]:
    """The columns in which every row has a score."""
    return [number for number, column in enumerate(zip(*rows, strict=True)) if None not in column]


# The ratings ---------------------------------------------------------------------------------------------------------


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
    if not all(map(math.isfinite, scores)) or tie_tolerance < 0:
        raise ValueError(
            f"scores must be finite and tie_tolerance must not be negative: {list(scores)}, {tie_tolerance}"
        )
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


# Who plays -----------------------------------------------------------------------------------------------------------


class Rated(Protocol):
    """What a rule may look at: a [`Member`]'s prompt and the current belief."""

    @property
    def prompt(self) -> SystemPrompt: ...
    @property
    def rating(self) -> Rating: ...


SelectionRule = Callable[[Sequence[Rated], int, random.Random], list[int]]
"""Gets the window, oldest first, and returns the positions of k different members; never more than there are."""


def optimistic_scores(members: Sequence[Rated], exploration: float = EXPLORATION) -> list[float]:
    """score = μ + λσ of each (eq 3)."""
    return [member.rating.mu + exploration * member.rating.sigma for member in members]


def top_plus_random(
    members: Sequence[Rated], k: int, rng: random.Random, exploration: float = EXPLORATION, temperature: float = 1.0
) -> list[int]:
    """The highest score always (of equal ones the youngest), the others uniformly: the paper's own runs (A.5)."""
    scores = optimistic_scores(members, exploration)
    top = max(range(len(scores)), key=lambda position: (scores[position], position))
    others = rng.sample(range(len(members) - 1), k - 1)
    return [top, *(position + (position >= top) for position in others)]


def softmax(
    members: Sequence[Rated], k: int, rng: random.Random, exploration: float = EXPLORATION, temperature: float = 1.0
) -> list[int]:
    """One after another with p ∝ exp(score / T) among those not drawn yet (eq 3, Algorithm 1).

    Where the exponentials of the others underflow to 0, the rest is drawn uniformly.
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
    """Each with the same probability."""
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
    """A rule by name with its parameters set; a function of one's own comes back as it is.

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
    return partial(RULES[rule], exploration=exploration, temperature=temperature)


def select(
    members: Sequence[Rated], k: int, rule: SelectionRule, rng: random.Random, independent: bool = False
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
