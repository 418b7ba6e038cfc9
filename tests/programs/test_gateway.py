"""The address itself: connections, sizes, broken requests, clients that hang up."""

import asyncio
import gzip
import itertools
import json
import logging
import socket
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp.compression_utils import ZLibDecompressor

from agentic_prompting.llm import Reply, Usage
from agentic_prompting.llm.loop import run
from agentic_prompting.programs import Google, Messages, Program, Responses
from agentic_prompting.programs.gateway import Gateway
from agentic_prompting.programs.rendering import Renderer
from agentic_prompting.programs.session import Session
from agentic_prompting.rollout import Limits, Rollout
from support.hang_ups import hang_up
from support.linear import processor_seconds
from support.programs import LIMITS, Scripted, byte_format, play_program

ASK = {"model": "agent", "messages": [{"role": "user", "content": "q"}]}


def post(base_url, key, body, path="/chat/completions", **headers):
    """Status and decoded body of a request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(base_url + path, data, headers), timeout=60
        ) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


# ---- connections of a rollout that has its own network ----


def session_of(policy):
    chat_format = byte_format()
    renderer = Renderer(chat_format)
    return Session(
        Rollout([1], row={}), policy, renderer, LIMITS, max_calls=10_000, max_sequences=10_000
    )


async def ask_through(port, key):
    """The status of a call through a port, on a connection of its own."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as client:
        reply = await client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=ASK)
        return reply.status


async def with_network(use):
    """Call `use(port, key, other_key)` with the port of a rollout's own network."""
    policy = Scripted(lambda text, request: "hello", byte_format())
    gateway = Gateway("127.0.0.1", 0)
    _, key = await gateway.open(session_of(policy))
    _, other_key = await gateway.open(session_of(policy))
    listener = socket.create_server(("127.0.0.1", 0))
    network = await gateway.listen_on(listener, key)
    try:
        return await use(listener.getsockname()[1], key, other_key)
    finally:
        network.close()
        await gateway.stop()


@pytest.mark.parametrize("count", [3, 32, 100])
def test_connections_at_one_moment_are_answered(count):
    async def use(port, key, other_key):
        return await asyncio.gather(*[ask_through(port, key) for _ in range(count)])

    assert run(with_network(use)) == [200] * count


def test_a_network_serves_its_rollout_alone():
    async def use(port, key, other_key):
        return await ask_through(port, other_key), await ask_through(port, key)

    assert run(with_network(use)) == (401, 200)


