"""The service, asked with the real `openai` client over loopback: answers, failures, limits,
cancellation, crowds.
"""

import asyncio
import itertools
import json
import logging
import math
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from urllib.parse import urlsplit

import openai
import psutil
import pytest

from agentic_prompting import LLMEnvironment
from agentic_prompting.agent import PromptAgent
from agentic_prompting.cli import main
from agentic_prompting.environments import Worker, Workers
from agentic_prompting.llm import (
    BudgetExceeded,
    OpenAIChat,
    RateLimited,
    Reply,
    ScriptedChat,
    ServerFailed,
    TimedOut,
    Usage,
    as_chat,
    loop as loop_module,
)
from agentic_prompting.llm.loop import run, start
from agentic_prompting.programs import ChatCompletions
from agentic_prompting.refine import ProRefiner, RefinedChat
from agentic_prompting.rollout import AgentSpec, BatchEngine, Limits, Sample
from agentic_prompting.serve import (
    AgentAnswers,
    ChatAnswers,
    ServeConfig,
    Server,
    Service,
    make_app,
    run_service,
    server as server_module,
)
from agentic_prompting.serve.answering import conversation
from agentic_prompting.serve.requests import read_answer_request
from support import servers
from support.base_exceptions import KINDS, raising
from support.hang_ups import hang_up
from support.marks import LONG
from support.policies import make_conductor_policy
from support.servers import LoopbackServer
from support.serving import ASK, running, scripted_agent, service_of

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
        completion = asking.chat.completions.create(model="agent", messages=QUESTION, **options)
        return list(completion) if options.get("stream") else completion


def metric(service, name, **labels):
    return service.metrics.registry.get_sample_value(f"agentic_prompting_{name}", labels)


# --- answers --------------------------------------------------------------------------------------


def test_an_answer(serve):
    address = serve()
    with client(address) as asking:
        assert [model.id for model in asking.models.list()] == ["agent"]
    completion = ask(address)
    assert completion.choices[0].message.content == "Nairobi"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.model == "agent"
    assert (
        completion.usage.total_tokens
        == completion.usage.prompt_tokens + completion.usage.completion_tokens
    )
    assert not hasattr(completion, "trajectory"), "only on request"


def test_the_trajectory_on_request(serve):
    completion = ask(serve(), extra_body={"trajectory": True})
    assert [turn["kind"] for turn in completion.trajectory["turns"]] == ["act", "answer"]
    assert completion.trajectory["observations"][0]["text"] == "the answer is Nairobi ."
    assert completion.trajectory["cost_usd"] == 0.25


def test_fields_of_a_row_reach_the_environment(tiny_policy):
    class Notes:
        def step(self, rollout):
            return f"the answer is {rollout.row['Text']} ."

    agent = scripted_agent(tiny_policy, ScriptedChat([reply()]))
    agent.environment = Notes()
    columns = {"question": "Frage", "context": "Text", "answers": "Antwort", "files": "Dateien"}
    agent.spec = replace(agent.spec, columns=columns)
    with running(service_of(agent)) as address:
        for name in ("context", "Text"):
            body = {"row": {name: "Lima"}, "trajectory": True}
            completion = ask(address, extra_body=body)
            assert completion.trajectory["observations"][0]["text"] == "the answer is Lima ."
        # The question is a message; truth and files are not for clients.
        for row in ({"Frage": "q"}, {"Antwort": "a"}, {"Dateien": "/etc"}, {"note": 1}, [1]):
            with pytest.raises(openai.BadRequestError) as refused:
                ask(address, extra_body={"row": row})
            assert refused.value.param == "row"
        # All formats have the field.
        with client(address) as asking:
            body = {"row": {"note": "Lima"}}
            with pytest.raises(openai.BadRequestError):
                asking.responses.create(model="agent", input="what ?", extra_body=body)


def test_an_agent_without_columns_takes_no_row(serve):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(serve(), extra_body={"row": {"context": "x"}})
    assert "--columns context=context" in str(refused.value)
    with pytest.raises(openai.BadRequestError) as refused:
        ask(serve(), extra_body={"row": {"answers": "x"}})
    assert "--columns" not in str(refused.value)
    assert ask(serve(), extra_body={"row": None}).choices[0].message.content == "Nairobi"


def test_an_environment_begins_each_episode(tiny_policy):
    """As in training: an instance of its own, and what it says first is in the prompt."""

    class Game:
        async def reset(self, row):
            (message,) = row["prompt"]
            return {
                **row,
                "prompt": [{**message, "content": "the game begins ."}],
                "capital": "Lima",
            }

        def step(self, rollout):
            return f"the answer is {rollout.row['capital']} ."

    agent = scripted_agent(tiny_policy, ScriptedChat([reply()]))
    agent.environment = Game()
    found = start(AgentAnswers(agent)(QUESTION, 0, None)).result(60).trajectory
    assert found["observations"][0]["text"] == "the answer is Lima ."


def test_streaming(serve):
    chunks = ask(
        serve(),
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"trajectory": True},
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Nairobi" and chunks[-1].usage.completion_tokens > 0
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-2].trajectory["status"] == "answered"


def test_the_same_seed_is_the_same_episode(serve):
    chat = ScriptedChat([reply()])
    address = serve(chat)
    seeds = [
        ask(address, seed=seed, extra_body={"trajectory": True}).trajectory["seed"]
        for seed in (5, 5)
    ]
    others = [ask(address, extra_body={"trajectory": True}).trajectory["seed"] for _ in range(2)]
    assert seeds == [5, 5] and others[0] != others[1]


