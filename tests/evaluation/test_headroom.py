"""The statistics of headroom: golden numbers, properties, and small simulations; the large one is a
benchmark.
"""

import subprocess
import sys
from itertools import combinations
from math import nan

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats

from agentic_prompting.evaluation.headroom import (
    choose_challenger,
    compare_prompts,
    decide,
    default_delta,
    expect_further,
    judge_prompts,
    mean_over_rows,
    measure_ceiling,
    measure_groups,
    paired_gain,
    plan_stages,
    possible_share,
    route_prompts,
    rows_needed,
    share_of_differing_groups,
)
from agentic_prompting.evaluation.intervals import Estimate, wilson_interval

BINARY = st.sampled_from([0.0, 1.0])
MISSING = float("nan")


def rng(seed=0):
    return np.random.default_rng(seed)


# --- prompts --------------------------------------------------------------------------------------


def test_a_gain_is_scipys_paired_t_interval():
    table = rng(1).random((40, 2))
    gain = paired_gain(table)
    expected = stats.ttest_rel(table[:, 1], table[:, 0]).confidence_interval(0.95)
    assert (gain.estimate.low, gain.estimate.high) == pytest.approx((expected.low, expected.high))
    assert gain.estimate.n == 40
    assert gain.estimate.mean == pytest.approx((table[:, 1] - table[:, 0]).mean())


@pytest.mark.parametrize("differing", [0, 1, 3])
def test_few_differences_are_not_certain(differing):
    """None of n differs: the half-width is about that of the rule of three, 3.7 / n."""
    table = np.ones((136, 2))
    table[:differing, 0] = 0
    estimate = paired_gain(table).estimate
    assert (estimate.high - estimate.low) / 2 == pytest.approx(3.7 / 136, rel=0.01)


def test_a_row_without_a_score_is_left_out():
    table = np.array([[0, 1], [0, 1], [1, 1], [MISSING, 1], [1, 0], [0, MISSING]])
    assert paired_gain(table).estimate.n == 4
    assert paired_gain(table).estimate.mean == pytest.approx(0.25)


@pytest.mark.parametrize(
    "table", [[[0, 1]], [[0, 2], [0, 1]], [[0, -0.1], [0, 1]], [0, 1], [[nan, 1], [0, 1]]]
)
def test_scores_that_give_no_gain(table):
    with pytest.raises(ValueError):
        paired_gain(table)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.01, 0.3, "worth it"),
        (0.01, 0.04, "worth it"),
        (0.0, 0.3, "cannot tell"),
        (-0.05, 0.1, "cannot tell"),
        (-0.05, 0.09, "not worth it"),
        (-0.3, -0.1, "not worth it"),
    ],
)
def test_a_verdict_says_no_more_than_its_interval(low, high, verdict):
    assert decide(Estimate((low + high) / 2, low, high, 10), delta=0.1) == verdict


def test_rows_that_a_gain_needs():
    """7.85 var / gain^2: 196 rows for ten points where the difference has a variance of a quarter."""
    assert rows_needed(0.25, 0.10) == 197
    assert rows_needed(0.25, 0.05) == 785
    assert rows_needed(0.25, 0.03) == 2181
    shown = [
        paired_gain(scores_of(rng(seed), (0.45, 0.55), 197)).estimate.low > 0 for seed in range(400)
    ]
    assert np.mean(shown) > 0.5, "independent rows have a variance of a half and need twice as many"


def scores_of(generator, chances, n):
    return (generator.random((n, len(chances))) < chances) * 1.0


@given(st.integers(2, 40), st.integers(16, 400), st.integers(40, 3000))
def test_a_plan_keeps_to_calls_and_rows(prompts, rows, calls):
    try:
        plan = plan_stages(calls, prompts, rows)
    except ValueError as error:
        assert "calls" in str(error) and (calls < prompts * 10 + 60 or rows < 32)
        return
    assert plan.calls <= calls and plan.choosing_rows + plan.fresh_rows <= rows
    assert plan.choosing_rows >= 4 and plan.fresh_rows >= 8 and 1 <= plan.repeats <= 4


