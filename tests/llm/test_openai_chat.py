"""`OpenAIChat` against a real HTTP server on the loopback interface that misbehaves on purpose."""

import asyncio
import copy
import email.utils
import gc
import gzip
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from types import SimpleNamespace

import pytest

from agentic_prompting.llm import (
    BadReply,
    BadRequest,
    BudgetExceeded,
    Closed,
    LLMError,
    Misconfigured,
    OpenAIChat,
    RateLimited,
    Refused,
    ReplayCache,
    ServerFailed,
    TimedOut,
    Unreachable,
    complete,
    run,
    start,
)
from agentic_prompting.llm.addresses import redact_url
from agentic_prompting.llm.budget import find_price
from agentic_prompting.llm.masking import escape_controls, sanitize_message
from support.servers import Answer, LoopbackServer, completion, unused_url

KEY = "sk-test-0123456789abcdefSECRET"


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.delenv(name, raising=False)
    # Without Retry-After a retry waits 0.5 s and more; these tests look at what is done, not how
    # slowly.
    monkeypatch.setattr("agentic_prompting.llm.openai_http._FIRST_WAIT", 0.01)


@pytest.fixture
def serve():
    """`serve(script, **settings)`: a started server and a client for it; both end with the test."""
    opened = []

    def start(script=lambda request, n: "ok", **settings):
        server = LoopbackServer(script).__enter__()
        chat = OpenAIChat("m", server.base_url, **settings)
        opened.extend([chat.close, lambda: server.__exit__(None)])
        return server, chat

    yield start
    for close in opened:
        close()


def user(text):
    return [{"role": "user", "content": text}]


def always(answer):
    return lambda request, n: answer


def in_turn(*answers):
    return lambda request, n: answers[min(n, len(answers) - 1)]


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def run_python(code, *args, **kwargs):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run(
        [sys.executable, "-W", "default", "-c", code, *args],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        **kwargs,
    )


def with_error(body, code):
    """A completion whose choice reports an error, as routers do when the server behind them fails."""
    body["choices"][0]["error"] = {"code": code, "message": "provider disconnected"}
    return body


FLAGGED = {
    "error": {
        "code": 403,
        "message": "Your chosen model requires moderation and your input was flagged",
        "metadata": {"reasons": ["violence"], "flagged_input": "how did ... die"},
    }
}

# What is sent, what comes back


def test_a_reply_with_usage_and_cost(serve):
    server, chat = serve(always(Answer("Nairobi", usage=(1000, 100))), price=(1.0, 10.0))
    reply = complete(chat, "Capital of Kenya?")
    assert (reply.text, reply.error, reply.finish_reason, reply.attempts) == (
        "Nairobi",
        None,
        "stop",
        1,
    )
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (1000, 100)
    assert reply.usage.cost_usd == pytest.approx(0.002)
    assert chat.usage == reply.usage
    assert server.requests == [{"model": "m", "messages": user("Capital of Kenya?")}]


def test_sampling_and_system_prompt_are_sent(serve):
    server, chat = serve(system_prompt="Be brief.", temperature=0.7, max_tokens=5)
    complete(chat, "a", temperature=0.1, top_k=3, extra_body={"min_p": 0.2})
    complete(chat, [{"role": "system", "content": "Mine."}, *user("b")])
    first, second = server.requests
    assert first["messages"] == [{"role": "system", "content": "Be brief."}, *user("a")]
    assert second["messages"] == [{"role": "system", "content": "Mine."}, *user("b")]
    sent = {name: value for name, value in first.items() if name not in ("model", "messages")}
    assert sent == {"temperature": 0.1, "max_tokens": 5, "top_k": 3, "min_p": 0.2}
    assert second["temperature"] == 0.7


def test_unicode_survives_and_half_surrogate_pairs_do_not(serve):
    text = 'naïve 東京 🗼 \u202e \x00 "\\'
    server, chat = serve(lambda request, n: request["messages"][0]["content"])
    assert complete(chat, text).text == text
    assert server.requests[0]["messages"] == user(text)
    cut = json.dumps(completion("cut \ud83d")).encode()
    _, chat = serve(always(Answer(body=cut)))
    assert complete(chat, "x").text == "cut \ufffd"


def test_conversation_is_copied_at_the_call(serve):
    server, chat = serve(always(Answer(delay=0.1)), max_concurrency=1)
    conversation = user("first")

    async def two():
        calls = [asyncio.ensure_future(chat(conversation)) for _ in range(2)]
        await asyncio.sleep(0)
        conversation[0]["content"] = "changed"
        conversation.append({"role": "user", "content": "more"})
        await asyncio.gather(*calls)

    run(two())
    assert [request["messages"] for request in server.requests] == [user("first")] * 2