def test_an_agent_without_an_answer_refuses(serve):
    """Its own failing: no error, and no text that could be taken for an answer."""
    address = serve(turns="done")
    choice = ask(address).choices[0]
    assert choice.message.content is None and "malformed" in choice.message.refusal
    deltas = [chunk.choices[0].delta for chunk in ask(address, stream=True) if chunk.choices]
    assert any(delta.refusal for delta in deltas) and not any(delta.content for delta in deltas)
    assert metric(serve.service, "requests_total", model="agent", outcome="no_answer") == 2


def test_a_conversation_goes_on_after_a_reply_without_an_answer(serve):
    """A client sends our own reply back, whose content is `null`: it got a 400, and so did every
    later question.
    """
    address = serve(turns="no tags at all")
    with client(address) as asking:
        message = (
            asking.chat.completions.create(model="agent", messages=QUESTION).choices[0].message
        )
        history = [*QUESTION, message.model_dump(), *QUESTION]
        assert (
            asking.chat.completions.create(model="agent", messages=history)
            .choices[0]
            .message.refusal
        )
    body = {"model": "agent", "messages": history}
    read = read_answer_request(json.dumps(body).encode(), ChatCompletions(), "")
    refused = read.messages[1]
    assert refused == {"role": "assistant", "content": message.refusal}
    assert "malformed" in message.refusal


def test_a_token_limit_ends_the_episode(serve):
    completion = ask(serve(), max_completion_tokens=16, extra_body={"trajectory": True})
    assert completion.choices[0].finish_reason == "length"
    assert completion.choices[0].message.content is None


def test_what_the_agent_is_shown():
    spec = AgentSpec("Q: {question}", system_prompt="Evolved.", limits=Limits())
    expected_messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a {question}"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert conversation(spec, expected_messages) == [
        {"role": "system", "content": "Evolved.\n\nBe kind."},
        {"role": "user", "content": "a {question}"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "Q: c"},
    ]
    assert conversation(AgentSpec(), expected_messages[-1:]) == expected_messages[-1:]


@pytest.mark.parametrize(
    "spec",
    [AgentSpec(system_prompt="Evolved.\n\nMore."), AgentSpec("Evolved.\n\nMore.\n\nQ: {question}")],
    ids=["prompt_place=system", "prompt_place=user"],
)
def test_an_evolved_prompt_is_said_once_above_the_clients(spec):
    """Also to a client that sends it, as it is in `system_prompt.txt`, or the question in the
    agent's template.
    """
    asked = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "c"}]
    shown = conversation(spec, asked)
    sent = {"role": "system", "content": "Evolved.\n\nMore.\n"}
    assert conversation(spec, [sent, *asked]) == shown
    assert conversation(spec, shown[:-1] + asked[1:]) == shown or spec.system_prompt
    assert (
        conversation(spec, [asked[0], {"role": "user", "content": shown[-1]["content"]}]) == shown
    )
    words = "\n\n".join(message["content"] for message in shown)
    assert words.count("Evolved.") == 1 and words.count("Be kind.") == 1
    almost = {"role": "system", "content": "Evolved"}
    assert "Evolved\n\nBe kind." in conversation(spec, [almost, *asked])[0]["content"], (
        "another text is the client's"
    )


def test_temperature_zero_is_greedy(tiny_policy):
    """Whatever the seed; and `--greedy` is it for all."""
    for limits, asked in (
        ({}, {"temperature": 0}),
        ({"greedy": True}, {}),
        ({"greedy": True}, {"temperature": 0.7}),
    ):
        service = service_of(PromptAgent.from_pretrained(tiny_policy), **limits)
        with running(service) as address:
            said = [
                ask(
                    address, seed=seed, max_tokens=12, extra_body={"trajectory": True}, **asked
                ).trajectory["turns"]
                for seed in range(4)
            ]
        assert all(turns == said[0] for turns in said)


def test_what_is_ignored_is_named(serve):
    address = serve()
    with client(address) as asking:
        for options in ({}, {"stream": True}):
            raw = asking.chat.completions.with_raw_response.create(
                model="agent",
                messages=QUESTION,
                temperature=0.7,
                top_p=0.5,
                user="me",
                stop=None,
                extra_body={"x\r\ny": 1, "é": 1},
                **options,
            )
            assert raw.headers["X-Ignored-Parameters"] == "temperature, top_p, user"
        raw = asking.chat.completions.with_raw_response.create(
            model="agent", messages=QUESTION, temperature=0, tools=[]
        )
        assert "X-Ignored-Parameters" not in raw.headers


def test_any_chat_model_can_be_served():
    """ProRefine's `RefinedChat` is one."""
    service = Service(
        {"prorefine": ChatAnswers(ScriptedChat([Reply("fine"), RateLimited("slow")]))},
        ServeConfig(),
    )
    with running(service) as address, client(address) as asking:
        completion = asking.chat.completions.create(model="prorefine", messages=QUESTION)
        assert completion.choices[0].message.content == "fine"
        with pytest.raises(openai.APIStatusError) as caught:
            asking.chat.completions.create(model="prorefine", messages=QUESTION)
        assert caught.value.status_code == 503


