"""Reading answers: in replies as models write them, and accepted answers that no reply could match."""

import time
from decimal import Decimal
from fractions import Fraction

import numpy
import pytest
from hypothesis import given, strategies as st

from agentic_prompting.evaluation import EvaluationTask, evaluate_agent
from agentic_prompting.evolution import parse_edits
from agentic_prompting.evolution.evolve import evolve
from agentic_prompting.llm import ScriptedChat
from agentic_prompting.refine import LabelVerifier, ProRefiner, read_improved_prompt
from agentic_prompting.rewards import (
    check_answers,
    exact_match,
    exact_match_reward,
    integer_match,
    letter_match,
    math_match,
    math_reward,
    read_answer,
    read_verdict,
    search_reward,
    token_f1,
    word_sorting_match,
)
from agentic_prompting.rewards.judges import read_scores

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


# Letters ------------------------------------------------------------------------------------------------------------


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


# Whole numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("1. The dogs are 7.\n2. The cats are 5.\n3.", "5"),
        ("Let us see:\n1.", "0"),
        ("1. Four and 5 make 9\n2. So the total", "9"),
        ("I have 7 dogs.\n\n**Step 2:** Now the", "7"),
        ("I have 7 dogs.\n### 2) Now the", "2"),
        ("1) 7 dogs\n(2) And", "7"),
        ("1. 7 dogs\n2. 8 cats\n\nAnswer:\n15.", "15"),
        ("1. one\n2. two\n**Answer:**\n3.", "3"),
        ("12.", "12"),
        ("1.", "1"),
        ("2.5 and\n3. more", "3"),
    ],
)
def test_numbers_of_lists_are_no_answers(reply, answer):
    assert integer_match(reply, [answer]) == 1.0


# Accepted answers that no reply can match ---------------------------------------------------------------------------


NEVER = {
    "letter_match": (letter_match, "Paris"),
    "letter_match, empty": (letter_match, ""),
    "integer_match": (integer_match, "2.5"),
    "integer_match, a word": (integer_match, "four"),
    "integer_match, a fraction": (integer_match, "3/4"),
    "word_sorting_match": (word_sorting_match, "..."),
    "math_match": (math_match, "$"),
    "math_reward": (math_reward, ""),
    "search_reward": (search_reward, "the"),
}


@pytest.mark.parametrize(("rule", "answer"), NEVER.values(), ids=NEVER)
def test_answers_that_cannot_match_are_refused(rule, answer):
    with pytest.raises(ValueError, match="no reply can match"):
        check_answers(rule, [answer])


@pytest.mark.parametrize(
    "answer", ["12", "-12", "1,240", "12.0", "$12", "12 apples", "12.", "(12)", "12%", 12.0]
)
def test_whole_numbers_can_match(answer):
    check_answers(integer_match, [answer])


def test_other_rules_accept_any_answer():
    for rule in (exact_match, token_f1, exact_match_reward, len, "a/reward-model", None):
        check_answers(rule, [""])


def test_a_rule_of_ones_own_may_refuse_answers():
    def rule(prediction, answers):
        return 1.0

    rule.answer_problem = lambda answer: "it is odd" if answer == "odd" else ""
    check_answers(rule, ["even"])
    with pytest.raises(ValueError, match="it is odd"):
        check_answers(rule, ["even", "odd"])


def test_an_evaluation_refuses_them_before_it_asks():
    asked = []
    task = EvaluationTask(
        "letters", [{"question": "q", "answers": ["B"]}, {"question": "r", "answers": ["42"]}]
    )
    with pytest.raises(ValueError, match="row 1 .*'42'"):
        evaluate_agent(asked.extend, [task], metrics=["letter_match"], progress=False)
    assert not asked


def test_a_refinement_refuses_them_before_it_asks():
    chat = ScriptedChat(["Answer: B"])
    refiner = ProRefiner(
        task=chat, feedback=chat, optimizer=chat, verifier=LabelVerifier(letter_match)
    )
    with pytest.raises(ValueError, match="query 0: .*'42'"):
        refiner.refine("Think.", {"question": "q", "answers": ["42"]})
    assert not chat.calls


def test_an_evolution_refuses_them_before_it_asks():
    chat = ScriptedChat(["\\boxed{4}"])
    with pytest.raises(ValueError, match="row 1 .*no reply can match"):
        evolve(chat, chat, [("2 + 2?", "4"), ("3 + 3?", "$")], math_reward, "Think.")
    assert not chat.calls


# Numbers ------------------------------------------------------------------------------------------------------------


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


# Time ---------------------------------------------------------------------------------------------------------------


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
]


@pytest.mark.parametrize("name", READERS)
def test_readers_take_linear_time(name):
    """A quadratic reader of 200,000 characters takes minutes."""
    read = READERS[name]
    read("warm")
    for piece in PIECES:
        text = piece * (200_000 // len(piece))
        started = time.process_time()
        read(text)
        read("```json\n" + text + "x")
        assert time.process_time() - started < 3, piece


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_readers_never_raise(text):
    for name, read in READERS.items():
        if not name.startswith("math"):
            read(text)
