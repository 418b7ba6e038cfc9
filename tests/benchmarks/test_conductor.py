"""The sandbox of the conductor: its world keeps what its protocol requires, and its traces are what the agent will see."""

import random

import pytest

from agentic_prompting.llm import run
from agentic_prompting.rollout import AgentSpec, Rollout, Sample, rollout_from_trace
from benchmarks.lab import share
from benchmarks.learning.conductor import (
    GRAMMAR,
    LIMITS,
    TEMPLATE,
    draw_traces,
    make_tokenizer,
    measure_baselines,
)
from benchmarks.learning.conductor_world import (
    Facts,
    ScriptedWorker,
    make_environment,
    make_split,
    plan_of,
    question_text,
    read_question,
)

FACTS = Facts()


def test_no_worker_is_enough_and_a_plan_is():
    _, rows = make_split(7, 1, 128, FACTS)
    scores = {
        name: share(measured["correct"])
        for name, measured in measure_baselines(rows, FACTS, 7).items()
    }
    assert scores["right plan"] == 1.0
    assert scores["right plan, random workers"] <= 0.25 and scores["oracle router"] <= 0.5
    assert all(score <= 0.35 for name, score in scores.items() if name.endswith("alone"))


def countries_of(rows):
    """The countries and capitals that questions name."""
    steps = [step for row in rows for step in plan_of(read_question(row["question"]))]
    named = {argument for step in steps for argument in step.arguments if isinstance(argument, str)}
    return named & {*FACTS.by_name, *FACTS.by_capital}


def test_training_names_no_country_of_the_held_out_questions():
    train, test = make_split(7, 512, 64, FACTS)
    assert len(countries_of(test)) > 20 and not countries_of(train) & countries_of(test)


def test_questions_are_read_as_they_are_written():
    rows, _ = make_split(7, 256, 1, FACTS)
    for row in rows:
        expression = read_question(row["question"])
        assert question_text(expression) == row["question"]
        assert FACTS.solve(expression) == row["answers"][0]
        assert len(plan_of(expression)) <= 3


def test_a_worker_guesses_what_is_not_its_own():
    forms = ScriptedWorker(FACTS, "forms")
    assert forms.answer("what is the form for 254 ?").startswith("the answer is form-")
    guess = forms.answer("what is the form for the code of Kenya ?")
    quoted = "Quoted replies:\n#1 : it is 254 ; the answer is 254 .\n\nRequest:\nwhat is the form for #1 ?"
    assert guess.startswith("the answer is form-")
    assert forms.answer(quoted) == forms.answer("what is the form for 254 ?")
    assert forms.answer("what is the code of Kenya ?") == "i do not understand ."


@pytest.mark.parametrize("retypes", [False, True])
def test_traces_have_the_tokens_of_episodes(retypes):
    tokenizer = make_tokenizer(FACTS)
    spec = AgentSpec(TEMPLATE, grammar=GRAMMAR, limits=LIMITS)
    chat_format = spec.tokens(tokenizer)
    environment = make_environment(FACTS)
    rows, _ = make_split(7, 256, 1, FACTS)
    for trace in draw_traces(rows, 100, environment, FACTS, retypes, random.Random(7)):
        written = rollout_from_trace(trace, spec, chat_format)
        assert tokenizer.unk_token_id not in written.context
        played = Rollout(chat_format.prompt_ids(trace["prompt"]), row=trace)
        for place, text in enumerate(trace["turns"]):
            ids = chat_format.turn_ids(text)
            played.add_turn(Sample(ids), chat_format.parse(ids))
            if place < len(trace["observations"]):
                observation = run(environment.step(played))
                after = chat_format.observation_ids(observation.text, after=played.ids)
                played.add_observation(observation, after)
        assert (played.prompt_ids, played.ids, played.mask) == (
            written.prompt_ids,
            written.ids,
            written.mask,
        )