# --- failures -------------------------------------------------------------------------------------


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
        assert "secret-host" not in str(caught.value.body), (
            "where the large LLM is, is nobody's business"
        )
    assert metric(serve.service, "environment_errors_total", model="agent", kind=error.kind) == 2


def test_a_broken_sampler_is_an_error_and_the_next_request_works(serve):
    address = serve()
    policy = serve.service.models["agent"].agent.policy
    real = policy.sampler
    policy.sampler = lambda requests: 1 / 0
    with pytest.raises(openai.InternalServerError) as caught:
        ask(address)
    assert caught.value.status_code == 503 and "ZeroDivisionError" in str(caught.value.body)
    policy.sampler = real
    assert ask(address).choices[0].message.content == "Nairobi"


@pytest.mark.parametrize("model", ["agent", "prorefine"])
@pytest.mark.parametrize("endpoint", ["down", "failing"])
def test_an_outage_does_not_say_where_the_large_llm_is(tiny_policy, endpoint, model):
    """Its host and port were in the message that the client got."""
    with LoopbackServer(lambda request, number: servers.Answer("it broke", status=500)) as server:
        url = servers.unused_url() if endpoint == "down" else server.base_url
        chat = OpenAIChat("m", url, max_retries=0, patience=0.1)
        agent = AgentAnswers(scripted_agent(tiny_policy, chat))
        refined = ChatAnswers(RefinedChat(ProRefiner(chat, chat, chat)))
        service = Service({"agent": agent, "prorefine": refined}, ServeConfig())
        with (
            running(service) as address,
            client(address) as asking,
            pytest.raises(openai.APIStatusError) as caught,
        ):
            asking.chat.completions.create(model=model, messages=QUESTION)
    body = str(caught.value.body)
    assert caught.value.status_code == (503 if endpoint == "down" else 502)
    assert "127.0.0.1" not in body and url.split(":")[2].split("/")[0] not in body
    assert ("no connection" if endpoint == "down" else "it broke") in body


@pytest.mark.parametrize("kind", KINDS.values())
def test_an_environment_that_exits_fails_its_request_alone(serve, kind):
    address = serve(as_chat(raising(kind, is_async=True)), timeout=10)
    with pytest.raises(openai.APIStatusError) as caught:
        ask(address)
    assert caught.value.status_code == 502 and kind.__name__ in str(caught.value.body)
    serve.service.models["agent"].agent.environment.chat = ScriptedChat([reply()])
    assert ask(address).choices[0].message.content == "Nairobi"


def test_an_error_in_the_operators_code_is_told_to_the_log_alone(serve, caplog):
    def broken(messages):
        raise KeyError("private detail")

    address = serve(as_chat(broken), timeout=10)
    with pytest.raises(openai.APIStatusError) as caught:
        ask(address)
    body = str(caught.value.body)
    assert caught.value.status_code == 502 and "KeyError" in body
    assert ".py" not in body and "private detail" not in body
    assert "private detail" in caplog.text and __file__ in caplog.text


def test_health_is_red_once_the_event_loop_has_ended(serve, monkeypatch):
    monkeypatch.setattr(loop_module, "_current", None)
    address = serve()
    assert ask(address).choices[0].message.content == "Nairobi"
    with urllib.request.urlopen(f"{address}/health") as response:
        assert response.status == 200
    start(stops_its_loop()).result(10)
    loop_module._current.thread.join(10)
    with pytest.raises(urllib.error.HTTPError) as red:
        urllib.request.urlopen(f"{address}/health")
    assert red.value.code == 503
    with pytest.raises(openai.APIStatusError) as caught:
        ask(address)
    assert caught.value.status_code == 503


async def stops_its_loop():
    loop = asyncio.get_running_loop()
    loop.call_later(0.1, loop.stop)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, "messages"),
        ({"model": "agent"}, 400, "messages"),
        ({"model": "agent", "messages": []}, 400, "messages"),
        ({"model": "agent", "messages": [{"role": "assistant", "content": "x"}]}, 400, "messages"),
        ({"model": "agent", "messages": QUESTION, "n": 2}, 400, "n"),
        ({"model": "gpt-4o", "messages": QUESTION}, 404, "model"),
        ({"model": "agent", "messages": QUESTION, "temperature": -1}, 400, "temperature"),
        ({"model": "agent", "messages": QUESTION, "tools": [{"type": "function"}]}, 400, "tools"),
        ({"model": "agent", "messages": QUESTION, "functions": [{"name": "f"}]}, 400, "functions"),
        ({"model": "agent", "messages": QUESTION, "logprobs": True}, 400, "logprobs"),
        (
            {"model": "agent", "messages": QUESTION, "response_format": {"type": "json_object"}},
            400,
            "response_format",
        ),
        (
            {"model": "agent", "messages": [{"role": "user", "content": "half \ud800 ?"}]},
            400,
            "messages",
        ),
        ({"model": "agent\udfff", "messages": QUESTION}, 404, "model"),
    ],
)
def test_bad_requests_are_told_in_openais_form(serve, body, status, param):
    got, said = post(serve(), body)
    assert got == status
    assert said["error"]["param"] == param
    assert said["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "more",
    [
        {"trajectory": None},
        {
            "stream": None,
            "stream_options": None,
            "stop": None,
            "n": None,
            "tools": None,
            "seed": None,
            "max_tokens": None,
        },
        {"stream_options": {"include_usage": None}},
        {
            "response_format": {"type": "text"},
            "logprobs": None,
            "functions": None,
            "temperature": None,
        },
    ],
)
def test_a_field_that_is_null_is_not_given(serve, more):
    messages = [{**QUESTION[0], "name": None}]
    status, said = post(serve(), {"model": "agent", "messages": messages, **more})
    assert status == 200 and said["choices"][0]["message"]["content"] == "Nairobi"
    assert "trajectory" not in said


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "agent", "messages": ['
        + b'{"role":"user","content":"a"},' * 30_000
        + b'{"role":"user","content":"b"}]}',
        b'{"model": "agent", "messages": [{"role":"user","content":['
        + b'{"type":"text","text":""},' * 30_000
        + b"{}]}]}",
        b'{"model": "agent", "x": [' + b"[]," * 300_000 + b"[]]}",
        b"[" * 100_000,
        b'{"model": "agent", "x": ' + b"[" * 1000 + b"]" * 1000 + b"}",
    ],
    ids=["messages", "parts", "lists", "deep", "deeper"],
)
def test_a_request_of_too_many_parts_is_refused(serve, body):
    status, said = post(serve(), body)
    assert status == 400
    assert said["error"]["type"] == "invalid_request_error"
    assert len(said["error"]["message"]) < 500
    assert said["error"]["code"] != "context_length_exceeded", "before it is rendered"


