"""Headroom of prompts: what a better system prompt would gain, measured in two stages.

Choosing and measuring on the same rows is too optimistic: the prompt that looks best is partly the luckiest. So some
rows choose a challenger among the prompts, and *fresh* rows measure the start prompt and the challenger:

    gain = mean(d), d = score under the challenger - score under the start, over fresh rows
    interval = mean(d) -+ t * sqrt(var(d) / n)

This assumes nothing about the prompts (data splitting, Cox 1975). An estimate from one stage would need them to be
draws from one distribution (empirical Bayes, Morris 1983), which the user's start prompt is not. In a simulation
(`benchmarks/learning/headroom.py`) the interval covers the true gain in 94 to 96 % of tasks.

Scores are between 0 and 1. Tables have a row for each question and a column for each prompt, the start prompt first;
NaN stands for an answer that failed, and its row is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from ..scoring import Estimate

Verdict = Literal["worth it", "not worth it", "cannot tell"]
Table = NDArray[np.float64]

LEVEL = 0.95
"""The coverage of all intervals, and twice the one-sided error of a verdict."""

POWER = 0.8
"""The probability with which `rows_needed` rows show a gain of `delta`."""

_FEW_DIFFERENCES = 4
_RULE_OF_THREE = (
    3.5  # a variance of 3.5 / n gives none of n differing rows about the half-width 3.7 / n
)


class TooFewScores(ValueError):
    """Too few answers have a score for a statistic."""


@dataclass(frozen=True)
class Gain:
    """The gain of one prompt over another on the same rows.

    Args:
        estimate ([`Estimate`]): Its mean and t interval, over the rows that both have a score for.
        variance (`float`): The variance of the difference on one row.
    """

    estimate: Estimate
    variance: float


@dataclass(frozen=True)
class PromptTest:
    """Whether prompts differ at all: the F test between the columns of a table, row effects removed.

    Args:
        statistic (`float`), p_value (`float`): Of the F test with (k - 1, (k - 1)(n - 1)) degrees of freedom.
        spread (`float`): The standard deviation between the prompts' true means, by the method of moments: the square
            root of max(0, variance of the means - their error).
    """

    statistic: float
    p_value: float
    spread: float


@dataclass(frozen=True)
class PromptHeadroom:
    """What a better system prompt would gain.

    Args:
        chosen (`int`): The column of the challenger.
        gain ([`Estimate`]): Its gain over the start prompt on fresh rows.
        verdict (`str`): `worth it`: the interval is above 0. `not worth it`: it is below `delta`. Else `cannot tell`.
        delta (`float`): The smallest gain that would be worth it.
        rows_needed (`int`): Fresh rows at which `delta` could be shown, or excluded where there is no gain.
        topped_up (`bool`): Whether the gain is that of a second set of fresh rows, because the first could not tell.
        start (`float`), best (`float`): Mean scores of start prompt and challenger on the same fresh rows.
        test ([`PromptTest`], *optional*): Between all prompts, on the rows that chose. Not part of the verdict.
        tried (`int`): How many challengers were tried.
        naive (`float`, *optional*): The gain on the rows that chose, which is too high.
    """

    chosen: int
    gain: Estimate
    verdict: Verdict
    delta: float
    rows_needed: int
    topped_up: bool
    start: float
    best: float
    test: PromptTest | None
    tried: int
    naive: float | None

    @property
    def possible_share(self) -> float:
        """See [`possible_share`]: how many of all proposals may still be good, if none that was tried is."""
        return possible_share(self.tried)

    def sentence(self) -> str:
        """The verdict in one sentence."""
        interval = f"{self.gain.mean:+.3f} [{self.gain.low:+.3f}, {self.gain.high:+.3f}] on {self.gain.n} fresh rows"
        if self.verdict == "worth it":
            return f"worth it: the best of {self.tried} prompts gains {interval}"
        if self.verdict == "not worth it":
            return f"not worth it: the best of {self.tried} prompts gains {interval}, less than {self.delta:g}"
        return (
            f"cannot tell at this budget: the best of {self.tried} prompts gains {interval}; "
            f"{self.rows_needed} fresh rows ({2 * self.rows_needed} calls) could tell"
        )


@dataclass(frozen=True)
class StagePlan:
    """How the calls of a measurement are spent.

    Args:
        prompts (`int`): Prompts to choose from, the start prompt included.
        choosing_rows (`int`): Rows that each of them answers once.
        fresh_rows (`int`): Other rows, which start prompt and challenger answer.
        repeats (`int`): How often they answer each fresh row: once, unless there are too few rows.
    """

    prompts: int
    choosing_rows: int
    fresh_rows: int
    repeats: int

    @property
    def calls(self) -> int:
        return self.prompts * self.choosing_rows + 2 * self.fresh_rows * self.repeats


CHOOSING_SHARE = 240 / 512
"""The share of the calls that choose: of 512 calls 12 prompts x 20 rows. Where one prompt in ten is good, this finds it
more often than 8 x 32."""

_FEWEST_CHOOSING, _FEWEST_FRESH, _MOST_REPEATS = 4, 8, 4


def plan_stages(calls: int, prompts: int, rows: int) -> StagePlan:
    """Split a number of calls into the two stages.

    Args:
        calls (`int`): At most this many.
        prompts (`int`): Prompts to choose from, the start prompt included; two at least.
        rows (`int`): Rows that there are.

    Raises:
        `ValueError`: Fewer than two prompts, or too few calls or rows for both stages.
    """
    if prompts < 2:
        raise ValueError(
            f"headroom needs a start prompt and others to compare with, got {prompts} prompt"
        )
    choosing_rows = max(_FEWEST_CHOOSING, int(calls * CHOOSING_SHARE) // prompts)
    choosing_rows = min(choosing_rows, rows // 2)
    remaining = calls - prompts * choosing_rows
    fresh_rows = min(remaining // 2, rows - choosing_rows)
    if choosing_rows < _FEWEST_CHOOSING or fresh_rows < _FEWEST_FRESH:
        least_calls = prompts * _FEWEST_CHOOSING + 2 * _FEWEST_FRESH
        least_rows = 2 * _FEWEST_FRESH
        raise ValueError(
            f"{calls} calls and {rows} rows are too few for {prompts} prompts: give {least_calls} calls and "
            f"{least_rows} rows at least, or fewer prompts"
        )
    repeats = max(1, min(_MOST_REPEATS, remaining // (2 * fresh_rows)))
    return StagePlan(prompts, choosing_rows, fresh_rows, repeats)


def default_delta(calls: int) -> float:
    """The smallest gain that so many calls can decide about: 0.05 from 2,000 calls on, else 0.10."""
    return 0.05 if calls >= 2000 else 0.10


# The stages -----------------------------------------------------------------------------------------------------------


def complete_rows(scores: ArrayLike) -> Table:
    """The rows of a table that have a score in every column. Raises as [`read_table`]."""
    table = read_table(scores)
    return table[~np.isnan(table).any(axis=1)]


def read_table(scores: ArrayLike) -> Table:
    """Scores as an array of rows and columns.

    Raises:
        `ValueError`: It is no table, or a score is not between 0 and 1.
    """
    table = np.asarray(scores, dtype=float)
    if table.ndim != 2:
        raise ValueError(f"expected a table of rows and columns, got {table.ndim} dimensions")
    scored = table[~np.isnan(table)]
    if scored.size and (scored.min() < 0 or scored.max() > 1):
        raise ValueError(
            f"scores must be between 0 and 1, got {scored.min():g} to {scored.max():g}"
        )
    return table


def choose_challenger(scores: ArrayLike, rng: np.random.Generator) -> int:
    """The column with the best scores among all but the first; one of the best at random if several are.

    Columns are compared by their mean difference from the mean of each row. Without missing scores that is the order of
    their means; with some, a prompt is not better for having failed on the hard rows.

    Args:
        scores (`ArrayLike` of shape (rows, prompts)): The start prompt first; NaN where there is none.
        rng (`np.random.Generator`): For ties.

    Raises:
        [`TooFewScores`]: No column but the first has a score on a row where another has one.
    """
    table = read_table(scores)
    scored = ~np.isnan(table)
    table = table[scored.sum(axis=1) >= 2]
    scored = ~np.isnan(table)
    row_means = np.where(scored, table, 0).sum(axis=1) / np.maximum(scored.sum(axis=1), 1)
    differences = np.where(scored, table - row_means[:, None], 0).sum(axis=0)
    counts = scored.sum(axis=0)
    means = np.where(counts > 0, differences / np.maximum(counts, 1), -np.inf)[1:]
    if not len(means) or np.isneginf(means.max()):
        raise TooFewScores("no prompt but the first has a score to compare")
    best = np.flatnonzero(np.isclose(means, means.max(), rtol=0, atol=1e-12))
    return 1 + int(rng.choice(best))


def paired_gain(scores: ArrayLike, level: float = LEVEL) -> Gain:
    """The gain of the second column over the first.

    Few differing rows say little about the variance of binary scores: with fewer than four it is taken to be 3.5 / n at
    least, which gives a table without any difference the width of the rule of three.

    Args:
        scores (`ArrayLike` of shape (rows, 2)): Start prompt and challenger on the same rows.
        level (`float`, *optional*, defaults to `0.95`): The coverage aimed at.

    Raises:
        [`TooFewScores`]: Fewer than two rows have both scores.
    """
    table = complete_rows(scores)
    n = len(table)
    if n < 2:
        raise TooFewScores(f"a gain needs two rows with both scores, got {n}")
    differences = table[:, 1] - table[:, 0]
    variance = float(differences.var(ddof=1))
    if np.count_nonzero(differences != np.median(differences)) < _FEW_DIFFERENCES:
        variance = max(variance, _RULE_OF_THREE / n)
    mean = float(differences.mean())
    half = t_quantile(level, n - 1) * math.sqrt(variance / n)
    return Gain(Estimate(mean, max(-1.0, mean - half), min(1.0, mean + half), n), variance)


@lru_cache(maxsize=4096)
def t_quantile(level: float, degrees: int) -> float:
    """Half the width of a t interval, in standard errors."""
    return float(stats.t.ppf(0.5 + level / 2, degrees))


def decide(gain: Estimate, delta: float) -> Verdict:
    """The verdict that an interval allows."""
    if gain.low > 0:
        return "worth it"
    if gain.high < delta:
        return "not worth it"
    return "cannot tell"


def rows_needed(variance: float, delta: float, power: float = POWER) -> int:
    """Fresh rows that would show a gain of `delta` with probability `power`, or exclude it where there is none.

    Args:
        variance (`float`): Of the difference on one row ([`Gain`]); about 0.25 for binary scores with hard and easy
            rows among them, 0.5 at most.
        delta (`float`): The gain.
        power (`float`, *optional*, defaults to `0.8`): The probability.
    """
    z = stats.norm.ppf(0.5 + LEVEL / 2) + stats.norm.ppf(power)
    return math.ceil(variance * (z / delta) ** 2)


def judge_prompts(
    choosing: ArrayLike,
    chosen: int,
    fresh: ArrayLike,
    delta: float,
    top_up: ArrayLike | None = None,
) -> PromptHeadroom:
    """The headroom of prompts, from the scores of both stages.

    Args:
        choosing (`ArrayLike` of shape (rows, prompts)): The scores that chose.
        chosen (`int`): What [`choose_challenger`] chose.
        fresh (`ArrayLike` of shape (rows, 2)): Start prompt and challenger on rows that did not choose.
        delta (`float`): The smallest gain that would be worth it.
        top_up (`ArrayLike` of shape (rows, 2), *optional*): The same on yet other rows. Used if the first could not
            tell, and then alone: pooled with them, the two looks would find gains that are not there.
    """
    first = paired_gain(fresh)
    gain, measured, topped_up = first, complete_rows(fresh), False
    if top_up is not None and decide(first.estimate, delta) == "cannot tell":
        gain, measured, topped_up = paired_gain(top_up), complete_rows(top_up), True
    table = complete_rows(choosing)
    start, best = measured.mean(axis=0)
    return PromptHeadroom(
        chosen=chosen,
        gain=gain.estimate,
        verdict=decide(gain.estimate, delta),
        delta=delta,
        rows_needed=rows_needed(gain.variance, delta),
        topped_up=topped_up,
        start=float(start),
        best=float(best),
        test=compare_prompts(table) if len(table) > 1 else None,
        tried=table.shape[1] - 1,
        naive=float((table[:, chosen] - table[:, 0]).mean()) if len(table) else None,
    )


# Beside the verdict ---------------------------------------------------------------------------------------------------


def compare_prompts(scores: ArrayLike) -> PromptTest:
    """The F test between prompts in a two-way table (Searle, Casella and McCulloch 1992): do any of them differ?

    Args:
        scores (`ArrayLike` of shape (rows, prompts)): Two rows and two prompts at least.

    Raises:
        [`TooFewScores`]: There are fewer.
    """
    means, error = _means_and_error(scores)
    n, k = complete_rows(scores).shape
    between = float(means.var(ddof=1))
    statistic = between / error
    p_value = float(stats.f.sf(statistic, k - 1, (k - 1) * (n - 1)))
    return PromptTest(statistic, p_value, math.sqrt(max(0.0, between - error)))


def _means_and_error(scores: ArrayLike) -> tuple[Table, float]:
    """The prompts' means, and the variance of such a mean in contrasts: residual mean square / rows."""
    table = complete_rows(scores)
    n, k = table.shape
    if n < 2 or k < 2:
        raise TooFewScores(f"comparing prompts needs two rows and two prompts, got {n} and {k}")
    means = table.mean(axis=0)
    residuals = table - table.mean(axis=1, keepdims=True) - means + table.mean()
    mean_square = float((residuals**2).sum()) / ((n - 1) * (k - 1))
    # A table that is all right or all wrong has no variance, which says nothing about the next row.
    return means, max(mean_square, 0.5 / (n * k)) / n