def test_the_default_plan():
    plan = plan_stages(512, 12, 1000)
    assert (plan.choosing_rows, plan.fresh_rows, plan.repeats, plan.calls) == (20, 136, 1, 512)
    few = plan_stages(512, 12, 64)
    assert (few.choosing_rows, few.fresh_rows, few.repeats) == (20, 44, 3)
    assert default_delta(512) == 0.10 and default_delta(2000) == 0.05
    with pytest.raises(ValueError, match="prompt"):
        plan_stages(512, 1, 1000)


def test_the_challenger_is_the_best_of_the_others():
    table = np.array([[1, 0, 1, 0], [1, 0, 1, 1], [1, MISSING, 0, 0]])
    assert choose_challenger(table, rng()) == 2, "the start prompt is none of them"
    tied = np.array([[1, 0, 1, 1], [1, 1, 0, 0]])
    drawn = [choose_challenger(tied, rng(seed)) for seed in range(300)]
    assert {place: drawn.count(place) > 70 for place in (1, 2, 3)} == {1: True, 2: True, 3: True}
    for nothing in ([[MISSING, 1], [1, MISSING]], [[1], [0]], [[MISSING, MISSING]], [[1, MISSING]]):
        with pytest.raises(ValueError):
            choose_challenger(nothing, rng())


def test_a_prompt_is_not_better_for_failing_on_hard_rows():
    """Prompt 1 failed on the two hard rows; prompt 2 solved one of them."""
    table = np.array([[1, 1, 1], [1, 1, 1], [0, MISSING, 1], [0, MISSING, 0]])
    assert choose_challenger(table, rng()) == 2


def test_two_stages():
    choosing = scores_of(rng(2), (0.5, 0.3, 0.7), 20)
    chosen = choose_challenger(choosing, rng())
    judgement = judge_prompts(choosing, chosen, scores_of(rng(3), (0.5, 0.7), 300), delta=0.1)
    assert judgement.chosen == chosen == 2
    assert judgement.verdict == "worth it"
    assert judgement.tried == 2
    assert judgement.gain.mean == pytest.approx(judgement.best - judgement.start)
    assert not judgement.topped_up
    assert judgement.sentence().startswith("worth it: ")
    assert judgement.naive > 0
    assert judgement.test.p_value < 0.2
    none = judge_prompts(choosing, chosen, scores_of(rng(4), (0.1, 0.1), 800), delta=0.1)
    assert none.verdict == "not worth it" and none.sentence().startswith("not worth it: ")


def test_a_top_up_is_used_alone_and_only_if_undecided():
    choosing = scores_of(rng(2), (0.5, 0.5), 20)
    unclear = scores_of(rng(3), (0.5, 0.55), 60)
    clear = scores_of(rng(4), (0.3, 0.7), 200)
    undecided = judge_prompts(choosing, 1, unclear, 0.1)
    assert undecided.verdict == "cannot tell" and str(undecided.rows_needed) in undecided.sentence()
    topped_up = judge_prompts(choosing, 1, unclear, 0.1, top_up=clear)
    assert topped_up.topped_up and topped_up.gain == paired_gain(clear).estimate
    assert topped_up.verdict == "worth it"
    assert not judge_prompts(choosing, 1, clear, 0.1, top_up=unclear).topped_up


def test_the_f_test_of_two_prompts_is_the_paired_t_test():
    table = rng(5).random((30, 2))
    expected = stats.ttest_rel(table[:, 0], table[:, 1])
    test = compare_prompts(table)
    assert test.statistic == pytest.approx(expected.statistic**2)
    assert test.p_value == pytest.approx(expected.pvalue)


def test_the_spread_between_prompts_is_without_the_error():
    generator = rng(6)
    means = np.clip(0.5 + 0.1 * generator.standard_normal(200), 0, 1)
    assert compare_prompts(scores_of(generator, means, 100)).spread == pytest.approx(
        means.std(), abs=0.02
    )
    assert compare_prompts(scores_of(generator, np.full(200, 0.5), 100)).spread < 0.03
    assert compare_prompts(np.ones((20, 5))).p_value == 1.0, (
        "a table without any difference shows none"
    )