def test_long_requests_are_read_beside_the_loop(serve, monkeypatch):
    """The loop that serves all clients is not held by one of them."""
    threads = []
    read_request = ChatCompletions.read_request

    def watched(self, body, path=""):
        threads.append(threading.current_thread().name)
        return read_request(self, body, path)

    monkeypatch.setattr(ChatCompletions, "read_request", watched)
    address = serve()
    for length in (10, 200_000):
        post(address, {"model": "agent", "messages": [{"role": "user", "content": "a " * length}]})
    short, long = threads
    assert short != long and "requests" in long


def test_refused_requests_are_counted(serve, monkeypatch):
    address = serve(max_body_bytes=2000)
    question = {"model": "agent", "messages": QUESTION}
    post(address, b"no JSON")
    post(address, {**question, "model": "other"})
    post(address, {**question, "user": "x" * 3000})
    post(address, question, {"Host": "evil.example"}.items())
    post(address, question)
    counted = {
        status: metric(serve.service, "requests_total", model="", outcome=status)
        for status in ("400", "404", "413", "403")
    }
    assert counted == {"400": 1, "404": 1, "413": 1, "403": 1}
    assert metric(serve.service, "requests_total", model="agent", outcome="answered") == 1


def post(address, body, headers=()):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **dict(headers)}
    request = urllib.request.Request(f"{address}/v1/chat/completions", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_half_a_surrogate_pair_in_a_part_is_the_clients_mistake(serve, caplog):
    part = {"type": "text", "text": "half \ud800 ?"}
    status, said = post(
        serve(), {"model": "agent", "messages": [{"role": "user", "content": [part]}]}
    )
    assert status == 400 and "surrogate" in said["error"]["message"] and not caplog.records


def test_a_prompt_that_does_not_fit_is_refused_at_once(serve):
    address = serve()
    agent = serve.service.models["agent"].agent
    long = [{"role": "user", "content": "Kenya " * 3000}]
    status, said = post(address, {"model": "agent", "messages": long})
    assert status == 400
    assert said["error"]["code"] == "context_length_exceeded"
    assert said["error"]["param"] == "messages"
    assert "1024" in said["error"]["message"] and "3" in said["error"]["message"]
    assert agent.policy.sampler.batches == [], "nothing was read"
    assert ask(address).choices[0].message.content == "Nairobi"


def test_an_agent_reads_as_far_as_its_model(tiny_policy):
    """As in training: a prompt that leaves no room ends as `truncated`, as one of the spec's own
    does.
    """
    agent = scripted_agent(tiny_policy, ScriptedChat([reply()]))
    assert agent.limits.max_context == 1024 and agent.spec.limits.max_context is None
    rollout, fits = agent.answer_all(["Kenya " * 3000, "Kenya ?"], progress=False)
    assert rollout.status == "truncated" and not rollout.ids and fits.answer == "Nairobi"
    narrow = PromptAgent.from_pretrained(
        tiny_policy, spec=AgentSpec(limits=Limits(max_context=100))
    )
    assert narrow.limits.max_context == 100


# --- limits ---------------------------------------------------------------------------------------


def test_a_key_is_needed_where_one_is_set(serve, monkeypatch, caplog):
    monkeypatch.setenv("AGENTIC_PROMPTING_API_KEY", "correct-horse")
    address = serve()
    for key in ("wrong", "correct-horse2", "Bearer"):
        with pytest.raises(openai.AuthenticationError) as caught, client(address, key) as asking:
            asking.chat.completions.create(model="agent", messages=QUESTION)
        assert caught.value.body["code"] == "invalid_api_key"
    with client(address, "correct-horse") as asking:
        assert (
            asking.chat.completions.create(model="agent", messages=QUESTION)
            .choices[0]
            .message.content
            == "Nairobi"
        )
    with urllib.request.urlopen(f"{address}/health") as response:
        assert response.status == 200
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{address}/metrics")
    assert "correct-horse" not in caplog.text


@pytest.mark.parametrize("name", ["timeout", "max_cost_usd", "max_concurrency"])
@pytest.mark.parametrize("value", [0, math.nan])
def test_every_limit_is_a_positive_number(name, value):
    with pytest.raises(ValueError, match="positive"):
        ServeConfig(**{name: value})


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


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:8080"}, 403),
        ({"Host": "192.168.1.4"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "["}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:8080", "Origin": "http://localhost:3000"}, 200),
        ({"Host": "LOCALHOST"}, 200),
        ({"Host": "[::1]:8080"}, 200),
        ({}, 200),
    ],
    ids=str,
)
def test_no_web_page_spends_the_money_of_a_service_without_a_key(
    serve, monkeypatch, headers, status
):
    """Its name may lead to this machine, but it is its name."""
    address = serve(ScriptedChat([reply()]))
    got, said = post(address, {"model": "agent", "messages": QUESTION}, headers.items())
    assert got == status and (status == 200 or said["error"]["code"] == "host_not_allowed")
    monkeypatch.setenv("AGENTIC_PROMPTING_API_KEY", "k")
    key = {"Authorization": "Bearer k"}
    assert (
        post(serve(), {"model": "agent", "messages": QUESTION}, {**key, **headers}.items())[0]
        == 200
    )


