"""Reading answers: in replies as models write them, and accepted answers of all types."""

from decimal import Decimal
from fractions import Fraction

import numpy
import pytest
from hypothesis import given, strategies as st

from agentic_prompting.evolution import parse_edits
from agentic_prompting.refine import read_improved_prompt
from agentic_prompting.rewards import (
    exact_match,
    integer_match,
    letter_match,
    math_match,
    math_reward,
    read_answer,
    read_verdict,
    token_f1,
    word_sorting_match,
)
from agentic_prompting.rewards.judges import read_scores
from support.linear import processor_seconds

REPLIES = {
    "**Answer:**\n42": "42",
    "**Final Answer:**\n\n42": "42",
    "### Answer:\n42": "42",
    "### Final Answer\n\n42": "42",
    "**Answer**\n42": "42",
    "**Answer**: 42": "42",
    "Answer: **42**.": "42",
    "**Answer: 42**": "42",
    "Answer: `42`": "42",
    "Answer: _42_": "42",
    "Answer: $42$.": "42",
    "Answer:\n$$\n42\n$$": "42",
    "Answer:\n\\[\n42\n\\]": "42",
    "Answer:\n```\n42\n```": "42",
    "Answer：42": "42",
    "Answer: \\text{Paris}": "Paris",
    "Answer: $\\boxed{\\text{Paris}}$": "Paris",
    "\\boxed{\\textbf{(B)}}": "(B)",
    "\\boxed{\\frac{1}{2}}.": "\\frac{1}{2}",
    "<answer>\\boxed{4}</answer>": "4",
    "<Answer>4</Answer>": "4",
    "Answer: 4\nI check it.\nAnswer:": "4",
    "Answer:": "",
    "The answers: 3\nAnswer: U.S.": "U.S",
    "Answer: and so on...": "and so on...",
    "an answer to this question": "an answer to this question",
}


@pytest.mark.parametrize(("reply", "answer"), REPLIES.items(), ids=REPLIES)
def test_answers_as_models_write_them(reply, answer):
    assert read_answer(reply) == answer


THOUGHTS = {
    "<think>Is it \\boxed{3}?</think>\nAnswer: 4": "4",
    "<think>I write <answer>3</answer>.</think>\nAnswer: 4": "4",
    "I try \\boxed{3} first.</think>\nAnswer: 4": "4",
    "<think>Answer: 3? No.</think>\n4": "4",
    "<think>so it is \\boxed{3} unless": "",
    "Answer: 4\n<think>or \\boxed{3}, unless": "4",
    "<think>a</think><answer>4</answer>": "4",
    "[THINK]\\boxed{3}[/THINK]\nAnswer: 4": "4",
}


@pytest.mark.parametrize(("reply", "answer"), THOUGHTS.items(), ids=THOUGHTS)
def test_a_thought_is_no_answer(reply, answer):
    assert read_answer(reply) == answer


DRAFT = {
    "integer": (lambda reply: integer_match(reply, ["3"]), "Answer: 3"),
    "letter": (lambda reply: letter_match(reply, ["B"]), "Answer: B"),
    "words": (lambda reply: word_sorting_match(reply, ["a b"]), "Answer: a b"),
    "maths": (lambda reply: math_match(reply, ["3"]), "\\boxed{3}"),
    "maths reward": (lambda reply: math_reward([], [reply], [["3"]])[0], "The final answer is 3"),
    "verdict": (read_verdict, "<ACCURACY>1</ACCURACY>"),
    "scores": (lambda reply: read_scores(reply, ["a"]), '{"scores": {"a": 1}}'),
    "edits": (lambda reply: parse_edits(reply).edits, '[{"op": "remove", "ids": ["G1"]}]'),
    "prompt": (
        lambda reply: read_improved_prompt(reply)[0],
        "<IMPROVED_PROMPT>Guess.</IMPROVED_PROMPT>",
    ),
}