def test_reply_cut_by_max_tokens_is_a_reply(serve):
    _, chat = serve(always(Answer("half a sen", finish_reason="length")))
    reply = complete(chat, "x")
    assert (reply.text, reply.finish_reason, reply.error) == ("half a sen", "length", None)


def test_what_cannot_be_sent_is_a_failed_call(serve):
    _, chat = serve()
    for messages, sampling in [
        ("abc", {}),
        ([1], {}),
        (user("\ud800"), {}),
        (user("x"), {"bias": {1, 2}}),
    ]:
        reply = start(chat(messages, **sampling)).result(5)
        assert isinstance(reply.error, BadRequest), (messages, reply)
    assert complete(chat, "x").text == "ok"


# What goes wrong at the other end


def test_429_is_retried_after_retry_after(serve):
    busy = Answer("slow down", status=429, headers={"retry-after": "0.4"})
    _server, chat = serve(in_turn(busy, "ok"))
    reply = complete(chat, "x")
    assert (reply.text, reply.attempts) == ("ok", 2)
    assert reply.seconds >= 0.4
    assert chat.stats.retries == 1


@pytest.mark.parametrize("unreadable", ["soon", "", "NaN", "-5", "inf"])
def test_retry_after_behind_unreadable_milliseconds(serve, unreadable):
    busy = Answer("busy", status=503, headers={"retry-after-ms": unreadable, "retry-after": "0.4"})
    _, chat = serve(in_turn(busy, "ok"))
    reply = complete(chat, "x")
    assert (reply.text, reply.attempts) == ("ok", 2)
    assert reply.seconds >= 0.4


@pytest.mark.parametrize(
    ("answer", "kind", "status", "part"),
    [
        (Answer("slow", status=429), RateLimited, 429, "slow"),
        (Answer("broken", status=500), ServerFailed, 500, "broken"),
        (Answer(status=503, body=b"<html>bad gateway</html>"), ServerFailed, 503, "bad gateway"),
        (Answer(drop="before"), Unreachable, None, "server running"),
        (Answer(drop="mid"), Unreachable, None, "server running"),
        (Answer(body=b'{"choices": [{"mess'), BadReply, None, "not JSON"),
        (Answer(body=b"<html>", headers={"content-type": "text/html"}), BadReply, None, "<html>"),
        (Answer(body=b"\xff\xfe"), BadReply, None, "not JSON"),
        (Answer(body=b""), BadReply, None, "not JSON"),
        (Answer(body=b"[]"), BadReply, None, "not a chat completion"),
        (Answer(body={"choices": []}), BadReply, None, "no choices"),
        (Answer(body={"choices": [{"message": "hm"}]}), BadReply, None, "no choices"),
        (Answer(body=completion(None)), BadReply, None, "no text"),
        (Answer(body=completion("")), BadReply, None, "no text"),
        (Answer(body=completion(" \n")), BadReply, None, "no text"),
        (
            Answer(body={"error": {"message": "upstream", "code": 502}}),
            ServerFailed,
            502,
            "upstream",
        ),
        (
            Answer(body={"error": {"message": "upstream", "code": "429"}}),
            RateLimited,
            429,
            "upstream",
        ),
        (Answer(body={"error": {"message": "upstream"}}), BadReply, None, "upstream"),
        (
            Answer(body={"object": "error", "message": "engine", "code": 500}),
            ServerFailed,
            500,
            "engine",
        ),
        (Answer("half a sen", finish_reason="error"), BadReply, None, "broke off"),
        (Answer("half a sen", finish_reason="abort"), BadReply, None, "broke off"),
        (
            Answer(body=with_error(completion("half a sen"), code=502)),
            ServerFailed,
            502,
            "disconnected",
        ),
        (
            Answer(body=with_error(completion("half a sen"), code=401)),
            BadReply,
            None,
            "disconnected",
        ),
        (Answer("{}", headers={"content-encoding": "gzip"}), BadReply, None, "decoded"),
    ],
)
def test_failures_that_may_pass_are_retried_then_reported(serve, answer, kind, status, part):
    server, chat = serve(always(answer), max_retries=2)
    reply = complete(chat, "x")
    assert type(reply.error) is kind, reply
    assert reply.text == ""
    assert reply.error.status == status
    assert part in str(reply.error)
    assert reply.attempts == reply.error.attempts == len(server.requests) == 3
    assert "m at http://127.0.0.1" in str(reply.error)
    assert not reply.error.fatal
    assert chat.stats.failed == 1