def is_open(connection):
    """Whether the other side has left a connection open."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


async def count_open(connections, limit):
    """How many connections are open as soon as they are at most `limit`, or else after 20 s."""
    for _ in range(200):
        await asyncio.sleep(0.1)
        open_connections = sum(map(is_open, connections))
        if open_connections <= limit:
            break
    return open_connections


def test_connections_of_a_network_are_limited(caplog):
    async def use(port, key, other_key):
        with ExitStack() as stack:
            connections = []
            for _ in range(320):
                connection = await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port))
                connections.append(stack.enter_context(connection))
            open_connections = await count_open(connections, limit=128)
        await asyncio.sleep(0.2)
        return open_connections, await ask_through(port, key)

    open_connections, status = run(with_network(use))
    assert 100 < open_connections <= 128, "the limit, and nothing far below it"
    assert status == 200, "a closed connection leaves its place"
    messages = [
        record.getMessage() for record in caplog.records if "connection" in record.getMessage()
    ]
    assert len(messages) == 1, "the limit is logged once"


# ---- requests that are too large, too many, or broken ----


def answered(agent, **options):
    """What a plain agent returns."""
    rollout, _ = play_program(agent, **options)
    assert rollout.status == "answered", rollout.error
    return rollout.returned["answer"]


def test_bodies_have_a_limit():
    def agent(row, base_url, api_key):
        post(base_url, api_key, ASK)
        fits = {**ASK, "user": "x" * (2**22 - 1000)}
        too_large = {**ASK, "user": "x" * 2**22}
        statuses = [post(base_url, api_key, body)[0] for body in (fits, too_large, b"{}," * 2**23)]
        return {"answer": statuses}

    assert answered(agent) == [200, 413, 413]

    def small(row, base_url, api_key):
        post(base_url, api_key, ASK)
        return {"answer": post(base_url, api_key, {**ASK, "user": "x" * 2000})[0]}

    assert answered(small, max_body_bytes=1000) == 413


def test_a_compressed_body_is_not_unpacked(monkeypatch):
    """A megabyte of it would be a gigabyte, unpacked on the event loop of all rollouts."""
    unpacked = []

    class Recorded(ZLibDecompressor):
        def decompress_sync(self, data, max_length=0):
            unpacked.append(len(data))
            return super().decompress_sync(data, max_length)

    monkeypatch.setattr("aiohttp.http_parser.ZLibDecompressor", Recorded)

    def agent(row, base_url, api_key):
        post(base_url, api_key, ASK)
        bomb = gzip.compress(b" " * 2**24)
        status, body = post(base_url, api_key, bomb, **{"Content-Encoding": "gzip"})
        return {"answer": [status, body["error"]["code"]]}

    assert answered(agent) == [415, "unsupported_encoding"]
    assert not unpacked


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"stop": [str(number) for number in range(17)]}, "stop"),
        ({"stop": ["x" * 2000]}, "stop"),
        ({"messages": [{"role": "user", "content": "q"}] * 8193}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 1025}, "tools"),
    ],
)
def test_too_many_parts_are_refused_by_name(more, param):
    def agent(row, base_url, api_key):
        post(base_url, api_key, ASK)
        status, body = post(base_url, api_key, {**ASK, **more})
        return {"answer": [status, body["error"]["param"]]}

    assert answered(agent) == [400, param]


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "agent", "messages": [' + b"{}," * 2**20 + b"{}]}",
        b'{"model": "agent", "messages": ['
        + b'{"role": "user", "content": "a"},' * 120_000
        + b"{}]}",
        b'{"model": "agent", "messages": [{"role": "user", "content": ['
        + b'{"text": "a"},' * 250_000
        + b"{}]}]}",
        b'{"model": "agent", "tools": ['
        + b'{"type": "mcp"}, {"function": {"name": "f"}}, ' * 30_000
        + b'{"type": "mcp"}], "messages": [{"role": "user", "content": "q"}]}',
        b'{"model": "agent", "messages": [{"role": "user", "content": "' + b"a " * 2**20 + b'"}]}',
    ],
    ids=["empty", "messages", "parts", "tools", "text"],
)
def test_a_large_request_leaves_the_loop_free(body):
    """The loop of all rollouts goes on while one request of the largest size is read.

    Between two ticks of the loop, its thread works little, and no other thread holds the
    interpreter's lock for long. Processor time is counted, so that other processes do not matter.
    """
    loop_seconds = []
    process_seconds = []

    async def tick():
        while True:
            loop_start = time.thread_time()
            process_start = time.process_time()
            try:
                await asyncio.sleep(0.01)
            finally:  # also when it is cancelled meanwhile
                loop_seconds.append(time.thread_time() - loop_start)
                process_seconds.append(time.process_time() - process_start)

    async def agent(row, base_url, api_key):
        return await asyncio.to_thread(ask, row, base_url, api_key)

    def ask(row, base_url, api_key):
        post(base_url, api_key, ASK)
        post(base_url, api_key, body)
        return "x"

    async def play():
        ticking = asyncio.ensure_future(tick())
        chat_format = byte_format()
        policy = Scripted(lambda text, request: "hello", chat_format)
        await Program(agent).play_episode(
            Rollout([1], row={}), policy, chat_format, Limits(5, 100, 4000, 8000)
        )
        ticking.cancel()

    run(play())
    assert max(loop_seconds) < 0.5, "the longest text takes 2 s if it is read on the loop"
    assert max(process_seconds) < 10


def test_parts_of_a_message_take_linear_time():
    text = "x" * 200
    items = [
        {"type": "message", "role": "assistant", "content": text},
        {"type": "function_call", "name": "f"},
    ]
    blocks = [
        {"type": "text", "text": text},
        {"type": "thinking", "thinking": text},
        {"type": "tool_use", "name": "f"},
    ]
    parts = [{"text": text}, {"text": text, "thought": True}, {"functionCall": {"name": "f"}}]
    user = {"role": "user", "content": "q"}

    def read(count: int) -> None:
        Responses().read_request({"model": "agent", "input": [user, *items * count]})
        Messages().read_request(
            {"messages": [user, {"role": "assistant", "content": blocks * count * 8}, user]}
        )
        Google().read_request(
            {"contents": [{"role": "model", "parts": parts * count * 8}]},
            "/models/agent:generateContent",
        )

    few = processor_seconds(lambda: read(400))
    many = processor_seconds(lambda: read(4000))
    # Ten times the parts: quadratic time would be 100 times as long.
    assert many < 30 * few + 0.1


def test_refused_requests_are_counted():
    def agent(row, base_url, api_key):
        post(base_url, api_key, ASK)
        codes = [post(base_url, api_key, b"no JSON")[1]["error"]["code"] for _ in range(8)]
        return {"answer": codes}

    assert answered(agent, max_calls=4) == ["invalid_json"] * 3 + ["rollout_ended"] * 5


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/messages/count_tokens", ASK),
        ("/models", None),
        ("/models/agent", None),
        ("/nowhere", ASK),
    ],
)
def test_requests_of_any_kind_have_a_limit(path, body):
    def agent(row, base_url, api_key):
        post(base_url, api_key, ASK)
        refused = 0
        for _ in range(200):
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(
                base_url + path, data, {"Authorization": f"Bearer {api_key}"}
            )
            try:
                urllib.request.urlopen(request).close()
            except urllib.error.HTTPError as error:
                refused += json.load(error)["error"]["code"] == "rollout_ended"
        return {"answer": refused}

    assert answered(agent, max_calls=4) > 100


def test_calls_of_large_llms_are_limited():
    calls = []

    async def big(messages, **options):
        calls.append(options.get("max_tokens"))
        return Reply("x", usage=Usage(1000, 1000, 0.05))

    big.sampling = {"max_tokens": 100}

    def agent(row, base_url, api_key):
        post(base_url, api_key, ASK)
        replies = [
            post(base_url, api_key, {**ASK, "model": "big", "max_tokens": 10**6}) for _ in range(9)
        ]
        return {
            "answer": [status for status, _ in replies],
            "code": replies[-1][1]["error"]["code"],
        }

    rollout, _ = play_program(agent, llms={"big": big}, max_llm_calls=5)
    assert rollout.answer == str([200] * 5 + [400] * 4)
    assert rollout.returned["code"] == "rollout_ended"
    assert rollout.counts["program/limits_reached"] == 1
    assert calls == [100] * 5, "a request lowers a model's own limit and does not raise it"
    calls.clear()
    play_program(agent, llms={"big": big}, max_llm_calls=10**6)
    assert len(calls) == 9


@pytest.mark.parametrize("wish", [{"temperature": "hot"}, {"temperature": 10**400}, {"top_p": -1}])
def test_settings_that_no_llm_takes_are_refused(wish):
    """The large LLM's own refusal would fail the rollout, and an agent could fail any rollout that
    goes badly.
    """

    async def big(messages, **options):
        raise AssertionError("not called")

    def agent(row, base_url, api_key):
        post(base_url, api_key, ASK)
        status, body = post(base_url, api_key, {**ASK, "model": "big", **wish})
        return {"answer": [status, body["error"]["param"]]}

    assert answered(agent, llms={"big": big}) == [400, next(iter(wish))]


def test_deep_settings_end_no_run():
    """A value as deep as the parser allows cannot be written down, where the stack is deeper."""

    def agent(row, base_url, api_key):
        post(base_url, api_key, ASK)
        for depth in range(900, 1000, 3):
            for name in ("temperature", "tool_choice", "tools"):
                value = b"[" * depth + b"]" * depth
                post(
                    base_url,
                    api_key,
                    b'{"%s": %s, %s' % (name.encode(), value, json.dumps(ASK).encode()[1:]),
                )
        return {"answer": "x"}

    assert answered(agent, max_calls=1000, max_sequences=1000) == "x"


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_hang_up_leave_no_traceback(stream, caplog):
    """Whether the request is complete, cut off or broken, and before or during the reply (0.1 s)."""

    def agent(row, base_url, api_key):
        address = urlsplit(base_url)
        start = f"POST {address.path}/chat/completions HTTP/1.1\r\nHost: x\r\n"
        body = json.dumps({**ASK, "stream": stream})
        length = f"Content-Length: {len(body)}\r\n"
        requests = {
            "complete": f"{start}{length}\r\n{body}",
            "cut off": f"{start}Content-Length: 10000\r\n\r\n{body}",
            "a length that is no number": f"{start}Content-Length: x\r\n\r\n{body}",
            "compressed": f"{start}{length}Content-Encoding: gzip\r\n\r\n{body}",
            "a header that is too long": f"{start}{length}X: {'a' * 20_000}\r\n\r\n{body}",
            "a broken chunk": f"{start}Transfer-Encoding: chunked\r\n\r\nzz\r\nxx\r\n",
            "no HTTP": "\x16\x03\x01 no HTTP\r\n\r\n",
        }
        ways = itertools.product(requests.values(), (0, 0.02, 0.2), (False, True))
        for request, seconds, with_reset in ways:
            hang_up(address.hostname, address.port, request.encode(), seconds, with_reset)
        time.sleep(0.3)
        status, _ = post(base_url, api_key, ASK)
        return {"answer": status}

    with caplog.at_level(logging.INFO):
        status = answered(agent, delay=0.1, max_calls=100, max_sequences=100)
    assert status == 200, "the next client gets its reply"
    assert not [
        record for record in caplog.records if record.exc_info or record.levelno > logging.INFO
    ]


def test_bytes_that_are_no_text_fail_no_rollout():
    """Half of a surrogate pair can come as bytes, too."""

    async def big(messages, **options):
        messages[0]["content"].encode()
        return Reply("fine")

    def agent(row, base_url, api_key):
        post(base_url, api_key, ASK)
        body = b'{"model": "%s", "messages": [{"role": "user", "content": "a \xed\xa0\xbd b"}]}'
        return {"answer": [post(base_url, api_key, body % name)[0] for name in (b"agent", b"big")]}

    assert answered(agent, llms={"big": big}) == [200, 200]