def possible_share(tried: int, level: float = LEVEL) -> float:
    """The largest share of proposals that may be good although none of `tried` is: 1 - (1 - level)^(1 / tried).

    Args:
        tried (`int`): How many were tried.
        level (`float`, *optional*, defaults to `0.95`): The confidence.
    """
    return 1 - (1 - level) ** (1 / tried)


def expect_further(
    scores: ArrayLike, further: int, rng: np.random.Generator, draws: int = 4000, scale: float = 0.1
) -> Estimate:
    """The gain of the best of `further` more prompts over the start prompt, *if they are like the challengers*.

    Empirical Bayes with the start prompt kept out (Efron and Morris 1975, Gelman 2006): the challengers' true means are
    mu + s z, s is 0 with probability 0.3 and else half-normal, and the best of K draws is mu + s e_K. The interval is
    too short where the challengers differ by more than about 0.1, because scores end at 0 and 1.

    Args:
        scores (`ArrayLike` of shape (rows, prompts)): The start prompt first, then two challengers at least.
        further (`int`): K.
        rng (`np.random.Generator`): For the draws.
        draws (`int`, *optional*, defaults to `4000`): From the posterior.
        scale (`float`, *optional*, defaults to `0.1`): Of the half-normal.
    """
    means, error = _means_and_error(scores)
    n, k = complete_rows(scores).shape
    challengers = means[1:]
    if len(challengers) < 2:
        raise TooFewScores("what further prompts may gain needs two challengers at least")

    # The posterior of s, the spread between prompts, on a grid of equal prior mass: 0 for three tenths of it.
    mass = (np.arange(200) + 0.5) / 200
    spread = scale * stats.norm.ppf(0.5 + 0.5 * np.clip((mass - 0.3) / 0.7, 0, 1))
    variance = spread**2 + error
    deviation = float(((challengers - challengers.mean()) ** 2).sum())
    likelihood = -0.5 * (len(challengers) - 1) * np.log(variance) - 0.5 * deviation / variance
    weights = np.exp(likelihood - likelihood.max())
    s = spread[rng.choice(len(spread), size=draws, p=weights / weights.sum())]

    # Then the means, given s; the error's own variance is that of a chi-squared.
    degrees = (n - 1) * (k - 1)
    error_draws = error * degrees / rng.chisquare(degrees, draws)
    mu = challengers.mean() + np.sqrt(
        (s**2 + error_draws) / len(challengers)
    ) * rng.standard_normal(draws)
    start = means[0] + np.sqrt(error_draws) * rng.standard_normal(draws)
    gains = np.minimum(mu + s * expected_maximum(further), 1.0) - start
    low, high = np.quantile(gains, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2])
    return Estimate(float(gains.mean()), float(low), float(high), n)