def test_a_body_that_does_not_come(serve):
    """The time for a request begins with its head."""
    address = serve(timeout=0.4)
    with connection_to(address) as raw:
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
            "application/json\r\n"
        )
        raw.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        said = b"".join(
            iter(lambda: raw.recv(4096), b"")
        )  # to the end: the connection is closed, too
    assert said.startswith(b"HTTP/1.1 408") and b'"invalid_request_error"' in said


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/chat", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea"]
)
def test_a_connection_that_asks_for_nothing_is_closed(serve, monkeypatch, sent):
    monkeypatch.setattr("agentic_prompting.serve.server._HEAD_SECONDS", 0.3)
    with connection_to(serve()) as raw:
        raw.sendall(sent)
        said = b"".join(iter(lambda: raw.recv(4096), b""))
    assert said.startswith(b"HTTP/1.1 200") == sent.startswith(b"GET")


def test_connections_are_bounded(serve, monkeypatch):
    monkeypatch.setattr("agentic_prompting.serve.server._SPARE_CONNECTIONS", 1)
    address = serve(max_concurrency=2)
    with ExitStack() as stack:
        idle = [stack.enter_context(connection_to(address)) for _ in range(3)]
        idle[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle[-1].recv(4096).startswith(b"HTTP/1.1 200")
        with connection_to(address) as one_more:
            assert not received(one_more)
    assert _status_soon(address) == 200, "places are free again"


def connection_to(address):
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def received(connection):
    try:
        return connection.recv(4096)
    except ConnectionResetError:
        return b""


def _status_soon(address):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            return _status(address)
        except openai.APIConnectionError:
            time.sleep(0.05)
    return None


def test_what_is_on_its_way_when_the_service_stops_gets_a_503(serve, monkeypatch, capfd):
    monkeypatch.setattr("agentic_prompting.serve.server._GRACE_SECONDS", 1)
    chat = ScriptedChat([reply()], latency=60)
    address = serve(chat)
    with ThreadPoolExecutor(2) as threads:
        futures = [
            threads.submit(post, address, {"model": "agent", "messages": QUESTION, "stream": s})
            for s in (0, 1)
        ]
        deadline = time.monotonic() + 10
        while len(chat.calls) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        serve.service.server.stop()  # as SIGTERM does
        results = [future.result(timeout=30) for future in futures]
    assert [status for status, _ in results] == [503, 503]
    assert {said["error"]["code"] for _, said in results} == {"shutting_down"}
    assert "Traceback" not in capfd.readouterr().err


def test_a_body_too_large(serve):
    address = serve(max_body_bytes=2000)
    large = [{"role": "user", "content": "x" * 4000}]
    with pytest.raises(openai.APIStatusError) as caught, client(address) as asking:
        asking.chat.completions.create(model="agent", messages=large)
    assert caught.value.status_code == 413
    # Without a length, in chunks: counted as they come.
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
            "application/json\r\n"
        )
        raw.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        raw.sendall(b"".join(b"400\r\n" + b"x" * 1024 + b"\r\n" for _ in range(4)) + b"0\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 413")
    assert ask(address).choices[0].message.content == "Nairobi"


def test_a_taken_port_is_found_before_the_model_is_loaded(tiny_policy, monkeypatch, capsys):
    monkeypatch.setattr(
        "agentic_prompting.PromptAgent.from_pretrained",
        lambda *_, **__: pytest.fail("it was loaded"),
    )
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as ended:
        port = str(taken.getsockname()[1])
        main(["serve", str(tiny_policy), "--sandbox", "--port", port])
    err = capsys.readouterr().err
    assert (ended.value.code, err.count("\n")) == (2, 1)
    assert f"cannot listen on 127.0.0.1, port {port} (Address already in use)" in err


