"""Every way an endpoint can misbehave: each call ends as its own reply or a typed error; an outage
is waited out.
"""

import asyncio
import json
import logging
import time
from concurrent.futures import wait

import pytest

from agentic_prompting.llm import LLMError, OpenAIChat, ReplayCache, RoutedChat, Unreachable, start
from agentic_prompting.llm.circuit_breaker import CircuitBreaker, wait_out_outages
from agentic_prompting.llm.completions import read_completion
from agentic_prompting.llm.usage import TokenCounts
from support.misbehaving import FAULTS, ODD_REPLIES, PASSING, MisbehavingServer, at_random, in_turn
from support.servers import completion, unused_url


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("agentic_prompting.llm.openai_http._FIRST_WAIT", 0.01)
    monkeypatch.setattr("agentic_prompting.llm.openai_http._MAX_WAIT", 0.05)
    monkeypatch.setattr("agentic_prompting.llm.circuit_breaker._FIRST_PAUSE", 0.05)
    monkeypatch.setattr("agentic_prompting.llm.circuit_breaker._MAX_PAUSE", 0.2)


def ask(chat, text):
    return start(chat([{"role": "user", "content": text}]))


def replies_to(chat, texts):
    futures = {text: ask(chat, text) for text in texts}
    return {text: future.result(30) for text, future in futures.items()}


def by_name(number, request):
    """Each request meets the fault that it asks for, every time."""
    return request["messages"][-1]["content"]


