"""Halves of surrogate pairs in texts of models and clients."""

import pytest
from hypothesis import given, strategies as st

from agentic_prompting.llm.surrogates import replace_surrogates


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("Zürich 😀", "Zürich 😀"),
        ("cut \ud83d", "cut \ufffd"),
        ("\ude00 alone", "\ufffd alone"),
        ("\ud83d\ude00 as two halves", "😀 as two halves"),
        ("\ufeffmark", "\ufeffmark"),
    ],
)
def test_halves_are_joined_or_replaced(text, expected):
    assert replace_surrogates(text) == expected


@given(st.text(st.characters(codec=None)))
def test_the_result_can_be_written(text):
    replace_surrogates(text).encode()
