"""The service, asked with the real `openai` client over loopback: answers, failures, limits, cancellation, crowds."""

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import openai
import pytest

from agentic_prompting import ScriptedChat
from agentic_prompting.agent import PromptAgent
from agentic_prompting.cli import main
from agentic_prompting.llm import BudgetExceeded, RateLimited, Reply, ServerFailed, TimedOut, Usage
from agentic_prompting.rollout import AgentSpec, Limits, SampleRequest
from agentic_prompting.serve import AgentAnswers, ChatAnswers, ServeConfig, Service, make_app
from agentic_prompting.serve.answering import conversation
from agentic_prompting.serve.shared_sampler import SharedSampler
from serving import ASK, running, scripted_agent, service_of

QUESTION = [{"role": "user", "content": "what is the capital of Kenya ?"}]


def reply(cost=0.25):
    return Reply("the answer is Nairobi .", usage=Usage(7, 5, cost))


@pytest.fixture
def serve(tiny_policy):
    """Start a service: `serve(chat, **options)` gives its address; stopped at the end of the test."""
    with ExitStack() as stack:

        def start(chat=None, turns=None, seconds=0.0, **limits):
            chat = chat if chat is not None else ScriptedChat([reply()])
            service = service_of(scripted_agent(tiny_policy, chat, turns, seconds), **limits)
            start.service = service
            return stack.enter_context(running(service))

        yield start


def client(address, key="none", **options):
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, **options)


def ask(address, **options):
    with client(address) as asking:
        said = asking.chat.completions.create(model="agent", messages=QUESTION, **options)
        return list(said) if options.get("stream") else said


def metric(service, name, **labels):
    return service.metrics.registry.get_sample_value(f"agentic_prompting_{name}", labels)


# --- answers ---------------------------------------------------------------------------------------------------------


def test_an_answer(serve):
    address = serve()
    with client(address) as asking:
        assert [model.id for model in asking.models.list()] == ["agent"]
    said = ask(address)
    assert said.choices[0].message.content == "Nairobi" and said.choices[0].finish_reason == "stop"
    assert said.model == "agent" and said.usage.total_tokens == said.usage.prompt_tokens + said.usage.completion_tokens
    assert not hasattr(said, "trajectory"), "only on request"


def test_the_trajectory_on_request(serve):
    said = ask(serve(), extra_body={"trajectory": True})
    assert [turn["kind"] for turn in said.trajectory["turns"]] == ["act", "answer"]
    assert said.trajectory["observations"][0]["text"] == "the answer is Nairobi ."
    assert said.trajectory["cost_usd"] == 0.25


def test_streaming(serve):
    chunks = ask(serve(), stream=True, stream_options={"include_usage": True}, extra_body={"trajectory": True})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Nairobi" and chunks[-1].usage.completion_tokens > 0
    assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-2].trajectory["status"] == "answered"


def test_the_same_seed_is_the_same_episode(serve):
    chat = ScriptedChat([reply()])
    address = serve(chat)
    seeds = [ask(address, seed=seed, extra_body={"trajectory": True}).trajectory["seed"] for seed in (5, 5)]
    others = [ask(address, extra_body={"trajectory": True}).trajectory["seed"] for _ in range(2)]
    assert seeds == [5, 5] and others[0] != others[1]


def test_an_agent_without_an_answer_refuses(serve):
    """Its own failing: no error, and no text that could be taken for an answer."""
    address = serve(turns="done")
    said = ask(address).choices[0]
    assert said.message.content is None and "malformed" in said.message.refusal
    deltas = [chunk.choices[0].delta for chunk in ask(address, stream=True) if chunk.choices]
    assert any(delta.refusal for delta in deltas) and not any(delta.content for delta in deltas)
    assert metric(serve.service, "requests_total", model="agent", outcome="no_answer") == 2


def test_a_token_limit_ends_the_episode(serve):
    said = ask(serve(), max_completion_tokens=16, extra_body={"trajectory": True})
    assert said.choices[0].finish_reason == "length" and said.choices[0].message.content is None


def test_what_the_agent_is_shown():
    spec = AgentSpec("Q: {question}", system_prompt="Evolved.", limits=Limits())
    said = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a {question}"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert conversation(spec, said) == [
        {"role": "system", "content": "Evolved.\n\nBe kind."},
        {"role": "user", "content": "a {question}"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "Q: c"},
    ]
    assert conversation(AgentSpec(), said[-1:]) == said[-1:]