@pytest.mark.parametrize(("tried", "share"), [(7, 0.348), (11, 0.238), (29, 0.098)])
def test_how_many_proposals_may_still_be_good(tried, share):
    assert possible_share(tried) == pytest.approx(share, abs=0.001)


def test_further_prompts_gain_more_where_prompts_differ():
    generator = rng(7)
    alike = scores_of(generator, np.full(12, 0.5), 60)
    differing = scores_of(generator, np.linspace(0.2, 0.8, 12), 60)
    few, many = (expect_further(differing, further, rng(1)) for further in (2, 40))
    assert many.mean > few.mean and expect_further(alike, 40, rng(1)).mean < many.mean
    assert expect_further(alike, 40, rng(1)) == expect_further(alike, 40, rng(1))


def test_a_gain_of_further_prompts_is_one_of_possible_scores():
    """Few rows: the draws of the posterior go far beyond the range of the scores."""
    scores = np.array([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.0, 1.0, 1.0]])
    gain = expect_further(scores, 20, rng(1))
    assert -1 <= gain.low <= gain.mean <= gain.high <= 1


def test_a_router_gains_only_where_rows_want_different_prompts():
    def twice(chances):
        return tuple((rng(seed).random(chances.shape) < chances) * 1.0 for seed in (1, 2))

    suits = np.where(rng(0).random((200, 4)) < 0.5, 0.95, 0.05)
    assert route_prompts(*twice(suits), rng()).low > 0.2
    alike = np.tile([0.3, 0.5, 0.6, 0.4], (200, 1))
    assert abs(route_prompts(*twice(alike), rng()).mean) < 0.1
    first, second = twice(suits)
    first[0, 0] = second[1, 1] = MISSING
    assert route_prompts(first, second, rng()).n == 198


def test_the_interval_covers_and_the_best_looking_does_not():
    """The reason for two stages: the start and eleven others that are all alike."""
    covered = []
    naive = []
    for seed in range(400):
        generator = rng(seed)
        choosing = scores_of(generator, np.full(12, 0.5), 20)
        chosen = choose_challenger(choosing, generator)
        judgement = judge_prompts(choosing, chosen, scores_of(generator, (0.5, 0.5), 136), 0.1)
        covered.append(judgement.gain.low <= 0 <= judgement.gain.high)
        naive.append(judgement.naive)
    assert 0.92 < np.mean(covered) < 0.98 and np.mean(naive) > 0.1


# --- groups ---------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=7), st.data())
def test_differing_groups_are_counted_over_all_subsets(rewards, data):
    size = data.draw(st.integers(1, len(rewards)))
    groups = list(combinations(rewards, size))
    expected = sum(len(set(group)) > 1 for group in groups) / len(groups)
    assert share_of_differing_groups(rewards, size) == pytest.approx(expected)


@pytest.mark.parametrize("size", [0, 3])
def test_groups_that_cannot_be_drawn(size):
    with pytest.raises(ValueError):
        share_of_differing_groups([0.0, 1.0], size)


def test_the_signal_of_groups():
    rewards = [[0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]]
    statuses = [
        ["answered"] * 4,
        ["malformed", "truncated", "answered", "answered"],
        ["answered"] * 4,
        ["answered"] * 4,
    ]
    signal = measure_groups(rewards, 4, statuses)
    assert signal.differing == wilson_interval(2, 4) and not signal.extrapolated
    assert signal.pass_at[1].mean == pytest.approx(7 / 16)
    assert signal.pass_at[4].mean == pytest.approx(3 / 4)
    assert (signal.always_right, signal.never_right) == (0.25, 0.25)
    assert signal.lost_to_form.mean == pytest.approx(1 / 8) and signal.failed.mean == 0
    smaller = measure_groups(rewards, 2)
    assert smaller.differing.mean == pytest.approx((4 / 6 + 0 + 0 + 3 / 6) / 4)


def test_a_failed_rollout_is_no_attempt():
    signal = measure_groups([[0, 1, None], [1, 1, 1], [None, None, MISSING]], 3)
    assert signal.rows == 2 and signal.rollouts == 9
    assert signal.differing.n == 1, "only one row has three scored rollouts"
    assert signal.pass_at[2].mean == 1.0
    nothing = measure_groups([[None, None]], 2)
    assert nothing.differing is None and nothing.verdict == "cannot tell" and nothing.sentence()


