"""The dialects, read and written without a server; histories as clients were recorded to send them
back.
"""

import asyncio
import json

import pytest
from openai import AsyncOpenAI

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
from agentic_prompting.programs.call_tree import conversation_keys
from agentic_prompting.programs.rendering import read_turn
from support.programs import ADD, called, play_program

ISSUED = ToolCall("call_1", "write", '{"path": "a.txt", "size": 1, "text": "hi é\\n"}')
OURS = ChatMessage("assistant", "I write now.", "I think.", (ISSUED,))
PLAIN = ChatMessage("assistant", "It is  done.", "I think.")


def chat(message):
    return (
        ChatCompletions()
        .read_request({"model": "agent", "messages": [{"role": "user", "content": "q"}, message]})
        .messages
    )


def responses(*items):
    return (
        Responses()
        .read_request({"model": "agent", "input": [{"role": "user", "content": "q"}, *items]})
        .messages
    )


def messages(*blocks, said=None):
    said = {"role": "assistant", "content": said or list(blocks)}
    user = {"role": "user", "content": "q"}
    return Messages().read_request({"model": "agent", "messages": [user, said, user]}).messages[:-1]


def google(*parts):
    contents = [{"role": "user", "parts": [{"text": "q"}]}, {"role": "model", "parts": list(parts)}]
    return (
        Google()
        .read_request({"contents": contents}, "/v1beta/models/agent:generateContent")
        .messages
    )


def function(arguments, id="call_1", **more):
    return {
        "role": "assistant",
        "tool_calls": [{"id": id, "function": {"name": "write", "arguments": arguments}}],
        **more,
    }


# One line for each way in which a client was seen to send our own reply back.
SAME_CALL = {
    "verbatim": chat(function(ISSUED.arguments, content="I write now.")),
    "re-serialised, no spaces": chat(
        function('{"path":"a.txt","size":1,"text":"hi é\\n"}', content="")
    ),
    "escaped, other order": chat(
        function('{"text": "hi \\u00e9\\n", "size": 1.0, "path": "a.txt"}', content=None)
    ),
    "an object instead of its text": chat(function(json.loads(ISSUED.arguments))),
    "ids dropped": chat(function(ISSUED.arguments, id="")),
    "ids replaced": chat(function(ISSUED.arguments, id="toolu_9")),
    "the thought beside": chat(function(ISSUED.arguments, reasoning_content="I think.")),
    "the thought in the text": chat(
        function(ISSUED.arguments, content="<think>I think.</think>I write now.")
    ),
    "unknown fields": chat(
        {**function(ISSUED.arguments), "refusal": None, "provider_specific_fields": {"x": 1}}
    ),
    "items": responses(
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "I think."}],
            "content": None,
            "encrypted_content": "handle-1",
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I write now."}],
        },
        {
            "type": "function_call",
            "call_id": "call_1",
            "name": "write",
            "arguments": ISSUED.arguments,
        },
    ),
    "items without the thought": responses(
        {
            "type": "function_call",
            "id": "fc_x",
            "call_id": "c",
            "name": "write",
            "arguments": ISSUED.arguments,
        },
    ),
    "blocks": messages(
        {"type": "thinking", "thinking": "I think.", "signature": "handle-1"},
        {"type": "text", "text": "I write now."},
        {
            "type": "tool_use",
            "id": "call_1",
            "name": "write",
            "input": json.loads(ISSUED.arguments),
        },
    ),
    "parts": google(
        {"text": "I think.", "thought": True},
        {"text": "I write now."},
        {
            "functionCall": {"id": "call_1", "name": "write", "args": json.loads(ISSUED.arguments)},
            "thoughtSignature": "aGFuZGxl",
        },
    ),
    "parts without the thought and the id": google(
        {
            "functionCall": {"name": "write", "args": json.loads(ISSUED.arguments)},
            "thought_signature": "aGFuZGxl",
        },
    ),
}
SAME_TEXT = {
    "verbatim": chat({"role": "assistant", "content": "It is  done."}),
    "white space": chat({"role": "assistant", "content": "It is done.\n"}),
    "parts": chat(
        {
            "role": "assistant",
            "content": [{"type": "text", "text": one} for one in ("It is ", "done.")],
        }
    ),
    "the thought in a message": responses(
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "<think>\nI think.\n</think>\n\n"}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "It is done."}]},
    ),
    "a block": messages(
        {"type": "text", "text": "It is done.", "cache_control": {"type": "ephemeral"}}
    ),
    "a text": messages(said="It is done."),
    "parts of Google": google(
        {"text": "hm", "thought": True}, {"text": "It is "}, {"text": "done."}
    ),
}