def test_the_address_is_printed_once_it_is_listened_on(monkeypatch, capsys):
    """It was printed before: also where the port was taken, and port 0 as 0."""
    servers = []
    monkeypatch.setattr(
        server_module, "Server", lambda *given: servers.append(Server(*given)) or servers[-1]
    )
    monkeypatch.setattr(
        "agentic_prompting.serve.app.requests_log.handlers", [logging.NullHandler()]
    )
    answers = {"one": ChatAnswers(ScriptedChat(["yes"]))}
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit):
        run_service(Service(answers, ServeConfig(port=taken.getsockname()[1])))
    assert capsys.readouterr().out == ""
    served = threading.Thread(target=run_service, args=[Service(answers, ServeConfig(port=0))])
    out = ""
    served.start()
    try:
        deadline = time.monotonic() + 30
        while not out and time.monotonic() < deadline:
            time.sleep(0.01)
            out = capsys.readouterr().out
        port = re.fullmatch(r"http://127.0.0.1:(\d+)/v1  models: one  \(Ctrl-C stops\)\n", out)[1]
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/health").status == 200
    finally:
        servers[-1].stop()
        served.join(15)


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


def test_a_refinement_that_costs_too_much():
    """Its calls are counted together, and no further one is made."""
    said = f"Wrong. {NEW_PROMPT}"
    chat = ScriptedChat([Reply(said, finish_reason="length", usage=Usage(1, 1, 0.4))])
    service = Service(
        {"prorefine": ChatAnswers(RefinedChat(ProRefiner(chat, chat, chat)), 1.0)}, ServeConfig()
    )
    with running(service) as address, client(address) as asking:
        with pytest.raises(openai.APIStatusError) as caught:
            asking.chat.completions.create(model="prorefine", messages=QUESTION)
        assert caught.value.status_code == 402 and len(chat.calls) == 3, (
            "0.4, 0.8, 1.2: then no more"
        )
        chat.script = ["Correct."]
        said = asking.chat.completions.create(model="prorefine", messages=QUESTION)
        assert said.choices[0].message.content == "Correct.", (
            "the next request has a limit of its own"
        )


def test_an_answer_that_exists_when_the_money_is_spent_is_returned():
    """As the page on serving says; it was paid for, and the client got a 402."""
    chat = ScriptedChat(
        [Reply("Correct.", usage=Usage(1, 1, 0.4)), Reply(NEW_PROMPT, usage=Usage(1, 1, 0.4))]
    )
    answer = run(ChatAnswers(RefinedChat(ProRefiner(chat, chat, chat)), 0.5)(QUESTION, 0, None))
    assert (answer.text, answer.error, len(chat.calls)) == ("Correct.", None, 2), (
        "the optimizer is not asked any more"
    )


@pytest.mark.parametrize("judge", [None, lambda query, answer: answer == "Correct."])
def test_a_refiner_is_served_as_it_is_without_a_model_as_verifier(judge):
    """Each request paid for a first answer that nothing judged, and a verifier that is a function
    was never asked.
    """
    chat = ScriptedChat(["Correct."])
    answer = run(
        ChatAnswers(RefinedChat(ProRefiner(chat, chat, chat, judge)), 1.0)(QUESTION, 0, None)
    )
    served = len(chat.calls)
    assert (
        answer.text
        == "Correct."
        == run(RefinedChat(ProRefiner(chat, chat, chat, judge))(QUESTION)).text
    )
    assert served == len(chat.calls) - served == (1 if judge else 3), (
        "a first answer; or task, critic, optimizer"
    )


NEW_PROMPT = "<IMPROVED_PROMPT>Think.</IMPROVED_PROMPT>"


def test_every_role_is_charged(tiny_policy, monkeypatch):
    """One budget for the agent's environment and ProRefine's four models, each with an account of
    its own.
    """
    roles = ("environment", "task", "feedback", "optimizer", "verifier")
    price = (10 * 0.15 + 5 * 0.60) / 1e6  # of a call of gpt-4o-mini
    errors = []
    spent = {}

    def serve_two(service):
        agent = service.models["agent"]
        agent.agent.policy = scripted_agent(tiny_policy, ScriptedChat([])).policy
        for model in ("prorefine", "agent"):
            errors.append(start(service.models[model](QUESTION, 0, None)).result(60).error)
        spent.update({role: metric(service, "spent_usd", role=role) for role in roles})

    monkeypatch.setattr("agentic_prompting.serve.run_service", serve_two)
    with LoopbackServer(lambda request, number: f"Wrong {number}. {NEW_PROMPT}") as server:
        url = ["--environment-model", "gpt-4o-mini", "--environment-base-url", server.base_url]
        with pytest.raises(SystemExit) as ended:
            main(
                [
                    "serve",
                    str(tiny_policy),
                    *url,
                    "--refine",
                    "--budget-usd",
                    f"{6.5 * price:.8f}",
                    "--port",
                    "0",
                ]
            )
    assert ended.value.code == 0
    assert errors[0] is None and isinstance(errors[1], BudgetExceeded), (
        "nothing is left for the agent"
    )
    assert all(spent.values()) and sum(spent.values()) == pytest.approx(7 * price), spent


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


# --- many, and gone -------------------------------------------------------------------------------


def test_200_at_once_share_batches(serve):
    address = serve(ScriptedChat([reply()], latency=0.05), seconds=0.02)

    async def ask_all():
        async with openai.AsyncOpenAI(
            base_url=f"{address}/v1", api_key="x", max_retries=0, timeout=60
        ) as asking:
            pending = [
                asking.chat.completions.create(model="agent", messages=QUESTION) for _ in range(200)
            ]
            return await asyncio.gather(*pending)

    answers = asyncio.run(ask_all())
    assert [said.choices[0].message.content for said in answers] == ["Nairobi"] * 200
    batches = serve.service.models["agent"].agent.policy.sampler.batches
    assert sum(batches) == 400 and len(batches) < 100, f"two turns each, many in a batch: {batches}"
    assert metric(serve.service, "requests_total", model="agent", outcome="answered") == 200
    assert metric(serve.service, "requests_in_flight") == 0


