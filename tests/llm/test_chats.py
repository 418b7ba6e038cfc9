"""`ScriptedChat`, `RoutedChat` and the small helpers around `ChatModel`."""

import asyncio
import os
import pickle
import signal
import threading
import time
from collections import Counter

import pytest

from agentic_prompting.environments import LLMEnvironment
from agentic_prompting.llm import (
    BadReply,
    BudgetExceeded,
    ChatModel,
    LLMError,
    Misconfigured,
    OpenAIChat,
    RateLimited,
    Reply,
    RoutedChat,
    ScriptedChat,
    ServerFailed,
    Unreachable,
    Usage,
    as_chat,
    chats,
    complete,
    run,
    start,
    with_system,
)


def user(text):
    return [{"role": "user", "content": text}]


def test_scripts_of_three_kinds():
    assert (
        complete(ScriptedChat(lambda messages: messages[-1]["content"].upper()), "abc").text
        == "ABC"
    )
    chat = ScriptedChat(["a", Reply(text="b", finish_reason="length"), RateLimited("slow")])
    first, second, third, fourth = (complete(chat, "x") for _ in range(4))
    assert (first.text, second.text, second.finish_reason) == ("a", "b", "length")
    assert isinstance(third.error, RateLimited)
    assert isinstance(fourth.error, RateLimited), "the last one repeats"
    pieces = ScriptedChat({"Kenya": "Nairobi", "Ken": "who?"})
    assert complete(pieces, "Capital of Kenya?").text == "Nairobi"
    assert isinstance(complete(pieces, "Peru?").error, ServerFailed)


def test_it_records_what_it_was_asked():
    chat = ScriptedChat(["ok"])
    complete(chat, user("a"), temperature=0.1)
    complete(chat, user("b"))
    assert chat.calls == [user("a"), user("b")]
    assert chat.sampling == [{"temperature": 0.1}, {}]


def test_it_fails_and_breaks_as_data():
    chat = ScriptedChat(["ok"], fail_on=lambda number: number == 1)
    assert [complete(chat, "x").error is None for _ in range(3)] == [True, False, True]
    error = complete(ScriptedChat(lambda messages: 1 / 0), "x").error
    assert isinstance(error, ServerFailed)
    assert "ZeroDivisionError" in str(error)


def test_latency_does_not_block_submit():
    waiting = [start(ScriptedChat(["ok"], latency=3600)(user(str(i)))) for i in range(20)]
    assert not any(future.done() for future in waiting)
    assert all(future.cancel() for future in waiting)
    reply = complete(ScriptedChat(["ok"], latency=0.1), "x")
    assert reply.text == "ok" and reply.seconds >= 0.1


def test_a_cancelled_call_stays_cancelled():
    chat = ScriptedChat(["ok"], latency=0.1)
    future = start(chat(user("x")))
    assert future.cancel()
    # A later and longer call on the same loop ends after the first one would have.
    complete(ScriptedChat(["ok"], latency=0.2), "x")
    assert future.cancelled()


def test_calls_are_numbered_across_threads():
    chat = ScriptedChat([str(i) for i in range(200)])
    seen = []

    def ask():
        for _ in range(25):
            seen.append(complete(chat, "x").text)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen, key=int) == [str(i) for i in range(200)]


def test_shared_protocol_and_helpers():
    for model in (
        ScriptedChat(["a"]),
        RoutedChat({"a": ScriptedChat(["a"])}, {"a": 1}),
        OpenAIChat("m", "http://h/v1"),
    ):
        assert isinstance(model, ChatModel)
    assert with_system("s", user("q")) == [{"role": "system", "content": "s"}, *user("q")]
    own = [{"role": "system", "content": "mine"}, *user("q")]
    assert with_system("s", own) == own
    assert with_system(None, user("q")) == user("q")
    assert Usage(1, 2, 0.5) + Usage(10, 20, 0.25) == Usage(11, 22, 0.75)
    assert Usage(1, 2).tokens == 3


