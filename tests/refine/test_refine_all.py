"""Many queries at once: speed, order, results files, resuming; and the refiner as a chat model."""

import asyncio
import json
import threading
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from agentic_prompting.llm import (
    BadRequest,
    BudgetExceeded,
    ChatModel,
    Closed,
    OpenAIChat,
    ReplayCache,
    Reply,
    ScriptedChat,
    ServerFailed,
    Usage,
    complete,
)
from agentic_prompting.llm.loop import in_parallel
from agentic_prompting.refine import (
    LabelVerifier,
    ProRefiner,
    RefinedChat,
    RefinementResult,
    RefinementStep,
    describe,
    refine,
    summarize,
)
from agentic_prompting.refine.results_file import ResultsFile
from agentic_prompting.refine.types import Failure, RoleUsage
from agentic_prompting.rewards import exact_match
from support.all_at_once import AllAtOnce
from support.refine_models import PROMPT, Log, RuleModel, answer, critic, improve, models, words
from support.servers import Answer, LoopbackServer

QUERIES = [f"Question {i}?" for i in range(20)]


def untimed(result):
    return replace(
        result, seconds=0.0, steps=tuple(replace(step, seconds=0.0) for step in result.steps)
    )


def refiner(log=None, **options):
    return ProRefiner(**{**models(log if log is not None else Log()), "max_steps": 4, **options})


# Concurrency ---------------------------------------------------------------------------------------------------------


def test_64_queries_wait_together():
    """Critic and optimizer answer when all 64 have asked: one query after another would wait for ever."""
    task = ScriptedChat(lambda said: Reply(text="on and on", finish_reason="length"))

    def say(messages):
        system, user = messages[0]["content"], messages[-1]["content"]
        return improve(system, user) if user.startswith("Prompt:") else "Wrong."

    large, threads = AllAtOnce(ScriptedChat(say), 64), threading.active_count()
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
    waiting, most = [], []

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
    begun, ended, all_ended = set(), {}, threading.Event()

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


# Results files -------------------------------------------------------------------------------------------------------


def test_results_are_written_as_they_finish(tmp_path):
    path = tmp_path / "deep" / "results.jsonl"
    results = refiner().refine_all(PROMPT, QUERIES, output=path, progress=False)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 20 and {line["id"] for line in lines} == {str(i) for i in range(20)}
    read = [
        RefinementResult.from_dict({k: v for k, v in line.items() if k not in ("key", "settings")})
        for line in lines
    ]
    assert sorted(read, key=lambda result: int(result.id)) == results


def test_a_killed_run_goes_on_where_it_was(tmp_path, caplog):
    path = tmp_path / "results.jsonl"
    whole = refiner().refine_all(PROMPT, QUERIES, output=path, progress=False)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        b"".join(lines[:7]) + lines[7][: len(lines[7]) // 2]
    )  # killed in the middle of a line
    log = Log()
    resumed = refiner(log).refine_all(PROMPT, QUERIES, output=path, progress=False)
    assert {said[-1]["content"] for role, said, _ in log.calls if role == "task"} == set(
        QUERIES[7:]
    )
    assert [untimed(result) for result in resumed] == [untimed(result) for result in whole]
    assert "cut off while being written" in caplog.text
    log = Log()
    assert refiner(log).refine_all(PROMPT, QUERIES, output=path, progress=False) == resumed
    assert log.calls == [] and len(path.read_bytes().splitlines()) == 20


def test_more_queries_equal_ones_and_another_order(tmp_path):
    path = tmp_path / "results.jsonl"
    refiner().refine_all(PROMPT, ["A?", "B?"], output=path, progress=False)
    log = Log()
    results = refiner(log).refine_all(PROMPT, ["B?", "A?", "A?", "C?"], output=path, progress=False)
    assert [result.query for result in results] == ["B?", "A?", "A?", "C?"]
    assert [result.id for result in results] == ["0", "1", "2", "3"]
    assert {said[-1]["content"] for role, said, _ in log.calls if role == "task"} == {"A?", "C?"}
    assert len(path.read_bytes().splitlines()) == 4


def test_queries_that_failed_are_done_again(tmp_path):
    path = tmp_path / "results.jsonl"
    log = Log(fail_at=set(range(0, 3)))  # the first query's task model, three times
    first = refiner(log).refine_all(
        PROMPT, ["A?", "B?"], max_in_flight=1, output=path, progress=False
    )
    assert [result.stop_reason for result in first] == ["failed", "finished"]
    log = Log()
    again = refiner(log).refine_all(PROMPT, ["A?", "B?"], output=path, progress=False)
    assert {said[-1]["content"] for role, said, _ in log.calls if role == "task"} == {"A?"}
    assert again[0].error is None and len(path.read_bytes().splitlines()) == 2