def test_the_real_policy_with_many_episodes(tiny_policy):
    """Tokenizer and model are used by many episodes at once; each answers as it does alone."""
    agent = PromptAgent.from_pretrained(tiny_policy)
    alone = agent.answer_all([QUESTION[0]["content"]], seed=0, progress=False)[0]
    answers = AgentAnswers(agent)
    works = [start(answers(QUESTION, alone.seed, None)) for _ in range(60)]
    texts = {json.dumps(work.result(timeout=60).trajectory["turns"]) for work in works}
    assert len(texts) == 1 and json.loads(texts.pop())[0]["text"] == alone.turns[0].text


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
    assert serve.service.models["agent"].agent.policy.sampler.batches == [1], (
        "the second turn was never sampled"
    )
    assert metric(serve.service, "requests_total", model="agent", outcome="499") == 1
    assert ask(address).choices[0].message.content == "Nairobi"


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_hang_up_leave_no_traceback(stream, caplog):
    """Whether the request is complete, cut off or broken, and before or during the reply (0.1 s)."""
    service = Service(
        {"agent": ChatAnswers(ScriptedChat(["yes " * 50_000] * 100, latency=0.1))}, ServeConfig()
    )
    start = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        "Content-Type: application/json\r\n"
    )
    body = json.dumps({"model": "agent", "messages": QUESTION, "stream": stream})
    requests = {
        "complete": f"{start}Content-Length: {len(body)}\r\n\r\n{body}",
        "cut off": f"{start}Content-Length: 10000\r\n\r\n{body}",
        "a broken chunk": f"{start}Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        "no HTTP": "\x16\x03\x01 no HTTP\r\n\r\n",
    }
    ways = itertools.product(requests.values(), (0, 0.05, 0.2), (False, True))
    with running(service) as address:
        server = urlsplit(address)
        for request, seconds, with_reset in ways:
            hang_up(server.hostname, server.port, request.encode(), seconds, with_reset)
        time.sleep(0.3)
        assert urllib.request.urlopen(f"{address}/health").status == 200
    assert not [
        record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR
    ]


def test_a_cancelled_request_leaves_the_engine(tiny_policy):
    """Nothing more is sampled of a turn that nobody waits for: the next request has the model to
    itself.
    """
    agent = PromptAgent.from_pretrained(
        tiny_policy, LLMEnvironment(chat := ScriptedChat([reply()]))
    )
    agent.policy.end.end_ids = (10**9,)  # a turn that would go on to its limit
    agent.limits = replace(agent.limits, max_turn_tokens=900)
    step = agent.policy.step
    rows = []
    started = threading.Event()

    def watched(arrived):
        step(arrived)
        rows.append(len(agent.policy.rows))
        started.set()

    agent.policy.step = watched
    answers = AgentAnswers(agent)
    left = start(answers(QUESTION, 0, None))
    started.wait(10)
    left.cancel()
    assert start(answers(QUESTION, 1, 5)).result(60).finish_reason == "length"
    assert left.cancelled() and len(rows) < 800 and max(rows) == 1 and chat.calls == []


@pytest.mark.parametrize("requests", [300, pytest.param(5000, marks=LONG)])
@pytest.mark.timeout(1800)
def test_what_is_kept_of_conversations_does_not_grow_with_requests(tiny_policy, requests):
    """Nothing is kept of a conversation that has ended: the service's memory is flat, whatever the
    bound.
    """
    agent = PromptAgent.from_pretrained(
        tiny_policy, LLMEnvironment(ScriptedChat([reply()] * (8 * requests)))
    )
    answers = AgentAnswers(agent)
    kept = []
    resident_mb = []

    async def some(first):
        await asyncio.gather(
            *(answers(QUESTION, seed=first + i, max_tokens=None) for i in range(20))
        )

    for first in range(0, requests, 20):
        start(some(first)).result(60)
        kept.append(agent.policy.cached_bytes)
        resident_mb.append(psutil.Process().memory_info().rss / 1e6)
    assert len(agent.policy._ended_conversations) <= 20 and max(kept[1:]) <= 2 * max(kept[:3]), kept
    assert resident_mb[-1] - resident_mb[len(resident_mb) // 2] < 20, resident_mb[::10]
    start(some(requests + 1000)).result(60)
    assert len(agent.policy.prefix_cache) <= 20


def test_the_commands_bound_on_kept_conversations(monkeypatch, tiny_policy, tmp_path):
    from agentic_prompting import serve as served
    from agentic_prompting.cli.serve import free_for_cache_mb

    given = []
    monkeypatch.setattr(served, "run_service", lambda service: None)
    loading = PromptAgent.from_pretrained
    monkeypatch.setattr(
        PromptAgent,
        "from_pretrained",
        lambda *a, **options: given.append(options["prefix_cache_mb"]) or loading(*a, **options),
    )
    for extra in ([], ["--prefix-cache-mb", "12.5"]):
        with pytest.raises(SystemExit) as stopped:
            main(["serve", str(tiny_policy), "--sandbox", "--port", "0", *extra])
        assert stopped.value.code == 0
    assert given[1] == 12.5 and 0 < given[0] <= psutil.virtual_memory().total / 4e6
    assert free_for_cache_mb(tmp_path) > 0


def test_each_request_is_a_line_in_the_log(serve, caplog):
    """Which model, how it ended, what it took; no question, no key."""
    caplog.set_level("INFO", "agentic_prompting.serve")
    address = serve()
    ask(address)
    ask(address, stream=True)
    with pytest.raises(openai.NotFoundError), client(address) as asking:
        asking.chat.completions.create(model="nobody", messages=QUESTION)
    with urllib.request.urlopen(f"{address}/health"):
        pass
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("agentic_prompting.serve")
    ]
    assert len(lines) == 3, lines  # health checks are none
    assert re.fullmatch(
        r"POST /v1/chat/completions 200 \d+\.\d\d s, agent answered, 2 turns, \$0\.2500", lines[0]
    )
    assert lines[1].endswith(", agent answered, 2 turns, $0.2500")
    assert re.fullmatch(r"POST /v1/chat/completions 404 \d+\.\d\d s", lines[2])
    assert not any("Kenya" in line for line in lines)