@pytest.mark.parametrize("shape", SAME_CALL)
def test_a_call_is_known_however_it_comes_back(shape):
    assert list(conversation_keys((), SAME_CALL[shape])) == list(
        conversation_keys((), [ChatMessage("user", "q"), OURS])
    )


@pytest.mark.parametrize("shape", SAME_TEXT)
def test_a_text_is_known_however_it_comes_back(shape):
    assert list(conversation_keys((), SAME_TEXT[shape])) == list(
        conversation_keys((), [ChatMessage("user", "q"), PLAIN])
    )


def test_other_values_are_another_call():
    for other in (
        '{"path": "b.txt", "size": 1, "text": "hi é\\n"}',
        '{"path": "a.txt"}',
        "{broken",
    ):
        assert list(conversation_keys((), chat(function(other)))) != list(
            conversation_keys((), [ChatMessage("user", "q"), OURS])
        )
    assert list(conversation_keys([ADD], chat(function(ISSUED.arguments)))) != list(
        conversation_keys((), chat(function(ISSUED.arguments)))
    )


def test_results_belong_to_their_place():
    one = {"type": "function_call_output", "call_id": "anything", "output": "2"}
    (_, _, entry) = responses({"type": "function_call", "name": "a", "arguments": "{}"}, one)
    assert entry == ChatMessage("tool", "2")


def test_responses_tools_are_flattened_and_hosted_ones_dropped():
    tools = [
        {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False},
        {"type": "web_search"},
        {
            "type": "namespace",
            "name": "n",
            "tools": [{"type": "function", "name": "g"}, {"type": "custom", "name": "c"}],
        },
    ]
    request = Responses().read_request(
        {"model": "agent", "input": "q", "instructions": "be brief", "tools": tools}
    )
    assert [tool["function"]["name"] for tool in request.tools] == [
        "f",
        "g",
        "c",
    ]
    assert request.custom_tools == {"c"}
    assert all(set(tool) == {"type", "function"} for tool in request.tools)
    assert request.messages == (ChatMessage("system", "be brief"), ChatMessage("user", "q"))


@pytest.mark.parametrize(
    "body",
    [
        {"input": "q", "previous_response_id": "resp_1"},
        {"input": "q", "text": {"format": {"type": "json_schema"}}},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {},
        [],
    ],
)
def test_responses_that_are_refused(body):
    with pytest.raises(Refusal) as refused:
        Responses().read_request(body)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "body", [None, {}, {"messages": ["x"]}, {"messages": [{"role": "boss"}]}, {"messages": []}]
)
def test_chat_requests_that_are_refused(body):
    with pytest.raises(Refusal) as refused:
        ChatCompletions().read_request(body)
    assert refused.value.status == 400


def test_an_empty_list_of_tools_is_none():
    assert (
        ChatCompletions()
        .read_request({"messages": [{"role": "user", "content": "q"}], "tools": []})
        .tools
        == ()
    )


def kinds(stream):
    return [json.loads(event.split(b"data: ")[1])["type"] for event in stream]


def test_the_whole_set_of_events_of_a_response():
    completion = Completion("agent", "text", "thought", (ISSUED,), "tool_calls", 5, 7)
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    thought = [
        f"reasoning_summary_{one}" for one in ("part.added", "text.delta", "text.done", "part.done")
    ]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    items = [["output_item.added", *one, "output_item.done"] for one in (thought, text, call)]
    expected = ["created", "in_progress", *(one for item in items for one in item), "completed"]
    assert kinds(Responses().write_events(completion, CompletionRequest("agent", ()))) == [
        f"response.{one}" for one in expected
    ]
    cut = Completion("agent", "text", finish_reason="length")
    assert (
        kinds(Responses().write_events(cut, CompletionRequest("agent", ())))[-1]
        == "response.incomplete"
    )
    assert Responses().write_body(cut)["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_turn_is_read():
    both = "<think>\nhm\n</think>\n\nI go.\n" + called("f", '{"a": 1}')
    turn = read_turn(both, [ADD])
    assert (turn.thought, turn.text, turn.tool_calls[0].name, turn.tool_calls[0].arguments) == (
        "hm",
        "I go.",
        "f",
        '{"a": 1}',
    )
    assert read_turn(both, ()).text == both.partition("</think>\n\n")[2], "without tools it is text"
    assert read_turn("<think>\nunfinished", [ADD]) == ChatMessage("assistant", "", "unfinished")


def test_a_call_with_tags_around_its_parameters():
    properties = {
        "text": {"type": "string"},
        "size": {"type": "integer"},
        "deep": {"type": "object"},
    }
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": properties}},
    }
    body = (
        "<function=f>\n<parameter=text>\n12\n34\n</parameter>\n<parameter=size>\n5\n</parameter>\n"
    )
    body += '<parameter=deep>\n{"a": [1]}\n</parameter>\n</function>'
    (call,) = read_turn(f"<tool_call>\n{body}\n</tool_call>", [tool]).tool_calls
    assert call.name == "f"
    assert json.loads(call.arguments) == {
        "text": "12\n34",
        "size": 5,
        "deep": {"a": [1]},
    }
    (call,) = read_turn("<tool_call>\n<function=f>\n</function>\n</tool_call>", [tool]).tool_calls
    assert call.arguments == "{}"


