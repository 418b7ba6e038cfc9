"""How much the rollouts of a group differ."""

import pytest
from hypothesis import given, settings, strategies as st

from agentic_prompting.rollout import group_diversity, mean_diversity


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["a b c", "a b c"], 0.0),
        (["a", "A"], 0.0),
        (["a b", "c d"], 1.0),
        # Pairs: (start, a), (a, b) and (start, a), (a, c); one of two is in the other text.
        (["a b", "a c"], 0.5),
        (["a", ""], 1.0),
    ],
)
def test_diversity_of_two_texts(texts, expected):
    assert group_diversity(texts) == pytest.approx(expected)


@pytest.mark.parametrize("texts", [[], ["a b"], ["", "  "]])
def test_without_two_texts_or_words_there_is_none(texts):
    assert group_diversity(texts) is None


@settings(deadline=None)
@given(st.lists(st.text(alphabet="ab c", max_size=12), min_size=2, max_size=6))
def test_diversity_is_a_share_that_ignores_the_order(texts):
    diversity = group_diversity(texts)
    assert diversity is None or 0 <= diversity <= 1
    assert diversity == pytest.approx(group_diversity(texts[::-1]))


def test_mean_diversity_leaves_out_groups_without():
    assert mean_diversity([["a", "a"], ["b"], ["c", "d"]]) == 0.5
    assert mean_diversity([["b"]]) is None
