"""The service in the formats of OpenAI's Responses, Anthropic's Messages and Google's
generateContent.
"""

import json
import urllib.error
import urllib.request

import pytest

from agentic_prompting.llm import Reply, ScriptedChat
from agentic_prompting.serve import ChatAnswers, ServeConfig, Service
from support.serving import running, scripted_agent, service_of

QUESTION = "what is the capital of Kenya ?"
GOOGLE_PATH = "/v1beta/models/{model}:generateContent"
MESSAGES = [{"role": "user", "content": QUESTION}]
FORMATS = {
    "responses": ("/v1/responses", {"model": "{model}", "input": QUESTION}),
    "messages": ("/v1/messages", {"model": "{model}", "messages": MESSAGES, "max_tokens": 500}),
    "google": (GOOGLE_PATH, {"contents": [{"role": "user", "parts": [{"text": QUESTION}]}]}),
}
both_ways = pytest.mark.parametrize("stream", [False, True])
all_formats = pytest.mark.parametrize("name", FORMATS)


def send(address, name, model="agent", stream=False, more=(), headers=()):
    """The status, the headers and the text of a reply."""
    path, body = FORMATS[name]
    body = {**json.loads(json.dumps(body).replace("{model}", model)), **dict(more)}
    path = path.replace("{model}", model)
    if stream and name == "google":
        path = path.replace("generateContent", "streamGenerateContent?alt=sse")
    elif stream:
        body["stream"] = True
    headers = {"Content-Type": "application/json", **dict(headers)}
    request = urllib.request.Request(address + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, response.headers, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


@pytest.fixture
def address(tiny_policy):
    chat = ScriptedChat([Reply("the answer is Nairobi .")])
    with running(service_of(scripted_agent(tiny_policy, chat))) as address:
        yield address


@all_formats
@both_ways
def test_an_answer_in_each_format(address, name, stream):
    status, headers, text = send(address, name, stream=stream)
    assert status == 200 and "Nairobi" in text, text
    content_type = "text/event-stream" if stream else "application/json"
    assert headers["Content-Type"].startswith(content_type)
    assert headers["x-request-id"].startswith("req_")
    if not stream:
        reply = json.loads(text)
        answers = {
            "responses": lambda: reply["output"][0]["content"][0]["text"],
            "messages": lambda: reply["content"][0]["text"],
            "google": lambda: reply["candidates"][0]["content"]["parts"][0]["text"],
        }
        assert answers[name]() == "Nairobi"


@all_formats
def test_no_answer_is_a_refusal_in_each_format(tiny_policy, name):
    agent = scripted_agent(tiny_policy, ScriptedChat([Reply("x")]), turns="done")
    with running(service_of(agent)) as address:
        status, _, text = send(address, name)
        _, _, events = send(address, name, stream=True)
    reply = json.loads(text)
    assert status == 200
    if name == "responses":
        (part,) = reply["output"][0]["content"]
        assert part["type"] == "refusal" and "malformed" in part["refusal"]
        assert "response.refusal.done" in events and "output_text" not in events
    elif name == "messages":
        assert (reply["stop_reason"], reply["content"]) == ("refusal", [])
        assert '"stop_reason": "refusal"' in events
    else:
        candidate = reply["candidates"][0]
        assert candidate["finishReason"] == "OTHER" and "malformed" in candidate["finishMessage"]
        assert "finishMessage" in events


@all_formats
def test_errors_have_the_form_of_each_format(address, name):
    status, _, text = send(address, name, model="nobody")
    error = json.loads(text)["error"]
    assert status == 404 and "nobody" in error["message"] and "agent" in error["message"]
    if name == "messages":
        assert json.loads(text)["type"] == "error"
    if name == "google":
        assert error["status"] == "NOT_FOUND"


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("responses", {"previous_response_id": "resp_1"}),
        ("responses", {"tools": [{"type": "function", "name": "f"}]}),
        ("messages", {"tools": [{"name": "f", "input_schema": {}}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        ("google", {"contents": [{"parts": [{"inlineData": {"data": "x"}}]}]}),
        ("google", {"generationConfig": {"candidateCount": 2}}),
    ],
)
def test_what_is_not_offered_is_refused(address, name, more):
    status, _, text = send(address, name, more=more)
    assert status == 400 and json.loads(text)["error"]["message"]


@pytest.mark.parametrize(
    ("name", "more", "ignored"),
    [
        (
            "responses",
            {"top_p": 0.5, "store": False, "temperature": 0.7},
            "store, temperature, top_p",
        ),
        ("messages", {"top_k": 5, "stop_sequences": ["x"]}, "stop_sequences, top_k"),
        (
            "google",
            {"generationConfig": {"topP": 0.5, "seed": 3}, "safetySettings": []},
            "safetySettings, topP",
        ),
    ],
)
def test_what_is_ignored_is_named(address, name, more, ignored):
    status, headers, text = send(address, name, more=more)
    assert (status, headers["X-Ignored-Parameters"]) == (200, ignored), text


@all_formats
def test_each_vendors_key_is_read(tiny_policy, monkeypatch, name):
    monkeypatch.setenv("AGENTIC_PROMPTING_API_KEY", "correct-horse")
    service = Service({"agent": ChatAnswers(ScriptedChat(["yes"]))}, ServeConfig())
    header = {"responses": "Authorization", "messages": "x-api-key", "google": "x-goog-api-key"}[
        name
    ]
    value = "Bearer correct-horse" if name == "responses" else "correct-horse"
    with running(service) as address:
        assert send(address, name)[0] == 401
        assert send(address, name, headers={header: value})[0] == 200


def get(url, **headers):
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, response.headers, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.loads(error.read())


def test_one_model_is_described(address):
    status, _, model = get(f"{address}/v1/models/agent")
    assert (status, model["id"], model["object"]) == (200, "agent", "model")
    status, _, error = get(f"{address}/v1/models/other")
    assert status == 404 and "agent" in error["error"]["message"]


def test_an_unknown_path_names_what_is_served(address):
    status, _, error = get(f"{address}/v1/embeddings")
    assert status == 404 and "/v1/chat/completions" in error["error"]["message"]
    status, headers, error = get(f"{address}/v1/chat/completions")
    assert (status, headers["Allow"]) == (405, "POST") and error["error"]["message"]


def test_a_request_id_comes_back(address):
    _, headers, _ = get(f"{address}/health", **{"x-request-id": "mine-1"})
    assert headers["x-request-id"] == "mine-1"
    _, headers, _ = get(f"{address}/health", **{"x-request-id": "not one\u00e9"})
    assert headers["x-request-id"].startswith("req_")


def test_a_body_without_a_content_type_is_refused(address):
    body = json.dumps({"model": "agent", "messages": MESSAGES}).encode()
    request = urllib.request.Request(f"{address}/v1/chat/completions", body)
    with pytest.raises(urllib.error.HTTPError) as caught:  # it says x-www-form-urlencoded
        urllib.request.urlopen(request, timeout=20)
    assert caught.value.code == 400 and "application/json" in caught.value.read().decode()