def test_any_chat_model_can_be_served():
    """ProRefine's `RefinedChat` is one."""
    service = Service({"prorefine": ChatAnswers(ScriptedChat([Reply("fine"), RateLimited("slow")]))}, ServeConfig())
    with running(service) as address, client(address) as asking:
        said = asking.chat.completions.create(model="prorefine", messages=QUESTION)
        assert said.choices[0].message.content == "fine"
        with pytest.raises(openai.APIStatusError) as caught:
            asking.chat.completions.create(model="prorefine", messages=QUESTION)
        assert caught.value.status_code == 503


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ServerFailed("it broke", "secret-host", status=500), 502),
        (TimedOut("late"), 502),
        (RateLimited("busy"), 503),
        (BudgetExceeded("all is spent"), 503),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_an_outage_is_an_error_and_no_answer(serve, error, status):
    address = serve(ScriptedChat([error]))
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError) as caught:
            ask(address, stream=stream)
        assert caught.value.status_code == status and caught.value.body["code"] == error.kind
        assert "secret-host" not in str(caught.value.body), "where the large LLM is, is nobody's business"
    assert metric(serve.service, "environment_errors_total", model="agent", kind=error.kind) == 2


def test_a_broken_sampler_is_an_error_and_the_next_request_works(serve):
    address = serve()
    sampler = serve.service.models["agent"].sampler
    real, sampler.sampler = sampler.sampler, lambda requests: 1 / 0
    with pytest.raises(openai.InternalServerError) as caught:
        ask(address)
    assert caught.value.status_code == 503 and "ZeroDivisionError" in str(caught.value.body)
    sampler.sampler = real
    assert ask(address).choices[0].message.content == "Nairobi"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, None),
        ({"model": "agent"}, 400, "messages"),
        ({"model": "agent", "messages": []}, 400, "messages"),
        ({"model": "agent", "messages": [{"role": "assistant", "content": "x"}]}, 400, "messages"),
        ({"model": "agent", "messages": QUESTION, "n": 2}, 400, "n"),
        ({"model": "gpt-4o", "messages": QUESTION}, 404, "model"),
    ],
)
def test_bad_requests_are_told_in_openais_form(serve, body, status, param):
    got, said = post(serve(), body)
    assert got == status and said["error"]["param"] == param and said["error"]["type"] == "invalid_request_error"


def post(address, body, headers=()):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **dict(headers)}
    request = urllib.request.Request(f"{address}/v1/chat/completions", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


# --- limits ----------------------------------------------------------------------------------------------------------


def test_a_key_is_needed_where_one_is_set(serve, monkeypatch, caplog):
    monkeypatch.setenv("AGENTIC_PROMPTING_API_KEY", "correct-horse")
    address = serve()
    for key in ("wrong", "correct-horse2", "Bearer"):
        with pytest.raises(openai.AuthenticationError) as caught, client(address, key) as asking:
            asking.chat.completions.create(model="agent", messages=QUESTION)
        assert caught.value.body["code"] == "invalid_api_key"
    with client(address, "correct-horse") as asking:
        assert asking.chat.completions.create(model="agent", messages=QUESTION).choices[0].message.content == "Nairobi"
    with urllib.request.urlopen(f"{address}/health") as response:
        assert response.status == 200
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{address}/metrics")
    assert "correct-horse" not in caplog.text


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org"])
def test_no_key_no_listening_elsewhere(host, monkeypatch):
    monkeypatch.delenv("AGENTIC_PROMPTING_API_KEY", raising=False)
    with pytest.raises(ValueError, match="AGENTIC_PROMPTING_API_KEY"):
        make_app(Service({}, ServeConfig(host=host)))
    monkeypatch.setenv("AGENTIC_PROMPTING_API_KEY", "k")
    assert make_app(Service({}, ServeConfig(host=host)))


def test_the_command_wants_a_key_before_it_loads_anything(monkeypatch, capsys):
    monkeypatch.delenv("AGENTIC_PROMPTING_API_KEY", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "nowhere", "--sandbox", "--host", "0.0.0.0"])
    assert ended.value.code == 2 and "set AGENTIC_PROMPTING_API_KEY" in capsys.readouterr().err


