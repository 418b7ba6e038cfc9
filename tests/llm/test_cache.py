"""`ReplayCache` on its own, and under `OpenAIChat`."""

import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from agentic_prompting.llm import (
    Misconfigured,
    OpenAIChat,
    ReplayCache,
    Reply,
    ServerFailed,
    Usage,
    complete,
    start,
)
from support.servers import Answer, LoopbackServer, unused_url

MESSAGES = [{"role": "user", "content": "Capital of Kenya?"}]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "replies.sqlite"


def put(cache, text, repeat=0, **sampling):
    cache.put(cache.key("m", MESSAGES, sampling, repeat), Reply(text=text))


def get(cache, repeat=0, **sampling):
    return cache.get(cache.key("m", MESSAGES, sampling, repeat))


def spawn(code, *args):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *args], env=environment, stdout=subprocess.PIPE, text=True
    )


def test_round_trip(path):
    cache = ReplayCache(path)
    key = cache.key("m", MESSAGES, {}, 0)
    assert cache.get(key) is None
    cache.put(
        key, Reply(text="Nairobi 🗼", finish_reason="length", usage=Usage(7, 3, 0.5), attempts=4)
    )
    got = ReplayCache(path).get(key)
    assert got == Reply(text="Nairobi 🗼", finish_reason="length", cached=True, attempts=0)
    assert got.usage == Usage()
    assert len(cache) == 1


def test_key_tells_requests_apart():
    cache = ReplayCache("unused", mode="off")

    def digest(model="m", messages=MESSAGES, **sampling):
        return cache.key(model, messages, sampling, 0).digest

    other = [{"role": "user", "content": "Capital of Kenya? "}]
    system = [{"role": "system", "content": "Capital of Kenya?"}]
    keys = [
        digest(),
        digest("n"),
        digest(messages=other),
        digest(messages=system),
        digest(temperature=1),
        digest(seed=1),
    ]
    assert len(set(keys)) == len(keys)
    assert digest(temperature=1, top_p=0) == digest(top_p=0.0, temperature=1.0)
    assert digest(temperature=0.5) != digest(temperature=0.25)
    assert digest(messages=[{"content": "Capital of Kenya?", "role": "user"}]) == digest()


def test_repeats_are_counted_per_request(path):
    cache = ReplayCache(path)
    other = [{"role": "user", "content": "else"}]
    assert [cache.key("m", MESSAGES, {}).repeat for _ in range(3)] == [0, 1, 2]
    assert cache.key("m", other, {}).repeat == 0
    assert cache.key("m", MESSAGES, {}, 7).repeat == 7
    assert cache.key("m", MESSAGES, {}).repeat == 3


def test_failures_and_empty_replies_are_not_recorded(path):
    cache = ReplayCache(path)
    key = cache.key("m", MESSAGES, {}, 0)
    cache.put(key, Reply(error=ServerFailed("no")))
    cache.put(key, Reply(text=""))
    assert len(cache) == 0
    assert cache, "an empty cache is still a cache"


def test_the_first_recording_stays(path):
    cache = ReplayCache(path)
    put(cache, "first")
    put(cache, "second")
    assert get(cache).text == "first"


def test_replay_of_something_unseen(path):
    put(ReplayCache(path), "ok")
    cache = ReplayCache(path, "replay")
    assert get(cache).text == "ok"
    error = get(cache, repeat=1).error
    assert isinstance(error, Misconfigured)
    for part in ("no recorded reply", "Capital of Kenya?", str(path), "record it first"):
        assert part in str(error)
    put(cache, "new", repeat=1)
    assert len(cache) == 1, "replay never writes"


def test_wrong_settings_are_found_at_once(path, tmp_path):
    with pytest.raises(FileNotFoundError, match="record it first"):
        ReplayCache(path, "replay")
    with pytest.raises(ValueError, match="mode"):
        ReplayCache(path, "write")
    text = tmp_path / "notes.txt"
    text.write_text("hello, this is no database at all" * 100)
    with pytest.raises(ValueError, match=r"notes\.txt"):
        ReplayCache(text)


def test_off_touches_no_file(path):
    cache = ReplayCache(path, "off")
    put(cache, "x")
    assert get(cache) is None
    assert len(cache) == 0
    assert not path.exists()


def test_pickle_and_reopen(path):
    cache = ReplayCache(path)
    put(cache, "ok")
    assert get(pickle.loads(pickle.dumps(cache))).text == "ok"
    cache.close()
    assert get(cache).text == "ok"