def test_a_larger_group_than_measured_has_a_lower_bound_only():
    rewards = [[0, 1]] * 30 + [[0, 0]] * 30
    signal = measure_groups(rewards, 8)
    assert signal.extrapolated
    assert signal.differing.high == 1.0
    assert signal.differing.low < 0.5 < signal.differing.high
    assert "or more" in signal.sentence()


def test_what_would_give_groups_a_signal():
    hopeless = [[0.0] * 4] * 64
    assert measure_groups(hopeless, 4).verdict == "not worth it"
    assert "easier" in measure_groups(hopeless, 4).sentence()
    assert "harder" in measure_groups([[1.0] * 4] * 64, 4).sentence()
    assert "warm start" in measure_groups(hopeless, 4, [["malformed"] * 4] * 64).sentence()
    assert measure_groups([[0.0, 1.0, 0.0, 1.0]] * 64, 4).sentence().startswith("worth it")
    assert measure_groups([[0.0, 1.0]] * 2 + [[0.0, 0.0]] * 8, 2).verdict == "cannot tell"


def test_a_mean_without_any_difference_is_not_certain():
    flat = mean_over_rows([0.5] * 64)
    assert flat.low < 0.48 and flat.high > 0.52 and mean_over_rows([0.5]).high == 1.0
    assert mean_over_rows([0.0, 1.0, 1.0]) == wilson_interval(2, 3)
    for wrong in (
        lambda: mean_over_rows([]),
        lambda: measure_groups([], 2),
        lambda: measure_groups([[1]], 1),
    ):
        with pytest.raises(ValueError):
            wrong()


# --- ceilings -------------------------------------------------------------------------------------


def test_the_ceiling_of_answers_that_never_change():
    scores = np.array([[[0], [1]], [[1], [0]], [[0], [0]], [[1], [1]]], dtype=float)
    ceiling = measure_ceiling(scores, ["plain", "other"])
    assert ceiling.naive.mean == 0.75 and ceiling.cross is None and ceiling.gain.mean == 0.25
    assert ceiling.each["plain"].mean == 0.5 and "plain" in ceiling.sentence()


@given(st.integers(2, 5), st.integers(2, 4), st.integers(2, 4), st.integers(0, 10_000))
def test_cross_never_exceeds_naive(rows, choices, repeats, seed):
    scores = (rng(seed).random((rows, choices, repeats)) < 0.5) * 1.0
    ceiling = measure_ceiling(scores, [str(place) for place in range(choices)])
    assert ceiling.cross.mean <= ceiling.naive.mean + 1e-12 and ceiling.low <= ceiling.high


def test_luck_is_in_naive_and_not_in_cross():
    """Requests that do not differ: the oracle's choice seems to gain 18 points."""
    naive = []
    cross = []
    gains = []
    for seed in range(100):
        difficulty = rng(seed).beta(0.5, 0.5, (64, 1, 1))
        ceiling = measure_ceiling(
            (rng(seed + 1000).random((64, 4, 2)) < difficulty) * 1.0, list("abcd")
        )
        naive.append(ceiling.naive.mean - difficulty.mean())
        cross.append(ceiling.cross.mean - difficulty.mean())
        gains.append(ceiling.gain.mean)
    assert np.mean(naive) == pytest.approx(0.18, abs=0.02)
    assert np.mean(cross) == pytest.approx(0, abs=0.02)
    assert np.mean(gains) == pytest.approx(0, abs=0.02)


def test_a_row_with_a_failed_answer_is_left_out_of_a_ceiling():
    scores = np.ones((5, 2, 3))
    scores[0, 1, 2] = MISSING
    assert measure_ceiling(scores, ["a", "b"]).naive.n == 4
    for table, names in ((scores[:2], ["a", "b"]), (scores, ["a"]), (2 * scores, ["a", "b"])):
        with pytest.raises(ValueError):
            measure_ceiling(table, names)


def test_the_room_does_not_load_scipy():
    code = "import sys, agentic_prompting.evaluation; sys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