@pytest.mark.parametrize(
    "bad",
    [Answer(drop="mid"), Answer(body=b"{"), Answer(body=completion(None)), Answer(status=500)],
)
def test_a_failure_that_passes_leaves_a_good_reply(serve, bad):
    _server, chat = serve(in_turn(bad, "ok"))
    reply = complete(chat, "x")
    assert (reply.text, reply.error, reply.attempts) == ("ok", None, 2)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "Nai"}, {"type": "text", "text": "robi"}], "Nairobi"),
        ([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "yes"}], "yes"),
        ([{"type": "output_text", "text": "yes"}], "yes"),
    ],
)
def test_a_reply_in_parts_is_a_reply(serve, content, text):
    """Refused, it would be paid for again at every attempt."""
    server, chat = serve(always(Answer(body=completion(content))))
    reply = complete(chat, "x")
    assert (reply.text, reply.error, len(server.requests)) == (text, None, 1)


@pytest.mark.parametrize(
    "content", [[], [{"type": "image_url", "image_url": "x"}], [1, None], [{"text": 3}], {"a": 1}]
)
def test_parts_without_text_are_no_reply(serve, content):
    _, chat = serve(always(Answer(body=completion(content))), max_retries=0)
    assert isinstance(complete(chat, "x").error, BadReply)


def test_attempts_that_gave_no_text_are_paid_for(serve):
    _, chat = serve(
        in_turn(Answer(body=completion(None, usage=(100, 10))), Answer("ok", usage=(100, 20)))
    )
    assert complete(chat, "x").usage.tokens == chat.usage.tokens == 230


@pytest.mark.parametrize(
    ("answer", "kind", "part"),
    [
        (
            Answer(f"Incorrect API key provided: {KEY}", status=401),
            Misconfigured,
            "OPENAI_API_KEY",
        ),
        (Answer("not your model", status=403), Misconfigured, "not your model"),
        (Answer("no such model", status=404), Misconfigured, "unknown model 'm'"),
        (Answer("too long", status=400), BadRequest, "too long"),
        (Answer("too large", status=413), BadRequest, "too large"),
        (Answer(status=422, body={"detail": "bad field"}), BadRequest, "bad field"),
        (
            Answer(status=429, body={"error": {"message": "quota", "code": "insufficient_quota"}}),
            Misconfigured,
            "out of credit",
        ),
        (Answer(status=403, body=FLAGGED), Refused, "input was flagged"),
        (
            Answer(status=400, body={"error": {"message": "no", "code": "content_filter"}}),
            Refused,
            "flagged",
        ),
        (
            Answer(status=403, body={"error": {"message": "Your account was flagged"}}),
            Misconfigured,
            "account",
        ),
        (
            Answer(body={"error": {"message": "bad key", "code": 401}}),
            Misconfigured,
            "OPENAI_API_KEY",
        ),
        (
            Answer(body={"error": {"message": "pay", "code": "insufficient_quota"}}),
            Misconfigured,
            "out of credit",
        ),
        (Answer(body={"error": {"message": "too long", "code": "400"}}), BadRequest, "too long"),
        (Answer(body=FLAGGED), Refused, "input was flagged"),
        (Answer(body=completion(None, refusal="I will not")), Refused, "I will not"),
        (Answer(finish_reason="content_filter"), Refused, "content filter"),
        (Answer(finish_reason="RECITATION"), Refused, "content filter"),
        (Answer(body=completion("", finish_reason="length")), BadReply, "max_tokens"),
    ],
)
def test_failures_that_no_retry_helps_are_not_retried(serve, answer, kind, part):
    server, chat = serve(always(answer), api_key=KEY)
    reply = complete(chat, "x")
    assert type(reply.error) is kind, reply
    assert part in str(reply.error)
    assert len(server.requests) == reply.attempts == 1
    assert reply.error.fatal == (kind is Misconfigured)


def test_max_tokens_is_renamed_for_reasoning_models(serve):
    """As OpenAI's reasoning models: they refuse a request with `max_tokens`, which costs neither
    money nor a retry.
    """

    def answer(request, n):
        if "max_tokens" not in request:
            return "ok" if request["max_completion_tokens"] == 7 else "no limit"
        what = (
            "Unsupported parameter: 'max_tokens' is not supported here. Use "
            "'max_completion_tokens' instead."
        )
        return Answer(what, status=400)

    server, chat = serve(answer, max_retries=0)
    assert [complete(chat, text, max_tokens=7).text for text in "ab"] == ["ok", "ok"]
    assert len(server.requests) == 3, "the second call knows the name"


