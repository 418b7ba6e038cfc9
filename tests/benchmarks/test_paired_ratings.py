"""Paired ratings against posteriors by brute force; what their order may not change; selection by Thompson sampling."""

import math
import random
from collections import Counter

import numpy as np
import paired_ratings
import pytest
from paired_ratings import PairedPopulation, PairedRatings, cholesky, top_two

from agentic_prompting.evolution import Member, Rating, SystemPrompt, select

Y = {0: [0.2, 0.4, 0.0, 0.6], 1: [0.5, 0.6, 0.1, 0.5], 2: [0.4, 0.9, 0.3, 0.9]}


def family(*parents):
    """Ratings of a first prompt and of children with these parents each."""
    ratings, known = PairedRatings(), {}
    for prompt, own in enumerate([(), *parents]):
        known[prompt] = ratings.believe(prompt, {parent: known[parent] for parent in own})
    return ratings, known


def noise_of(batches):
    """s² from the definition: residuals of the least-squares fit of problem and prompt, weighted, discounted."""
    squares = freedom = 0.0
    for rows, slots in batches:
        prompts, b = list(rows), len(next(iter(rows.values())))
        design, y, w = [], [], []
        for i, prompt in enumerate(prompts):
            for p in range(b):
                design.append([float(i == j) for j in range(len(prompts))] + [float(p == q) for q in range(b)])
                y.append(rows[prompt][p])
                w.append(slots[prompt])
        root = np.sqrt(w)
        fit = np.linalg.lstsq(np.array(design) * root[:, None], np.array(y) * root, rcond=None)[0]
        left = (np.array(y) - np.array(design) @ fit) * root
        squares, freedom = 0.9 * squares + left @ left, 0.9 * freedom + (len(prompts) - 1) * (b - 1)
    return (0.3**2 * 8 + squares) / (8 + freedom)


def posterior(parents, batches):
    """The whole model written out: every problem has an effect of its own with a prior as good as flat."""
    n = len(parents) + 2
    lift = np.eye(n)  # each effect as a sum of independent parts: gain, the first effect, each child's own
    for child, own in enumerate(parents):
        lift[child + 2] = lift[[parent + 1 for parent in own]].mean(0)
        lift[child + 2, 0] += 1
        lift[child + 2, child + 2] = 1
    prior = np.diag([0.06**2, 1e-6, *[0.12**2] * len(parents)])
    x, c = lift @ np.array([0.03, *[0.0] * (n - 1)]), lift @ prior @ lift.T
    for number, (rows, slots) in enumerate(batches):
        c = c + 0.01**2 * np.eye(n)
        noise, b = noise_of(batches[: number + 1]), len(next(iter(rows.values())))
        big = np.zeros((n + b, n + b))
        big[:n, :n], big[n:, n:] = c, 1e4 * np.eye(b)
        h, y, r = [], [], []
        for prompt, row in rows.items():
            for p, reward in enumerate(row):
                h.append([float(i in (prompt + 1, n + p)) for i in range(n + b)])
                y.append(reward)
                r.append(noise / slots[prompt])
        h, mean = np.array(h), np.concatenate([x, np.zeros(b)])
        gain = big @ h.T @ np.linalg.inv(h @ big @ h.T + np.diag(r))
        x, c = (mean + gain @ (np.array(y) - h @ mean))[:n], (big - gain @ h @ big)[:n, :n]
    return x, c


ONCE, TWICE = {0: 1, 1: 1, 2: 1}, {0: 1, 1: 2, 2: 1}
PAIR = {1: [0.1, 0.9], 2: [0.3, 0.8]}


