"""Anthropic's Messages and Google's generateContent: what is read, written, refused, and both
against the gateway.
"""

import json
from functools import partial

import aiohttp
import pytest

from agentic_prompting.programs import (
    ChatCompletions,
    ChatMessage,
    Completion,
    CompletionRequest,
    Google,
    Messages,
    Refusal,
    Responses,
    ToolCall,
)
from support.programs import ADD, called, play_program

ASKED = CompletionRequest("agent", ())
CALL = ToolCall("call_1", "write", '{"path": "a.txt"}')
BROKEN = ToolCall("call_2", "write", '{"path": ')
GOOGLE = "/v1beta/models/agent:{}"
read_google = partial(Google().read_request, path=GOOGLE.format("streamGenerateContent?alt=sse"))


def test_a_request_of_messages_as_a_coding_agent_sends_it():
    request = Messages().read_request(
        {
            "model": "policy",
            "max_tokens": 16384,
            "stream": True,
            "tool_choice": {"type": "auto"},
            "temperature": 1,
            "system": [
                {"type": "text", "text": "You code.", "cache_control": {"type": "ephemeral"}}
            ],
            "thinking": {"type": "enabled", "budget_tokens": 8192, "display": "summarized"},
            "stop_sequences": ["END"],
            "tools": [
                {"name": "write", "description": "Writes.", "input_schema": {"type": "object"}},
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
            ],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Create a file"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "handle-1"},
                        {
                            "type": "tool_use",
                            "id": "call_1",
                            "name": "write",
                            "input": {"path": "a.txt"},
                        },
                        {"type": "tool_use", "id": "call_2", "name": "write", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "call_1",
                            "content": "wrote it",
                            "is_error": False,
                        },
                        {
                            "type": "tool_result",
                            "tool_use_id": "call_2",
                            "content": [{"type": "text", "text": "no"}],
                        },
                        {"type": "text", "text": "go on"},
                    ],
                },
            ],
        }
    )
    calls = (CALL, ToolCall("call_2", "write", "{}"))
    assert request.messages == (
        ChatMessage("system", "You code."),
        ChatMessage("user", "Create a file"),
        ChatMessage("assistant", "", "hm", calls),
        ChatMessage("tool", "wrote it"),
        ChatMessage("tool", "no"),
        ChatMessage("user", "go on"),
    )
    assert request.messages[2].handle == "handle-1"
    assert (request.max_tokens, request.stream, request.stops, request.allows_tool_calls) == (
        16384,
        True,
        ("END",),
        True,
    )
    assert [tool["function"]["name"] for tool in request.tools] == ["write"]
    assert request.other_settings == {"temperature": 1, "tools": "web_search_20250305"}


def test_a_request_of_google_as_a_coding_agent_sends_it():
    args = {"path": "a.txt"}
    schema = {
        "type": "OBJECT",
        "properties": {"path": {"type": "STRING", "description": "The type of it."}},
    }
    request = read_google(
        {
            "systemInstruction": {"role": "user", "parts": [{"text": "You code."}]},
            "generationConfig": {
                "temperature": 1,
                "topP": 0.95,
                "topK": 64,
                "maxOutputTokens": 99,
                "stopSequences": ["END"],
                "thinkingConfig": {"includeThoughts": True},
            },
            "tools": [
                {
                    "functionDeclarations": [
                        {"name": "write", "description": "Writes.", "parameters": schema},
                        {"name": "read", "parametersJsonSchema": {"type": "object"}},
                    ]
                },
                {"googleSearch": {}},
            ],
            "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
            "contents": [
                {
                    "role": "user",
                    "parts": [{"text": "Today is Monday. "}, {"text": "Create a file"}],
                },
                {
                    "role": "model",
                    "parts": [
                        {"text": "hm", "thought": True},
                        {
                            "functionCall": {"name": "write", "args": args},
                            "thoughtSignature": "aGFuZGxl",
                        },
                    ],
                },
                {
                    "role": "user",
                    "parts": [
                        {"functionResponse": {"name": "write", "response": {"output": "wrote"}}}
                    ],
                },
                {"role": "model", "parts": [{"text": "so"}]},
                {
                    "role": "user",
                    "parts": [
                        {
                            "functionResponse": {
                                "name": "write",
                                "response": {"name": "write", "content": "again"},
                            }
                        },
                        {"functionResponse": {"name": "write", "response": {"error": "no"}}},
                    ],
                },
            ],
        }
    )
    assert request.messages == (
        ChatMessage("system", "You code."),
        ChatMessage("user", "Today is Monday. Create a file"),
        ChatMessage("assistant", "", "hm", (ToolCall("", "write", '{"path": "a.txt"}'),)),
        ChatMessage("tool", "wrote"),
        ChatMessage("assistant", "so"),
        ChatMessage("tool", "again"),
        ChatMessage("tool", '{"error": "no"}'),
    )
    assert request.messages[2].handle == "aGFuZGxl"
    assert (request.model, request.stream, request.max_tokens, request.stops) == (
        "agent",
        True,
        99,
        ("END",),
    )
    lowered = {
        "type": "object",
        "properties": {"path": {"type": "string", "description": "The type of it."}},
    }
    assert [tool["function"]["parameters"] for tool in request.tools] == [
        lowered,
        {"type": "object"},
    ]
    assert request.other_settings == {
        "temperature": 1,
        "top_p": 0.95,
        "top_k": 64,
        "tools": "googleSearch",
    }
    assert (
        not Google()
        .read_request({"contents": [{"parts": [{"text": "q"}]}]}, GOOGLE.format("generateContent"))
        .stream
    )


