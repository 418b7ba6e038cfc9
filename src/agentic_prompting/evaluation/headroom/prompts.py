"""Headroom of prompts: the gain of a better system prompt, measured in two stages.

Choosing and measuring on the same rows is too optimistic: the prompt that looks best is partly the
luckiest. Therefore some rows choose a challenger among the prompts, and *fresh* rows measure the
start prompt and the challenger:

    gain = mean(d), d = score under the challenger - score under the start, over fresh rows
    interval = mean(d) -+ t * sqrt(var(d) / n)

This assumes nothing about the prompts (data splitting, Cox 1975). An estimate from a single stage
would assume that they are drawn from one distribution (empirical Bayes, Morris 1983), which is
false for the user's start prompt. In a simulation (`benchmarks/learning/headroom.py`) the interval
covers the true gain in 94 to 96 % of tasks.

Scores are between 0 and 1. Tables have a row per question and a column per prompt, the start prompt
first. NaN stands for a failed answer, whose row is left out.
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

from ...llm.numbers import count_in_words
from ..intervals import Estimate

Verdict = Literal["worth it", "not worth it", "cannot tell"]
# (rows, prompts) of scores, the start prompt first; NaN for a missing score.
ScoreTable = NDArray[np.float64]

LEVEL = 0.95
"""Coverage of all intervals. The one-sided error of a verdict is half of 1 - `LEVEL`."""

POWER = 0.8
"""The probability with which `rows_needed` rows show a gain of `delta`."""

# With fewer rows that differ, the observed variance is not trusted; see `paired_gain`.
_FEW_DIFFERENCES = 4
_RULE_OF_THREE = 3.5
"""If none of n rows differs, a variance of 3.5 / n gives the interval a half-width of about 3.7 /
n.
"""


class TooFewScores(ValueError):
    """Too few answers have a score for a statistic."""


@dataclass(frozen=True)
class Gain:
    """The gain of one prompt over another on the same rows.

    Args:
        estimate ([`Estimate`]): Mean and t interval over the rows for which both prompts have a
            score.
        variance (`float`): The variance of the difference on one row.
    """

    estimate: Estimate
    variance: float


@dataclass(frozen=True)
class PromptTest:
    """Whether prompts differ at all: the F test between the columns of a table, with row effects
    removed.

    Args:
        statistic (`float`), p_value (`float`): Result of the F test with (k - 1, (k - 1)(n - 1))
            degrees of freedom.
        spread (`float`): Standard deviation between the true means of the prompts, by the method of
            moments: the square root of max(0, variance of the means - their error).
    """

    statistic: float
    p_value: float
    spread: float


@dataclass(frozen=True)
class PromptHeadroom:
    """The gain of a better system prompt.

    Args:
        chosen (`int`): Column of the challenger.
        gain ([`Estimate`]): Gain of the challenger over the start prompt on fresh rows.
        verdict (`str`): `worth it` if the interval is above 0, `not worth it` if it is below
            `delta`, else `cannot tell`.
        delta (`float`): The smallest gain that would be worth it.
        rows_needed (`int`): Number of fresh rows that could show a gain of `delta`, or exclude it
            if there is no gain.
        topped_up (`bool`): Whether the gain was measured on a second set of fresh rows, because the
            first was inconclusive.
        start (`float`), best (`float`): Mean scores of start prompt and challenger on the same
            fresh rows.
        test ([`PromptTest`], *optional*): Test between all prompts on the choosing rows. Not part
            of the verdict.
        tried (`int`): Number of challengers.
        naive (`float`, *optional*): The gain on the choosing rows, which is too high.
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
        """The share of all proposals that may be good although none of the tried ones is.

        See [`possible_share`].
        """
        return possible_share(self.tried)

    def sentence(self) -> str:
        """Return the verdict in one sentence."""
        interval = (
            f"{self.gain.mean:+.3f} [{self.gain.low:+.3f}, {self.gain.high:+.3f}] on "
            f"{count_in_words(self.gain.n, 'fresh row')}"
        )
        if self.verdict == "worth it":
            return f"worth it: the best of {self.tried} prompts gains {interval}"
        if self.verdict == "not worth it":
            return (
                f"not worth it: the best of {self.tried} prompts gains {interval}, less than "
                f"{self.delta:g}"
            )
        return (
            f"cannot tell at this budget: the best of {self.tried} prompts gains {interval}; "
            f"{count_in_words(self.rows_needed, 'fresh row')} ({2 * self.rows_needed:,} calls) "
            "could tell"
        )


