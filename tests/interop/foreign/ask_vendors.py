"""A tool is called and its result read through the clients of Anthropic and of Google, which know
address and key from their environment; streamed first, then whole. Prints both answers, and whether
both count the same tokens.
"""

import os

from anthropic import Anthropic
from google import genai
from google.genai import types

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def through_anthropic():
    client = Anthropic(max_retries=0)
    asked = {"model": "agent", "messages": [{"role": "user", "content": "1+1"}]}
    counted = client.messages.count_tokens(**asked).input_tokens
    asked |= {
        "max_tokens": 200,
        "tools": [{"name": "add", "description": "adds", "input_schema": SCHEMA}],
    }
    with client.messages.stream(**asked) as stream:
        said = stream.get_final_message()
    assert [block.type for block in said.content] == [
        "thinking",
        "text",
        "tool_use",
    ]
    assert said.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": said.content[-1].id, "content": "2"}
    asked["messages"] += [
        {"role": "assistant", "content": said.content},
        {"role": "user", "content": [result]},
    ]
    return client.messages.create(**asked).content[-1].text, counted


def through_google():
    options = {"base_url": os.environ["GOOGLE_GEMINI_BASE_URL"]}
    client = genai.Client(
        api_key=os.environ["GEMINI_API_KEY"], http_options=options
    )  # closed with its last name
    models = client.models
    declared = types.FunctionDeclaration(
        name="add", description="adds", parameters_json_schema=SCHEMA
    )
    off = types.AutomaticFunctionCallingConfig(disable=True)
    config = types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[declared])], automatic_function_calling=off
    )
    contents = [types.Content(role="user", parts=[types.Part(text="1+1")])]
    *_, last = models.generate_content_stream(model="agent", contents=contents, config=config)
    said = last.candidates[0].content
    result = types.Part.from_function_response(name="add", response={"output": "2"})
    contents += [said, types.Content(role="user", parts=[result])]
    text = models.generate_content(model="agent", contents=contents, config=config).text
    return text, models.count_tokens(model="agent", contents="1+1").total_tokens


one, counted = through_anthropic()
two, total = through_google()
print(f"{one} {two} {counted == total > 0}")