@pytest.mark.parametrize(("read", "draft"), DRAFT.values(), ids=DRAFT)
def test_no_reader_takes_a_draft_from_a_thought(read, draft):
    if read(draft) is None:
        pytest.skip("needs the [math] extra")
    assert read(draft) and read(f"<think>well</think>{draft}")
    for reply in (
        f"<think>{draft}",
        f"<think>{draft} or not",
        f"<think>{draft}</think>no",
        f"{draft}?</think>no",
    ):
        assert not read(reply), reply


def test_proposed_prompts_may_mention_thoughts():
    text = "Think in <think></think> tags, then write <think> no more."
    assert parse_edits(f'<think>x</think>[{{"op": "add", "text": "{text}"}}]').edits[0].text == text
    assert read_improved_prompt(f"<IMPROVED_PROMPT>{text}</IMPROVED_PROMPT>") == (text, None)


# Numbers


@pytest.mark.parametrize(
    "accepted", [4, 4.0, Decimal("4.0"), Fraction(4), numpy.float32(4), numpy.int64(4), "4.0"]
)
def test_accepted_numbers_of_all_types(accepted):
    assert (
        exact_match("4", [accepted])
        == token_f1("4.0", [accepted])
        == integer_match("so 4", [accepted])
        == 1.0
    )
    assert exact_match("40", [accepted]) == token_f1("40", [accepted]) == 0.0


@pytest.mark.parametrize(
    ("reply", "answer"), [("25", "2.5"), ("5", "-5"), ("$25", "2.5"), ("50", "5.0%"), ("5", ".5")]
)
def test_numbers_are_compared_as_numbers(reply, answer):
    assert exact_match(reply, [answer]) == token_f1(reply, [answer]) == 0.0


def test_other_types_are_no_accepted_answers():
    for answer in (True, None, [1], float("nan"), float("inf")):
        with pytest.raises(ValueError, match="accepted answer must be"):
            exact_match("4", [answer])


# Time


READERS = {
    "read_answer": read_answer,
    "read_verdict": read_verdict,
    "read_scores": lambda text: read_scores(text, ["a"]),
    "letter_match": lambda text: letter_match(text, ["B"]),
    "integer_match": lambda text: integer_match(text, ["3"]),
    "word_sorting_match": lambda text: word_sorting_match(text, ["a"]),
    "exact_match": lambda text: exact_match(text, ["a"]),
    "token_f1": lambda text: token_f1(text, ["a"]),
    "parse_edits": parse_edits,
    "read_improved_prompt": read_improved_prompt,
    "math_match": lambda text: math_match(text, ["3"]),
    "math_reward": lambda text: math_reward([], [text], [["3"]]),
}
PIECES = [
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "<answer>a</answer>",
    "\\boxed{",
    "\\boxed ",
    "{",
    "}",
    "Answer:",
    "answer ",
    "Answer:\n",
    "answer" + " " * 20,
    "<accuracy>",
    "</accuracy>",
    "< ",
    "```json\n",
    "```\n",
    "\n",
    " ",
    "1.\n",
    "1. a\n",
    "**",
    "*.",
    "$",
    "\\text{",
    "\\boxed",
    "(",
    "<improved prompt>",
    "[{",
    "<<<<<<< SEARCH\n",
    "<<<<<<< SEARCH\n=======\n",
    '[{"a": "\n```\n',
    "'a':",
    "9",
    "a the ",
    "~",
]


@pytest.mark.parametrize("name", READERS)
def test_readers_take_linear_time(name):
    """A quadratic reader of 200,000 characters takes minutes."""
    read = READERS[name]
    read("warm")
    for piece in PIECES:
        repeated = piece * (200_000 // len(piece))
        texts = [
            repeated,
            f"```json\n{repeated}x",
            f"{'a' * 100_000}:\n{repeated}",
            f"{repeated}`",
        ]
        for text in texts:
            seconds = processor_seconds(lambda text=text: read(text), repeats=1)
            assert seconds < 30, (piece, text[:10])


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_readers_never_raise(text):
    for name, read in READERS.items():
        if not name.startswith("math"):
            read(text)
