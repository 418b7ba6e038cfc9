"""`ScriptedChat` and the small helpers around `ChatModel`."""

import pickle
import threading
import time

import pytest

from agentic_prompting.llm import (
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
    Usage,
    complete,
    with_system,
)


def user(text):
    return [{"role": "user", "content": text}]


def test_scripts_of_three_kinds():
    assert complete(ScriptedChat(lambda messages: messages[-1]["content"].upper()), "abc").text == "ABC"
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
    waiting = [ScriptedChat(["ok"], latency=3600).submit(user(str(i))) for i in range(20)]
    assert not any(future.done() for future in waiting) and all(future.cancel() for future in waiting)
    reply = complete(ScriptedChat(["ok"], latency=0.1), "x")
    assert reply.text == "ok" and reply.seconds >= 0.1


def test_a_cancelled_call_stays_cancelled():
    chat = ScriptedChat(["ok"], latency=0.1)
    future = chat.submit(user("x"))
    assert future.cancel()
    time.sleep(0.2)
    assert future.cancelled()


def test_calls_are_numbered_across_threads():
    chat = ScriptedChat([str(i) for i in range(200)])
    seen = []
    ask = lambda: seen.extend(complete(chat, "x").text for _ in range(25))  # noqa: E731
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
