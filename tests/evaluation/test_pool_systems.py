"""Baselines over a pool of workers: whom they ask, what they cost, and what their failures are."""

import json

import pytest

from agentic_prompting.environments import Worker
from agentic_prompting.evaluation import (
    BestOfSystem,
    OracleRouterSystem,
    RandomPlanSystem,
    RouterSystem,
    WorkerSystem,
    baselines_at_cost,
    baselines_of_pool,
    evaluate_agent,
    save_run,
)
from agentic_prompting.llm import Misconfigured, Reply, ScriptedChat, ServerFailed
from agentic_prompting.report.cost_points import cost_points
from agentic_prompting.report.run_summary import RunSummary

ROWS = [
    {"question": f"{name} {number}", "answers": [name]}
    for name in ("apple", "pear")
    for number in range(10)
]


def always(text):
    return lambda messages: f"Answer: {text}"


def make_pool():
    """Each worker is right about one half of the questions; pears are cheaper."""
    return {
        "apples": Worker(always("apple"), "apples", usd=0.03),
        "pears": Worker(always("pear"), "pears", usd=0.01),
    }


def evaluate(systems, rows=ROWS, **options):
    return evaluate_agent(
        systems, {"fruit": rows}, ["exact_match"], runs=1, progress=False, **options
    )


def score_of(evaluation, system):
    return evaluation.result(system, "fruit").estimates["exact_match"].mean


def test_a_pool_has_its_baselines():
    evaluation = evaluate(baselines_of_pool(make_pool()))
    assert score_of(evaluation, "apples alone") == score_of(evaluation, "pears alone") == 0.5
    assert 0.2 < score_of(evaluation, "even router") < 0.8
    assert score_of(evaluation, "oracle router") == 1.0
    assert evaluation.result("apples alone", "fruit").cost_usd == pytest.approx(0.03)
    # The oracle pays the worker that is right.
    assert evaluation.result("oracle router", "fruit").cost_usd == pytest.approx(0.02)


def test_an_oracle_falls_back_on_the_cheapest():
    (answer,) = OracleRouterSystem(make_pool())([{"question": "plum", "answers": ["plum"]}])
    assert answer.text == "pear" and answer.worth_usd == pytest.approx(0.01)


def test_a_router_keeps_to_its_weights():
    router = RouterSystem(make_pool(), {"apples": 0.0, "pears": 2.0})
    assert {answer.text for answer in router(ROWS)} == {"pear"}
    assert router.settings != RouterSystem(make_pool()).settings
    with pytest.raises(ValueError, match="plums"):
        RouterSystem(make_pool(), {"plums": 1.0})
    with pytest.raises(ValueError, match="weights"):
        RouterSystem(make_pool(), {"pears": 0.0})


def test_best_of_n_takes_the_majority():
    texts = iter(["Answer: a", "Answer: The B.", "Answer: b"])
    chat = ScriptedChat(lambda messages: next(texts))
    (answer,) = BestOfSystem({"a": Worker(chat, usd=0.1)}, "a", 3)(["q"])
    assert answer.text == "The B"  # the first of two that are the same without article and case
    assert answer.calls == 3 and answer.worth_usd == pytest.approx(0.3)


def test_questions_with_one_ending_draw_apart():
    repeats = []

    async def chat(messages, repeat=None, **options):
        repeats.append(repeat)
        return Reply("Answer: yes")

    system = WorkerSystem({"a": Worker(chat)}, "a")
    system(["What is the currency of Andorra?", "What is the language of Andorra?"])
    assert len(set(repeats)) == 2


class Failing:
    """Fails with an error in each call but the first ones."""

    def __init__(self, error, sound=0):
        self.error = error
        self.sound = sound

    async def __call__(self, messages, **options):
        self.sound -= 1
        if self.sound >= 0:
            return Reply("Answer: yes")
        return Reply(error=self.error)


def test_failures_are_no_wrong_answers():
    outage = ServerFailed("down", "a")
    (answer,) = WorkerSystem({"a": Failing(outage)}, "a")(["q"])
    assert answer.error and answer.text is None and not answer.fatal
    # One sound sample suffices, unless the error affects all further questions.
    (answer,) = BestOfSystem({"a": Failing(outage, sound=1)}, "a", 4)(["q"])
    assert answer.text == "yes" and answer.error is None and answer.calls == 4
    (answer,) = BestOfSystem({"a": Failing(Misconfigured("key"), sound=1)}, "a", 4)(["q"])
    assert answer.fatal and answer.text is None
    rows = [{"question": "q", "answers": ["yes"]}]
    pool = {"down": Failing(outage), "up": always("yes")}
    assert OracleRouterSystem(pool)(rows)[0].text == "yes"
    assert RandomPlanSystem({"down": Failing(outage)}, 3)(["q"])[0].error


def test_a_random_plan_hands_replies_on():
    chat = ScriptedChat(lambda messages: f"Answer: {len(chat.calls)}")
    tool = Worker(lambda text: f"tool got {text}", takes="text")
    (answer,) = RandomPlanSystem({"a": chat}, 3)(["what"])
    last_request = chat.calls[-1][-1]["content"]
    assert answer.calls == 3 and "#1 : " in last_request and "#2 : " in last_request
    assert last_request.endswith("what")
    (answer,) = RandomPlanSystem({"tool": tool}, 2)(["what"])
    assert answer.whole == "tool got what"


def test_baselines_spend_what_an_agent_spends():
    pool = make_pool()
    cheap = {name: Worker(worker.model, usd=0.0) for name, worker in pool.items()}
    best = {"apples": Worker(always("apple"), usd=0.02), "pears": pool["pears"]}
    rows = [*ROWS, {"question": "apple", "answers": ["apple"]}]
    agent = WorkerSystem({"agent": Worker(always("apple"), usd=0.06)}, "agent")
    evaluation = evaluate({"agent": agent, **baselines_of_pool(best)}, rows)
    assert list(baselines_at_cost(best, evaluation, "agent")) == [
        "best of 3, apples",
        "random plan of 4",
    ]
    # Where nothing costs dollars the calls count.
    twice = BestOfSystem(cheap, "apples", 2)
    evaluation = evaluate({"agent": twice, **baselines_of_pool(cheap)}, rows)
    systems = baselines_at_cost(cheap, evaluation, "agent")
    assert list(systems) == ["best of 2, apples", "random plan of 2"]
    with pytest.raises(KeyError, match="apples alone"):
        baselines_at_cost(pool, evaluate({"agent": agent}), "agent")


def test_the_report_shows_them_with_intervals(tmp_path):
    evaluation = evaluate(baselines_of_pool(make_pool()), output=tmp_path)
    save_run(tmp_path, evaluation)
    points = {point.name: point for point in cost_points([RunSummary.read(tmp_path)], ["run"])}
    assert set(points) == {"apples alone", "pears alone", "even router", "oracle router"}
    alone = points["pears alone"]
    assert alone.low < alone.mean < alone.high and alone.usd == pytest.approx(0.01)
    assert points["oracle router"].front and not points["apples alone"].front
    lines = (tmp_path / "oracle_router.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["trajectory"] == {"workers": ["apples"]}
