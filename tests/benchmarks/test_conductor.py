"""The sandbox of the conductor: its world keeps what its protocol requires, and its traces are what
the agent will see.
"""

import random
from types import SimpleNamespace

import pytest

from agentic_prompting import Workers
from agentic_prompting.llm import Reply, ServerFailed, Usage, run
from agentic_prompting.rollout import AgentSpec, Observation, Rollout, Sample, rollout_from_trace
from benchmarks.lab import share
from benchmarks.learning.conductor import make_tokenizer
from benchmarks.learning.conductor_baselines import (
    BASELINES,
    BUDGET_BASELINES,
    GRAMMAR,
    OUTAGE_BASELINES,
    TEMPLATE,
    measure_scripts,
)
from benchmarks.learning.conductor_tables import (
    budget_table,
    retyping_table,
    summarise,
    variants_table,
)
from benchmarks.learning.conductor_traces import draw_traces
from benchmarks.learning.conductor_variants import VARIANTS, LateCost
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
        for name, measured in measure_scripts(BASELINES, rows, make_environment(FACTS), 7).items()
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
    quoted = (
        "Quoted replies:\n#1 : it is 254 ; the answer is 254 .\n\nRequest:\nwhat is the form for "
        "#1 ?"
    )
    assert guess.startswith("the answer is form-")
    assert forms.answer(quoted) == forms.answer("what is the form for 254 ?")
    assert forms.answer("what is the code of Kenya ?") == "i do not understand ."


DETERMINISTIC = ["references", "unchecked", "retyping", "names"]


def play(chat_format, environment, trace):
    """The rollout of a trace's turns, with the observations of an environment."""
    played = Rollout(chat_format.prompt_ids(trace["prompt"]), row=trace)
    for place, text in enumerate(trace["turns"]):
        ids = chat_format.turn_ids(text)
        played.add_turn(Sample(ids), chat_format.parse(ids))
        if place < len(trace["observations"]):
            observation = run(environment.step(played))
            after = chat_format.observation_ids(observation.text, after=played.ids)
            played.add_observation(observation, after)
    return played


def tokens_of(rollout):
    return rollout.prompt_ids, rollout.ids, rollout.mask


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_traces_have_the_tokens_of_episodes(name):
    variant = VARIANTS[name]
    tokenizer = make_tokenizer(FACTS, variant)
    spec = AgentSpec(TEMPLATE, grammar=GRAMMAR, limits=variant.limits)
    chat_format = spec.create_format(tokenizer)
    environment = variant.environment(FACTS)
    rows, _ = make_split(7, 256, 1, FACTS)
    for trace in draw_traces(rows, 100, environment, FACTS, variant, random.Random(7)):
        written = rollout_from_trace(trace, spec, chat_format)
        assert tokenizer.unk_token_id not in written.context
        assert tokens_of(play(chat_format, environment, trace)) == tokens_of(written)


class Replay:
    """A worker that repeats the replies of a trace; `unavailable` is a failed call."""

    def __init__(self):
        self.replies = []

    async def __call__(self, messages, **options):
        reply = self.replies.pop(0)
        if reply == "unavailable":
            return Reply(error=ServerFailed("down", "numbers"))
        return Reply(reply)


@pytest.mark.parametrize("name", ["budget", "outages"])
def test_traces_with_luck_have_the_tokens_of_episodes(name):
    variant = VARIANTS[name]
    tokenizer = make_tokenizer(FACTS, variant)
    spec = AgentSpec(TEMPLATE, grammar=GRAMMAR, limits=variant.limits)
    chat_format = spec.create_format(tokenizer)
    environment = variant.environment(FACTS)
    replay = Replay()
    replayed = Workers(dict.fromkeys(environment.pool, replay), unavailable="visible")
    rows = variant.with_budgets(make_split(7, 256, 1, FACTS)[0])
    traces = draw_traces(rows, 100, environment, FACTS, variant, random.Random(7))
    for trace in traces:
        lines = [line for text in trace["observations"] for line in text.split("\n")]
        replay.replies = [line.partition(" : ")[2] for line in lines]
        written = rollout_from_trace(trace, spec, chat_format)
        assert tokenizer.unk_token_id not in written.context
        assert tokens_of(play(chat_format, replayed, trace)) == tokens_of(written)
    turns = " ".join(text for trace in traces for text in trace["turns"])
    assert ("rumours" in turns) == variant.has_twin
    assert ("ask again" in turns) == variant.retries


