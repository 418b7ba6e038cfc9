"""Selection rules against their formulas, and the population: rating, windows, best, exact resume."""

import json
import math
import random
from collections import Counter

import pytest

from agentic_prompting.evolution import (
    RULES,
    Member,
    Population,
    Rating,
    SystemPrompt,
    common_means,
    load_state,
    optimistic_scores,
    rate,
    select,
    selection_rule,
    sole_wins,
)

RATINGS = [
    Rating(25, 2),
    Rating(27, 1),
    Rating(24, 4),
    Rating(28, 0.5),
    Rating(20, 3),
]  # scores 29 29 32 29 26
DRAWS = 20_000


def members(ratings=RATINGS):
    return [Member(SystemPrompt("p", id=number), rating) for number, rating in enumerate(ratings)]


def frequencies(rule, k, draws=DRAWS, candidates=None, **options):
    """How often each position is chosen, and how often it is the first."""
    rng = random.Random(0)
    chosen = Counter()
    first = Counter()
    candidates = candidates or members()
    for _ in range(draws):
        picked = select(candidates, k, rule, rng, **options)
        assert len(set(picked)) == k
        chosen.update(picked)
        first[picked[0]] += 1
    n = len(candidates)
    return [chosen[position] / draws for position in range(n)], [
        first[position] / draws for position in range(n)
    ]


def close(p):
    return pytest.approx(p, abs=4.5 * math.sqrt(0.25 / DRAWS))


def test_scores_are_optimistic():
    assert optimistic_scores(members()) == [29, 29, 32, 29, 26]
    assert optimistic_scores(members(), exploration=0) == [25, 27, 24, 28, 20]


@pytest.mark.parametrize("places", [[], [2], [2, 2], [0, 1, 2], [0, 5]])
def test_a_rule_that_does_not_draw_what_was_asked_for_is_an_error(places):
    """Of none, selection would wait for ever; of the best one alone, no prompt would ever be rated."""
    calls = iter(range(5))

    def rule(members, k, rng):
        next(calls)  # ends a test that waits for ever
        return places

    with pytest.raises(ValueError, match="the selection rule rule.* 2 .*5"):
        select(members(), 2, rule, random.Random(0))


def test_top_plus_random():
    chosen, first = frequencies(selection_rule("top_plus_random"), 3)
    assert first[2] == chosen[2] == 1
    assert [chosen[position] for position in (0, 1, 3, 4)] == close(
        [0.5] * 4
    )  # two of the four others, uniformly


def test_softmax():
    temperature = 2.0
    chosen, first = frequencies(selection_rule("softmax", temperature=temperature), 2)
    weights = [math.exp(score / temperature) for score in (29, 29, 32, 29, 26)]
    p = [weight / sum(weights) for weight in weights]
    assert first == close(p)
    second = [sum(p[j] * p[i] / (1 - p[j]) for j in range(5) if j != i) for i in range(5)]
    assert chosen == close([one + two for one, two in zip(p, second, strict=True)])


def test_uniform():
    assert frequencies(selection_rule("uniform"), 2)[0] == close([0.4] * 5)


def test_the_top_one_is_the_youngest_of_equals():
    rng = random.Random(0)
    assert select(members(), 1, selection_rule("top_plus_random"), rng) == [2]
    assert select(members([Rating(25, 2)] * 3), 1, selection_rule("top_plus_random"), rng) == [2]
    assert select(members(), 1, selection_rule("top_plus_random", exploration=0), rng) == [3]


def test_independent_draws_are_those_of_eq_3():
    """Algorithm 1 draws M times from one distribution: each draw has it, and the same prompt may
    come twice.
    """
    rng = random.Random(0)
    temperature = 2.0
    rule = selection_rule("softmax", temperature=temperature)
    drawn = [select(members(), 2, rule, rng, independent=True) for _ in range(DRAWS)]
    weights = [math.exp(score / temperature) for score in (29, 29, 32, 29, 26)]
    p = [weight / sum(weights) for weight in weights]
    for slot in (0, 1):
        assert [
            Counter(pair[slot] for pair in drawn)[position] / DRAWS for position in range(5)
        ] == close(p)
    assert sum(first == second for first, second in drawn) / DRAWS == close(sum(x * x for x in p))
    population = grown(2, rule="uniform", independent_draws=True)
    assert any(len({prompt.id for prompt in population.select(2)}) == 1 for _ in range(50))


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_draws_different_ones_while_there_are_enough(rule):
    rng = random.Random(0)
    for n in range(1, 6):
        for k in range(1, 9):
            counts = Counter(select(members()[:n], k, selection_rule(rule), rng))
            assert sum(counts.values()) == k
            assert max(counts.values()) - min(counts[position] for position in range(n)) <= 1