@pytest.mark.parametrize("parents", [[(0,), (0,)], [(0,), (1,)], [(0,), (0, 1)]])
@pytest.mark.parametrize("batches", [[(Y, ONCE)], [(Y, TWICE)], [(Y, ONCE), (PAIR, {1: 1, 2: 1}), (Y, TWICE)]])
def test_the_posterior_is_that_of_the_whole_model(parents, batches):
    ratings, known = family(*parents)
    for rows, slots in batches:
        known |= ratings.rate({prompt: known[prompt] for prompt in rows}, rows, slots)
    x, c = posterior(parents, batches)
    assert ratings.x == pytest.approx(x, abs=1e-5)
    assert np.array(ratings.c) == pytest.approx(c, abs=1e-5)
    assert [known[prompt].mu for prompt in range(3)] == pytest.approx(x[1:], abs=1e-5)
    assert [known[prompt].sigma for prompt in range(3)] == pytest.approx(np.sqrt(np.diag(c)[1:]), abs=1e-5)


def test_two_prompts_by_integration():
    """Bayes' rule on a grid of gain, the child's own part and the effect of the one problem."""
    ratings, known = family((0,))
    new = ratings.rate(known, {0: [0.2], 1: [0.7]}, {0: 1, 1: 1})
    g, d, problem = (np.linspace(-s, s, 161) for s in (0.6, 1.0, 3.0))
    g, d, problem = g[:, None, None], d[None, :, None], problem[None, None, :]
    normal = lambda x, sd: np.exp(-((x / sd) ** 2) / 2)  # noqa: E731
    drift = 0.01
    density = normal(g - 0.03, math.hypot(0.06, drift)) * normal(d, math.hypot(0.12, drift))
    density = density * normal(0.2 - problem, math.hypot(0.3, drift)) * normal(0.7 - problem - g - d, 0.3)
    # The drift of the gain is not the child's: it was born before.
    effect = float((density * (g + d)).sum() / density.sum())
    assert new[1].mu == pytest.approx(effect, abs=2e-3)


def test_neither_the_order_of_problems_nor_that_of_prompts_matters():
    def after(order, columns):
        ratings, known = family((0,), (1,))
        rows = {prompt: [Y[prompt][at] for at in columns] for prompt in order}
        return ratings.rate(known, rows, {prompt: TWICE[prompt] for prompt in order})

    first = after([0, 1, 2], [0, 1, 2, 3])
    for order, columns in (([2, 0, 1], [0, 1, 2, 3]), ([0, 1, 2], [3, 1, 0, 2]), ([1, 2, 0], [2, 3, 0, 1])):
        again = after(order, columns)
        for prompt in range(3):
            assert (again[prompt].mu, again[prompt].sigma) == pytest.approx((first[prompt].mu, first[prompt].sigma))


def test_neither_harder_problems_nor_better_weights_count():
    one, other = (family((0,), (1,)) for _ in range(2))
    shifted = {prompt: [value + at for at, value in enumerate(row)] for prompt, row in Y.items()}
    plain, moved = one[0].rate(one[1], Y, ONCE), other[0].rate(other[1], shifted, ONCE)
    assert [moved[prompt].mu for prompt in Y] == pytest.approx([plain[prompt].mu for prompt in Y])


def test_a_missing_cell_leaves_its_problem_out_and_one_prompt_alone_says_nothing():
    (one, known), (other, _) = family((0,), (1,)), family((0,), (1,))
    holes = {0: [0.2, None, 0.0, 0.6], 1: [0.5, 0.6, 0.1, 0.5], 2: [0.4, 0.9, 0.3, None]}
    whole = {prompt: [row[0], row[2]] for prompt, row in Y.items()}
    assert one.rate(known, holes, ONCE) == other.rate(known, whole, ONCE)
    before = list(one.x)
    one.rate({1: known[1]}, {1: [1.0, 1.0]}, {1: 1})
    assert one.x == before


def test_relatives_learn_from_each_other_and_unchanged_children_of_the_gain():
    ratings, known = family((0,), (1,), (0,))
    new = ratings.rate({0: known[0], 1: known[1]}, {0: [0.0] * 8, 1: [1.0] * 8}, {0: 1, 1: 1})
    assert new[2].mu - known[2].mu > new[3].mu - known[3].mu > 0, "the child of the good one more than its sister"
    gain = ratings.x[0]
    assert gain > 0.03
    ratings.unchanged()
    assert ratings.x[0] < gain