def test_broken_json_in_a_call_is_handed_on():
    turn = read_turn('<tool_call>\n{"name": "f", "arguments": {"a": 1\n</tool_call>', [ADD])
    assert turn.tool_calls[0].name == "f" and turn.tool_calls[0].arguments == '{"a": 1'
    assert read_turn("<tool_call>\nnothing\n</tool_call>", [ADD]).tool_calls == ()


# --- through the SDK, streamed and not ------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_both_dialects_streamed_and_not(dialect, stream):
    """A tool is called and its result read; the policy writes other white space than its template
    would.
    """

    async def agent(row, base_url, api_key):
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        through = through_chat if dialect == "chat" else through_responses
        return await through(client, stream)

    call = '<think>\nhm\n</think>\n\nI add.  <tool_call>\n{"name":"add","arguments":{"a":1}}\n</tool_call>'
    rollout, policy = play_program(
        agent, lambda text, _: "It is 2." if "tool_response>\n2" in text else call
    )
    assert rollout.answer == "It is 2.", rollout.error
    assert len(rollout.sequences) == 1 and len(rollout.turns) == 2
    assert call in policy.contexts()[1], "what the policy wrote, as it wrote it"


async def through_chat(client, stream):
    messages = [{"role": "user", "content": "1+1"}]
    while True:
        asked = {"model": "agent", "messages": messages, "tools": [ADD]}
        if stream:
            text = ""
            calls = []
            thought = ""
            async for chunk in await client.chat.completions.create(**asked, stream=True):
                delta = chunk.choices[0].delta
                text += delta.content or ""
                thought += getattr(delta, "reasoning_content", None) or ""
                calls += delta.tool_calls or []
        else:
            message = (await client.chat.completions.create(**asked)).choices[0].message
            text = message.content
            calls = message.tool_calls
            thought = getattr(message, "reasoning_content", "")
        if not calls:
            return text
        assert thought == "hm" and text == "I add."
        function = {
            "name": calls[0].function.name,
            "arguments": calls[0].function.arguments.replace(" ", ""),
        }
        messages.append(
            {
                "role": "assistant",
                "tool_calls": [{"id": "x", "type": "function", "function": function}],
            }
        )
        messages.append({"role": "tool", "tool_call_id": "x", "content": "2"})


async def through_responses(client, stream):
    tool = {"type": "function", **ADD["function"]}
    items = [{"role": "user", "content": "1+1"}]
    while True:
        asked = {
            "model": "agent",
            "input": items,
            "tools": [tool],
            "instructions": "add",
            "store": False,
        }
        if stream:
            async for event in await client.responses.create(**asked, stream=True):
                last = event
            response = last.response
        else:
            response = await client.responses.create(**asked)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        assert response.output[0].type == "reasoning" and response.output[0].summary[0].text == "hm"
        items += [item.to_dict() for item in response.output]
        items.append({"type": "function_call_output", "call_id": calls[0].call_id, "output": "2"})


def test_a_stream_that_is_cut_is_asked_again_and_learns_once():
    """The client reads the headers and goes away before the reply."""
    seen = []

    async def agent(row, base_url, api_key):
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        ask = {"model": "agent", "messages": [{"role": "user", "content": "q"}], "stream": True}
        first = await client.chat.completions.create(**ask)
        await first.close()
        await asyncio.sleep(0.1)
        async for chunk in await client.chat.completions.create(**ask):
            seen.append(chunk)
        return "x"

    rollout, policy = play_program(agent, delay=0.5)
    assert len(policy.requests) == 2 and len(rollout.turns) == 1 and len(rollout.sequences) == 1


def test_half_a_surrogate_pair_is_no_failure():
    async def agent(row, base_url, api_key):
        import aiohttp

        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as http:
            body = b'{"model": "agent", "messages": [{"role": "user", "content": "a \\ud83d b"}]}'
            reply = await http.post(f"{base_url}/chat/completions", data=body)
            return (await reply.json())["choices"][0]["message"]["content"]

    assert play_program(agent)[0].answer == "hello"