def test_the_variants_leave_room_for_their_promises():
    variant = VARIANTS["budget"]
    rows = [{**row, "budget": "high"} for row in make_split(7, 1, 128, FACTS)[1]]
    measured = measure_scripts(BUDGET_BASELINES, rows, variant.environment(FACTS), 7)
    twin = measured["right plan, rumours"]
    expert = measured["right plan"]
    assert twin["usd"] < 0.6 * expert["usd"] and share(twin["correct"]) > 0.7
    assert share(measured["best of nine, rumours"]["correct"]) < 0.35
    environment = VARIANTS["outages"].environment(FACTS)
    measured = measure_scripts(OUTAGE_BASELINES, rows, environment, 7)
    once, several = (share(entry["correct"]) for entry in measured.values())
    assert once < 0.9 < several


def test_a_cost_counts_late():
    rollout = Rollout([1], row={"budget": "low", "question": "q"})
    rollout.add_turn(Sample([2]), GRAMMAR.parse('<ask to="A">q</ask>'))
    rollout.add_observation(Observation("x", replies=(Reply("x", usage=Usage(cost_usd=0.01)),)), [])
    rollout.add_turn(Sample([2]), GRAMMAR.parse("<think>t</think> <answer>x</answer>"))
    rollout.finish("answered")
    reward = LateCost({"low": 100.0}, first_step=3)
    scores = [reward([rollout], SimpleNamespace(global_step=step)) for step in (2, 3)]
    assert scores == [[0.0], [-1.0]]


def measured(correct, usd=0.002, **more):
    return {"correct": correct, "usd": usd, "right_worker": 1.0, **more}


def test_the_tables_say_what_was_promised():
    run = {"variant": "budget", "seed": 1, "kinds": ["f"] * 4, "baselines": {}}
    run |= {"before": measured("0001"), "after": measured("1110", 0.004), "low": measured("1111")}
    run["low, untrained"] = measured("0000")
    failed = {"variant": "outages-failed", "seed": 1, "kinds": ["f"] * 4}
    failed |= {"before": measured("0000"), "after": measured("1100", failed=2)}
    failed["no outages"] = measured("1111")
    lines = variants_table([run, failed]).splitlines()
    assert any("`high` | 1 | 0.750" in line and "missed" in line for line in lines)
    assert any("`low` | 1 | 1.000" in line and "kept" in line for line in lines)
    # Failed rollouts are no wrong answers.
    assert any("*failed*" in line and "1.000" in line for line in lines)
    assert budget_table([run]).splitlines()[-1].endswith("| 0.50 | at most 0.60: kept |")
    assert summarise([run, failed])["budget"]["low"]["mean"] == 1.0


def test_retyping_is_compared_on_the_seeds_that_both_have():
    kinds = ["f", "ff", "fnr", "record", "record"]
    with_references = {"variant": "references", "kinds": kinds, "after": {"correct": "11111"}}
    with_retyping = {"variant": "retyping", "kinds": kinds, "after": {"correct": "01010"}}
    other_seed = {**with_references, "seed": 2, "after": {"correct": "00000"}}
    runs = [{**with_references, "seed": 1}, other_seed, {**with_retyping, "seed": 1}]
    _, _, one_word, record = retyping_table(runs).splitlines()
    assert "| 1.00 | 0.50 | at least 0.10 lower: kept |" in one_word
    assert "| 1.00 | 0.50 | at least 0.50 lower: kept |" in record
    assert retyping_table([other_seed]) == "No run of it has been recorded yet."