def test_errors_are_exceptions_that_pickle():
    error = ServerFailed("broken", "m at http://h/v1", attempts=3, status=503)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.status, copy.attempts) == (ServerFailed, str(error), 503, 3)
    assert str(error) == "broken (m at http://h/v1, HTTP 503, 3 attempts)"
    assert error.kind == "ServerFailed"
    assert (error.fatal, Misconfigured("x").fatal, BudgetExceeded("x").fatal) == (False, True, True)
    with pytest.raises(LLMError):
        raise error


# The one awaitable, and whatever can be made one


def gathered(*coroutines):
    async def all_of_them():
        return await asyncio.gather(*coroutines)

    return run(all_of_them())


def test_a_chat_model_is_awaited():
    for model in (ScriptedChat(["a"]), RoutedChat({"a": ScriptedChat(["a"])}, {"a": 1})):
        assert asyncio.run(model(user("q"))).text == "a"
        assert run(model(user("q"))).text == "a"


def test_concurrent_replies_keep_the_order_of_calls():
    chat = ScriptedChat([str(i) for i in range(50)])
    done = []

    async def ask(i):
        reply = await chat(user(str(i)))
        done.append((i, reply.text))

    gathered(*(ask(i) for i in range(50)))
    assert done == [(i, str(i)) for i in range(50)]


@pytest.mark.timeout(120)
def test_waiting_replies_wait_together_and_can_be_cancelled():
    chat = ScriptedChat(["ok"], latency=600)
    futures = [start(chat(user("x"))) for _ in range(30)]
    while len(chat.calls) < 30:  # one after another, the second would be called after 600 s
        time.sleep(0.01)
    run(asyncio.sleep(0))  # the loop is free meanwhile
    assert not any(future.done() for future in futures)
    assert all(future.cancel() for future in futures)


def test_replies_come_after_their_latency():
    chat = ScriptedChat(["ok"], latency=0.05)
    replies = gathered(*(chat(user("x")) for _ in range(30)))
    assert {reply.text for reply in replies} == {"ok"}
    assert min(reply.seconds for reply in replies) >= 0.05


class Plain:
    model = "plain-model"

    def __call__(self, messages, temperature=1.0):
        return f"{messages[-1]['content']} at {temperature}"


class Awaited:
    async def __call__(self, messages, **keywords):
        await asyncio.sleep(0)
        return Reply(text=str(sorted(keywords)))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda messages: messages[-1]["content"].upper(), "Q"),
        (Plain(), "q at 0.5"),
        (Awaited(), "['repeat', 'session', 'temperature']"),
        (
            lambda messages, **keywords: Awaited()(messages, **keywords),
            "['repeat', 'session', 'temperature']",
        ),
        (lambda messages, repeat: Reply(text=f"sample {repeat}"), "sample 3"),
        (lambda conversation: conversation[-1]["content"].upper(), "Q"),
        (lambda turns, /, repeat, temperature=1.0: f"{repeat} at {temperature}", "3 at 0.5"),
        (ScriptedChat(["s"]), "s"),
    ],
    ids=[
        "function",
        "object",
        "async object",
        "function of an async one",
        "keyword",
        "any name",
        "positional",
        "own",
    ],
)
def test_functions_and_objects_are_chat_models(model, text):
    chat = as_chat(model)
    assert isinstance(chat, ChatModel) and as_chat(chat) is chat
    assert run(chat(user("q"), repeat=3, session="s", temperature=0.5)).text == text
    assert complete(model, "q", repeat=3, session="s", temperature=0.5).text == text
    routed = RoutedChat({"a": model}, {"a": 1})
    assert complete(routed, "q", repeat=3, session="s", temperature=0.5).text == text


def broken(messages):
    raise ValueError("no such thing")


async def broken_later(messages):
    raise RateLimited("slow")


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (broken, ServerFailed),
        (broken_later, RateLimited),
        (lambda messages: 3, BadReply),
        (lambda messages: "", BadReply),
    ],
)
def test_error_of_a_function_is_a_failed_call(model, kind):
    reply = complete(model, "q")
    assert isinstance(reply.error, kind) and reply.text == ""
    if kind is not RateLimited:  # its own words
        assert model.__name__ in str(reply.error), "the error names the function"


