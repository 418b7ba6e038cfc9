"""The readers of replies: tags, CORRECT, sentences, verdicts. Pure functions, so mostly properties."""

import re

import pytest
from hypothesis import given, strategies as st

from agentic_prompting.llm import fill
from agentic_prompting.refine import prompt_diff, read_improved_prompt
from agentic_prompting.refine.templates import first_units
from agentic_prompting.rewards import read_verdict

anything = st.text(max_size=60)
no_tag = anything.filter(
    lambda text: not re.search(r"improved[_ -]?prompt|think", text, re.IGNORECASE)
)
opening = st.sampled_from(
    ["<IMPROVED_PROMPT>", "<improved_prompt>", "< Improved_Prompt >", "<IMPROVED PROMPT>"]
)
closing = st.sampled_from(
    ["</IMPROVED_PROMPT>", "</improved_prompt >", "< / Improved_Prompt>", "</IMPROVED-PROMPT>"]
)


@given(no_tag, opening, no_tag, closing, no_tag)
def test_what_is_between_the_tags_is_read(before, start, prompt, end, after):
    improved, problem = read_improved_prompt(before + start + prompt + end + after)
    assert (improved, problem) == (
        (prompt.strip(), None) if prompt.strip() else (None, "empty prompt")
    )


@given(no_tag, opening, no_tag)
def test_without_an_end_there_is_none(before, start, after):
    assert read_improved_prompt(before + after) == (None, "no tag")
    assert read_improved_prompt(before + start + after) == (None, "unclosed tag")


@given(st.lists(st.one_of(no_tag, opening, closing), max_size=12).map("".join))
def test_any_mixture_gives_one_or_the_other_and_no_tag_within(reply):
    improved, problem = read_improved_prompt(reply)
    assert (improved is None) != (problem is None)
    if improved is not None:
        assert improved == improved.strip() and improved in reply
        assert not re.search(r"<\s*/?\s*improved[_ -]?prompt\s*>", improved, re.IGNORECASE)


@pytest.mark.parametrize(
    ("reply", "prompt"),
    [
        ("I use <IMPROVED_PROMPT> tags.\n<IMPROVED_PROMPT>Sort.</IMPROVED_PROMPT>", "Sort."),
        (
            (
                "<IMPROVED_PROMPT>draft</IMPROVED_PROMPT> better: "
                "<IMPROVED_PROMPT>final</IMPROVED_PROMPT>"
            ),
            "final",
        ),
        ("<IMPROVED_PROMPT>whole</IMPROVED_PROMPT> and <IMPROVED_PROMPT>cut of", "whole"),
        ("</IMPROVED_PROMPT> <IMPROVED_PROMPT>x</IMPROVED_PROMPT></IMPROVED_PROMPT>", "x"),
        (
            "<IMPROVED_PROMPT>Write <b>bold</b>, if 1 < 2.</IMPROVED_PROMPT>",
            "Write <b>bold</b>, if 1 < 2.",
        ),
    ],
)
def test_of_several_the_last_complete_one(reply, prompt):
    assert read_improved_prompt(reply) == (prompt, None)


def test_long_replies_take_no_time():
    assert read_improved_prompt("<IMPROVED_PROMPT>" * 20_000) == (None, "unclosed tag")
    assert read_improved_prompt("<" + " " * 1_000_000) == (None, "no tag")
    assert first_units("." * 200_000, 1, "sentence") == "." * 200_000


@given(
    st.text(alphabet="ab.!? \n3", max_size=80),
    st.integers(1, 12),
    st.sampled_from(["sentence", "paragraph"]),
)
def test_units_grow_to_the_whole_text(text, count, unit):
    part = first_units(text, count, unit)
    more = first_units(text, count + 1, unit)
    assert text.startswith(more) and more.startswith(part)
    assert part == more == text or len(part) < len(more)
    assert first_units(text, 1000, unit) == text


def test_units():
    text = 'It is 3.5, "so." Then...  what?\nA line\n\nSecond paragraph. End'
    assert [first_units(text, n, "sentence") for n in (1, 2, 3, 4, 5)] == [
        'It is 3.5, "so."',
        'It is 3.5, "so." Then...',
        'It is 3.5, "so." Then...  what?',
        'It is 3.5, "so." Then...  what?\nA line',
        'It is 3.5, "so." Then...  what?\nA line\n\nSecond paragraph.',
    ]
    assert first_units(text, 1, "paragraph") == 'It is 3.5, "so." Then...  what?\nA line'
    assert first_units(text, 2, "paragraph") == text


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("<ACCURACY>1</ACCURACY>", True),
        ("x < accuracy > 0 </ Accuracy> y", False),
        ("<ACCURACY>0</ACCURACY> no: <ACCURACY>1.0</ACCURACY>", True),
        ("<ACCURACY>0 or 1</ACCURACY>", None),
        ("<ACCURACY>1</ACCURACY> <ACCURACY>?</ACCURACY>", None),
        ("<ACCURACY>1", None),
        ("1", None),
        ("", None),
    ],
)
def test_verdicts(reply, verdict):
    assert read_verdict(reply) is verdict


@given(anything, anything)
def test_templates_are_filled_in_one_pass(query, output):
    template = "Q {query} O {output} {other} {query}"
    assert fill(template, query=query, output=output) == f"Q {query} O {output} {{other}} {query}"
    assert fill("{query}{output}", query="{output}", output="{query}") == "{output}{query}"


def test_a_diff_names_sentences():
    assert (
        prompt_diff("Count them. Be brief.", "Count them. Be careful.")
        == "  Count them.\n- Be brief.\n+ Be careful."
    )