@lru_cache
def expected_maximum(draws: int) -> float:
    """The expected largest of so many standard normal draws."""
    if draws == 1:
        return 0.0
    return float(
        stats.norm.expect(lambda x: draws * x * stats.norm.cdf(x) ** (draws - 1), lb=-9, ub=9)
    )


def route_prompts(first: ArrayLike, second: ArrayLike, rng: np.random.Generator) -> Estimate:
    """What choosing a prompt for each question would gain over the single best prompt.

    The first answers choose: for each row the prompt with the best score, and the one with the best mean for all rows
    (which also wins a row's ties). The second answers to the same rows measure both. Its power is low with two answers,
    so that an interval around 0 excludes little; an F test of interaction in its place has the wrong size for binary
    scores.

    Args:
        first (`ArrayLike` of shape (rows, prompts)), second (`ArrayLike` of the same shape): Two answers of each prompt
            to each row, independent of each other.
        rng (`np.random.Generator`): For ties between means.
    """
    choosing = np.asarray(first, dtype=float)
    measuring = np.asarray(second, dtype=float)
    complete = ~(np.isnan(choosing).any(axis=1) | np.isnan(measuring).any(axis=1))
    choosing, measuring = complete_rows(choosing[complete]), complete_rows(measuring[complete])

    means = choosing.mean(axis=0)
    single = int(rng.choice(np.flatnonzero(np.isclose(means, means.max(), rtol=0, atol=1e-12))))
    routed = choosing.argmax(axis=1)
    ties = choosing[:, single] >= choosing.max(axis=1)
    routed[ties] = single
    row_numbers = np.arange(len(routed))
    pairs = np.column_stack([measuring[:, single], measuring[row_numbers, routed]])
    return paired_gain(pairs).estimate


def as_table(rows: Sequence[Sequence[float | None]]) -> Table:
    """Scores with `None` for failures as a table with NaN."""
    as_floats: list[list[float]] = []
    for row in rows:
        as_floats.append([math.nan if score is None else float(score) for score in row])
    return np.array(as_floats, dtype=float)