@pytest.mark.parametrize(("status", "longest", "shortest"), [(429, 80, 50), (500, 16, 11)])
def test_retries_after_a_429_last_a_minute(serve, status, longest, shortest, monkeypatch):
    """Limits of requests and tokens are by the minute: retries that all end within it lose the
    call.
    """
    waits: list[float] = []

    async def kept(seconds):
        waits.append(seconds)

    monkeypatch.setattr("agentic_prompting.llm.openai_http._FIRST_WAIT", 0.5)
    _server, chat = serve(always(Answer("slow", status=status)))
    without_waits = SimpleNamespace(**{**vars(asyncio), "sleep": kept})
    monkeypatch.setattr("agentic_prompting.llm.openai_http.asyncio", without_waits)
    assert complete(chat, "x").attempts == 6
    assert shortest < sum(waits) < longest


@pytest.mark.parametrize("asked", ["3600", "1e9", "120.5", "a date"])
def test_long_retry_after_is_capped(serve, asked, monkeypatch):
    monkeypatch.setattr("agentic_prompting.llm.openai_http._MAX_RETRY_AFTER", 0.05, raising=False)
    asked = email.utils.formatdate(time.time() + 7200, usegmt=True) if asked == "a date" else asked
    _server, chat = serve(
        in_turn(Answer("later", status=429, headers={"retry-after": asked}), "ok")
    )
    assert (complete(chat, "x").text, chat.stats.retries) == ("ok", 1)


@pytest.mark.parametrize(
    ("status", "says", "attempts"),
    [(500, "false", 3), (429, "false", 3), (401, "true", 1), (400, "true", 1), (404, "true", 1)],
)
def test_the_server_does_not_decide_what_is_retried(serve, status, says, attempts):
    server, chat = serve(
        always(Answer("no", status=status, headers={"x-should-retry": says})), max_retries=2
    )
    assert complete(chat, "x").attempts == len(server.requests) == attempts


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_errors_that_name_the_address(serve, status):
    """Followed, the conversation and the key would go to another host, or a GET would be taken as
    the answer.
    """
    other, _ = serve()
    away = other.base_url.replace("/v1", "/sk-hidden/v1/chat/completions")
    server, chat = serve(always(Answer(status=status, body=b"moved", headers={"location": away})))
    reply = complete(chat, "x")
    assert isinstance(reply.error, Misconfigured) and reply.attempts == len(server.requests) == 1
    assert other.base_url.removesuffix("/v1") in str(reply.error)
    assert "hidden" not in str(reply.error)
    assert not other.requests


def test_a_compressed_reply_is_read(serve):
    body = gzip.compress(json.dumps(completion("small")).encode())
    _, chat = serve(always(Answer(body=body, headers={"content-encoding": "gzip"})))
    assert complete(chat, "x").text == "small"
    _, chat = serve(
        always(Answer(body=body[:-12], headers={"content-encoding": "gzip"})), max_retries=0
    )
    assert "decoded" in str(complete(chat, "x").error)


@pytest.mark.parametrize("headers", [{}, {"content-encoding": "gzip"}])
def test_a_reply_has_a_largest_size(serve, headers):
    """64 MiB compress to 65 kB; unpacked, a few of them are more than the machine has."""
    body = json.dumps(completion("x" * (64 << 20))).encode()
    server, chat = serve(
        always(Answer(body=gzip.compress(body) if headers else body, headers=headers))
    )
    reply = complete(chat, "x")
    assert isinstance(reply.error, BadReply) and "more than 32 MiB" in str(reply.error)
    assert reply.attempts == len(server.requests) == 1, "it would be as long again"


def test_of_an_errors_body_the_beginning_is_read(serve):
    _, chat = serve(always(Answer("too long " + "x" * (8 << 20), status=400)))
    reply = complete(chat, "x")
    assert isinstance(reply.error, BadRequest) and "too long" in str(reply.error)


def test_a_server_that_hangs_meets_the_timeout(serve):
    server, chat = serve(
        always(Answer(delay=20)), timeout=1.0, max_retries=1
    )  # in less a busy machine sends nothing
    reply = complete(chat, "x")
    assert isinstance(reply.error, TimedOut)
    assert "1 s" in str(reply.error)
    assert reply.attempts == len(server.requests) == 2


def test_a_server_that_trickles_meets_the_timeout_too(serve):
    _, chat = serve(always(Answer(trickle=0.05)), timeout=0.4, max_retries=0)
    reply = complete(chat, "x")
    assert isinstance(reply.error, TimedOut), (
        "the time of the whole reply counts, not that of each piece"
    )


def test_nobody_there():
    with OpenAIChat("m", unused_url(), max_retries=1) as chat:
        reply = complete(chat, "x")
    assert isinstance(reply.error, Unreachable)
    assert reply.attempts == 2