def test_a_body_too_large(serve):
    address = serve(max_body_bytes=2000)
    large = [{"role": "user", "content": "x" * 4000}]
    with pytest.raises(openai.APIStatusError) as caught, client(address) as asking:
        asking.chat.completions.create(model="agent", messages=large)
    assert caught.value.status_code == 413
    # Without a length, in chunks: counted as they come.
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        raw.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        raw.sendall(b"".join(b"400\r\n" + b"x" * 1024 + b"\r\n" for _ in range(4)) + b"0\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 413")
    assert ask(address).choices[0].message.content == "Nairobi"


def test_a_request_that_takes_too_long(serve):
    address = serve(ScriptedChat([reply()], latency=600), timeout=0.3)
    with pytest.raises(openai.APIStatusError) as caught:
        ask(address)
    assert caught.value.status_code == 504


def test_a_request_that_costs_too_much(serve):
    chat = ScriptedChat([reply(0.4)])
    address = serve(chat, turns=ASK, max_cost_usd=1.0)
    with pytest.raises(openai.APIStatusError) as caught:
        ask(address)
    assert caught.value.status_code == 402 and len(chat.calls) == 3, "0.4, 0.8, 1.2: then no more"


def test_too_many_at_once(serve):
    address = serve(ScriptedChat([reply()], latency=0.5), max_concurrency=2)
    with ThreadPoolExecutor(6) as threads:
        outcomes = list(threads.map(lambda _: _status(address), range(6)))
    assert sorted(outcomes) == [200, 200, 429, 429, 429, 429]
    assert _status(address) == 200


def _status(address):
    try:
        ask(address)
    except openai.APIStatusError as error:
        return error.status_code
    return 200


# --- many, and gone --------------------------------------------------------------------------------------------------


def test_200_at_once_share_batches(serve):
    address = serve(ScriptedChat([reply()], latency=0.05), seconds=0.02)

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0, timeout=60) as asking:
            asked = [asking.chat.completions.create(model="agent", messages=QUESTION) for _ in range(200)]
            return await asyncio.gather(*asked)

    answers = asyncio.run(ask_all())
    assert [said.choices[0].message.content for said in answers] == ["Nairobi"] * 200
    batches = serve.service.models["agent"].agent.sampler.batches
    assert sum(batches) == 400 and len(batches) < 100, f"two turns each, many in a batch: {batches}"
    assert metric(serve.service, "requests_total", model="agent", outcome="answered") == 200
    assert metric(serve.service, "requests_in_flight") == 0


def test_the_real_sampler_under_many_threads(tiny_policy):
    """Tokenizer and model are used by many episodes at once; each answers as it does alone."""
    agent = PromptAgent.from_pretrained(tiny_policy)
    alone = [agent.answer_all([QUESTION[0]["content"]], seed=0, progress=False)[0]]
    answers = AgentAnswers(agent)
    works = [answers.start(QUESTION, alone[0].seed, None) for _ in range(60)]
    texts = {json.dumps(work.future.result(timeout=60).trajectory["turns"]) for work in works}
    answers.close()
    assert len(texts) == 1 and json.loads(texts.pop())[0]["text"] == alone[0].turns[0].text


def test_a_client_that_hangs_up_stops_its_episode(serve):
    """The call to the large LLM is cancelled, and nothing more is sampled for it."""
    chat = ScriptedChat([reply()], latency=0.5)
    address = serve(chat)
    with pytest.raises(openai.APITimeoutError):
        ask(address, timeout=0.2)
    deadline = time.monotonic() + 5
    while metric(serve.service, "requests_in_flight") and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.6)  # the reply would be there by now
    assert serve.service.models["agent"].agent.sampler.batches == [1], "the second turn was never sampled"
    assert metric(serve.service, "requests_total", model="agent", outcome="499") == 1
    assert ask(address).choices[0].message.content == "Nairobi"


def test_a_cancelled_request_leaves_the_samplers_queue():
    started, go_on, sampled = threading.Event(), threading.Event(), []

    def sampler(requests):
        started.set()
        go_on.wait(10)
        sampled.extend(request.seed for request in requests)
        return [f"sample {request.seed}" for request in requests]

    shared = SharedSampler(sampler, linger=0)
    first = shared.submit(SampleRequest([1], 1, seed=1))
    started.wait(10)
    second, third = (shared.submit(SampleRequest([1], 1, seed=seed)) for seed in (2, 3))
    second.cancel()
    go_on.set()
    assert first.result(10) == "sample 1" and third.result(10) == "sample 3"
    shared.close()
    shared.close()
    assert sampled == [1, 3]