def test_functions_empty_reply_is_a_failure():
    """As from a server; the agent read an empty answer and learned from it. What it cost stays."""
    reply = complete(lambda messages: Reply("\n", usage=Usage(3, 0, 0.5)), "q")
    assert isinstance(reply.error, BadReply)
    assert reply.text == ""
    assert reply.usage == Usage(3, 0, 0.5)


def test_functions_parameter_may_have_any_name():
    for model in (
        lambda conversation: "x",
        lambda m, temperature=1.0: "x",
        lambda x, repeat, session: "x",
    ):
        assert isinstance(model, ChatModel)
    for other in (lambda query, answer: True, lambda: "x", lambda *given: "x", print, 3):
        assert not isinstance(other, ChatModel)


def test_function_without_a_parameter_is_refused():
    def forgot():
        return "ok"

    with pytest.raises(TypeError, match="forgot.*messages"):
        as_chat(forgot)
    with pytest.raises(TypeError, match="forgot takes no messages"):
        LLMEnvironment(forgot)


def test_plain_functions_wait_side_by_side():
    together = threading.Barrier(20)

    def waits(messages):
        together.wait(30)
        return "ok"

    assert [reply.text for reply in gathered(*(as_chat(waits)(user("q")) for _ in range(20)))] == [
        "ok"
    ] * 20


def test_an_adapted_model_is_still_itself():
    chat = as_chat(Plain())
    assert chat.model == "plain-model" and not hasattr(chat, "check")
    assert pickle.loads(pickle.dumps(chat)).model == "plain-model"
    with pytest.raises(TypeError, match="not a chat model"):
        as_chat("gpt-4o")


def test_plain_function_may_call_another_model():
    inner = ScriptedChat(["deep"], latency=0.01)
    assert complete(lambda messages: complete(inner, messages).text, "q").text == "deep"


# Synchronous front doors


def test_they_work_inside_a_running_loop():
    """A notebook's."""

    async def cell():
        return complete(ScriptedChat(["ok"], latency=0.01), "q").text

    assert asyncio.run(cell()) == "ok"


def test_waiting_on_the_background_thread_is_refused():
    async def waits_for_itself():
        return complete(ScriptedChat(["ok"]), "q")

    with pytest.raises(RuntimeError, match="use `await` there"):
        run(waits_for_itself())


def test_what_a_coroutine_raises_is_raised():
    async def fails():
        raise KeyError("x")

    with pytest.raises(KeyError):
        run(fails())


def test_ctrl_c_cancels_what_is_waited_for():
    ended = threading.Event()
    running = threading.Event()

    async def waits():
        running.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    def interrupt():
        running.wait(10)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run(waits())
    assert ended.wait(10)


def test_function_chat_limits_concurrent_calls():
    from agentic_prompting import FunctionChat

    lock = threading.Lock()
    now = [0]
    most = [0]

    def slow(messages):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        return messages[-1]["content"].upper()

    chat = FunctionChat(slow, max_concurrency=2)
    waiting = [start(chat(user(f"q{i}"))) for i in range(12)]
    assert [one.result(30).text for one in waiting] == [f"Q{i}" for i in range(12)] and most[0] == 2
    assert complete(FunctionChat(lambda messages: 1 / 0), "x").error.kind == "ServerFailed"

    async def at_once(messages, temperature=None):
        return f"{temperature}"

    assert complete(FunctionChat(at_once, max_concurrency=1), "x", temperature=0.5).text == "0.5"
    with pytest.raises(ValueError, match="max_concurrency must be at least 1"):
        FunctionChat(slow, max_concurrency=0)
    with pytest.raises(TypeError, match="not a function"):
        FunctionChat("gpt-4o-mini")


# --- which model answers, and that it stays ---


def models(*names):
    return {name: ScriptedChat(lambda messages, name=name: name) for name in names}


def longest_to_b(question, names):
    return "b" if len(question) > 5 else "a"


def test_the_rule_sees_the_question_and_the_names():
    seen = []
    chat = RoutedChat(
        models("a", "b"), lambda question, names: seen.append((question, names)) or "b"
    )
    reply = complete(chat, [{"role": "system", "content": "s"}, *user("q"), *user("later")])
    assert reply.text == "b"
    assert seen == [("q", ["a", "b"])]


