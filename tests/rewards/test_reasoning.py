"""Letters and whole numbers, as models and datasets write them."""

import pytest

from agentic_prompting.rewards import (
    integer_match,
    letter_match,
)

LETTERS = {
    "Answer: \\boxed{B}": "B",
    "Answer: $\\boxed{\\text{B}}$": "B",
    "Answer: \\text{B}": "B",
    "Answer: \\mathrm{(B)}": "B",
    "Answer: \\boxed{\\textbf{(J) } 12}": "J",
    "**Answer:**\n\n**(F)**": "F",
    "### Answer\nG": "G",
    "Answer: Option B": "B",
    "Answer: option (B).": "B",
    "So it is \\boxed{H}.": "H",
    "<answer>C</answer>": "C",
    "Answer: A because it is": "A",
    "Answer: I": "I",
    "Answer: (I) 7": "I",
    "Answer: I think it is B": None,
    "Answer: It's B": None,
    "Answer: I'm sure": None,
    "Answer: \\boxed{12}": None,
    "Answer: optional": None,
    "Answer: ‘B’": "B",
    "B": "B",
    "(B).": "B",
    "**B**\n": "B",
    "<think>C or D?</think> \\text{D}": "D",
    "B is not right": None,
    "A) 12\nB) 13": None,
}


@pytest.mark.parametrize(("reply", "letter"), LETTERS.items(), ids=LETTERS)
def test_letters_as_models_write_them(reply, letter):
    assert [option for option in "ABCDEFGHIJ" if letter_match(reply, [option])] == (
        [letter] if letter else []
    )


@pytest.mark.parametrize(
    "answer", ["B", "(B)", "B.", "B)", " B ", "\\text{B}", "\\boxed{B}", "B) 42", "**B**", "$B$"]
)
def test_accepted_letters_as_datasets_write_them(answer):
    assert letter_match("Answer: B", [answer]) == 1.0 and letter_match("Answer: C", [answer]) == 0.0


def test_small_letters_count_where_they_are_accepted():
    for reply in ("Answer: b", "Answer: (b)", "Answer: B"):
        assert letter_match(reply, ["b"]) == 1.0 and letter_match(reply, ["c"]) == 0.0
    assert letter_match("Answer: a dog", ["a"]) == 0.0


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("1. The dogs are 7.\n2. The cats are 5.\n3.", "5"),
        ("Let us see:\n1.", "0"),
        ("1. Four and 5 make 9\n2. So the total", "9"),
        ("I have 7 dogs.\n\n**Step 2:** Now the", "7"),
        ("I have 7 dogs.\n### 2) Now the", "2"),
        ("1) 7 dogs\n(2) And", "7"),
        ("Item 1: 7 dogs\nItem 2: and", "7"),
        ("1. 7 dogs\n2. 8 cats\n\nAnswer:\n15.", "15"),
        ("1. one\n2. two\n**Answer:**\n3.", "3"),
        ("12.", "12"),
        ("1.", "1"),
        ("2.5 and\n3. more", "3"),
    ],
)
def test_numbers_of_lists_are_no_answers(reply, answer):
    assert integer_match(reply, [answer]) == 1.0


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("Leo will be \\boxed{16} years old in 3 years.", "16"),
        ("\\boxed{3 + 13 = 16}, which is 2 more than 14", "16"),
        ("first \\boxed{7}, no: \\boxed{1,240.00} on day 5", "1240"),
        ("1. \\boxed{4}\n2.", "4"),
        ("\\boxed{sixteen}, that is 16", "16"),
        ("<think>\\boxed{8}</think> Answer: 9", "9"),
    ],
)
def test_a_box_has_the_integer(reply, answer):
    assert integer_match(reply, [answer]) == 1.0
