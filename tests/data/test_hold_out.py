"""`hold_out`: the same rows for every command, and no question on both sides."""

import pytest
from hypothesis import given, strategies as st

from agentic_prompting.data import hold_out, load_task


def rows_of(questions):
    return load_task([{"question": question, "answer": "a"} for question in questions])


@given(st.lists(st.sampled_from("abcdefghij"), min_size=2, max_size=30), st.randoms())
def test_no_question_is_on_both_sides(questions, rng):
    if len(set(questions)) < 2:
        questions = [*questions, "k", "l"]
    learned, held_out = hold_out(rows_of(questions), 0.5)
    assert not set(learned["question"]) & set(held_out["question"])
    assert sorted([*learned["question"], *held_out["question"]]) == sorted(questions)

    # Another order of the rows, the same split.
    shuffled = list(questions)
    rng.shuffle(shuffled)
    assert set(hold_out(rows_of(shuffled), 0.5)[1]["question"]) == set(held_out["question"])


def test_the_share_counts_different_questions():
    learned, held_out = hold_out(rows_of([f"{n}?" for n in range(10)] * 2), 0.3)
    assert (len(learned), len(held_out)) == (14, 6)


@pytest.mark.parametrize("share", [0, 1, -0.5, 3, 0.01, 0.99])
def test_a_share_that_leaves_a_side_empty_is_refused(share):
    with pytest.raises(ValueError, match="hold out|one side"):
        hold_out(rows_of(["a", "b", "c"]), share)