def test_own_rules_draw_and_bad_ones_are_named():
    assert select(
        members(), 2, selection_rule(lambda given, k, rng: [4, 0][:k]), random.Random(0)
    ) == [4, 0]
    with pytest.raises(ValueError, match="'best'.*top_plus_random, softmax"):
        selection_rule("best")
    with pytest.raises(ValueError, match="temperature > 0"):
        selection_rule("softmax", temperature=0)
    with pytest.raises(ValueError, match="cannot select 2 of 0"):
        select([], 2, RULES["uniform"], random.Random(0))


# The matrix
# ----------------------------------------------------------------------------------------------------------


def test_the_crossover_matrix_by_hand():
    phi = [[1.0, 0.2, 0.6, 0.5, None], [0.4, 0.8, 0.6, 0.5, 1.0], [0.4, 0.2, 0.6, 0.9, 1.0]]
    assert sole_wins(phi) == [[0], [1], [3]]  # column 2 is a tie, column 4 not complete
    assert common_means(phi) == pytest.approx([2.3 / 4, 2.3 / 4, 2.1 / 4])
    assert common_means([[0.5, None], [None, None], [1.0, 0.0]]) == [0.5, None, 1.0]
    assert common_means([[0.5, None], [None, 1.0]]) == [None, None]
    assert sole_wins([]) == common_means([]) == []


# The population
# ------------------------------------------------------------------------------------------------------


def grown(n=5, **options):
    population = Population(SystemPrompt("root"), **options)
    for number in range(1, n):
        population.add(SystemPrompt(f"child {number}", parents=(number - 1,), operator="mutation"))
    return population


def test_record_rates_and_returns_values():
    population = grown(3)
    before = [member.rating for member in population.members]
    values = population.record([2, 0, 1], [[1.0, 0.5], [0.0, 0.5], [0.25, 0.0]])
    assert values == [0.75, 0.25, 0.125]
    expected = rate([before[2], before[0], before[1]], values)
    assert [population.rating(name) for name in (2, 0, 1)] == expected
    assert [member.matches for member in population.members] == [1, 1, 1]


def test_a_prompt_drawn_twice_is_one_player():
    twice = grown(2)
    once = grown(2)
    values = twice.record([0, 1, 0], [[1.0, None], [0.5, 0.5], [0.0, 1.0]])
    assert values == [0.75, 0.5, 0.75]
    once.record([0, 1], [[0.5, 1.0], [0.5, 0.5]])
    assert [member.rating for member in twice.members] == [member.rating for member in once.members]
    alone = grown(1)
    assert alone.record([0, 0], [[1.0], [0.0]]) == [0.5, 0.5]
    assert (alone.rating(0), alone.members[0].matches) == (Rating(), 0), (
        "nobody plays against itself"
    )


def test_the_unscorable_is_not_rated():
    population = grown(3)
    before = population.rating(1)
    assert population.record([0, 1, 2], [[1.0], [None], [0.0]]) == [1.0, None, 0.0]
    assert (population.rating(1), population.members[1].matches) == (before, 0)
    assert population.rating(0).mu > 25 > population.rating(2).mu
    population = grown(2)
    population.record([0, 1], [[None], [0.3]])
    assert population.rating(0) == Rating()


def test_conditions_are_matched():
    """A prompt whose calls failed on the hard problem does not win by that."""
    population = grown(2)
    assert population.record([0, 1], [[0.8, None], [0.9, 0.0]]) == [0.8, 0.9]


def test_children_start_as_appendix_b_says():
    population = grown(1)
    population.members[0].rating = Rating(30, 3)
    child = population.add(SystemPrompt("c", parents=(0,), operator="mutation"))
    assert population.rating(child) == Rating(30, math.sqrt(10))
    both = population.add(SystemPrompt("d", parents=(0, 1), operator="crossover"))
    assert population.rating(both).mu == pytest.approx(30)
    assert population.rating(both).sigma == pytest.approx(math.sqrt(1 / (1 / 9 + 1 / 10) + 1))
    then = population.add(SystemPrompt("e", parents=(0,)), {0: Rating(1, 2)})
    assert population.rating(then) == Rating(1, math.sqrt(5)), (
        "the parent's rating when the child was made"
    )
    with pytest.raises(ValueError, match="has id 1 already"):
        population.add(child)
    with pytest.raises(ValueError, match="parents \\(9,\\) .* ids go to 3"):
        population.add(SystemPrompt("x", parents=(9,)))


def test_window_and_lineage():
    population = grown(8, window=3, rule="uniform")
    drawn_ids = {prompt.id for _ in range(50) for prompt in population.select(2)}
    assert drawn_ids == {5, 6, 7}
    assert [member.prompt.id for member in population.members] == list(range(8))
    assert [member.prompt.parents for member in population.members[1:]] == [(n,) for n in range(7)]


