"""No sandbox shows a policy anything about what it is held to afterwards."""

import random

import pytest

from agentic_prompting.rollout import ChatFormat, parse_turn, rollout_from_trace
from agentic_prompting.sandbox import (
    DEFAULT_MIX,
    Oracle,
    load_world,
    make_split,
    make_traces,
    parse_question,
    setup,
)
from agentic_prompting.sandbox.policy import nonsense, sandbox_spec, world_tokenizer
from support.leaks import leaks


@pytest.mark.parametrize("name", ["prompt-r1", *setup.WORLDS])
def test_nothing_about_a_held_out_country_is_seen_before(name):
    assert leaks(name, 5, warm_start_steps=30) == []


def test_exercises_are_no_questions_and_go_on_by_copying():
    spec = sandbox_spec()
    tokenizer = world_tokenizer()
    rng = random.Random(0)
    traces = make_traces(make_split(5)[0], 200, {**DEFAULT_MIX, "impatient": 0}, Oracle(), rng)
    conversations = [
        rollout_from_trace(trace, spec, ChatFormat(tokenizer, spec.grammar)) for trace in traces
    ]
    exercises = nonsense(conversations, tokenizer, load_world(), rng)
    for exercise, conversation, trace in zip(exercises, conversations, traces, strict=True):
        assert exercise.mask == conversation.mask and exercise.context != conversation.context
        asked, said = (tokenizer.decode(ids) for ids in (exercise.prompt_ids, exercise.ids))
        assert parse_question(asked) is None and parse_question(said) is None
        if trace["kind"] == "decompose":
            assert (
                parse_turn(said.rpartition("<|im_start|>")[2]).answer
                in said.rpartition("the answer is")[2]
            )