def test_threads_share_one_cache(path):
    cache = ReplayCache(path)
    threads = [
        threading.Thread(
            target=lambda t=t: [put(cache, f"{t}-{i}", repeat=100 * t + i) for i in range(50)]
        )
        for t in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cache) == 200
    assert get(cache, repeat=303).text == "3-3"


WRITER = """
import sys, time
from agentic_prompting.llm import ReplayCache, Reply
cache = ReplayCache(sys.argv[1])
first, count = int(sys.argv[2]), int(sys.argv[3])
for i in range(first, first + count):
    cache.put(cache.key("m", [{"role": "user", "content": "Capital of Kenya?"}], {}, i), Reply(text=f"reply {i}"))
    print(i, flush=True)
"""


def test_several_processes_write_one_file(path):
    writers = [spawn(WRITER, str(path), str(1000 * n), "200") for n in range(3)]
    for writer in writers:
        writer.communicate(timeout=30)
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    cache = ReplayCache(path, "replay")
    assert len(cache) == 600
    assert get(cache, repeat=2199).text == "reply 2199"


def test_nothing_is_lost_by_kill_9(path):
    writer = spawn(WRITER, str(path), "0", "1000000")
    written = [int(writer.stdout.readline()) for _ in range(200)]
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    cache = ReplayCache(path)
    assert all(get(cache, repeat=i).text == f"reply {i}" for i in written)
    put(cache, "more", repeat=-1)
    assert get(cache, repeat=-1).text == "more"


def test_look_up_uses_the_index(path):
    cache = ReplayCache(path)
    rows = ((os.urandom(32), 0, "m", "text" * 20, "stop", 1, 1, 0.0) for _ in range(100_000))
    connection = cache._connected()
    connection.execute("BEGIN")
    connection.executemany(
        "INSERT INTO replies (key, repeat, model, text, finish_reason, prompt_tokens, "
        "completion_tokens, recorded_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        rows,
    )
    connection.execute("COMMIT")
    plan = connection.execute(
        "EXPLAIN QUERY PLAN SELECT text FROM replies WHERE key = ? AND repeat = ?", (b"", 0)
    )
    assert "PRIMARY KEY" in plan.fetchone()[3]
    assert all(get(cache, repeat=i) is None for i in range(1000))


# A damaged file


def damage(path, how):
    """Make `how` of every page but those of the schema and the root; give back how many there were."""
    with open(path, "r+b") as file:
        pages = range(4096 * 3, os.path.getsize(path), 4096)
        for page in pages:
            file.seek(page)
            file.write(how(4096))
    return len(pages)


def recording(path, replies=200):
    cache = ReplayCache(path)
    for i in range(replies):
        put(cache, f"reply {i} " + "long " * 400, repeat=i)
    cache.close()
    return [f"reply {i} " + "long " * 400 for i in range(replies)]


