"""The oracle: knows, guesses, or does not understand."""

import time
from collections import Counter

import pytest

from agentic_prompting.llm import ChatModel, complete, start
from agentic_prompting.sandbox.world import (
    ANSWER,
    NOT_UNDERSTOOD,
    Oracle,
    all_questions,
    load_world,
    parse_question,
    value_of,
)

MULTI_HOP = all_questions((2, 3))
ONE_HOP = all_questions((1,))


def user(text):
    return {"role": "user", "content": text}


def test_it_is_a_chat_model():
    assert isinstance(Oracle(), ChatModel)


def test_following_the_path_gives_the_answer_to_every_question():
    oracle = Oracle(seed=5)
    for question in MULTI_HOP:
        for step, expected in question.path:
            assert value_of(oracle.answer(step)) == expected
        assert expected == question.answer


def test_guesses_look_like_answers_and_are_of_the_right_kind():
    oracle = Oracle()
    world = load_world()
    for question in MULTI_HOP:
        value = value_of(oracle.answer(question.text))
        assert value in world.values[parse_question(question.text).chain[-1]]


@pytest.mark.parametrize("seed", range(3))
def test_passing_the_question_on_is_right_by_chance_alone(seed):
    oracle = Oracle(seed=seed)
    world = load_world()
    right = [value_of(oracle.answer(question.text)) == question.answer for question in MULTI_HOP]
    chance = [
        1 / len(world.values[parse_question(question.text).chain[-1]]) for question in MULTI_HOP
    ]
    assert 0.05 < sum(chance) / len(chance) < 0.065  # what the module's docstring says
    assert sum(right) / len(right) == pytest.approx(sum(chance) / len(chance), abs=0.025)


def test_guesses_can_be_right_on_purpose():
    oracle = Oracle(guess_right=0.5)
    right = sum(value_of(oracle.answer(question.text)) == question.answer for question in MULTI_HOP)
    assert 0.45 < right / len(MULTI_HOP) < 0.6


def test_it_does_not_understand_anything_else():
    oracle = Oracle()
    for text in ("hello", "", "what is the meaning of life ?", "what is the currency of Nairobi ?"):
        assert oracle.answer(text) == NOT_UNDERSTOOD
    assert value_of(NOT_UNDERSTOOD) is None


def test_it_answers_the_last_user_message():
    messages = [
        {"role": "system", "content": "be brief"},
        user("what is the currency of Kenya ?"),
        {"role": "assistant", "content": "the answer is shilling ."},
        user("which country has the capital Port-au-Prince ?"),
    ]
    reply = complete(Oracle(), messages)
    assert reply.text == "the answer is Haiti ."
    assert reply.error is None and reply.finish_reason == "stop"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (2 + 7 + 5 + 7, 5)
    assert complete(Oracle(), []).text == NOT_UNDERSTOOD


def test_two_oracles_with_the_same_seed_say_the_same():
    def replies(seed):
        oracle = Oracle(noise=0.3, seed=seed)
        return [
            complete(oracle, question.text).text for question in MULTI_HOP[:100] + ONE_HOP[:100]
        ]

    assert replies(1) == replies(1) != replies(2)


def test_the_guess_does_not_depend_on_how_or_when_it_is_asked():
    oracle = Oracle(noise=0.5)
    text = MULTI_HOP[0].text
    again = [user("hello"), user(f"tell me : {text.upper()}")]
    assert complete(oracle, text).text == complete(oracle, again, repeat=3).text


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5, 1.0])
def test_noise_is_as_frequent_as_it_says(noise):
    oracle = Oracle(noise=noise)
    world = load_world()
    values = [(question, value_of(complete(oracle, question.text).text)) for question in ONE_HOP]
    assert all(
        value in world.values[parse_question(question.text).chain[-1]] for question, value in values
    )
    wrong = sum(value != question.answer for question, value in values) / len(values)
    assert wrong == pytest.approx(noise, abs=0.04)


def test_noise_is_drawn_anew_for_each_repeat_and_each_conversation():
    oracle = Oracle(noise=0.5)
    text = "what is the currency of Kenya ?"
    repeats = Counter(
        complete(oracle, text, repeat=i).text == "the answer is shilling ." for i in range(200)
    )
    later = Counter(
        complete(oracle, [user(f"hello {i}"), user(text)]).text == "the answer is shilling ."
        for i in range(200)
    )
    assert 70 < repeats[True] < 130 and 70 < later[True] < 130
    assert complete(oracle, text).text == complete(oracle, text, repeat=0).text


def test_latency_does_not_block():
    question = [user("what is the currency of Kenya ?")]
    waiting = [start(Oracle(latency=3600)(question)) for _ in range(50)]
    assert not any(future.done() for future in waiting)
    assert all(future.cancel() for future in waiting)
    assert start(Oracle(latency=0.1)(question)).result(60).text == "the answer is shilling ."


def test_a_cancelled_call_stays_cancelled():
    future = start(Oracle(latency=0.05)([user("hello")]))
    assert future.cancel()
    time.sleep(0.1)
    assert future.cancelled()


@pytest.mark.parametrize(
    "bad", [{"noise": 1.5}, {"noise": -0.1}, {"guess_right": 2}, {"latency": -1}]
)
def test_impossible_arguments_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Oracle(**bad)


def test_the_reply_pattern_can_be_copied_word_by_word():
    assert ANSWER.replace("{value}", "CFA franc").split() == [
        "the",
        "answer",
        "is",
        "CFA",
        "franc",
        ".",
    ]
    assert value_of("the answer is CFA franc .") == "CFA franc"