def test_a_session_keeps_its_model():
    chat = RoutedChat(models("a", "b"), longest_to_b)
    texts = [
        complete(chat, user(text), session="s").text for text in ("short", "a long question", "x")
    ]
    assert texts == ["a", "a", "a"]
    assert complete(chat, user("a long question"), session="t").text == "b"
    assert complete(chat, user("a long question")).text == "b"
    assert complete(chat, user("short")).text == "a"


def test_everything_is_passed_on():
    inner = ScriptedChat(["ok"])
    complete(RoutedChat({"a": inner}, {"a": 1.0}), user("q"), session="s", temperature=0.3)
    assert inner.calls == [user("q")]
    assert inner.sampling == [{"temperature": 0.3}]


def test_weighted_draws_depend_on_seed_and_session_alone():
    weights = {"a": 3.0, "b": 1.0, "c": 0.0}
    sessions = [f"episode-{i}" for i in range(400)]

    def draws(seed, order):
        chat = RoutedChat(models("a", "b", "c"), weights, seed=seed)
        return {session: chat.choose(user("q"), session) for session in order}

    assert draws(0, sessions) == draws(0, reversed(sessions))
    assert draws(0, sessions) != draws(1, sessions)
    counts = Counter(draws(0, sessions).values())
    assert counts["c"] == 0
    assert 270 < counts["a"] < 330
    chat = RoutedChat(models("a", "b", "c"), weights)
    assert len({chat.choose(user(f"question {i}")) for i in range(50)}) == 2, (
        "without sessions, by question"
    )
    assert len({chat.choose(user("the same")) for _ in range(20)}) == 1


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(chats, "_MAX_SESSIONS", 3)
    chat = RoutedChat(models("a", "b"), longest_to_b)
    for session in "wxyz":
        chat.choose(user("short"), session)
        chat.choose(user("short"), "x")
    assert list(chat._model_names) == ["y", "z", "x"]
    assert chat.choose(user("a long question"), "x") == "a", "used last, so kept"
    assert chat.choose(user("a long question"), "w") == "b", "forgotten"


@pytest.mark.parametrize(
    "rule",
    [lambda question, names: "gpt", lambda question, names: 1 / 0, lambda question, names: []],
)
def test_a_bad_rule_is_a_failed_call(rule):
    reply = complete(RoutedChat(models("a", "b"), rule), user("q"), session="s")
    assert isinstance(reply.error, Misconfigured)
    assert "routing rule" in str(reply.error)


def test_unknown_names_say_which_exist():
    reply = complete(RoutedChat(models("a", "b"), lambda question, names: "gpt"), user("q"))
    assert "'gpt'" in str(reply.error)
    assert "['a', 'b']" in str(reply.error)
    with pytest.raises(ValueError, match=r"\['gpt'\].*\['a', 'b'\]"):
        RoutedChat(models("a", "b"), {"gpt": 1.0})


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": -1.0, "b": 2.0}])
def test_bad_weights(weights):
    with pytest.raises(ValueError, match="weights"):
        RoutedChat(models("a", "b"), weights)


def test_check_checks_every_model_that_can_be_checked():
    class Checked(ScriptedChat):
        def __init__(self, error=None):
            super().__init__(["ok"])
            self.error = error
            self.checks = 0

        def check(self):
            self.checks += 1
            if self.error:
                raise self.error

    good = Checked()
    bad = Checked(Unreachable("gone"))
    RoutedChat({"a": good, "b": ScriptedChat(["ok"])}, {"a": 1.0}).check()
    assert good.checks == 1
    with pytest.raises(Unreachable):
        RoutedChat({"a": good, "b": bad}, {"a": 1.0}).check()


def test_pickle_keeps_the_choices_of_weighted_rules():
    chat = RoutedChat({"a": None, "b": None}, {"a": 1.0, "b": 1.0}, seed=3)
    twin = pickle.loads(pickle.dumps(chat))
    assert [twin.choose(user("q"), str(i)) for i in range(50)] == [
        chat.choose(user("q"), str(i)) for i in range(50)
    ]