def test_the_client_goes_on_after_failures_and_interrupts(serve):
    _server, chat = serve(in_turn(Answer(status=400), Answer(delay=1), "ok"), max_retries=0)
    assert complete(chat, "x").error is not None
    pending = start(chat(user("slow")))
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        pending.result()
    assert complete(chat, "x").text == "ok"
    assert pending.result(5).text == "ok"


# Many at once


def test_200_calls_are_made_at_once(serve):
    """None is answered before all are there: neither `submit` nor a call may wait for another's
    answer.
    """
    everybody = threading.Barrier(200)
    server, chat = serve(
        lambda request, n: (everybody.wait(120), "ok")[1], max_concurrency=200, timeout=120
    )
    futures = [start(chat(user(str(i)))) for i in range(200)]
    assert all(future.result().text == "ok" for future in futures)
    assert server.most_at_once == 200


def test_waiting_for_a_slot_is_no_timeout(serve):
    server, chat = serve(always(Answer(delay=0.1)), max_concurrency=3, timeout=0.8, max_retries=0)
    replies = [future.result() for future in [start(chat(user(str(i)))) for i in range(36)]]
    assert [reply.error for reply in replies] == [None] * 36
    assert replies[-1].seconds > 0.8
    assert server.most_at_once == 3


def test_requests_per_minute_spaces_requests(serve):
    _server, chat = serve(requests_per_minute=600)
    started = time.perf_counter()
    wait([start(chat(user(str(i)))) for i in range(6)])
    assert time.perf_counter() - started >= 0.5


