"""TrueSkill against the reference's numbers and against integration by brute force; what children
start with.
"""

import math

import numpy as np
import pytest

from agentic_prompting.evolution import Rating, crossover_rating, mutation_rating, ranks, rate

BETA = 25 / 6
TAU = 25 / 300


def test_the_reference_numbers():
    new = rate([Rating()] * 3, [0.9, 0.4, 0.4])
    assert [rating.mu for rating in new] == pytest.approx([30.109, 22.443, 22.448], abs=5e-4)
    assert [rating.sigma for rating in new] == pytest.approx([6.735, 5.972, 5.974], abs=5e-4)


def test_the_order_is_that_of_the_input():
    new = rate([Rating()] * 3, [0.4, 0.9, 0.1])
    assert new[1].mu > new[0].mu > new[2].mu


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        ([0.52, 0.515, 0.508, 0.50], [0, 0, 1, 1]),  # ties do not chain
        ([0.50, 0.508, 0.515, 0.52], [1, 1, 0, 0]),
        ([0.52, 0.51], [0, 0]),  # exactly the tolerance, a little more in floating point
        ([0.52, 0.5099], [0, 1]),
        ([1.0, 1.0, 0.0], [0, 0, 1]),
        ([], []),
    ],
)
def test_ties(scores, wanted):
    assert ranks(scores) == wanted


def test_tie_tolerance_can_be_set():
    assert ranks([0.5, 0.4], tie_tolerance=0.2) == [0, 0]
    assert ranks([0.5, 0.5 - 1e-6], tie_tolerance=0.0) == [0, 1]


def brute_force(one: Rating, other: Rating, drawn: bool) -> list[Rating]:
    """Bayes' rule on a grid: p(skills | outcome) with the drift before and normal performances
    (Appendix B).
    """
    from statistics import NormalDist

    margin = NormalDist().inv_cdf((0.1 + 1) / 2) * math.sqrt(2) * BETA
    sigmas = [math.hypot(rating.sigma, TAU) for rating in (one, other)]
    grids = [
        np.linspace(r.mu - 9 * s, r.mu + 9 * s, 1201)
        for r, s in zip((one, other), sigmas, strict=True)
    ]
    priors = [
        np.exp(-(((g - r.mu) / s) ** 2) / 2)
        for g, r, s in zip(grids, (one, other), sigmas, strict=True)
    ]
    difference = (grids[0][:, None] - grids[1][None, :]) / (math.sqrt(2) * BETA)
    bound = margin / (math.sqrt(2) * BETA)
    cdf = np.vectorize(NormalDist().cdf, otypes=[float])
    table = np.linspace(-40, 40, 40001)
    values = cdf(table)
    phi = lambda x: np.interp(x, table, values)  # noqa: E731
    likelihood = (
        phi(difference + bound) - phi(difference - bound) if drawn else phi(difference - bound)
    )
    joint = priors[0][:, None] * priors[1][None, :] * likelihood
    joint /= joint.sum()
    new = []
    for axis, grid in enumerate(grids):
        density = joint.sum(axis=1 - axis)
        mu = float((density * grid).sum())
        new.append(Rating(mu, math.sqrt(float((density * (grid - mu) ** 2).sum()))))
    return new


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize(
    "ratings",
    [(Rating(), Rating()), (Rating(20, 3), Rating(31, 1.5)), (Rating(30, 2), Rating(25, 6))],
)
def test_two_players_by_brute_force(ratings, drawn):
    new = rate(ratings, [0.5, 0.5] if drawn else [0.8, 0.2])
    for ours, exact in zip(new, brute_force(*ratings, drawn), strict=True):
        assert (ours.mu, ours.sigma) == pytest.approx((exact.mu, exact.sigma), abs=2e-3)


def test_many_games_find_the_order():
    rng = np.random.default_rng(0)
    skill = [0.2, 0.4, 0.6]
    ratings = [Rating()] * 3
    for _ in range(60):
        ratings = rate(ratings, [float(rng.binomial(20, p)) / 20 for p in skill])
    assert ratings[0].mu < ratings[1].mu < ratings[2].mu
    assert all(rating.sigma < 3 for rating in ratings)


def test_huge_upsets_are_rated():
    new = rate([Rating(100, 1), Rating(25, 1)], [0.0, 1.0])
    assert new[0].mu < 100
    assert new[1].mu > 25


def test_nothing_to_compare():
    assert rate([Rating(30, 2)], [0.5]) == [Rating(30, 2)]
    assert rate([], []) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rate([Rating()], [0.1, 0.2]), "1 ratings but 2 scores"),
        (lambda: rate([Rating()] * 2, [0.1, math.nan]), "must be finite"),
        (lambda: rate([Rating()] * 2, [0.1, 0.2], -1), "must not be negative"),
        (lambda: Rating(25, 0), "sigma > 0"),
        (lambda: crossover_rating([]), "at least one parent"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_children():
    """Appendix B."""
    assert mutation_rating(Rating(30, 3), 1.0) == Rating(30, math.sqrt(10))
    assert mutation_rating(Rating(30, 3), 4.0) == Rating(30, 5)
    child = crossover_rating([Rating(30, 2), Rating(24, 4)], 1.0)
    assert child.mu == pytest.approx((30 / 4 + 24 / 16) / (1 / 4 + 1 / 16))  # 28.8
    assert child.sigma == pytest.approx(math.sqrt(1 / (1 / 4 + 1 / 16) + 1))
    same = crossover_rating([Rating(30, 2)], 1.0)
    assert (same.mu, same.sigma) == pytest.approx((30, math.sqrt(5)))
