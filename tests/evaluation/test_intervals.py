"""The intervals against published values and, by simulation, against what they promise: to cover
the truth.
"""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from agentic_prompting.evaluation import (
    Estimate,
    bootstrap_interval,
    paired_difference,
    wilson_interval,
)
from paper_tables.estimates import mean_of_means, seed_interval, stars, wald_interval


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I: Wilson's score interval
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_newcombes_values(successes, n, low, high):
    estimate = wilson_interval(successes, n)
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=5e-5)
    assert (estimate.mean, estimate.n) == (successes / n, n)


@given(
    st.integers(1, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))),
    st.floats(0.5, 0.999),
)
def test_wilson_is_inside_and_around(case, level):
    successes, n = case
    estimate = wilson_interval(successes, n, level)
    assert 0 <= estimate.low <= estimate.mean <= estimate.high <= 1
    mirrored = wilson_interval(n - successes, n, level)
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - estimate.high, 1 - estimate.low))


def test_wilson_covers_the_truth():
    rng = np.random.default_rng(0)
    shares = rng.uniform(
        0.1, 0.9, 20_000
    )  # over many truths: for a single one the coverage of any such interval jumps
    successes = rng.binomial(128, shares)
    ends = {s: wilson_interval(s, 128) for s in range(129)}
    covered = np.mean(
        [ends[s].low <= p <= ends[s].high for s, p in zip(successes.tolist(), shares, strict=True)]
    )
    assert covered == pytest.approx(0.95, abs=0.015)


def test_bootstrap_covers_the_truth():
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(800):  # F1-like values: many zeros, many ones, something between
        values = rng.choice([0.0, 0.5, 1.0], size=128, p=[0.4, 0.2, 0.4])
        estimate = bootstrap_interval(values, n_resamples=300, seed=trial)
        covered += estimate.low <= 0.5 <= estimate.high
    assert covered / 800 == pytest.approx(0.95, abs=0.015)


def test_bootstrap_is_seeded_and_agrees_with_theory():
    values = np.random.default_rng(2).normal(3.0, 2.0, 400)
    estimate = bootstrap_interval(values)
    assert estimate == bootstrap_interval(values) != bootstrap_interval(values, seed=1)
    half = 1.96 * values.std() / 400**0.5
    assert (estimate.low, estimate.high) == pytest.approx(
        (values.mean() - half, values.mean() + half), abs=0.03
    )
    assert bootstrap_interval(values, level=0.5).low > estimate.low


def test_one_value_and_constant_values_have_no_width():
    assert bootstrap_interval([0.25]) == Estimate(0.25, 0.25, 0.25, 1)
    assert bootstrap_interval([1.0] * 9) == Estimate(1.0, 1.0, 1.0, 9)


def test_an_estimate_prints_itself():
    assert str(wilson_interval(64, 128)) == "0.500 [0.415, 0.585] (n=128)"


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_impossible_counts(successes, n):
    with pytest.raises(ValueError, match="0 <= successes <= n"):
        wilson_interval(successes, n)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")], [[1.0], [2.0]]])
def test_bootstrap_refuses_what_has_no_mean(values):
    with pytest.raises(ValueError, match="expected finite numbers"):
        bootstrap_interval(values)


def test_levels_and_resamples_are_checked():
    for level in (0, 1, 95):
        with pytest.raises(ValueError, match="level must be between 0 and 1"):
            wilson_interval(1, 2, level)
    with pytest.raises(ValueError, match="n_resamples"):
        bootstrap_interval([1.0], n_resamples=0)


@pytest.mark.parametrize(("n", "quantile"), [(2, 12.7062), (3, 4.3027), (5, 2.7764), (31, 2.0423)])
def test_over_seeds_it_is_students(n, quantile):
    """Against the printed table of Student's t."""
    means = [0.5 + 0.01 * seed for seed in range(n)]
    estimate = seed_interval(means)
    assert estimate.high - estimate.mean == pytest.approx(
        quantile * np.std(means, ddof=1) / n**0.5, rel=1e-4
    )


def test_a_mean_of_means_counts_each_group_once():
    groups = [[1.0] * 10, [0.0, 1.0] * 100]
    estimate = mean_of_means(groups)
    assert (estimate.mean, estimate.n) == (0.75, 210)
    # Half of the standard error of the only group that varies.
    assert estimate.high - estimate.low == pytest.approx(1.96 * 0.5 / 200**0.5, rel=0.1)


# ProRefine's Table 1, word sorting and GSM8K for the 8B model and object counting: right answers
# out of 100 (1,319), the interval as printed, and the stars.
TABLE_1 = {
    "object counting, 1B": (
        100,
        [(48, 0.382, 0.578, ""), (62, 0.524, 0.716, ""), (60, 0.503, 0.696, "")],
    ),
    "object counting, 3B": (
        100,
        [(65, 0.556, 0.744, ""), (73, 0.643, 0.817, ""), (85, 0.780, 0.920, "*")],
    ),
    "word sorting, 1B": (
        100,
        [(11, 0.048, 0.172, ""), (33, 0.237, 0.423, "*"), (22, 0.138, 0.302, "")],
    ),
    "word sorting, 8B": (
        100,
        [(50, 0.401, 0.598, ""), (69, 0.599, 0.781, "*"), (86, 0.792, 0.928, "**")],
    ),
    "GSM8K, 1B": (
        1319,
        [(593, 0.423, 0.476, ""), (611, 0.436, 0.489, ""), (863, 0.627, 0.678, "**")],
    ),
    "GSM8K, 8B": (
        1319,
        [(1080, 0.797, 0.839, ""), (1140, 0.845, 0.882, "*"), (1167, 0.868, 0.902, "*")],
    ),
}


@pytest.mark.parametrize("name", TABLE_1)
def test_wald_and_the_stars_are_those_of_prorefines_table_1(name):
    n, rows = TABLE_1[name]
    shares = [wald_interval(right, n) for right, *_ in rows]
    for share, (_, low, high, _) in zip(shares, rows, strict=True):
        assert (share.low, share.high) == pytest.approx(
            (low, high), abs=2.5e-3
        )  # some are printed a little askew
    cot, textgrad, prorefine = shares
    assert (stars(textgrad, [cot]), stars(prorefine, [cot, textgrad])) == (rows[1][3], rows[2][3])


@pytest.mark.parametrize("difference", [-1.0, 0.0, 1.0])
def test_equal_differences_are_no_certainty(difference):
    """Ten questions on which nothing differs leave room for others that do."""
    first = {number: max(0.0, difference) for number in range(10)}
    second = {number: max(0.0, -difference) for number in range(10)}
    estimate = paired_difference(first, second).difference
    unseen = wilson_interval(0, 10).high
    assert estimate.mean == difference
    assert estimate.low == pytest.approx(max(-1.0, difference - unseen * (1 + difference)))
    assert estimate.high == pytest.approx(min(1.0, difference + unseen * (1 - difference)))
    assert estimate.low < estimate.high