def test_many_threads_share_a_client(serve):
    _server, chat = serve(lambda request, n: request["messages"][0]["content"])
    seen = {}

    def ask(name):
        for i in range(5):
            seen[name, i] = complete(chat, f"{name}-{i}").text

    threads = [threading.Thread(target=ask, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == {(name, i): f"{name}-{i}" for name in range(8) for i in range(5)}
    assert chat.stats.calls == 40


def test_a_cancelled_future_cancels_its_request(serve):
    server, chat = serve(in_turn(Answer(delay=5), "ok"), max_concurrency=1)
    running, waiting, last = (start(chat(user(text))) for text in ("running", "waiting", "last"))
    until(lambda: server.requests)
    assert waiting.cancel()  # before it can take the slot of the other
    assert running.cancel()
    assert last.result(5).text == "ok"
    assert [request["messages"][0]["content"] for request in server.requests] == ["running", "last"]


BAD = [
    Answer(drop="before"),
    Answer(drop="mid"),
    Answer(delay=0.6),
    Answer(status=500),
    Answer(body=b"<html>"),
]


def test_every_call_returns_its_connection(serve, monkeypatch):
    """More failures of each kind, and cancelled calls, than there are places."""
    monkeypatch.setattr("agentic_prompting.llm.openai_http._MAX_REPLY_BYTES", 1000)
    bad = [*BAD, Answer("x" * 5000)]
    _server, chat = serve(
        lambda request, n: "ok" if request["messages"][0]["content"] == "ok" else bad[n % len(bad)],
        max_concurrency=2,
        max_retries=0,
        timeout=0.3,
        patience=0.1,
    )
    for i in range(36):
        pending = start(chat(user("bad")))
        if i % 3:
            assert pending.result(5).error is not None
        else:
            time.sleep(0.02)
            pending.cancel()
    until(lambda: complete(chat, "ok").error is None)  # a breaker that is open waits meanwhile
    assert [future.result(5).text for future in [start(chat(user("ok"))) for _ in range(8)]] == [
        "ok"
    ] * 8
    assert not chat._http.client.connector._acquired


# Money


def test_a_spent_budget_stops_new_calls(serve):
    server, chat = serve(always(Answer(usage=(1_000_000, 0))), price=(1.0, 1.0), budget_usd=1.5)
    assert [complete(chat, "x").error for _ in range(2)] == [None, None]
    reply = complete(chat, "x")
    assert isinstance(reply.error, BudgetExceeded)
    assert reply.error.fatal
    assert "$2.0000" in str(reply.error)
    assert "$1.5000" in str(reply.error)
    assert (len(server.requests), reply.attempts) == (2, 0)


def test_calls_in_flight_end_with_the_budget(serve):
    _, chat = serve(
        always(Answer(delay=0.1, usage=(1_000_000, 0))), price=(1.0, 1.0), budget_usd=0.5
    )
    replies = [future.result() for future in [start(chat(user(str(i)))) for i in range(4)]]
    assert all(reply.text == "ok" for reply in replies)
    assert isinstance(complete(chat, "x").error, BudgetExceeded)


def test_prices():
    assert (
        find_price("gpt-4o-mini")
        == find_price("gpt-4o-mini-2024-07-18")
        == find_price("openai/gpt-4o-mini")
    )
    assert find_price("gpt-4o") != find_price("gpt-4o-mini")
    assert find_price("gpt-4o-audio-preview") is None, "another model with another price"
    assert find_price("Qwen/Qwen3-4B") is None
    assert find_price("gpt-4o-2024-05-13") == (5, 15), (
        "twice its model's: half of a budget would have been twice spent"
    )
    assert find_price("gpt-3.5-turbo-1106") == (1, 2)
    assert find_price("gpt-3.5-turbo-0125") == (
        0.5,
        1.5,
    )
    with pytest.raises(ValueError, match="needs a price"):
        OpenAIChat("Qwen/Qwen3-4B", budget_usd=1)


@pytest.mark.parametrize("name", ["timeout", "patience", "requests_per_minute"])
def test_no_limit_is_nan(name):
    with pytest.raises(ValueError, match=name):
        OpenAIChat("m", unused_url(), **{name: math.nan})


@pytest.mark.parametrize(
    "price", [0.6, (0.6,), (-1, 2), "0.15,0.6", (1.0, math.nan), (math.inf, 1.0), ("1", "2")]
)
def test_invalid_price_is_refused_before_any_request(price):
    """Each call was sent, paid for, and then failed because its cost could not be computed."""
    with pytest.raises(ValueError, match="price must be two numbers"):
        OpenAIChat("m", unused_url(), price=price)


# The key


def test_the_key_is_nowhere_to_be_seen(serve, tmp_path, monkeypatch):
    quoting = Answer(f"your key {KEY} or Bearer {KEY} is bad " + "x" * 400 + KEY, status=400)
    cache = ReplayCache(tmp_path / "replies.sqlite")
    server, chat = serve(in_turn("ok", quoting), api_key=KEY, cache=cache)
    complete(chat, "a")
    error = complete(chat, "b").error
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    assert "your key [key]" in str(error)
    assert "\n" not in str(error)
    assert len(str(error)) < 400
    assert error.__cause__ is None
    assert error.__context__ is None
    assert "SECRET" not in f"{error} {error!r} {chat} {chat!r} {vars(chat)}"
    assert b"SECRET" not in pickle.dumps([chat, error])
    cache.close()
    assert all(b"SECRET" not in file.read_bytes() for file in tmp_path.iterdir())
    with pytest.raises(LLMError) as shown:
        raise error
    assert shown.value.__context__ is None


def test_secrets_are_cut_out_of_texts():
    assert sanitize_message("key hunter2hunter2 here", "hunter2hunter2") == "key [key] here"
    assert sanitize_message("got sk-proj-ab**************wxyz.").startswith("got [key]")
    assert "token123" not in sanitize_message("Illegal header value b'Bearer token123'")
    assert sanitize_message("two\nlines none", "none") == "two lines none"
    assert "user:pw" not in repr(OpenAIChat("m", "http://user:pw@host/v1?api_key=abc"))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("https://user:pw@host:1/v1/?api_key=abc#x", "https://host:1/v1"),
        ("https://gateway/v1/0123-account/sk-in-path/openai", "https://gateway/.../openai"),
        ("https://host/planted-key/v1/chat/completions", "https://host/.../v1/chat/completions"),
        ("https://openrouter.ai/api/v1", "https://openrouter.ai/api/v1"),
        ("https://host/planted", "https://host/..."),
        ("https://host", "https://host"),
        ("localhost:8000/planted/v1", "localhost:8000/.../v1"),
        ("http://[planted", "an address that cannot be read"),
    ],
)
def test_redacted_url_has_host_and_common_path(url, shown):
    assert redact_url(url) == shown


def test_a_key_in_the_path_is_not_shown(serve, caplog):
    server, _ = serve(
        lambda request, n: Answer("no such page: /planted-in-path/v1/chat/completions", status=404)
    )
    with (
        OpenAIChat("m", server.base_url.replace("/v1", "/planted-in-path/v1")) as chat,
        caplog.at_level("DEBUG"),
    ):
        error = complete(chat, "x").error
    assert "planted" not in f"{chat!r} {error} {error!r} {caplog.text}"


