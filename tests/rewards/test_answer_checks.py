"""Accepted answers that a rule can never match are refused before a run."""

import pytest

from agentic_prompting.evaluation import EvaluationTask, evaluate_agent
from agentic_prompting.evolution.evolve import evolve
from agentic_prompting.llm import ScriptedChat
from agentic_prompting.refine import LabelVerifier, ProRefiner
from agentic_prompting.rewards import (
    check_answers,
    exact_match,
    exact_match_reward,
    integer_match,
    letter_match,
    math_match,
    math_reward,
    search_reward,
    token_f1,
    word_sorting_match,
)

UNMATCHABLE = {
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


@pytest.mark.parametrize(("rule", "answer"), UNMATCHABLE.values(), ids=UNMATCHABLE)
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