def test_a_fatal_failure_stops_the_run_and_loses_nothing(tmp_path, caplog):
    path = tmp_path / "results.jsonl"
    clean = Log()
    refiner(clean).refine_all(PROMPT, QUERIES[:3], progress=False)
    log = Log(fail_at=set(range(len(clean.calls), 999)), error=BudgetExceeded("$5 are spent"))
    results = refiner(log).refine_all(PROMPT, QUERIES, max_in_flight=1, output=path, progress=False)
    assert [result.error is None for result in results] == [True] * 3 + [False] * 17
    assert all(result.error.kind == "BudgetExceeded" for result in results[3:])
    assert len(log.calls) == len(clean.calls) + 1  # the fourth query's first call, and no other
    assert "stopped after 4 of 20 queries" in caplog.text
    assert len(path.read_bytes().splitlines()) == 4
    log = Log()
    assert all(
        r.error is None
        for r in refiner(log).refine_all(PROMPT, QUERIES, output=path, progress=False)
    )
    assert len({said[-1]["content"] for role, said, _ in log.calls if role == "task"}) == 17


def test_a_file_of_something_else_is_not_touched(tmp_path):
    path = tmp_path / "results.jsonl"
    refiner().refine_all(PROMPT, ["A?"], output=path, progress=False)
    before = path.read_bytes()
    for other in (refiner(tokens_per_step=5), refiner(verifier=lambda query, output: True)):
        with pytest.raises(ValueError, match="holds results of other settings or models"):
            other.refine_all(PROMPT, ["A?"], output=path, progress=False)
    assert path.read_bytes() == before
    path.write_text('{"question": "mine"}\n')
    with pytest.raises(ValueError, match="line 1 of .* is no refinement result"):
        refiner().refine_all(PROMPT, ["A?"], output=path, progress=False)
    assert path.read_text() == '{"question": "mine"}\n'


def test_paid_replies_are_not_paid_twice(tmp_path):
    def said(body, number):
        system, user = body["messages"][0]["content"], body["messages"][-1]["content"]
        if user.startswith("Prompt:"):
            return Answer(improve(system, user))
        if user.startswith("Question:"):
            return Answer("Be careful.")
        full = answer(25)(system, user).split()
        limit = body["max_tokens"]
        return Answer(
            " ".join(full[:limit]), finish_reason="length" if len(full) > limit else "stop"
        )

    with LoopbackServer(said) as server:
        cache = ReplayCache(tmp_path / "replies.sqlite")
        runs = []
        for _ in range(2):
            with OpenAIChat("small", server.base_url, "none", cache=cache) as chat:
                results = ProRefiner(chat, chat, chat).refine_all(
                    PROMPT, QUERIES[:5], progress=False
                )
                runs.append((results, chat.stats))
        asked = len(server.requests)
    (first, paid), (second, unpaid) = runs
    # Queries whose critic says the same share the optimizer's greedy reply already in the first run.
    assert paid.calls - paid.cached == asked == len(cache) and paid.cached == 4 * 3
    assert unpaid.cached == unpaid.calls == paid.calls and unpaid.usage.tokens == 0
    assert [(r.answer, r.prompt, len(r.steps)) for r in first] == [
        (r.answer, r.prompt, len(r.steps)) for r in second
    ]
    assert first[0].prompt == PROMPT + "+++" and second[0].usage["task"].cached == 4


texts = st.text(max_size=20) | st.sampled_from(["\u2028", "\ud800", "a\nb", "\x00"])
failures = st.builds(
    Failure, st.sampled_from(["task", "verifier"]), st.integers(-1, 9), texts, texts, st.booleans()
)
steps = st.builds(
    RefinementStep,
    texts,
    texts,
    st.none() | texts,
    st.booleans(),
    st.none() | texts,
    st.none() | texts,
)
results_of_any_kind = st.builds(
    RefinementResult,
    *[texts] * 5,
    st.sampled_from(["verified", "failed"]),
    steps=st.lists(steps, max_size=3).map(tuple),
    error=st.none() | failures,
    failures=st.lists(failures, max_size=2).map(tuple),
    usage=st.dictionaries(st.sampled_from(["task"]), st.builds(RoleUsage, st.integers(0, 9))),
    seconds=st.floats(0, 9),
)


@given(results_of_any_kind)
def test_results_survive_json(tmp_path_factory, result):
    path = tmp_path_factory.mktemp("results") / "r.jsonl"
    for _ in range(2):
        ResultsFile(path, "s").add("k", result)
    assert ResultsFile(path, "s").results == ({} if result.error else {"k": result})
    assert RefinementResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_results_of_a_later_version_are_refused():
    with pytest.raises(ValueError, match="upgrade agentic-prompting"):
        RefinementResult.from_dict({**refiner().refine(PROMPT, "A?").to_dict(), "format": 99})
    with pytest.raises(ValueError, match="not a refinement result: KeyError"):
        RefinementResult.from_dict({"format": 1})


def test_a_summary_counts_and_means():
    log = Log(fail_at={3})
    results = refiner(log).refine_all(PROMPT, QUERIES[:2], max_in_flight=1, progress=False)
    summary = summarize(results)
    assert summary["queries"] == 2 and summary["steps"] == 4 and summary["task/failed"] == 1
    assert summary["stop/finished"] == 2 and "stop/failed" not in summary
    assert summary["feedback/calls"] == sum(result.usage["feedback"].calls for result in results)