@pytest.mark.parametrize("how", [bytes, os.urandom, lambda n: b"long " * (n // 5) + b"x" * (n % 5)])
def test_a_damaged_recording_is_asked_anew_never_believed(path, counting, how, caplog):
    recorded = recording(path)
    assert damage(path, how) > 50
    with OpenAIChat("m", counting.base_url, cache=ReplayCache(path), max_concurrency=64) as chat:
        replies = [
            future.result(30) for future in [start(chat(MESSAGES, repeat=i)) for i in range(200)]
        ]
    assert [reply.error for reply in replies] == [None] * 200
    kept = [reply.text == recorded[i] for i, reply in enumerate(replies) if reply.cached]
    assert all(kept) and len(kept) + len(counting.requests) == 200 and len(counting.requests) > 50


def test_a_damaged_recording_in_replay_mode_says_so(path):
    recorded = recording(path)
    cache = ReplayCache(path, "replay")
    damage(path, os.urandom)
    with OpenAIChat("m", unused_url(), cache=cache) as chat:
        replies = [start(chat(MESSAGES, repeat=i)).result(5) for i in range(200)]
    for reply, text in zip(replies, recorded, strict=True):
        assert reply.text == text if reply.error is None else isinstance(reply.error, Misconfigured)
    errors = [str(reply.error) for reply in replies if reply.error]
    assert errors and all(str(path) in error for error in errors)
    assert any("damaged" in error for error in errors)


def test_a_changed_reply_is_recorded_anew(path, counting):
    put(ReplayCache(path), "right")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("UPDATE replies SET text = 'wrong'")
    for cached in (False, True):
        with OpenAIChat("m", counting.base_url, cache=ReplayCache(path)) as chat:
            reply = complete(chat, MESSAGES, repeat=0)
            assert (reply.text, reply.cached) == ("reply 0", cached)


# Under OpenAIChat


@pytest.fixture
def counting():
    with LoopbackServer(lambda request, n: Answer(f"reply {n}", delay=0.05)) as server:
        yield server


def test_samples_stay_different_and_replay_needs_no_server(path, counting):
    with OpenAIChat("m", counting.base_url, cache=ReplayCache(path), price=(1.0, 1.0)) as chat:
        recorded = [complete(chat, "q").text for _ in range(4)]
        named = complete(chat, "q", repeat=9).text
    assert len({*recorded, named}) == 5
    with OpenAIChat("m", unused_url(), cache=ReplayCache(path, "replay"), price=(1.0, 1.0)) as chat:
        replies = [complete(chat, "q") for _ in range(4)]
        assert [reply.text for reply in replies] == recorded
        assert complete(chat, "q", repeat=9).text == named
        assert all(
            (reply.cached, reply.attempts, reply.usage) == (True, 0, Usage()) for reply in replies
        )
        assert chat.stats.cached == 5
        assert chat.usage == Usage()
        missing = complete(chat, "q", repeat=5)
        assert isinstance(missing.error, Misconfigured)
        assert missing.error.fatal
        assert missing.attempts == 0
        chat.check()


@pytest.mark.parametrize("mode", ["record", "replay"])
def test_what_a_recorded_reply_is_worth_is_known(path, counting, mode):
    for how in ("record", mode):
        with OpenAIChat(
            "m", counting.base_url, cache=ReplayCache(path, how), price=(1e6, 1e6)
        ) as chat:
            reply = complete(chat, "q", repeat=0)
    assert reply.cached and (reply.usage, reply.worth) == (Usage(), Usage(10, 5, 15.0))


def test_a_second_recording_run_is_free(path, counting):
    for expected in (3, 3):
        with OpenAIChat("m", counting.base_url, cache=ReplayCache(path)) as chat:
            texts = [complete(chat, "q", temperature=1).text for _ in range(3)]
        assert len(counting.requests) == expected
    assert texts == ["reply 0", "reply 1", "reply 2"]


def test_a_failed_call_is_asked_again(path):
    answers = [Answer(status=400), Answer("ok")]
    with (
        LoopbackServer(lambda request, n: answers[n]) as server,
        OpenAIChat("m", server.base_url, cache=ReplayCache(path)) as chat,
    ):
        assert complete(chat, "q", repeat=0).error is not None
        assert complete(chat, "q", repeat=0).text == "ok"
        assert complete(chat, "q", repeat=0).cached


def test_concurrent_calls_for_a_sample_send_one_request(path, counting):
    with OpenAIChat("m", counting.base_url, cache=ReplayCache(path)) as chat:
        futures = [start(chat(MESSAGES, repeat=0)) for _ in range(5)] + [
            start(chat(MESSAGES, repeat=1))
        ]
        texts = [future.result().text for future in futures]
        assert len(counting.requests) == 2
        assert len(set(texts[:5])) == 1
        assert sorted(future.result().cached for future in futures) == [
            False,
            False,
            True,
            True,
            True,
            True,
        ]


def test_call_waiting_for_a_cancelled_one_is_sent(path, counting):
    counting.script = lambda request, n: Answer("ok", delay=0.4)
    with OpenAIChat("m", counting.base_url, cache=ReplayCache(path)) as chat:
        first = start(chat(MESSAGES, repeat=0))
        second = start(chat(MESSAGES, repeat=0))
        while not counting.requests:
            time.sleep(0.005)
        first.cancel()
        assert second.result(5).text == "ok"
        assert not second.result().cached


def test_unwritable_cache_loses_no_reply(path, counting, caplog, monkeypatch):
    cache = ReplayCache(path)
    monkeypatch.setattr(cache, "put", lambda key, reply: 1 / 0)
    with OpenAIChat("m", counting.base_url, cache=cache) as chat:
        assert complete(chat, "q").text == "reply 0"
    assert "could not be recorded" in caplog.text
