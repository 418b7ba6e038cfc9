"""Exact match and F1 against an independent implementation, and the rewards that use them."""

import re

import pytest
from hypothesis import given, strategies as st

from agentic_prompting.rewards import (
    PromptR1Reward,
    exact_match,
    exact_match_reward,
    normalize_answer,
    token_f1,
    token_f1_reward,
)
from support.agent_turns import ASK, END, NILE, episode, failed_episode


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("  The  Cat's  \tHat. ", "cats hat"),
        ("An apple a day", "apple day"),
        ("theatre", "theatre"),
        ("24,960", "24960"),
        ("A", ""),
        ("$5-year", "5year"),
    ],
)
def test_normalize_answer(text, normal):
    assert normalize_answer(text) == normal
    assert normalize_answer(normal) == normal


def test_both_empty_is_squad_v2s_rule():
    assert exact_match("", [""]) == token_f1("", [""]) == token_f1("?!", ["..."]) == 1.0
    assert token_f1("", ["Nile"]) == token_f1("Nile", [""]) == 0.0


def test_overlap_is_a_multiset():
    assert token_f1("no no no", ["no"]) == pytest.approx(2 * 1 / 4)
    assert token_f1("no no", ["no no no"]) == pytest.approx(2 * 2 / 5)


def reference_tokens(text: str, articles: str = r"\b(?:a|an|the)\b") -> list[str]:
    kept = "".join(c for c in text.lower() if c not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
    return [word for word in re.sub(articles, " ", kept).split() if word]


def reference_pair(prediction: str, answer: str) -> tuple[list[str], list[str]]:
    """The tokens of both; with articles where they are all there is."""
    pair = reference_tokens(prediction), reference_tokens(answer)
    return (
        pair
        if any(pair)
        else (reference_tokens(prediction, "(?!)"), reference_tokens(answer, "(?!)"))
    )


def reference_f1(prediction: str, answer: str) -> float:
    """Written from the definition: precision and recall of a greedy one-to-one matching of tokens."""
    predicted, expected = reference_pair(prediction, answer)
    if not predicted and not expected:
        return 1.0
    unmatched = list(expected)
    hits = 0
    for token in predicted:
        if token in unmatched:
            unmatched.remove(token)
            hits += 1
    if hits == 0:
        return 0.0
    precision = hits / len(predicted)
    recall = hits / len(expected)
    return 2 * precision * recall / (precision + recall)


ANSWERS = st.lists(
    st.sampled_from(["the", "a", "Nile", "nile!", "river", "24,960", "...", "Ünlü", "an\n"]),
    max_size=6,
).map(" ".join)


@given(
    prediction=ANSWERS | st.text(), answers=st.lists(ANSWERS | st.text(), min_size=1, max_size=4)
)
def test_scores_agree_with_an_independent_implementation(prediction, answers):
    assert token_f1(prediction, answers) == pytest.approx(
        max(reference_f1(prediction, a) for a in answers)
    )
    pairs = [reference_pair(prediction, a) for a in answers]
    assert exact_match(prediction, answers) == float(any(one == other for one, other in pairs))


@given(prediction=ANSWERS, answers=st.lists(ANSWERS, min_size=1, max_size=4))
def test_exact_match_implies_f1(prediction, answers):
    assert exact_match(prediction, answers) <= token_f1(prediction, answers) <= 1.0
    assert token_f1(prediction, answers) == token_f1(prediction, answers[::-1])


@pytest.mark.parametrize(
    ("answer", "golds", "expected"),
    [
        ("the", ["A"], 0.0),
        ("a", ["A"], 1.0),
        ("A.", ["B", "A"], 1.0),
        ("", [""], 1.0),
        ("the", [""], 0.0),
        ("?", ["!"], 1.0),
    ],
)
def test_where_normalisation_leaves_nothing_articles_count(answer, golds, expected):
    """An option letter is an article to SQuAD: "the" is not the right answer to a question whose
    answer is "A".
    """
    assert exact_match(answer, golds) == token_f1(answer, golds) == expected
    turns = [
        "<think>w</think><interaction_prompt>p</interaction_prompt>",
        f"<think>w</think><answer>{answer}</answer>",
    ]
    if answer:
        assert PromptR1Reward().score_turns(turns, golds).total == expected


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("(4)", "-4", 0.0),
        ("**-4**", "4", 0.0),
        ('"2.5"', "25", 0.0),
        ("[4.0]", "40", 0.0),
        ("**4.0**", "4", 1.0),
        ("`1,000`", "1000", 1.0),
    ],
)
def test_marks_around_a_number_change_nothing(prediction, answer, score):
    assert exact_match(prediction, [answer]) == token_f1(prediction, [answer]) == score


@pytest.mark.parametrize("reward", [PromptR1Reward(), exact_match_reward, token_f1_reward])
def test_a_failed_rollout_has_no_reward_and_its_neighbours_do(reward):
    rollouts = [episode(ASK, END), failed_episode(), episode(ASK, END), episode(status="truncated")]
    rewards = reward(
        prompts=["p"] * 4,
        completions=["c"] * 4,
        completion_ids=[[2]] * 4,
        rollout=rollouts,
        answers=[NILE, NILE, ["Danube"], NILE],
        question=["q"] * 4,
        trainer_state=None,
    )
    assert rewards == [1.0, None, 0.0, None]


def test_answers_that_were_not_given_score_zero():
    rollouts = [episode(ASK, status="out_of_turns"), episode("<think>…", status="truncated")]
    assert exact_match_reward([], [], rollouts, [[""], NILE]) == [0.0, 0.0]
    assert token_f1_reward([], [], rollouts, [[""], NILE]) == [0.0, 0.0]
