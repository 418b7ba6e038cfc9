"""Paired ratings and top-two selection, which the library had and left out; `ratings.py` compares them with its own.

A rating is one joint normal belief about the effects of all prompts, learned from matched problems. The model of a
batch, for prompt i on problem p:

    reward[i, p] = problem[p] + effect[i] + noise,    noise ~ N(0, s² / slots[i])
    effect[child] = mean effect of its parents + gain + N(0, CHILD_SD²)

`problem[p]` has a flat prior and is integrated out: it holds how hard the problem is and what the weights of the
moment can do, so only differences within a batch count, as under TrueSkill. `gain` is what a reflection is worth on
average; it is learned with the effects. Effects are relative to the first prompt's. Weights change, so before each
batch every effect and the gain drift a little. s² is estimated from what problem and prompt leave unexplained.

A batch of k prompts says as much as k - 1 independent contrasts, of each prompt with the weighted mean of those before
it; each is one scalar update. Plain Python: the same bits on every process and machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from agentic_prompting.evolution import Population, Rating, SystemPrompt
from agentic_prompting.evolution.results import Row
from agentic_prompting.evolution.selection import Rated

GAIN_MEAN, GAIN_SD = 0.03, 0.06
CHILD_SD = 0.12
ROOT_SD = 1e-3
DRIFT_SD = 0.01
NOISE_SD, NOISE_WEIGHT = 0.3, 8.0
"""What is believed of s before the first batch, and how many degrees of freedom that is worth."""
FORGET = 0.9
"""Weight of the earlier batches in s², per batch."""
KEPT = 64
"""Prompts in the joint belief, the newest; an older one has its last rating, independent of the others."""


class PairedRatings:
    """Beliefs from matched differences of rewards. A prompt is named by its id.

    A rating's `mu` is in units of reward above the first prompt; `sigma` is the doubt about that. Made for rewards that
    differ by the order of 1.

    Example:

        >>> ratings = PairedRatings()
        >>> first, child = ratings.believe(0, {}), ratings.believe(1, {0: Rating(0.0, 1e-3)})
        >>> new = ratings.rate({0: first, 1: child}, {0: [0.2, 0.4], 1: [0.6, 0.8]}, {0: 1, 1: 1})
        >>> child.mu, round(new[1].mu, 3), new[1].sigma < child.sigma
        (0.03, 0.132, True)
    """

    def __init__(self) -> None:
        self.ids: list[int] = []  # of the effects, which begin at place 1
        self.x, self.c = [GAIN_MEAN], [[GAIN_SD**2]]
        self.squares = self.freedom = 0.0

    @property
    def noise(self) -> float:
        """s²."""
        return (NOISE_SD**2 * NOISE_WEIGHT + self.squares) / (NOISE_WEIGHT + self.freedom)

    def believe(self, prompt: int, parents: Mapping[int, Rating]) -> Rating:
        """The belief about a new prompt: its parents' mean effect, plus the gain."""
        if not parents:
            sd = CHILD_SD if self.ids else ROOT_SD
            return self._append(prompt, {}, 0.0, sd**2)
        weights, share = {0: 1.0}, 1 / len(parents)
        mean, variance = 0.0, CHILD_SD**2
        for parent, rating in parents.items():
            if parent in self.ids:
                weights[self._place(parent)] = share
            else:
                mean, variance = mean + share * rating.mu, variance + (share * rating.sigma) ** 2
        born = self._append(prompt, weights, mean, variance)
        self._forget_oldest()
        return born

    def rate(
        self, ratings: Mapping[int, Rating], rows: Mapping[int, Row], slots: Mapping[int, int]
    ) -> dict[int, Rating]:
        """The new ratings of all prompts in the joint belief: a batch changes what is believed of relatives, too.

        Args:
            ratings: Those of the prompts in the batch.
            rows: By prompt its mean reward on each problem, `None` where there is none.
            slots: By prompt how often it was drawn.
        """
        for prompt, rating in ratings.items():
            if prompt not in self.ids:
                self._append(prompt, {}, rating.mu, rating.sigma**2)
        for place, row in enumerate(self.c):
            row[place] += DRIFT_SD**2
        prompts = sorted(rows)
        complete = [column for column in zip(*(rows[one] for one in prompts), strict=True) if None not in column]
        if complete and len(prompts) > 1:
            cells: list[list[float]] = [list(row) for row in zip(*complete, strict=True)]  # type: ignore[arg-type]
            self._compare([self._place(one) for one in prompts], cells, [slots[one] for one in prompts])
        self._forget_oldest()
        return {prompt: self._rating(prompt) for prompt in self.ids}

    def draw(self, members: Sequence[Rated], rng: random.Random) -> list[float]:
        """An effect for each, drawn jointly."""
        effects = draw_independently(members, rng)  # those outside of the joint belief keep it
        joint = [at for at, member in enumerate(members) if member.prompt.id in self.ids]
        places = [self._place(members[at].prompt.id or 0) for at in joint]
        lower = cholesky([[self.c[i][j] for j in places] for i in places])
        normal = [rng.gauss(0, 1) for _ in joint]
        for at, place, row in zip(joint, places, lower, strict=True):
            effects[at] = self.x[place] + _dot(row, normal)
        return effects

    def unchanged(self) -> None:
        """A reflection gave nothing new: a gain of 0 was drawn."""
        self._observe({0: 1.0}, 0.0, CHILD_SD**2)

    def _compare(self, places: Sequence[int], cells: Sequence[Sequence[float]], weights: Sequence[int]) -> None:
        """Learn from a row of mean rewards for each prompt, on the same problems."""
        values, problems = [fmean(row) for row in cells], len(cells[0])
        centred = [[cell - value for cell in row] for row, value in zip(cells, values, strict=True)]
        means = [_dot(column, weights) / sum(weights) for column in zip(*centred, strict=True)]
        left = [weight * (cell - mean) ** 2 for weight, row in zip(weights, centred, strict=True)
                for cell, mean in zip(row, means, strict=True)]  # fmt: skip
        self.squares = FORGET * self.squares + math.fsum(left)
        self.freedom = FORGET * self.freedom + (len(cells) - 1) * (problems - 1)
        for count in range(1, len(places)):
            before = weights[:count]
            contrast = {places[count]: 1.0}
            contrast |= {place: -weight / sum(before) for place, weight in zip(places, before, strict=False)}
            difference = values[count] - _dot(values[:count], before) / sum(before)
            self._observe(contrast, difference, self.noise / problems * (1 / weights[count] + 1 / sum(before)))

    def _observe(self, weights: Mapping[int, float], value: float, variance: float) -> None:
        """Condition on a weighted sum of effects (and the gain) that was seen with a normal error."""
        column = [sum(row[place] * weight for place, weight in weights.items()) for row in self.c]
        total = variance + sum(column[place] * weight for place, weight in weights.items())
        miss = value - sum(self.x[place] * weight for place, weight in weights.items())
        self.x = [mean + one * miss / total for mean, one in zip(self.x, column, strict=True)]
        self.c = [[cell - one * other / total for cell, other in zip(row, column, strict=True)]
                  for row, one in zip(self.c, column, strict=True)]  # fmt: skip

    def _append(self, prompt: int, weights: Mapping[int, float], mean: float, variance: float) -> Rating:
        """A new effect: a weighted sum of those known, and an independent part with this mean and variance."""
        row = [sum(known[place] * weight for place, weight in weights.items()) for known in self.c]
        own = variance + sum(row[place] * weight for place, weight in weights.items())
        self.x.append(mean + sum(self.x[place] * weight for place, weight in weights.items()))
        for known, cell in zip(self.c, row, strict=True):
            known.append(cell)
        self.c.append([*row, own])
        self.ids.append(prompt)
        return self._rating(prompt)

    def _forget_oldest(self) -> None:
        while len(self.ids) > KEPT:
            del self.ids[0], self.x[1], self.c[1]
            for row in self.c:
                del row[1]

    def _place(self, prompt: int) -> int:
        return self.ids.index(prompt) + 1

    def _rating(self, prompt: int) -> Rating:
        place = self._place(prompt)
        return Rating(self.x[place], math.sqrt(max(self.c[place][place], 1e-12)))