def test_old_prompts_leave_the_joint_belief_and_can_come_back(monkeypatch):
    monkeypatch.setattr(paired_ratings, "KEPT", 3)
    ratings, _ = family((0,), (1,), (2,), (3,))
    assert ratings.ids == [2, 3, 4] and len(ratings.x) == len(ratings.c) == len(ratings.c[0]) == 4
    late = ratings.believe(5, {0: Rating(0.5, 0.1)})
    assert late.mu == pytest.approx(0.53) and late.sigma == pytest.approx(math.sqrt(0.1**2 + 0.06**2 + 0.12**2))
    new = ratings.rate({0: Rating(0.5, 0.1), 5: late}, {0: [0.9], 5: [0.1]}, {0: 1, 5: 1})
    assert new[0].mu > 0.5 and new[5].mu < late.mu


def grown():
    population = PairedPopulation(SystemPrompt("Answer.", ()), seed=3)
    for number in range(1, 5):
        population.add(SystemPrompt("Answer.", (f"Rule {number}.",), parents=(number - 1,), operator="mutation"))
    return population


def test_the_parent_is_the_prompt_believed_best_not_the_luckiest():
    population = grown()
    good = [[0.0] * 8, [0.9] * 8]
    for _ in range(6):
        population.record([0, 1], good)
    population.record([0, 1], [[0.6] * 8, [0.5] * 8])
    assert population.parent([member.prompt for member in population.members[:2]]).id == 1


# Top two: Thompson sampling -------------------------------------------------------------------------------------------

BELIEFS = [Rating(25, 2), Rating(27, 1), Rating(26, 4)]


def test_challengers_come_as_often_as_they_may_be_the_best():
    given = [Member(SystemPrompt("p", id=n), rating) for n, rating in enumerate(BELIEFS)]
    rng, draws = random.Random(0), 20_000
    counts = Counter(tuple(select(given, 2, top_two, rng)) for _ in range(draws))
    better = 0.5 * math.erfc(-1 / math.hypot(2, 4) / math.sqrt(2))  # P(skill of 2 > skill of 0)
    assert counts[1, 2] / draws == pytest.approx(better, abs=0.015)
    assert counts[1, 0] + counts[1, 2] == draws, "the first is the one with the highest mean"


def test_a_draw_is_a_draw_from_the_joint_belief():
    population = grown()
    population.record([0, 1, 2], [[0.2, 0.4], [0.9, 0.8], [0.4, 0.5]])
    rng = random.Random(1)
    drawn = np.array([population.ratings.draw(population.members, rng) for _ in range(20_000)])
    assert drawn.mean(0) == pytest.approx(population.ratings.x[1:], abs=0.01)
    assert np.cov(drawn.T) == pytest.approx(np.array(population.ratings.c)[1:, 1:], abs=0.002)


def test_a_direction_without_doubt_is_drawn_at_its_mean():
    lower = cholesky([[1.0, 1.0], [1.0, 1.0]])
    assert lower == [[1.0], [1.0, 0.0]]


def test_a_population_rates_by_its_own_ratings_and_not_by_trueskill(monkeypatch):
    """One prompt alone changes nothing; a parent that has left the joint belief has the rating that is given."""
    population, (ratings, known) = grown(), family((0,), (1,), (2,), (3,))
    assert {n: member.rating for n, member in enumerate(population.members)} == known
    rows = {0: [0.2, 0.4], 1: [0.9, 0.8]}
    assert population.record([0, 1], list(rows.values())) == pytest.approx([0.3, 0.85])
    known |= ratings.rate({0: known[0], 1: known[1]}, rows, {0: 1, 1: 1})
    assert {n: member.rating for n, member in enumerate(population.members)} == known
    state = list(population.ratings.x)
    population.record([2], [[1.0, 1.0]])
    assert population.ratings.x == state
    monkeypatch.setattr(paired_ratings, "KEPT", 3)
    small = grown()
    assert small.ratings.ids == [2, 3, 4]
    late = small.add(SystemPrompt("Answer.", ("Late.",), parents=(0,), operator="mutation"), {0: Rating(0.5, 0.1)})
    assert small.rating(late).mu == pytest.approx(0.53)