ASK = {"messages": [{"role": "user", "content": "q"}]}
CONTENTS = {"contents": [{"parts": [{"text": "q"}]}]}


@pytest.mark.parametrize(
    "read, body, named",
    [
        (Messages().read_request, {}, "messages"),
        (Messages().read_request, {**ASK, "mcp_servers": [{}]}, "mcp_servers"),
        (
            Messages().read_request,
            {**ASK, "output_format": {"type": "json_schema"}},
            "output_format",
        ),
        (
            Messages().read_request,
            {**ASK, "tools": [{"type": "bash_20250124", "name": "bash"}]},
            "bash_20250124",
        ),
        (
            Messages().read_request,
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "image",
        ),
        (Messages().read_request, {"messages": [{"role": "user", "content": 7}]}, "blocks"),
        (
            Messages().read_request,
            {"messages": [*ASK["messages"], {"role": "assistant", "content": "{"}]},
            "given text",
        ),
        (ChatCompletions().read_request, {**ASK, "modalities": ["text", "audio"]}, "modalities"),
        (read_google, {}, "contents"),
        (read_google, {**CONTENTS, "cachedContent": "x"}, "cachedContent"),
        (read_google, {**CONTENTS, "generationConfig": {"candidateCount": 2}}, "candidateCount"),
        (
            read_google,
            {**CONTENTS, "generationConfig": {"response_mime_type": "application/json"}},
            "responseMimeType",
        ),
        (
            read_google,
            {**CONTENTS, "generationConfig": {"responseModalities": ["AUDIO"]}},
            "responseModalities",
        ),
        (read_google, {**CONTENTS, "tools": [{"computerUse": {}}]}, "tools.computerUse"),
        (read_google, {"contents": [{"parts": [{"inlineData": {}}]}]}, "inlineData"),
        (read_google, {"contents": [{"role": "boss", "parts": []}]}, "boss"),
        (
            partial(Google().read_request, path=GOOGLE.format("streamGenerateContent")),
            CONTENTS,
            "alt=sse",
        ),
        (
            Responses().read_request,
            {"input": "q", "tools": [{"type": "computer_use_preview"}]},
            "computer_use_preview",
        ),
    ],
)
def test_what_a_dialect_cannot_carry_is_refused_by_name(read, body, named):
    with pytest.raises(Refusal) as refused:
        read(body)
    assert refused.value.status == 400 and named in refused.value.message


def test_tools_that_are_left_out_are_named():
    tools = [
        {"type": "web_search"},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
    ]
    assert Responses().read_request(
        {"input": "q", "tools": tools, "parallel_tool_calls": True}
    ).other_settings == {"tools": "web_search, namespace n, without its name"}


def test_a_wish_for_one_call_at_a_time_is_told_to_make_no_difference():
    asked = {"input": "q", "parallel_tool_calls": False}
    tools = [{"type": "function", "name": "g"}]
    assert Responses().read_request({**asked, "tools": tools}).other_settings == {
        "parallel_tool_calls": False
    }
    assert Responses().read_request(asked).other_settings == {}, "without tools it is none"


def parsed(stream):
    return [json.loads(one.split(b"data: ")[1]) for one in stream]


def test_the_whole_set_of_events_of_a_message():
    completion = Completion("agent", "text", "hm", (CALL, BROKEN), "tool_calls", 5, 7, id="h")
    events = parsed(Messages().write_events(completion, ASKED))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    thought = [block[0], block[1], *block[1:]]
    kinds = ["message_start", "ping", *thought, *block * 3, "message_delta", "message_stop"]
    assert [one["type"] for one in events] == kinds
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert deltas == [
        {"type": "thinking_delta", "thinking": "hm"},
        {"type": "signature_delta", "signature": "h"},
        {"type": "text_delta", "text": "text"},
        {"type": "input_json_delta", "partial_json": CALL.arguments},
        {"type": "input_json_delta", "partial_json": BROKEN.arguments},
    ]
    assert [one["index"] for one in events if one["type"] == block[0]] == [0, 1, 2, 3]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == 7
    whole = Messages().write_body(completion)
    assert [one["input"] for one in whole["content"][2:]] == [{"path": "a.txt"}, {}]
    assert (
        Messages().write_body(Completion("agent", "x", finish_reason="length"))["stop_reason"]
        == "max_tokens"
    )


