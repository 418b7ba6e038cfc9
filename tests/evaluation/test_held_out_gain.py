"""The paired difference between the first and the best prompt of an evolution on held-out
questions.
"""

import pytest

from agentic_prompting.evaluation.held_out_gain import (
    describe_held_out_gain,
    estimate_held_out,
    measure_held_out_gain,
)
from agentic_prompting.evaluation.intervals import wilson_interval
from agentic_prompting.evolution import Member, Population, Rating, SystemPrompt


def member(prompt_id, scores):
    prompt = SystemPrompt(f"P{prompt_id}", id=prompt_id)
    return Member(prompt, Rating(), held_out_scores=scores)


def test_only_common_questions_count():
    first = member(0, [0.0, 1.0, None, 0.5])
    best = member(1, [1.0, 1.0, 1.0, None])
    paired = measure_held_out_gain(first, best)
    assert paired.difference.mean == 0.5 and paired.difference.n == 2
    assert (paired.wins, paired.losses, paired.ties, paired.left_out) == (1, 0, 1, 2)


@pytest.mark.parametrize(
    ("scores", "words", "missing"),
    [
        ([1.0] * 10, "over 10 questions", "no gain"),
        ([1.0, 0.0] + [0.0] * 8, "no gain was shown: the interval contains 0", "worse than"),
        ([-1.0] * 10, "is worse than the first one", "no gain"),
    ],
)
def test_what_the_interval_shows_is_said(scores, words, missing):
    text = describe_held_out_gain(member(0, [0.0] * 10), member(1, scores))
    assert words in text and missing not in text


@pytest.mark.parametrize(
    ("first", "best"), [(None, [1.0]), ([1.0], None), ([None, 1.0], [1.0, None])]
)
def test_unknown_scores_say_nothing(first, best):
    assert measure_held_out_gain(member(0, first), member(1, best)) is None
    assert describe_held_out_gain(member(0, first), member(1, best)) == ""


def test_the_interval_of_a_score_is_that_of_a_table():
    """Wilson's for rewards of 0 and 1: ten right answers of ten are no certainty."""
    population = Population(SystemPrompt("P"))
    population.note_held_out(population.best(), [1.0] * 10 + [None])
    assert estimate_held_out(population.members[0]) == wilson_interval(10, 10)


def test_older_files_have_no_scores_by_question():
    old = Member(SystemPrompt("P", id=0), Rating(), held_out={"mean": 0.5})
    assert str(estimate_held_out(old)).startswith("0.500 [0.500, 0.500]")
    old.held_out |= {"deviation": 0.5, "n": 100}
    assert str(estimate_held_out(old)).startswith("0.500 [0.402, 0.598]")