@dataclass(frozen=True)
class StagePlan:
    """How the calls of a measurement are divided.

    Args:
        prompts (`int`): Prompts to choose from, including the start prompt.
        choosing_rows (`int`): Rows that each of these prompts answers once.
        fresh_rows (`int`): Other rows, which the start prompt and the challenger answer.
        repeats (`int`): Number of answers of each to a fresh row: one, unless there are too few
            rows.
    """

    prompts: int
    choosing_rows: int
    fresh_rows: int
    repeats: int

    @property
    def calls(self) -> int:
        return self.prompts * self.choosing_rows + 2 * self.fresh_rows * self.repeats


CHOOSING_SHARE = 240 / 512
"""Share of the calls that choose: of 512 calls, 12 prompts x 20 rows.

If one prompt in ten is good, this finds it more often than 8 x 32.
"""

# Bounds of `plan_stages`.
_MIN_CHOOSING_ROWS = 4
_MIN_FRESH_ROWS = 8
_MAX_REPEATS = 4


def plan_stages(calls: int, prompts: int, rows: int) -> StagePlan:
    """Divide a number of calls between the two stages.

    Args:
        calls (`int`): Largest number of calls.
        prompts (`int`): Prompts to choose from, including the start prompt; at least two.
        rows (`int`): Number of available rows.

    Raises:
        `ValueError`: If there are fewer than two prompts, or too few calls or rows for both stages.
    """
    if prompts < 2:
        raise ValueError(
            f"headroom needs a start prompt and others to compare with, got {prompts} prompt"
        )

    # The first stage gets its share of the calls and at most half of the rows, the second stage the
    # rest.
    choosing_rows = max(_MIN_CHOOSING_ROWS, int(calls * CHOOSING_SHARE) // prompts)
    choosing_rows = min(choosing_rows, rows // 2)
    remaining = calls - prompts * choosing_rows
    fresh_rows = min(remaining // 2, rows - choosing_rows)
    if choosing_rows < _MIN_CHOOSING_ROWS or fresh_rows < _MIN_FRESH_ROWS:
        least_calls = prompts * _MIN_CHOOSING_ROWS + 2 * _MIN_FRESH_ROWS
        least_rows = 2 * _MIN_FRESH_ROWS
        raise ValueError(
            f"{count_in_words(calls, 'call')} and {count_in_words(rows, 'row')} are too few for "
            f"{prompts} prompts: give {least_calls} calls and {least_rows} rows at least, or fewer "
            "prompts"
        )

    # Calls that remain because there are too few rows are spent on repeats.
    repeats = max(1, min(_MAX_REPEATS, remaining // (2 * fresh_rows)))
    return StagePlan(prompts, choosing_rows, fresh_rows, repeats)


def default_delta(calls: int) -> float:
    """Return the smallest gain that this number of calls can resolve: 0.05 from 2,000 calls on,
    else 0.10.
    """
    return 0.05 if calls >= 2000 else 0.10


# ---- the stages ----


def complete_rows(scores: ArrayLike) -> ScoreTable:
    """Return the rows of a table that have a score in every column. Raises like [`read_table`]."""
    table = read_table(scores)
    return table[~np.isnan(table).any(axis=1)]


def read_table(scores: ArrayLike) -> ScoreTable:
    """Convert scores to an array of rows and columns.

    Raises:
        `ValueError`: If the scores are not a table, or a score is not between 0 and 1.
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
    """Return the column with the best scores, except for the first.

    A random one of the best if there are several.

    Columns are compared by their mean difference from the mean of each row. Without missing scores,
    this is the order of their means. With missing scores, it does not favour a prompt that failed
    on hard rows.

    Args:
        scores (`ArrayLike` of shape (rows, prompts)): Scores, the start prompt first; NaN for a
            missing score.
        rng (`np.random.Generator`): Generator for ties.

    Raises:
        [`TooFewScores`]: If no column but the first has a score on a row where another column has
            one.
    """
    # Rows with a single score compare nothing.
    table = read_table(scores)
    has_score = ~np.isnan(table)
    table = table[has_score.sum(axis=1) >= 2]
    has_score = ~np.isnan(table)

    # The mean difference of each column from the row means, -inf for a column without scores.
    row_means = np.where(has_score, table, 0).sum(axis=1) / np.maximum(has_score.sum(axis=1), 1)
    differences = np.where(has_score, table - row_means[:, None], 0).sum(axis=0)
    counts = has_score.sum(axis=0)
    means = np.where(counts > 0, differences / np.maximum(counts, 1), -np.inf)[1:]
    if not len(means) or np.isneginf(means.max()):
        raise TooFewScores("no prompt but the first has a score to compare")

    # One of the best columns. The tolerance keeps rounding errors from breaking ties.
    best = np.flatnonzero(np.isclose(means, means.max(), rtol=0, atol=1e-12))
    return 1 + int(rng.choice(best))


def paired_gain(scores: ArrayLike, level: float = LEVEL) -> Gain:
    """Return the gain of the second column over the first.

    With fewer than four differing rows, the variance of binary scores is hardly known: it is then
    taken to be at least 3.5 / n, which gives a table without any difference the width of the rule
    of three.

    Args:
        scores (`ArrayLike` of shape (rows, 2)): Scores of start prompt and challenger on the same
            rows.
        level (`float`, *optional*, defaults to `0.95`): Nominal coverage.

    Raises:
        [`TooFewScores`]: If fewer than two rows have both scores.
    """
    # Leave out rows without both scores.
    table = complete_rows(scores)
    n = len(table)
    if n < 2:
        raise TooFewScores(f"a gain needs two rows with both scores, got {n}")

    # The variance of the difference, and the t interval of its mean.
    differences = table[:, 1] - table[:, 0]
    variance = float(differences.var(ddof=1))
    if np.count_nonzero(differences != np.median(differences)) < _FEW_DIFFERENCES:
        variance = max(variance, _RULE_OF_THREE / n)
    mean = float(differences.mean())
    # A difference of two scores is between -1 and 1, and so are the ends of its interval.
    half_width = t_quantile(level, n - 1) * math.sqrt(variance / n)
    estimate = Estimate(mean, max(-1.0, mean - half_width), min(1.0, mean + half_width), n)
    return Gain(estimate, variance)


@lru_cache(maxsize=4096)
def t_quantile(level: float, degrees: int) -> float:
    """Half the width of a t interval, in standard errors."""
    # Two-sided: the level is the mass between the negative and the positive quantile.
    return float(stats.t.ppf(0.5 + level / 2, degrees))


def decide(gain: Estimate, delta: float) -> Verdict:
    """Return the verdict that follows from the interval of a gain."""
    if gain.low > 0:
        return "worth it"
    if gain.high < delta:
        return "not worth it"
    return "cannot tell"


def rows_needed(variance: float, delta: float, power: float = POWER) -> int:
    """Fresh rows needed to show a gain of `delta` with probability `power`, or to exclude it if
    there is none.

    Args:
        variance (`float`): Variance of the difference on one row ([`Gain`]): about 0.25 for binary
            scores on a mix of hard and easy rows, at most 0.5.
        delta (`float`): The gain to show.
        power (`float`, *optional*, defaults to `0.8`): Probability of showing it.
    """
    # The sample size of a two-sided z test: n = variance * ((z_level + z_power) / delta)^2.
    z = stats.norm.ppf(0.5 + LEVEL / 2) + stats.norm.ppf(power)
    return math.ceil(variance * (z / delta) ** 2)


def judge_prompts(
    choosing: ArrayLike,
    chosen: int,
    fresh: ArrayLike,
    delta: float,
    top_up: ArrayLike | None = None,
) -> PromptHeadroom:
    """Return the headroom of prompts, computed from the scores of both stages.

    Args:
        choosing (`ArrayLike` of shape (rows, prompts)): Scores on the choosing rows.
        chosen (`int`): The column from [`choose_challenger`].
        fresh (`ArrayLike` of shape (rows, 2)): Scores of start prompt and challenger on fresh rows.
        delta (`float`): The smallest gain that would be worth it.
        top_up (`ArrayLike` of shape (rows, 2), *optional*): Scores of both on further rows. Used if
            `fresh` is inconclusive, and then alone: pooling both looks would find gains that do not
            exist.
    """
    # The gain on fresh rows, or on those of the second look.
    gain = paired_gain(fresh)
    measured_table = complete_rows(fresh)
    topped_up = False
    if top_up is not None and decide(gain.estimate, delta) == "cannot tell":
        gain = paired_gain(top_up)
        measured_table = complete_rows(top_up)
        topped_up = True
    start, best = measured_table.mean(axis=0)

    # The gain on the choosing rows, for comparison. Too few of them may be complete.
    choosing_table = complete_rows(choosing)
    n_choosing = len(choosing_table)
    naive = None
    if n_choosing:
        naive = float((choosing_table[:, chosen] - choosing_table[:, 0]).mean())
    return PromptHeadroom(
        chosen=chosen,
        gain=gain.estimate,
        verdict=decide(gain.estimate, delta),
        delta=delta,
        rows_needed=rows_needed(gain.variance, delta),
        topped_up=topped_up,
        start=float(start),
        best=float(best),
        test=compare_prompts(choosing_table) if n_choosing > 1 else None,
        tried=choosing_table.shape[1] - 1,
        naive=naive,
    )


# ---- beside the verdict ----


def compare_prompts(scores: ArrayLike) -> PromptTest:
    """Return the F test between prompts in a two-way table (Searle, Casella and McCulloch 1992): do
    any of them differ?

    Args:
        scores (`ArrayLike` of shape (rows, prompts)): Scores of at least two prompts on at least
            two rows.

    Raises:
        [`TooFewScores`]: If there are fewer.
    """
    # Means of shape (prompts,), and the variance that chance alone gives each of them.
    means, error = _means_and_error(scores)
    n, k = complete_rows(scores).shape
    between = float(means.var(ddof=1))
    statistic = between / error
    p_value = float(stats.f.sf(statistic, k - 1, (k - 1) * (n - 1)))
    # The method of moments: the variance between true means is what the error does not explain.
    return PromptTest(statistic, p_value, math.sqrt(max(0.0, between - error)))


def _means_and_error(scores: ArrayLike) -> tuple[NDArray[np.float64], float]:
    """Return the means of the prompts, and the variance of such a mean in contrasts: residual mean
    square / rows.
    """
    table = complete_rows(scores)
    n, k = table.shape
    if n < 2 or k < 2:
        raise TooFewScores(f"comparing prompts needs two rows and two prompts, got {n} and {k}")

    # Residuals after removing the effects of rows and prompts.
    means = table.mean(axis=0)
    residuals = table - table.mean(axis=1, keepdims=True) - means + table.mean()
    mean_square = float((residuals**2).sum()) / ((n - 1) * (k - 1))
    # If all scores of a table are equal, its variance is 0, but that of the next row need not be.
    mean_square = max(mean_square, 0.5 / (n * k))
    return means, mean_square / n


def possible_share(tried: int, level: float = LEVEL) -> float:
    """Return the largest share of proposals that may be good if none of `tried` is: 1 - (1 -
    level)^(1 / tried).

    Args:
        tried (`int`): Number of tried proposals.
        level (`float`, *optional*, defaults to `0.95`): Confidence level.
    """
    # If a share s is good, all tried ones fail with probability (1 - s)^tried; solve for 1 - level.
    return 1 - (1 - level) ** (1 / tried)


def expect_further(
    scores: ArrayLike, further: int, rng: np.random.Generator, draws: int = 4000, scale: float = 0.1
) -> Estimate:
    """Return the gain of the best of `further` more prompts over the start prompt, *if they are
    like the challengers*.

    Empirical Bayes without the start prompt (Efron and Morris 1975, Gelman 2006): the challengers'
    true means are mu + s z, where s is 0 with probability 0.3 and half-normal otherwise, and the
    best of K draws is mu + s e_K. The interval is too short if the challengers differ by more than
    about 0.1, because scores are limited to [0, 1].

    Args:
        scores (`ArrayLike` of shape (rows, prompts)): Scores of the start prompt, then of at least
            two challengers.
        further (`int`): K, the number of further prompts.
        rng (`np.random.Generator`): Generator for the draws.
        draws (`int`, *optional*, defaults to `4000`): Number of draws from the posterior.
        scale (`float`, *optional*, defaults to `0.1`): Scale of the half-normal.
    """
    means, error = _means_and_error(scores)
    n, k = complete_rows(scores).shape
    challengers = means[1:]
    if len(challengers) < 2:
        raise TooFewScores("what further prompts may gain needs two challengers at least")

    # The posterior of s, the spread between prompts, on a grid of equal prior mass, three tenths of
    # which is at 0.
    mass = (np.arange(200) + 0.5) / 200
    spread = scale * stats.norm.ppf(0.5 + 0.5 * np.clip((mass - 0.3) / 0.7, 0, 1))
    # The likelihood of the observed means, with mu integrated out: their variance is s^2 + error.
    variance = spread**2 + error
    deviation = float(((challengers - challengers.mean()) ** 2).sum())
    likelihood = -0.5 * (len(challengers) - 1) * np.log(variance) - 0.5 * deviation / variance
    # Subtracting the maximum keeps the exponentials from all becoming 0.
    weights = np.exp(likelihood - likelihood.max())
    s = spread[rng.choice(len(spread), size=draws, p=weights / weights.sum())]

    # The means given s. The error is drawn as well, from a scaled inverse chi-squared distribution.
    degrees = (n - 1) * (k - 1)
    error_draws = error * degrees / rng.chisquare(degrees, draws)
    mu_deviation = np.sqrt((s**2 + error_draws) / len(challengers))
    mu = challengers.mean() + mu_deviation * rng.standard_normal(draws)
    # The start prompt is not one of the draws: its mean varies by its own error only.
    start = means[0] + np.sqrt(error_draws) * rng.standard_normal(draws)

    # The gain of the best further prompt. The draws may leave the range of the scores, the means
    # that they stand for cannot.
    best = np.clip(mu + s * expected_maximum(further), 0.0, 1.0)
    gains = best - np.clip(start, 0.0, 1.0)
    low, high = np.quantile(gains, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2])
    return Estimate(float(gains.mean()), float(low), float(high), n)


@lru_cache
def expected_maximum(draws: int) -> float:
    """Return the expected maximum of this number of standard normal draws."""
    if draws == 1:
        return 0.0
    # The density of the largest of n draws is n * pdf(x) * cdf(x)^(n - 1).
    return float(
        stats.norm.expect(lambda x: draws * x * stats.norm.cdf(x) ** (draws - 1), lb=-9, ub=9)
    )


def route_prompts(first: ArrayLike, second: ArrayLike, rng: np.random.Generator) -> Estimate:
    """Return the gain of choosing a prompt for each question over the single best prompt.

    The first answers choose the prompt with the best score for each row, and the prompt with the
    best mean for all rows (which also wins a row's ties). The second answers to the same rows
    measure both. With two answers the power is low, so an interval around 0 excludes little. An F
    test of interaction is no alternative: it has the wrong size for binary scores.

    Args:
        first (`ArrayLike` of shape (rows, prompts)), second (`ArrayLike` of the same shape): Scores
            of two independent answers of each prompt to each row.
        rng (`np.random.Generator`): Generator for ties between means.
    """
    choosing = np.asarray(first, dtype=float)
    measuring = np.asarray(second, dtype=float)
    # Only rows with both answers under every prompt count.
    complete = ~(np.isnan(choosing).any(axis=1) | np.isnan(measuring).any(axis=1))
    choosing = complete_rows(choosing[complete])
    measuring = complete_rows(measuring[complete])

    # The single best prompt, and the best prompt of each row.
    means = choosing.mean(axis=0)
    single = int(rng.choice(np.flatnonzero(np.isclose(means, means.max(), rtol=0, atol=1e-12))))
    routed = choosing.argmax(axis=1)
    # Where the single best prompt is among the best ones of a row, routing chooses it as well.
    ties = choosing[:, single] >= choosing.max(axis=1)
    routed[ties] = single

    # Measure both on the second answers.
    row_numbers = np.arange(len(routed))
    pairs = np.column_stack([measuring[:, single], measuring[row_numbers, routed]])
    return paired_gain(pairs).estimate


def as_table(rows: Sequence[Sequence[float | None]]) -> ScoreTable:
    """Convert scores with `None` for failures to a table with NaN."""
    float_rows: list[list[float]] = []
    for row in rows:
        float_rows.append([math.nan if score is None else float(score) for score in row])
    return np.array(float_rows, dtype=float)