# --- one fault after another ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes():
    """What becomes of a call under each fault that does not stop, and the number of requests made
    for it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentic_prompting.llm.openai_http._FIRST_WAIT", 0.01)
        patch.setattr("agentic_prompting.llm.openai_http._MAX_REPLY_BYTES", 12 << 20)
        patch.setattr(
            "agentic_prompting.llm.circuit_breaker._MAX_FAILURES", 10**6
        )  # here every fault is met on purpose
        with MisbehavingServer(by_name, hang_seconds=9) as server:
            with OpenAIChat(
                "m", server.base_url, api_key="sk-planted-0123456789", timeout=3, max_retries=1
            ) as chat:
                replies = replies_to(chat, FAULTS)
            last_messages = [request["messages"][-1]["content"] for request in server.requests]
    return {name: (reply, last_messages.count(name)) for name, reply in replies.items()}


def test_there_are_many_ways():
    assert len(FAULTS) >= 25


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_its_error(outcomes, name):
    """A reply or a typed error, never both and never the server's words as an answer; final errors
    are not retried.
    """
    reply, requests = outcomes[name]
    fault = FAULTS[name]
    if fault.error is None:
        assert (reply.text, reply.error, requests) == (f"reply to {name}", None, 1)
        return
    assert type(reply.error).__name__ == fault.error, reply
    assert reply.text == ""
    assert requests == reply.attempts == reply.error.attempts == (2 if fault.passes else 1)
    assert reply.error.fatal == (fault.error == "Misconfigured")
    assert "m at http://127.0.0.1" in str(reply.error) and "planted" not in str(reply.error)


@pytest.mark.parametrize(
    "name", [name for name, fault in FAULTS.items() if fault.error and fault.passes]
)
def test_a_fault_that_passes_costs_nothing_but_time(name):
    with (
        MisbehavingServer(in_turn(name), hang_seconds=3) as server,
        OpenAIChat("m", server.base_url, timeout=0.5) as chat,
    ):
        reply = ask(chat, "x").result(10)
        assert (reply.text, reply.error, reply.attempts) == ("reply to x", None, 2)
        assert server.met == {name: 1, None: 1}


def test_stale_connections_fail_no_call():
    """The server closes each connection after its reply, though it promised to keep it."""
    with MisbehavingServer(lambda number, request: "stale connection") as server:
        with OpenAIChat("m", server.base_url, max_concurrency=4) as chat:
            for i in range(8):
                assert ask(chat, str(i)).result(10).text == f"reply to {i}"
                time.sleep(0.01)
        assert server.connections >= 8


@pytest.mark.parametrize(
    "tokens", [10**400, -7, True, "twelve", None, [1], 1e308, "9" * 5000, "NaN", "inf"]
)
def test_invalid_counts_upset_no_sum(tokens):
    body = completion("text")
    body["usage"] = {"prompt_tokens": tokens, "completion_tokens": tokens}
    completed = read_completion(json.dumps(body).encode())
    assert completed.reply.text == "text" and completed.counts == TokenCounts(None, None)


def test_a_password_in_the_address_is_not_logged(caplog):
    with (
        MisbehavingServer() as server,
        caplog.at_level(logging.DEBUG),
        OpenAIChat("m", server.base_url.replace("//", "//user:planted@")) as chat,
    ):
        assert ask(chat, "x").result(10).error is None
    assert "planted" not in caplog.text


# --- many calls at random -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_random_faults_lose_and_mix_up_nothing(seed, tmp_path):
    cache = ReplayCache(tmp_path / "replies.sqlite")
    # 10 MB on a busy machine can take longer than this timeout, which is then rightly asked for
    # again.
    quick = [name for name in PASSING if name != "10 MB"]
    with MisbehavingServer(at_random(0.3, seed, quick), latency=0.002, hang_seconds=5) as server:
        with OpenAIChat("m", server.base_url, timeout=3, cache=cache) as chat:
            replies = replies_to(chat, [f"call {i}" for i in range(300)])
        assert (
            sum(count for fault, count in server.met.items() if fault not in (None, *ODD_REPLIES))
            > 50
        )
        assert max(server.answered.values()) == 1, (
            "a good reply was thrown away and asked for again"
        )
    good = {text: reply for text, reply in replies.items() if reply.error is None}
    assert len(good) >= 297 and len(replies) == len(cache) + len(replies) - len(good) == 300
    assert all(reply.text == f"reply to {text}" for text, reply in good.items())
    assert all(
        isinstance(reply.error, LLMError) for reply in replies.values() if reply.error is not None
    )


# --- the endpoint is down -------------------------------------------------------------------------


def test_an_outage_is_waited_out_without_a_storm(monkeypatch):
    monkeypatch.setattr("agentic_prompting.llm.circuit_breaker._FIRST_PAUSE", 0.1)
    with (
        MisbehavingServer(latency=0.05) as server,
        OpenAIChat("m", server.base_url, max_retries=2) as chat,
    ):
        assert ask(chat, "before").result(10).error is None
        server.outage(1.5)
        replies = replies_to(chat, [f"call {i}" for i in range(200)])
        assert [reply.error for reply in replies.values()] == [None] * 200
        # Down for 30 latencies: 64 at once, two retries each, would all have failed within the
        # first.
        assert chat.stats.retries < 64 + 20 and max(server.answered.values()) == 1


def test_dead_endpoint_gets_fewer_and_fewer_requests():
    with OpenAIChat("m", unused_url(), max_retries=5, patience=0.6, max_concurrency=16) as chat:
        replies = replies_to(chat, [str(i) for i in range(32)])
    assert all(isinstance(reply.error, Unreachable) for reply in replies.values())
    assert sum(reply.attempts for reply in replies.values()) < 64, (
        "without the breaker: 32 calls times 6 attempts"
    )
    assert any(
        "was down for as long as a call waits" in str(reply.error) for reply in replies.values()
    )


def test_it_recovers_by_itself():
    with (
        MisbehavingServer() as server,
        OpenAIChat("m", server.base_url, max_retries=0, patience=5) as chat,
    ):
        server.go_down()
        failed = [ask(chat, str(i)).result(10).error for i in range(5)]
        assert all(isinstance(error, Unreachable) for error in failed)
        waiting = ask(chat, "waiting")
        time.sleep(0.01)
        server.come_back()
        assert waiting.result(10).text == "reply to waiting"
        breaker = chat._http.breaker
        assert (breaker.pause, breaker.pauses) == (0.0, 1)


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_few_calls_are_as_patient_as_many(calls):
    """Fewer attempts than the breaker waits for; and what finds out whether the endpoint is back
    spends no retry.
    """
    with (
        MisbehavingServer() as server,
        OpenAIChat("m", server.base_url, max_retries=2, patience=60) as chat,
    ):
        server.go_down()
        waiting = [ask(chat, str(i)) for i in range(calls)]
        time.sleep(1.5)  # as good as for ever: the waits between attempts are 0.01 to 0.2 s here
        assert not any(future.done() for future in waiting)
        server.come_back()
        assert [future.result(30).error for future in waiting] == [None] * calls


def test_patience_ends(caplog):
    with OpenAIChat("m", unused_url(), max_retries=2, patience=0.5) as chat:
        assert "was down for as long as a call waits" in str(ask(chat, "lone").result(30).error)
        ask(chat, "another").result(30)
    assert sum("is down" in message for message in caplog.messages) == 1, "a wait is not silent"


def test_a_dead_server_costs_the_patience_once(caplog):
    """Calls after the first two wait no more, nor do those of another model at the same address."""
    with MisbehavingServer() as server:
        options = {"max_retries": 2, "patience": 1, "max_concurrency": 2}
        with (
            OpenAIChat("m", server.base_url, **options) as chat,
            OpenAIChat("other", server.base_url, **options) as other,
        ):
            server.go_down()
            first_replies = replies_to(chat, ["first", "second"])
            later_replies = replies_to(chat, [str(i) for i in range(12)])
            later_replies |= replies_to(other, ["other"])
            replies = [*first_replies.values(), *later_replies.values()]
            assert all(isinstance(reply.error, Unreachable) for reply in replies)
            assert max(reply.attempts for reply in first_replies.values()) > 1
            assert max(reply.attempts for reply in later_replies.values()) <= 1
            assert sum("is down" in message for message in caplog.messages) == 1
            server.come_back()
            time.sleep(2.1)  # an attempt is made every 2 s
            assert ask(chat, "again").result(10).error is None
            assert ask(other, "again").result(10).error is None
            # It has answered: the next outage is waited for again.
            server.go_down()
            waiting = ask(chat, "waiting")
            time.sleep(0.5)
            assert not waiting.done()
            server.come_back()
            assert waiting.result(10).error is None


def test_training_waits_for_each_call():
    with wait_out_outages(), OpenAIChat("m", unused_url(), max_retries=2, patience=0.5) as chat:
        for text in ("first", "second"):
            reply = ask(chat, text).result(60)
            assert isinstance(reply.error, Unreachable)
            assert reply.attempts > 1


def test_being_refused_is_not_being_dead():
    """Errors that say the endpoint lives never hold other calls back."""
    alive = [
        name
        for name, fault in FAULTS.items()
        if fault.error in ("RateLimited", "BadReply", "Refused", "BadRequest")
    ]
    with (
        MisbehavingServer(by_name) as server,
        OpenAIChat("m", server.base_url, max_retries=0) as chat,
    ):
        for name in alive:
            assert ask(chat, name).result(10).attempts == 1
            assert chat._http.breaker.pause == 0


def test_breaker_probes_singly_with_growing_pauses(monkeypatch):
    monkeypatch.setattr("agentic_prompting.llm.circuit_breaker._MAX_PAUSE", 1.0)
    slept = []
    at_once = []

    async def run():
        breaker = CircuitBreaker()
        inside = 0
        for _ in range(5):
            breaker.dead(is_probe=False)

        async def sleep(seconds, real=asyncio.sleep):
            slept.append(seconds)
            await real(0)

        monkeypatch.setattr("agentic_prompting.llm.circuit_breaker.asyncio.sleep", sleep)

        async def attempt(number):
            nonlocal inside
            async with breaker.attempt(60) as probing:
                inside += probing
                at_once.append(inside)
                breaker.dead(probing) if number < 6 else breaker.alive()
                inside -= probing
                return probing

        return await asyncio.gather(*(attempt(i) for i in range(10)))

    assert asyncio.run(run()) == [True] * 7 + [False] * 3
    assert slept[:7] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0] and max(at_once) == 1


def test_failures_in_flight_do_not_lengthen_the_pause():
    breaker = CircuitBreaker()
    for _ in range(64):
        breaker.dead(is_probe=False)
    assert (breaker.pause, breaker.pauses) == (0.05, 1)


def test_dead_model_does_not_delay_others():
    with MisbehavingServer() as server:
        dead = OpenAIChat("m", unused_url(), max_retries=0)
        living = OpenAIChat("m", server.base_url)
        with dead, living:
            both = RoutedChat({"dead": dead, "living": living}, lambda question, names: question)
            waiting = [start(both([{"role": "user", "content": "dead"}])) for _ in range(8)]
            wait(waiting[:5])
            assert (
                start(both([{"role": "user", "content": "living"}])).result(5).text
                == "reply to living"
            )
