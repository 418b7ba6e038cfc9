"""Many questions at once."""

import asyncio
import threading
from dataclasses import replace

import pytest

from agentic_prompting.llm import (
    Reply,
    ScriptedChat,
)
from agentic_prompting.llm.loop import in_parallel
from agentic_prompting.refine import (
    ProRefiner,
    refine,
    summarize,
)
from support.all_at_once import AllAtOnce
from support.refine_models import (
    PROMPT,
    QUERIES,
    Log,
    RuleModel,
    critic,
    improve,
    models,
    refiner,
    untimed,
)


def test_64_queries_wait_together():
    """Critic and optimizer answer when all 64 have asked: one query after another would wait for
    ever.
    """
    task = ScriptedChat(lambda said: Reply(text="on and on", finish_reason="length"))

    def say(messages):
        system = messages[0]["content"]
        user = messages[-1]["content"]
        return improve(system, user) if user.startswith("Prompt:") else "Wrong."

    large = AllAtOnce(ScriptedChat(say), 64)
    threads = threading.active_count()
    refining = ProRefiner(task, large, large, max_steps=3)
    results = refining.refine_all(PROMPT, [f"Question {i}?" for i in range(64)], progress=False)
    assert [len(result.steps) for result in results] == [3] * 64
    assert threading.active_count() <= threads + 2, "no thread a query"


def test_results_are_in_the_order_of_the_queries_and_the_same_as_one_by_one():
    delays = iter([0.05, 0.0, 0.03, 0.0, 0.02] * 100)
    task = ScriptedChat(
        lambda said: "Answer to " + said[-1]["content"], latency=lambda: next(delays)
    )
    others = {role: model for role, model in models(Log()).items() if role != "task"}
    together = ProRefiner(task, **others).refine_all(PROMPT, QUERIES, progress=False)
    assert [result.answer for result in together] == [f"Answer to {query}" for query in QUERIES]
    assert [result.id for result in together] == [str(i) for i in range(20)]
    task.latency = 0.0
    alone = [ProRefiner(task, **others).refine(PROMPT, query) for query in QUERIES]
    assert [replace(untimed(result), id="0") for result in together] == [
        untimed(result) for result in alone
    ]


@pytest.mark.parametrize("limit", [1, 3, 50])
def test_no_more_in_flight_than_allowed(limit):
    waiting = []
    most = []

    class Held(RuleModel):
        async def __call__(self, messages, **options):
            waiting.append(messages)
            most.append(len(waiting))
            await asyncio.sleep(0.002)
            waiting.pop()
            return await super().__call__(messages, **options)

    held = replace(refiner(), feedback=Held("feedback", Log(), critic))
    results = held.refine_all(PROMPT, QUERIES, max_in_flight=limit, progress=False)
    assert max(most) <= limit and len(results) == 20
    with pytest.raises(ValueError, match="max_in_flight must be at least 1"):
        held.refine_all(PROMPT, QUERIES, max_in_flight=0)


def test_thousands_of_instant_calls_do_not_nest():
    result = refiner(Log(), max_steps=2_000).refine(PROMPT, "Long?")
    assert result.stop_reason == "finished"
    log = Log()
    long = ProRefiner(
        **models(log, length=2_500, optimizer=lambda *_: "no tag"),
        max_steps=2_000,
        tokens_per_step=1,
    )
    assert len(long.refine(PROMPT, "Longer?").steps) == 2_000


def test_no_queries():
    assert refiner().refine_all(PROMPT, [], progress=False) == []
    assert summarize([]) == {"queries": 0, "steps": 0.0, "kept_prompts": 0}


def test_a_model_that_breaks_its_promise_fails_its_calls_only():
    async def awaited(messages, **options):
        if "Question 2?" in messages[-1]["content"]:
            raise asyncio.CancelledError
        raise (
            RuntimeError("no future")
            if "Question 3?" in messages[-1]["content"]
            else ValueError("inside")
        )

    def plain(messages):
        if "Question 2?" in messages[-1]["content"]:
            raise asyncio.CancelledError
        raise (
            RuntimeError("no future")
            if "Question 3?" in messages[-1]["content"]
            else ValueError("inside")
        )

    for rude in (awaited, plain):
        results = refiner(max_failures=1, feedback=rude).refine_all(
            PROMPT, QUERIES[2:5], progress=False
        )
        assert [
            "CancelledError" in str(results[0].error),
            "no future" in str(results[1].error),
        ] == [True, True]
        assert "ValueError: inside" in str(results[2].error)
        assert all(result.error.kind == "ServerFailed" and result.answer for result in results)


def test_leaving_early_cancels_what_is_in_flight():
    begun = set()
    ended = {}
    all_ended = threading.Event()

    async def work(number):
        begun.add(number)
        try:
            while number != 1 or len(begun) < 3:
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            ended[number] = "cancelled"
            if len(ended) == 2:
                all_ended.set()
            raise

    running = in_parallel(map(work, range(3)), max_in_flight=3)
    assert next(running) == (1, None)
    running.close()
    assert all_ended.wait(60) and ended == {0: "cancelled", 2: "cancelled"}


def test_a_bug_in_a_refinement_is_raised():
    async def work():
        raise KeyError("bug")

    with pytest.raises(KeyError, match="bug"):
        list(in_parallel([work()], 1))


def test_it_works_where_an_event_loop_is_running_already():
    async def notebook():
        by_method = refiner().refine(PROMPT, "A?")  # synchronous, as in a cell
        awaited = await refiner().arefine(PROMPT, "A?")
        return by_method, awaited, await refine("A?", PROMPT, **models(Log()))

    by_method, awaited, function = map(untimed, asyncio.run(notebook()))
    assert by_method == awaited == function and by_method.stop_reason == "finished"


def test_waiting_for_itself_is_refused():
    async def inside():
        return refiner().refine(PROMPT, "A?")

    with pytest.raises(RuntimeError, match="use `await`"):
        list(in_parallel([inside()], 1))


def test_an_optimizer_that_writes_no_tag_is_warned_about(caplog):
    def critic(messages):
        return "Just be careful."

    def small(messages, max_tokens=9):
        return Reply("a b", finish_reason="length")

    results = ProRefiner(small, critic, critic, max_steps=2).refine_all(
        "Think.", ["A?", "B?"], progress=False
    )
    assert [result.prompt for result in results] == ["Think.", "Think."]
    (record,) = caplog.records
    assert (
        "4 of 4 replies of the optimizer had no new prompt between <IMPROVED_PROMPT> tags"
        in record.message
    )
    assert "4 no tag" in record.message


def test_verdicts_that_cannot_be_read_are_warned_about(caplog):
    def critic(messages):
        return "Just be careful."

    def small(messages, max_tokens=9):
        return Reply("a b", finish_reason="stop")

    refiner = ProRefiner(small, critic, critic, verifier=critic, max_steps=1)
    results = refiner.refine_all("Think.", ["A?", "B?"], progress=False)
    assert [result.verdict for result in results] == ["none", "none"]
    assert any("2 of 2 verdicts on a first answer" in message for message in caplog.messages)