@pytest.mark.parametrize(
    "address", ["{}?key=planted-key&v=2", "{}?key=planted%2Dkey", "{}/planted%2Dkey/v1"]
)
def test_key_in_the_address_is_masked_when_quoted(serve, address):
    """Only the text of the address itself was removed: `key=planted-key`, and `planted%2Dkey`."""
    server, _ = serve(lambda request, n: Answer("API key not valid: planted-key", status=400))
    with OpenAIChat("m", address.format(server.base_url)) as chat:
        error = complete(chat, "x").error
    assert "planted" not in f"{error} {error!r}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]52;c;cm0gLXJm\x07", "\\u001b]52;c;cm0gLXJm\\u0007"),
        ("\x1b[2J\x9b31m", "\\u001b[2J\\u009b31m"),
        ("a\u202eb\u2066c\u200f", "a\\u202eb\\u2066c\\u200f"),
        ("over\rwritten\r\nnext\x08\x7f", "over\\u000dwritten\nnext\\u0008\\u007f"),
        ("tag \U000e0041 half \ud83d", "tag \\udb40\\udc41 half \\ud83d"),
        ("naïve 東京 🗼 👨\u200d👩\u200d👧 a\tb\nc", "naïve 東京 🗼 👨\u200d👩\u200d👧 a\tb\nc"),
    ],
    ids=["clipboard", "clear", "direction", "return", "invisible", "ordinary"],
)
def test_what_would_steer_a_terminal_is_shown_instead(text, shown):
    assert escape_controls(text) == escape_controls(shown) == shown
    line = json.dumps({"said": text}, ensure_ascii=False)
    assert json.loads(escape_controls(line)) == {"said": text}, "JSON stays the same JSON"


def test_errors_steer_no_terminal(serve):
    _, chat = serve(always(Answer("\x1b]52;c;eA==\x07 \x9b2J \u202e no", status=400)))
    assert str(complete(chat, "x").error).isprintable()


def test_where_the_key_comes_from(serve, monkeypatch):
    server, chat = serve()
    complete(chat, "x")
    assert server.headers[-1]["authorization"] == "Bearer none"
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server, chat = serve()
    complete(chat, "x")
    assert server.headers[-1]["authorization"] == f"Bearer {KEY}"


def test_no_key_for_openai_itself():
    with OpenAIChat("gpt-4o-mini") as chat:
        reply = complete(chat, "x")
        assert isinstance(reply.error, Misconfigured)
        assert "OPENAI_API_KEY" in str(reply.error)
        with pytest.raises(Misconfigured, match="no key"):
            chat.check()


def test_key_that_cannot_be_sent_is_masked():
    with OpenAIChat("m", unused_url(), api_key="secret-part\nSECRET-part", max_retries=0) as chat:
        reply = complete(chat, "x")
    assert isinstance(reply.error, LLMError)
    assert "secret-part" not in str(reply.error).lower()