def test_best():
    population = grown(4)
    for member, rating in zip(
        population.members,
        [Rating(30, 1), Rating(33, 4), Rating(29, 0.1), Rating(50, 1)],
        strict=True,
    ):
        member.rating = rating
        member.matches = 1
    population.members[3].matches = 0
    assert [population.best(rule).id for rule in ("conservative", "mean", "newest")] == [2, 1, 3]
    population.exploration = 0.5
    assert population.best().id == 1
    assert grown(1).best().id == 0
    with pytest.raises(ValueError, match="best_rule must be"):
        population.best("oldest")
    assert grown(4, best_rule="newest").best().id == 3


def test_diversity():
    assert grown(1).diversity() == 0
    population = Population(SystemPrompt("a b"))
    population.add(SystemPrompt("b c"))
    assert population.diversity() == pytest.approx(1 - 1 / 3)
    population.add(SystemPrompt("d"))
    assert population.diversity() == pytest.approx((1 - 1 / 3 + 1 + 1) / 3)


def play_on(population, steps, start=0):
    drawn_ids = []
    for step in range(start, start + steps):
        prompts = population.select(3)
        drawn_ids.append([prompt.id for prompt in prompts])
        noise = random.Random(step)
        population.record(prompts, [[noise.random() for _ in range(4)] for _ in prompts])
        if step % 2:
            population.add(
                SystemPrompt(
                    f"born at {step}",
                    (f"word{step}",),
                    parents=(drawn_ids[-1][0],),
                    operator="mutation",
                )
            )
    return drawn_ids


@pytest.mark.parametrize("options", [{"rule": rule} for rule in RULES])
def test_resume_is_exact(options):
    whole = grown(3, window=4, **options)
    first = grown(3, window=4, **options)
    play_on(whole, 12)
    play_on(first, 12)
    second = Population(SystemPrompt("root"), window=4, seed=99, **options)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert play_on(second, 12, 12) == play_on(whole, 12, 12)
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda state: state.pop("rng"), "'rng' is missing"),
        (lambda state: state["rng"][1].pop(), ": ."),
        (lambda state: state["members"].clear(), "no members"),
        (lambda state: state["members"].pop(1), "member 1 has the id 2"),
        (lambda state: state["members"][1].pop("rating"), "'rating' is missing"),
        (lambda state: state["members"][1]["rating"].append(3), ": ."),
        (
            lambda state: state["members"][1]["prompt"].update(parents=[7]),
            "member 1 has parents .*7",
        ),
        (lambda state: state["members"][1].update(prompt="text"), ": ."),
    ],
)
def test_damaged_state_is_told_in_a_line_and_changes_nothing(edit, message, tmp_path):
    population = grown(3, window=4)
    before = json.loads(json.dumps(population.state_dict()))
    state = json.loads(json.dumps(before))
    edit(state)
    with pytest.raises(ValueError, match=f"saved population is damaged.*{message}"):
        population.load_state_dict(state)
    assert population.state_dict() == before
    path = tmp_path / "population.json"
    path.write_text(json.dumps({"population": state}))
    with pytest.raises(ValueError, match=r"\S*population\.json .*damaged") as caught:
        load_state(path, lambda saved: population.load_state_dict(saved["population"]))
    assert "\n" not in str(caught.value) and caught.value.__suppress_context__


def test_a_state_file_that_is_cut_off_is_named(tmp_path):
    path = tmp_path / "population.json"
    path.write_text('{"population": {')
    with pytest.raises(ValueError, match=r"\S*population\.json cannot be resumed: Expecting"):
        load_state(path, print)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window=0 must be at least 1"),
        ({"best_rule": "oldest"}, "best_rule must be one of conservative, mean, newest"),
        (
            {"independent_draws": True},
            "independent draws by 'top_plus_random' would all give the same",
        ),
        ({"delta_sigma": -1.0}, "delta_sigma=-1.0"),
        ({"delta_sigma": math.nan}, "delta_sigma=nan"),
        ({"exploration": -1.0}, "exploration >= 0"),
        ({"exploration": math.nan}, "exploration >= 0"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        Population(SystemPrompt("root"), **options)


@pytest.mark.parametrize("rule", RULES)
def test_ten_thousand_prompts_in_one_window(rule):
    population = Population(SystemPrompt("root"), window=10_000, rule=rule)
    rng = random.Random(0)
    for number in range(1, 10_000):
        population.members.append(
            Member(SystemPrompt("p", id=number), Rating(rng.gauss(25, 3), rng.uniform(1, 8)))
        )
    for _ in range(3):  # how long that takes is in benchmarks/speed/growth.py
        chosen = population.select(3)
        assert len({prompt.id for prompt in chosen}) == 3
        before = [population.rating(prompt) for prompt in chosen]
        population.record(chosen, [[0.1], [0.2], [0.3]])
        assert [population.rating(prompt) for prompt in chosen] != before