class PairedPopulation(Population):
    """A [`Population`] whose prompts are rated by [`PairedRatings`]."""

    def __init__(self, root: SystemPrompt, **options: Any):
        self.ratings = PairedRatings()
        super().__init__(root, **options)
        self.members[0].rating = self.ratings.believe(0, {})

    def record(self, prompts: Sequence[SystemPrompt | int], scores: Sequence[Row]) -> list[float | None]:
        """As [`Population.record`]'s, for prompts that are drawn once each, as in the simulation."""
        present = [member.rating for member in self.members]
        values = super().record(prompts, scores)
        ids = [prompt if isinstance(prompt, int) else prompt.id or 0 for prompt in prompts]
        before, rows = {name: present[name] for name in ids}, dict(zip(ids, scores, strict=True))
        new = self.ratings.rate(before, rows, dict.fromkeys(ids, 1)) if len(ids) > 1 else {}
        for name, rating in enumerate(present):
            self.members[name].rating = new.get(name, rating)
        return values

    def parent(self, prompts: Sequence[SystemPrompt]) -> SystemPrompt:
        """The prompt of a batch that mutates: the one believed best, not the luckiest; of equal ones the first."""
        return max(prompts, key=lambda prompt: self.rating(prompt).mu)

    def add(self, child: SystemPrompt, parents: Mapping[int, Rating] | None = None) -> SystemPrompt:
        known = {name: (parents or {}).get(name, self.members[name].rating) for name in child.parents}
        born = super().add(child, parents)
        self.members[-1].rating = self.ratings.believe(len(self.members) - 1, known)
        return born


def draw_independently(members: Sequence[Rated], rng: random.Random) -> list[float]:
    """A skill for each, from its own normal distribution."""
    return [rng.gauss(member.rating.mu, member.rating.sigma) for member in members]


def top_two(
    members: Sequence[Rated],
    k: int,
    rng: random.Random,
    draw: Callable[[Sequence[Rated], random.Random], list[float]] = draw_independently,
) -> list[int]:
    """A rule of selection: the highest μ (of equal ones the newest), and challengers by Thompson sampling.

    Each challenger is the best of those not chosen yet by skills drawn anew, so a prompt plays as often as it may be
    the best.
    """
    chosen = [max(range(len(members)), key=lambda place: (members[place].rating.mu, place))]
    while len(chosen) < k:
        skills = draw(members, rng)
        chosen.append(max((place for place in range(len(members)) if place not in chosen), key=skills.__getitem__))
    return chosen


def cholesky(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """The lower triangle L of a covariance L·Lᵀ, one row each. A direction without variance has a row of zeros."""
    lower: list[list[float]] = []
    for i, row in enumerate(matrix):
        new: list[float] = []
        for j in range(i):
            new.append((row[j] - _dot(new, lower[j])) / lower[j][j] if lower[j][j] else 0.0)
        rest = row[i] - _dot(new, new)
        lower.append([*new, math.sqrt(rest) if rest > 1e-12 else 0.0])
    return lower


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=False))