def test_copies(serve, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", KEY)
    server, chat = serve(api_key=KEY, temperature=0.5)
    complete(chat, "x")
    assert copy.deepcopy(chat) is chat
    with pickle.loads(pickle.dumps(chat)) as twin:
        assert complete(twin, "x").text == "ok"
        assert server.headers[-1]["authorization"] == f"Bearer {KEY}", (
            "found in the environment again"
        )
        assert server.requests[-1]["temperature"] == 0.5
    monkeypatch.delenv("MY_API_KEY")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-for-openai-alone")
    with pickle.loads(pickle.dumps(OpenAIChat("m", server.base_url, api_key=KEY))) as twin:
        complete(twin, "x")
        assert server.headers[-1]["authorization"] == "Bearer none", "never another endpoint's key"


def test_base_url_from_the_environment(monkeypatch):
    assert "api.openai.com" in repr(OpenAIChat("m"))
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere/v1")
    assert "http://elsewhere/v1" in repr(OpenAIChat("m"))
    with pytest.raises(ValueError, match="http://"):
        OpenAIChat("m", "localhost:8000/v1")


# check and close


def test_check(serve):
    server, chat = serve(always(Answer(status=404)))
    with pytest.raises(Misconfigured, match="unknown model"):
        chat.check()
    server, chat = serve(always(Answer(status=500)))
    with pytest.raises(ServerFailed):
        chat.check()
    assert len(server.requests) == 2, "one retry"
    server, chat = serve(always(Answer(body=completion("", finish_reason="length"))))
    chat.check()
    assert len(server.requests) == 1


def test_check_is_skipped_after_a_success(serve, monkeypatch):
    server, chat = serve()
    chat.check(), chat.check()
    assert len(server.requests) == 1
    server, chat = serve()
    complete(chat, "x"), chat.check()
    assert len(server.requests) == 1
    server, chat = serve(in_turn(Answer(status=400), "ok"))
    complete(chat, "x"), chat.check()
    assert len(server.requests) == 2, "a call that failed says nothing"
    monkeypatch.setattr("agentic_prompting.llm.openai_chat._SECONDS_WITHOUT_CHECK", 0.0)
    chat.check()
    assert len(server.requests) == 3, "long ago is not now"


def test_close_ends_calls_in_flight_and_later_ones(serve):
    server, chat = serve(always(Answer(delay=20)), max_concurrency=2)
    futures = [start(chat(user(str(i)))) for i in range(4)]
    until(lambda: len(server.requests) == 2)
    chat.close()
    assert all(isinstance(future.result(1).error, Closed) for future in futures), (
        "it did not wait for their answers"
    )
    assert isinstance(complete(chat, "x").error, Closed)
    chat.close()


def test_close_in_a_callback_does_not_hang(serve):
    _, chat = serve()
    done = threading.Event()
    start(chat(user("x"))).add_done_callback(lambda future: (chat.close(), done.set()))
    assert done.wait(5)
    assert isinstance(complete(chat, "x").error, Closed)


def test_connections_of_a_forgotten_client_are_closed(serve):
    server, _ = serve()
    chat = OpenAIChat("m", server.base_url)
    complete(chat, "x")
    client = chat._http.client
    del chat
    gc.collect()
    until(lambda: client.closed)


EXIT = """
import sys
from agentic_prompting.llm import OpenAIChat, complete, start
chat = OpenAIChat("m", sys.argv[1])
assert complete(chat, "x").text == "ok"
futures = [start(chat([{"role": "user", "content": "hang"}])) for _ in range(5)]
if sys.argv[2] == "raise":
    raise SystemError("boom")
"""


@pytest.mark.parametrize("way", ["return", "raise"])
def test_interpreter_exit_with_calls_in_flight(serve, way):
    def hangs(request, n):
        return Answer(delay=600) if request["messages"][0]["content"] == "hang" else "ok"

    server, _ = serve(hangs)
    ended = run_python(EXIT, server.base_url, way)  # which gives up long before the server answers
    if way == "return":
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    else:
        assert "SystemError: boom" in ended.stderr
        assert "closed" not in ended.stderr


FORK = """
import os, sys
from agentic_prompting.llm import OpenAIChat, complete
chat = OpenAIChat("m", sys.argv[1])
assert complete(chat, "parent").text == "parent"
child = os.fork()
if child == 0:
    os._exit(0 if complete(chat, "child").text == "child" else 1)
assert complete(chat, "parent again").text == "parent again"
assert os.waitpid(child, 0)[1] == 0
assert complete(chat, "parent after").text == "parent after"
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_gets_its_own_loop(serve):
    server, _ = serve(lambda request, n: request["messages"][0]["content"])
    ended = run_python(FORK, server.base_url)
    assert ended.returncode == 0, ended.stderr


def test_importing_is_fast_and_light():
    heavy = "{'openai', 'torch', 'transformers', 'trl'}"
    code = f"import sys, agentic_prompting.llm; print(sorted({heavy} & set(sys.modules)))"
    assert run_python(code).stdout == "[]\n"


# Other people's event loops


def test_client_works_in_one_loop_after_another(serve):
    server, chat = serve(lambda request, n: request["messages"][0]["content"])

    async def ask(text):
        replies = await asyncio.gather(*(chat(user(f"{text} {i}")) for i in range(8)))
        return [reply.text for reply in replies]

    for text in ("first", "second"):
        assert asyncio.run(ask(text)) == [f"{text} {i}" for i in range(8)]
    assert run(ask("ours")) == [f"ours {i}" for i in range(8)]
    assert len(server.requests) == 24


def test_cancellation_in_the_callers_loop_reaches_the_request(serve):
    server, chat = serve(always(Answer(delay=20)), max_concurrency=1)

    async def give_up():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await chat(user("slow"))

    asyncio.run(give_up())
    until(lambda: not chat._tasks)
    server.script = always("ok")
    assert complete(chat, "x").text == "ok", "its place is free again"


def test_close_ends_the_call_not_the_episode(serve):
    server, chat = serve(always(Answer(delay=20)))
    heard = []

    async def episode():
        reply = await chat(user("slow"))
        heard.append(type(reply.error))
        await asyncio.sleep(0.01)
        return "went on"

    ending = start(episode())
    until(lambda: server.requests)
    chat.close()
    assert ending.result(5) == "went on" and heard == [Closed]


def test_an_interpreter_ends_with_waits_of_all_kinds(serve):
    server, _ = serve(always(Answer(delay=600)))
    code = """
import asyncio, sys
from agentic_prompting.llm import OpenAIChat, ScriptedChat, start
chat = OpenAIChat("m", sys.argv[1])
async def episode(): return await chat([{"role": "user", "content": "x"}])
futures = [start(episode()), start(asyncio.sleep(600)), start(ScriptedChat(["x"], latency=600)([{"content": "x"}]))]
"""
    ended = run_python(code, server.base_url)  # has a time limit below the waits
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