def test_a_description_shows_every_step():
    text = describe(refiner().refine(PROMPT, "A?"), width=40)
    assert "Step 4" in text and f"- {PROMPT}" in text and f"+ {PROMPT}+" in text
    assert "Ended: finished, 4 steps, prompt changed 4 times" in text and "(cut off)" in text


# As a chat model -----------------------------------------------------------------------------------------------------


def conversation(*texts, system=None):
    roles = ["user", "assistant"] * len(texts)
    said = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return ([{"role": "system", "content": system}] if system else []) + said


def test_a_refiner_as_a_chat_model():
    log = Log()
    chat = RefinedChat(refiner(log), prompt="By default.")
    assert isinstance(chat, ChatModel)
    reply = complete(chat, conversation("How many?", system=PROMPT))
    assert reply.text == words(35, "v4w") and reply.finish_reason == "stop" and reply.error is None
    assert reply.usage.prompt_tokens == 7 * len(log.calls) and not reply.cached
    assert log.calls[0][1] == conversation("How many?", system=PROMPT)
    complete(chat, "How many?")
    assert log.calls[13][1] == conversation("How many?", system="By default.")


def test_earlier_turns_reach_the_task_model_and_the_critic():
    log = Log()
    complete(
        RefinedChat(refiner(log)),
        conversation("Capital of Kenya?", "Nairobi.", "Its currency?", system=PROMPT),
    )
    assert log.calls[0][1] == conversation(
        "Capital of Kenya?", "Nairobi.", "Its currency?", system=PROMPT
    )
    shown = log.calls[1][1][-1]["content"]
    assert "User: Capital of Kenya?\n\nAssistant: Nairobi.\n\nUser: Its currency?" in shown


def test_sampling_of_the_caller_goes_to_the_task_model():
    log = Log()
    complete(RefinedChat(refiner(log)), "How many?", max_tokens=12, temperature=0.5, repeat=3)
    limits = [sent["max_tokens"] for role, _, sent in log.calls if role == "task"]
    assert limits == [10, 20, 30, 40, 12]
    assert {sent["temperature"] for role, _, sent in log.calls if role == "task"} == {0.5}
    assert {sent["temperature"] for role, _, sent in log.calls if role != "task"} == {0}


@pytest.mark.parametrize(
    "said", [[], conversation(" "), conversation("a", "b"), [{"role": "user"}], [{"content": 3}]]
)
def test_what_is_no_question_is_an_error_in_the_reply(said):
    reply = complete(RefinedChat(refiner()), said)
    assert isinstance(reply.error, BadRequest) and "not a conversation to refine" in str(
        reply.error
    )
    assert isinstance(complete(RefinedChat(refiner()), "x", max_tokens=0).error, BadRequest)


def test_failures_come_through_as_errors():
    down = refiner(Log(fail_at=set(range(99)), error=Closed("the client was closed")))
    reply = complete(RefinedChat(down), "How many?")
    assert (
        isinstance(reply.error, Closed)
        and "task model in step 3" in str(reply.error)
        and reply.text == ""
    )
    partly = complete(RefinedChat(refiner(Log(fail_at={1, 3, 5}))), "How many?")
    assert partly.error is None and partly.text == words(
        35, "v0w"
    )  # the critic is down; the answer is there
    empty = refiner()
    empty.task.rule = lambda system, user: ""
    assert "empty" in str(complete(RefinedChat(empty), "How many?").error)


def test_it_waits_for_nothing_and_can_be_cancelled():
    async def main():
        asked, cancelled = asyncio.Event(), []

        async def never(messages, **options):
            asked.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(messages)
                raise

        asking = asyncio.create_task(
            RefinedChat(refiner(log, feedback=never))(conversation("How many?"))
        )
        await asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        return cancelled

    log = Log()
    assert len(asyncio.run(main())) == 1 and log.roles == ["task"]


def test_what_cannot_be_a_chat_model():
    with pytest.raises(ValueError, match="which a conversation does not have"):
        RefinedChat(refiner(verifier=LabelVerifier(exact_match)))
    with pytest.raises(ValueError, match="the prompt is empty"):
        RefinedChat(refiner(), prompt="")


def test_checks_ask_each_model_once():
    checked = []

    class Checked(RuleModel):
        def check(self):
            checked.append(self.role)
            raise ServerFailed("down")

    large = Checked("critic", Log(), critic)
    checking = refiner(feedback=large, optimizer=large)
    with pytest.raises(ServerFailed):
        RefinedChat(checking).check()
    assert checked == ["critic"]


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


def test_a_refined_reply_is_worth_its_recorded_calls():
    """A resumed run finds them recorded: with a `CostReward` its rollouts got other rewards than before."""
    paid, saved = Usage(1, 1, 0.25), {"cached": True, "saved": Usage(1, 1, 0.25)}
    first, again = (
        complete(
            RefinedChat(ProRefiner(*[lambda messages, made=made: Reply("Fine.", **made)] * 3)), "q"
        )
        for made in ({"usage": paid}, saved)
    )
    assert (first.usage.cost_usd, again.usage.cost_usd) == (0.75, 0.0), "task, critic and optimizer"
    assert first.worth.cost_usd == again.worth.cost_usd == 0.75