def test_messages_name_the_stop_sequence():
    completion = Completion("agent", "x", stop_text="END")
    body = Messages().write_body(completion)
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "END")
    *_, message_delta, _ = parsed(Messages().write_events(completion, ASKED))
    assert message_delta["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


def test_a_reply_of_google_is_one_event():
    completion = Completion("agent", "", "hm", (CALL, BROKEN), "tool_calls", 5, 7, id="abcd")
    (whole,) = parsed(Google().write_events(completion, ASKED))
    (candidate,) = whole["candidates"]
    thought, first, second = candidate["content"]["parts"]
    assert thought == {"text": "hm", "thought": True} and candidate["finishReason"] == "STOP"
    assert first["thoughtSignature"] == "abcd"
    assert second == {"functionCall": {"id": "call_2", "name": "write", "args": {}}}
    assert whole["usageMetadata"] == {
        "promptTokenCount": 5,
        "candidatesTokenCount": 7,
        "totalTokenCount": 12,
    }
    cut = Google().write_body(Completion("agent", "x", finish_reason="length", id="h"))[
        "candidates"
    ][0]
    assert cut["finishReason"] == "MAX_TOKENS"
    assert cut["content"]["parts"] == [{"text": "x", "thoughtSignature": "h"}]


def test_errors_are_in_the_form_of_their_dialect():
    over = Refusal(400, "This rollout is over.", "rollout_ended")
    assert Messages().write_error(over)["type"] == "error"
    assert Messages().write_error(over)["error"]["type"] == "invalid_request_error"
    error = Google().write_error(over)["error"]
    assert (error["code"], error["status"], error["details"][0]["reason"]) == (
        400,
        "INVALID_ARGUMENT",
        "rollout_ended",
    )
    for dialect in (Messages(), Google()):
        (last,) = parsed(dialect.write_failure(Refusal(500, "broken"), ASKED))
        assert last == dialect.write_error(Refusal(500, "broken"))


# --- against the gateway --------------------------------------------------------------------------


async def post(url, body, headers=None):
    async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as reply:
        text = await reply.text()
        if reply.content_type == "text/event-stream":
            return reply.status, [
                json.loads(one)
                for line in text.splitlines()
                if (one := line[6:]) and line[:5] == "data:"
            ]
        return reply.status, json.loads(text)


async def through_messages(address, key, stream):
    """A client that knows the key alone, drops ids, and sends thought and signature back."""
    tool = {"name": "add", "description": "adds", "input_schema": ADD["function"]["parameters"]}
    body = {
        "model": "agent",
        "max_tokens": 300,
        "system": "add",
        "tools": [tool],
        "stream": stream,
        "messages": [],
    }
    body["messages"] = [{"role": "user", "content": "1+1"}]
    while True:
        status, reply = await post(f"{address}/v1/messages", body, {"x-api-key": key})
        assert status == 200, reply
        if stream:
            blocks = [one["content_block"] for one in reply if one["type"] == "content_block_start"]
            for one in (one for one in reply if one["type"] == "content_block_delta"):
                value = next(value for name, value in one["delta"].items() if name != "type")
                kind = one["delta"]["type"].removesuffix("_delta")
                name = {"input_json": "input"}.get(kind, kind)
                blocks[one["index"]][name] = value if name != "input" else as_object(value)
        else:
            blocks = reply["content"]
        if not any(one["type"] == "tool_use" for one in blocks):
            return blocks[-1]["text"]
        assert blocks[0]["thinking"] == "hm"
        results = [
            {"type": "tool_result", "content": "2"}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        blocks = [{name: value for name, value in one.items() if name != "id"} for one in blocks]
        body["messages"] += [
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": results},
        ]


async def through_google(address, key, stream):
    """A client that drops thoughts and the ids of calls."""
    declared = {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "OBJECT", "properties": {}},
    }
    body = {
        "contents": [{"role": "user", "parts": [{"text": "1+1"}]}],
        "tools": [{"functionDeclarations": [declared]}],
    }
    body["systemInstruction"] = {"parts": [{"text": "add"}]}
    verb = "streamGenerateContent?alt=sse" if stream else "generateContent"
    while True:
        status, reply = await post(
            f"{address}/v1beta/models/agent:{verb}", body, {"x-goog-api-key": key}
        )
        assert status == 200, reply
        parts = (reply[0] if stream else reply)["candidates"][0]["content"]["parts"]
        calls = [part for part in parts if "functionCall" in part]
        if not calls:
            return parts[-1]["text"]
        for part in calls:
            del part["functionCall"]["id"]
        result = {"functionResponse": {"name": "add", "response": {"output": "2"}}}
        body["contents"] += [
            {"role": "model", "parts": calls},
            {"role": "user", "parts": [result] * len(calls)},
        ]


def as_object(text):
    try:
        return json.loads(text)
    except ValueError:
        return {}


@pytest.mark.parametrize("written", ['{"a":1}', '{"a": one}'], ids=["JSON", "broken"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("through", [through_messages, through_google])
def test_a_rollout_is_one_sequence_in_both_dialects(through, stream, written):
    """Broken arguments come back as an empty object: the handle says whose they are."""

    async def agent(row, base_url, api_key):
        return await through(base_url.rpartition("/" + api_key)[0], api_key, stream)

    call = f'<think>\nhm\n</think>\n\nI add.  <tool_call>\n{{"name":"add","arguments":{written}}}\n</tool_call>'
    rollout, policy = play_program(
        agent, lambda text, _: "It is 2." if "tool_response>\n2" in text else call
    )
    assert rollout.answer == "It is 2.", rollout.error
    assert len(rollout.sequences) == 1 and len(rollout.turns) == 2
    assert call in policy.contexts()[1], "what the policy wrote, as it wrote it"
    assert policy.contexts()[0].startswith("<|im_start|>system\nadd")


def test_tokens_are_counted_without_a_turn_of_the_policy():
    async def agent(row, base_url, api_key):
        google = base_url.removesuffix("v1") + GOOGLE.format("{}").lstrip("/")
        seen = [
            (await post(f"{base_url}/messages/count_tokens", ASK))[1]["input_tokens"],
            (await post(google.format("countTokens"), {"generateContentRequest": CONTENTS}))[1][
                "totalTokens"
            ],
            (await post(google.format("countTokens"), CONTENTS))[1]["totalTokens"],
        ]
        reply = (await post(google.format("generateContent"), CONTENTS))[1]
        return {"answer": "x", "seen": [*seen, reply["usageMetadata"]["promptTokenCount"]]}

    rollout, policy = play_program(agent)
    assert len(set(rollout.returned["seen"])) == 1 and len(policy.requests) == 1


@pytest.mark.parametrize("where", ["Authorization", "x-api-key", "x-goog-api-key", "query", "path"])
def test_the_key_is_found_wherever_a_client_puts_it(where):
    async def agent(row, base_url, api_key):
        address = base_url if where == "path" else base_url.rpartition("/" + api_key)[0] + "/v1"
        headers = (
            {}
            if where in ("query", "path")
            else {where: f"Bearer {api_key}" if where[0] == "A" else api_key}
        )
        query = f"?key={api_key}" if where == "query" else ""
        status, reply = await post(
            f"{address}/models/agent:generateContent{query}", CONTENTS, headers
        )
        assert status == 200, reply
        assert (await post(f"{address}/messages", ASK, {"x-api-key": "sk-wrong"}))[0] == (
            200 if where == "path" else 401
        )
        return "x"

    assert play_program(agent)[0].answer == "x"


def test_equal_replies_are_told_apart_by_their_handles():
    """Two agents get the same call from the same context, and go on with other results, the second
    one first.
    """

    async def agent(row, base_url, api_key):
        url = base_url.removesuffix("v1") + GOOGLE.format("generateContent").lstrip("/")
        ask = {"role": "user", "parts": [{"text": "1+1"}]}
        tools = [{"functionDeclarations": [{"name": "add", "parameters": {}}]}]
        parts = []
        for _ in range(2):
            reply = (await post(url, {"contents": [ask], "tools": tools}))[1]
            parts.append(reply["candidates"][0]["content"]["parts"][1:])  # without the thought
        for i in (1, 0):
            del parts[i][0]["functionCall"]["id"]
            result = {"functionResponse": {"name": "add", "response": {"output": str(i)}}}
            contents = [
                ask,
                {"role": "model", "parts": parts[i]},
                {"role": "user", "parts": [result]},
            ]
            await post(url, {"contents": contents, "tools": tools})
        return "x"

    def say(text, request):
        return (
            "done"
            if "tool_response" in text
            else f"<think>thought {next(number)}</think>" + called("add", "{}")
        )

    number = iter(range(2))
    rollout, policy = play_program(agent, say)
    assert len(rollout.sequences) == 2
    for i, context in zip((1, 0), policy.contexts()[2:], strict=True):
        assert f"thought {i}" in context and f"<tool_response>\n{i}\n" in context
