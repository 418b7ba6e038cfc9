"""The supervised traces of the warm start."""

import random

import pytest

from agentic_prompting.llm.chats import ScriptedChat
from agentic_prompting.rollout.grammar import TagGrammar, parse_turn
from agentic_prompting.sandbox.traces import DEFAULT_MIX, KINDS, make_traces, vocabulary
from agentic_prompting.sandbox.world import (
    Oracle,
    World,
    all_questions,
    load_world,
    parse_question,
    value_of,
)

QUESTIONS = all_questions()


def traces(kind, n=300, oracle=None):
    return make_traces(QUESTIONS, n, {kind: 1.0}, oracle or Oracle(), random.Random(0))


def final_answer(trace):
    return parse_turn(trace["turns"][-1]).answer


def is_right(trace):
    return final_answer(trace) in trace["answers"]


def requests(trace):
    return [parse_turn(turn).request for turn in trace["turns"][:-1]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_trace_is_an_episode_that_could_have_happened(kind):
    oracle = Oracle()
    for trace in traces(kind):
        assert trace["kind"] == kind
        turns = [parse_turn(turn) for turn in trace["turns"]]
        assert [turn.kind for turn in turns] == ["act"] * (len(turns) - 1) + ["answer"]
        assert all(turn.well_formed for turn in turns[:-1])
        assert turns[-1].well_formed == (kind != "bare")
        assert [oracle.answer(turn.request) for turn in turns[:-1]] == trace["observations"]


def test_decompose_asks_the_path_and_is_right():
    paths = {question.text: [step for step, _ in question.path] for question in QUESTIONS}
    for trace in traces("decompose"):
        assert requests(trace) == paths[trace["question"]]
        assert is_right(trace)


def test_decompose_builds_on_the_replies_it_got():
    wrong = 0
    for trace in traces("decompose", oracle=Oracle(noise=0.5)):
        values = [value_of(reply) for reply in trace["observations"]]
        assert final_answer(trace) == values[-1]
        assert all(
            f" {value} ?" in request
            for value, request in zip(values, requests(trace)[1:], strict=False)
        )
        wrong += not is_right(trace)
    assert wrong > 100


def test_pass_on_asks_the_question_and_repeats_the_guess():
    for trace in traces("pass_on"):
        assert requests(trace) == [trace["question"]]
        assert final_answer(trace) == value_of(trace["observations"][0])


def test_impatient_asks_nothing():
    assert all(len(trace["turns"]) == 1 for trace in traces("impatient"))


def test_partial_begins_right_and_ends_wrong():
    for trace in traces("partial"):
        assert parse_question(requests(trace)[0]).hops == 1
        assert len(requests(trace)) < 3
    assert sum(map(is_right, traces("partial"))) < 0.06 * 300


def test_a_turn_does_what_its_thought_says():
    for kind in ("decompose", "partial"):
        for trace in traces(kind):
            for turn in map(parse_turn, trace["turns"][:-1]):
                parsed = parse_question(turn.request)
                sought = {"capital": "city", "name": "country"}.get(
                    parsed.chain[-1], parsed.chain[-1]
                )
                assert (
                    turn.thought.endswith(sought)
                    if parsed.hops == 1
                    else turn.thought == "ask the whole question"
                )


def test_multi_word_answers_are_there():
    several = [question for question in QUESTIONS if " " in question.answer]
    for trace in make_traces(several, 200, {"decompose": 1.0}, Oracle(), random.Random(0)):
        assert is_right(trace) and " " in final_answer(trace)
    assert {"CFA franc", "North America", "Dominican Republic"} <= {
        question.answer for question in several
    }


def test_the_default_mix_scores_between_a_quarter_and_two_fifths():
    mixed = make_traces(QUESTIONS, 3000, DEFAULT_MIX, Oracle(), random.Random(1))
    assert {trace["kind"] for trace in mixed} == set(KINDS)
    assert 0.3 < sum(map(is_right, mixed)) / len(mixed) < 0.4
    assert sum(DEFAULT_MIX.values()) == pytest.approx(1.0)


def test_traces_follow_from_their_generator():
    def make(seed):
        return make_traces(QUESTIONS, 50, DEFAULT_MIX, Oracle(), random.Random(seed))

    assert make(1) == make(1) != make(2)


def test_what_cannot_be_written_is_an_error():
    with pytest.raises(ValueError, match="clairvoyant"):
        make_traces(QUESTIONS, 5, {"clairvoyant": 1.0}, Oracle(), random.Random(0))
    with pytest.raises(ValueError, match="two hops"):
        make_traces(all_questions((1,)), 5, DEFAULT_MIX, Oracle(), random.Random(0))


def test_another_grammar_and_any_chat_model():
    grammar = TagGrammar(act="ask", observation="reply")
    parrot = ScriptedChat(lambda messages: "no idea")
    (trace,) = make_traces(
        QUESTIONS, 1, {"pass_on": 1.0}, parrot, random.Random(0), grammar=grammar
    )
    assert parse_turn(trace["turns"][0], grammar).request == trace["question"]
    assert final_answer(trace) == "no idea"


def test_the_vocabulary_is_exactly_the_words_that_occur():
    world = World(load_world().countries[:4])
    questions = all_questions((1, 2, 3), world)
    oracle = Oracle(world=world)
    mixed = make_traces(
        all_questions((2, 3), world), 2000, DEFAULT_MIX, oracle, random.Random(0), world=world
    )
    texts = [question.text for question in questions] + [oracle.answer("hello")]
    texts += [
        text
        for trace in mixed
        for text in [*trace["turns"], *trace["observations"], *trace["answers"]]
    ]
    texts += ["<interaction_response> </interaction_response>"]
    texts += [value for values in world.values.values() for value in values]
    words = vocabulary(world)
    assert words == sorted({word for text in texts for word in text.split()})


def test_the_whole_vocabulary_is_small():
    words = vocabulary()
    assert 600 < len(words) < 800
    assert {
        "Nairobi",
        "NBO",
        "CFA",
        "franc",
        "?",
        ".",
        "<answer>",
        "</interaction_response>",
    } <= set(words)
