"""The oracle's server, asked through the real OpenAI client and in ways no client would."""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from urllib.parse import urlsplit

import openai
import pytest

from agentic_prompting.llm.types import Reply, ServerFailed
from agentic_prompting.sandbox.server import MODEL, OracleServer, main
from agentic_prompting.sandbox.world import Oracle
from support.all_at_once import AllAtOnce

QUESTION = [{"role": "user", "content": "what is the currency of Senegal ?"}]
ANSWER = "the answer is CFA franc ."


@pytest.fixture(scope="module")
def server():
    with OracleServer() as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.base_url, api_key="any", max_retries=0) as client:
        yield client


def post(server, body, headers=None):
    address = urlsplit(server.base_url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=5)
    connection.request("POST", "/v1/chat/completions", body, headers or {})
    response = connection.getresponse()
    result = response.status, json.loads(response.read())
    connection.close()
    return result


def test_a_completion(client):
    completion = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0.7, max_tokens=50
    )
    assert completion.choices[0].message.content == ANSWER
    assert completion.choices[0].finish_reason == "stop"
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (7, 6)


def test_models_and_health(client, server):
    assert [model.id for model in client.models.list()] == [MODEL]
    with urllib.request.urlopen(server.base_url.removesuffix("/v1") + "/health") as response:
        assert json.load(response) == {"status": "ok"}


def test_an_unknown_model_is_a_404(client):
    with pytest.raises(openai.NotFoundError, match="gpt-12") as caught:
        client.chat.completions.create(model="gpt-12", messages=QUESTION)
    assert caught.value.code == "model_not_found"


def test_a_wrong_key_is_a_401_that_does_not_repeat_it():
    with OracleServer(api_key="right") as server:
        with openai.OpenAI(
            base_url=server.base_url, api_key="wrong-secret", max_retries=0
        ) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                client.chat.completions.create(model=MODEL, messages=QUESTION)
            assert caught.value.code == "invalid_api_key"
            assert "wrong-secret" not in str(caught.value)
        with openai.OpenAI(base_url=server.base_url, api_key="right") as client:
            assert (
                client.chat.completions.create(model=MODEL, messages=QUESTION)
                .choices[0]
                .message.content
                == ANSWER
            )


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b"[]",
        b"\xff",
        json.dumps({"model": MODEL}),
        json.dumps({"model": MODEL, "messages": []}),
        json.dumps({"model": MODEL, "messages": ["hello"]}),
        json.dumps({"model": MODEL, "messages": [{"role": "user", "content": None}]}),
        json.dumps({"model": MODEL, "messages": QUESTION, "n": 2}),
        json.dumps({"model": MODEL, "messages": QUESTION, "stream": True}),
    ],
)
def test_a_bad_body_is_a_400(server, body):
    status, answer = post(server, body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error" and answer["error"]["message"]


@pytest.mark.parametrize("length", ["1048577", "999999999999", "9" * 5000])
def test_a_body_too_large_is_refused_unread(server, length):
    address = urlsplit(server.base_url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as raw:
        raw.sendall(
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
            f"{length}\r\n\r\n".encode()
        )
        received = b"".join(
            iter(lambda: raw.recv(4096), b"")
        )  # to the end: the connection is closed
    assert received.startswith(b"HTTP/1.1 413") and b"request_too_large" in received


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org", ""])
def test_no_key_no_listening_elsewhere(host, capsys, monkeypatch):
    monkeypatch.delenv("AGENTIC_PROMPTING_API_KEY", raising=False)
    with pytest.raises(ValueError, match="api_key"):
        OracleServer(host=host)
    with pytest.raises(SystemExit):
        main(["--host", host, "--port", "0"])
    assert "AGENTIC_PROMPTING_API_KEY" in capsys.readouterr().err


def test_with_a_key_it_listens_elsewhere():
    with OracleServer(host="0.0.0.0", api_key="k") as server:
        here = server.base_url.replace("0.0.0.0", "127.0.0.1")
        with openai.OpenAI(base_url=here, api_key="k", max_retries=0) as client:
            assert (
                client.chat.completions.create(model=MODEL, messages=QUESTION)
                .choices[0]
                .message.content
                == ANSWER
            )


def test_a_body_without_a_length_is_refused(server):
    assert post(server, iter([b"{}"]), {"Transfer-Encoding": "chunked"})[0] == 411


def test_a_connection_survives_a_refusal(server):
    address = urlsplit(server.base_url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=5)
    statuses = []
    for path, body in [
        ("/nowhere", b"x" * 100),
        ("/v1/chat/completions", b"{"),
        ("/v1/chat/completions", None),
    ]:
        body = body or json.dumps({"model": MODEL, "messages": QUESTION}).encode()
        connection.request("POST", path, body)
        if not statuses:
            first_socket = connection.sock
        response = connection.getresponse()
        statuses.append(response.status)
        response.read()
    assert statuses == [404, 400, 200] and connection.sock is first_socket
    connection.close()


def test_a_model_that_fails_or_has_a_defect_is_a_500():
    class Broken:
        async def __call__(self, messages, **kwargs):
            if messages[-1]["content"] == "raise":
                raise RuntimeError("defect")
            return Reply(error=ServerFailed("no"))

    with OracleServer(Broken()) as server:
        for text, expected in (
            ("fail", "no"),
            ("raise", "the model Broken raised RuntimeError: defect"),
        ):
            status, answer = post(
                server,
                json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}]}),
            )
            said = answer["error"]["message"]
            assert status == 500 and said.startswith(expected), "then the place, file and line"


def test_two_hundred_requests_at_once():
    async def ask(base_url):
        async with openai.AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
            calls = [
                client.chat.completions.create(model=MODEL, messages=QUESTION) for _ in range(200)
            ]
            return await asyncio.gather(*calls)

    with OracleServer(AllAtOnce(Oracle(), 200)) as server:  # none is answered before all have come
        completions = asyncio.run(ask(server.base_url))
        assert {completion.choices[0].message.content for completion in completions} == {ANSWER}


def test_the_seed_tells_samples_apart():
    body = {"model": MODEL, "messages": QUESTION}
    with OracleServer(Oracle(noise=0.5)) as server:
        answers = [post(server, json.dumps({**body, "seed": seed}))[1] for seed in range(20)]
    texts = {answer["choices"][0]["message"]["content"] for answer in answers}
    assert ANSWER in texts and len(texts) > 3


def test_closing_breaks_off_open_connections():
    server = OracleServer().start()
    address = urlsplit(server.base_url)
    with socket.create_connection((address.hostname, address.port), timeout=5) as kept_alive:
        kept_alive.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
        assert kept_alive.recv(4096)
        server.close()
        server.close()
        assert kept_alive.recv(4096) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.hostname, address.port), timeout=5)


def test_it_runs_as_a_program_and_ends_cleanly():
    command = [
        sys.executable,
        "-m",
        "agentic_prompting.sandbox.server",
        "--port",
        "0",
        "--latency",
        "0.01",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # A test run in the background ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        base_url = process.stdout.readline().strip()
        with openai.OpenAI(base_url=base_url, api_key="any") as client:
            assert (
                client.chat.completions.create(model=MODEL, messages=QUESTION)
                .choices[0]
                .message.content
                == ANSWER
            )
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=5)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()


def test_a_taken_port_is_said_in_a_line(capsys):
    from agentic_prompting.sandbox.server import main

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit):
        main(["--port", str(taken.getsockname()[1])])
    assert "cannot serve on 127.0.0.1:" in capsys.readouterr().err