# --- progress -------------------------------------------------------------------------------------

TWO_ASKS = '<think> both </think> <ask to="facts">capital</ask> <ask to="forms">form #1</ask>'
ANSWER = "<think> done </think> <answer>#1</answer>"


class Conductor:
    """A sampler that asks two workers in its first turn, and answers with the first reply."""

    def __init__(self, chat_format):
        self.format = chat_format

    def __call__(self, requests):
        texts = [self.format.tokenizer.decode(request.context) for request in requests]
        turns = [ANSWER if "#1 :" in text else TWO_ASKS for text in texts]
        return [Sample(self.format.turn_ids(turn)) for turn in turns]


@pytest.fixture(scope="module")
def conductor_policy(tmp_path_factory):
    return make_conductor_policy(tmp_path_factory.mktemp("conductor"))


@pytest.fixture
def conductor(conductor_policy):
    """Start a service of a conductor: `conductor(facts)` gives its address."""
    with ExitStack() as stack:

        def start(facts):
            pool = {
                "facts": Worker(facts, usd=0.01),
                "forms": Worker(ScriptedChat(lambda messages: "a form"), usd=0.02),
            }
            environment = Workers(pool)
            agent = PromptAgent.from_pretrained(conductor_policy, environment)
            agent.policy = BatchEngine(Conductor(agent.chat_format))
            start.service = service_of(agent)
            return stack.enter_context(running(start.service))

        yield start


def test_a_conductor_streams_its_progress(conductor):
    released = threading.Event()

    def facts(messages):
        assert released.wait(30)
        return "Nairobi"

    address = conductor(facts)
    chunks = []
    with client(address) as asking:
        options = {"stream": True, "extra_body": {"progress": True}}
        for chunk in asking.chat.completions.create(model="agent", messages=QUESTION, **options):
            chunks.append(chunk)
            # The first event comes while the worker is at work.
            released.set()
    events = [chunk.progress for chunk in chunks if hasattr(chunk, "progress")]
    assert events[0] == {"turn": 1, "event": "asking", "asked": ["facts", "forms"]}
    assert events[1]["event"] == "replied" and events[1]["cost_usd"] == pytest.approx(0.03)
    assert events[1]["workers"]["forms"] == {"calls": 1, "cost_usd": 0.02}
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "Nairobi" and len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].workers["facts"]["cost_usd"] == 0.01


def test_progress_is_asked_for_and_needs_a_stream(conductor):
    address = conductor(ScriptedChat(lambda messages: "Nairobi"))
    assert not any(hasattr(chunk, "progress") for chunk in ask(address, stream=True))
    with client(address) as asking:
        raw = asking.chat.completions.with_raw_response.create(
            model="agent", messages=QUESTION, extra_body={"progress": True}
        )
    assert raw.headers["x-ignored-parameters"] == "progress"
    assert raw.parse().workers["facts"]["calls"] == 1


def test_a_failure_after_the_first_event_is_an_event(conductor):
    address = conductor(ScriptedChat([Reply(error=ServerFailed("broken", "facts"))]))
    with pytest.raises(openai.APIError, match="broken"):
        ask(address, stream=True, extra_body={"progress": True})
    assert metric(conductor.service, "requests_total", model="agent", outcome="502") == 1
    assert conductor.service.in_flight == 0


def test_a_failure_before_the_first_event_keeps_its_status(conductor):
    address = conductor(ScriptedChat(lambda messages: "Nairobi"))
    conductor.service.in_flight = 10**6
    with pytest.raises(openai.RateLimitError):
        ask(address, stream=True, extra_body={"progress": True})
    conductor.service.in_flight = 0


def test_progress_of_a_client_that_hangs_up_ends_the_episode(conductor):
    started = threading.Event()
    released = threading.Event()

    def facts(messages):
        started.set()
        assert released.wait(30)
        return "Nairobi"

    address = conductor(facts)
    options = {"stream": True, "extra_body": {"progress": True}}
    with client(address) as asking:
        stream = asking.chat.completions.create(model="agent", messages=QUESTION, **options)
        assert next(iter(stream)).progress["event"] == "asking"
        assert started.wait(10)
        stream.close()
    for _ in range(100):
        if metric(conductor.service, "requests_total", model="agent", outcome="499") == 1:
            break
        time.sleep(0.1)
    released.set()
    assert metric(conductor.service, "requests_total", model="agent", outcome="499") == 1
