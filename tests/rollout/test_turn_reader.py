"""Thoughts and tool calls in a turn: both forms, tags in arguments, types of parameters, linear
time.
"""

import json

import pytest
from hypothesis import given, settings, strategies as st

from agentic_prompting.environments.search import SearchGrammar
from agentic_prompting.interop import Dialogue, ToolGrammar
from agentic_prompting.programs.rendering import read_turn
from agentic_prompting.rollout import (
    FunctionCall,
    TagGrammar,
    parse_turn,
    read_call,
    remove_closed_thoughts,
    split_turn,
)
from support.linear import FRAMES, PIECES, TAGS, assert_linear
from support.programs import ADD, byte_format


def as_json(**arguments):
    call = {"name": "write", "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def as_xml(**arguments):
    """A call as the templates of Qwen3-Coder and Qwen3.5 write it."""
    parameters = "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in arguments.items()
    )
    return f"<tool_call>\n<function=write>\n{parameters}</function>\n</tool_call>"


def tool(**properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "write", "parameters": parameters}}


TOOL = tool(text={"type": "string"}, other={"type": "string"})


# --- tags in arguments ----------------------------------------------------------------------------

QUOTED = [
    "see </tool_call> here",
    "x </think> y",
    "<think>",
    "<tool_call> and </tool_call>",
    "</function>",
    "a </parameter> b",
    "<parameter=x>",
    "</function>\n</tool_call>",
    'say "</tool_call>" \\ twice',
    "line one\n</tool_call>\nline two",
    "<tool_call>\n<function=f>\n</function>\n</tool_call>",
    as_xml(text="a", other="b"),
    as_json(text="</tool_call>"),
]


@pytest.mark.parametrize("write", [as_json, as_xml])
@pytest.mark.parametrize("text", QUOTED)
def test_an_argument_may_quote_tags(write, text):
    arguments = {"text": text, "other": "</tool_call>"}
    for thought in ("", "<think>\nhm\n</think>\n\n"):
        turn = thought + write(**arguments)
        (call,) = read_turn(turn, [TOOL]).tool_calls
        assert json.loads(call.arguments) == arguments
        assert ToolGrammar().parse(turn).kind == "act"
        assert ToolGrammar().read_calls(turn, [TOOL]) == [FunctionCall("write", arguments)]


@pytest.mark.parametrize("write", [as_json, as_xml])
def test_calls_behind_a_quoting_call_are_read(write):
    turn = f"I go.\n{write(text='x </tool_call> y')}\n{write(text='<tool_call>')}"
    entry = read_turn(turn, [TOOL])
    assert [json.loads(call.arguments)["text"] for call in entry.tool_calls] == [
        "x </tool_call> y",
        "<tool_call>",
    ]
    assert entry.text == "I go."


def test_a_broken_call_does_not_swallow_the_next():
    unclosed_parameter = (
        "<tool_call>\n<function=write>\n<parameter=text>\n1\n</function>\n</tool_call>\n"
    )
    unclosed_string = '<tool_call>\n{"name": "write", "arguments": {"text": "1}}\n</tool_call>\n'
    for broken, good in (
        (unclosed_parameter, as_xml(text="2")),
        (unclosed_string, as_json(text="2")),
    ):
        first, second = read_turn(broken + good, [TOOL]).tool_calls
        assert first.name == "write" and "2" not in first.arguments
        assert json.loads(second.arguments) == {"text": "2"}


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([*TAGS, '"', "\\", "\n", "{", "}", "x", "é"]), max_size=12).map(
        "".join
    )
)
def test_any_json_argument_is_read_back(text):
    turn = "<think>\nhm\n</think>\n" + as_json(text=text) + as_json(text="second")
    assert [call.arguments["text"] for call in ToolGrammar().read_calls(turn)] == [text, "second"]


# --- thoughts -------------------------------------------------------------------------------------

DRAFT = as_json(text="draft")
THOUGHTS = {
    "closed": (f"<think>a {DRAFT}</think>b", "b", 0),
    "opened by the template": (f"a {DRAFT}</think>b", "b", 0),
    "opened by the template, drafting half a call": (
        f"a <tool_call> or</think>b{as_json(text='x')}",
        "b",
        1,
    ),
    "two": ("<think>a</think>\n<think>c</think>b", "b", 0),
    "mentions a pair": ("<think>in <think></think> tags</think>b", "b", 0),
    "empty": ("<think></think>b", "b", 0),
    "cut": (f"<think>a {DRAFT}", "", 0),
    "behind text": (f"b<think>a {DRAFT}</think>", "b", 0),
    "none": ("b", "b", 0),
}


@pytest.mark.parametrize(("turn", "outside", "calls"), THOUGHTS.values(), ids=THOUGHTS)
def test_a_thought_is_no_text_and_no_call(turn, outside, calls):
    parts = split_turn(turn)
    assert (parts.outside.strip(), len(parts.calls)) == (outside, calls)
    assert len(read_turn(turn, [TOOL]).tool_calls) == calls


@pytest.mark.parametrize("grammar", [ToolGrammar(), Dialogue(), SearchGrammar()])
def test_a_thought_without_an_end_is_malformed(grammar):
    turn = grammar.parse("<think>It may be Nairobi. Answer: Nairobi")
    assert (turn.kind, turn.answer, turn.request) == ("malformed", None, None)


@pytest.mark.parametrize("grammar", [ToolGrammar(), SearchGrammar()])
def test_an_answer_has_no_thought_in_it(grammar):
    assert grammar.parse("<think>Answer: Lima?</think>Answer: Nairobi").answer.endswith("Nairobi")
    assert grammar.parse(f"<think>{DRAFT}</think>Answer: Nairobi").kind == "answer"


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<think", "a", "\n"]), max_size=12).map(
        "".join
    )
)
def test_closed_thoughts_are_removed(text):
    left = remove_closed_thoughts(text)
    assert left == text or "<think>" in text
    assert "<think>" not in left or "</think>" not in left.partition("<think>")[2]


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ['{"text": "a"}', '{"text": "\\"quoted\\""}', "{}", ""])
def test_arguments_that_are_a_json_text_are_decoded_once(text):
    body = json.dumps({"name": "write", "arguments": text})
    (call,) = read_turn(f"<tool_call>{body}</tool_call>", [TOOL]).tool_calls
    assert json.loads(call.arguments) == json.loads(text or "{}")
    assert read_call(body) == FunctionCall("write", json.loads(text or "{}"))


def test_arguments_that_are_another_text_stay():
    (call,) = read_turn(
        '<tool_call>{"name": "write", "arguments": "rm -r x"}</tool_call>', [TOOL]
    ).tool_calls
    assert call.arguments == "rm -r x"
    assert read_call('{"name": "write", "arguments": "rm -r x"}').problem


@pytest.mark.parametrize("written", ["null", '""', None])
def test_missing_arguments_are_none(written):
    rest = "" if written is None else f', "arguments": {written}'
    assert read_call(f'{{"name": "write"{rest}}}') == FunctionCall("write", {})


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "1e999", "[" * 150 + "]" * 150, "[" * 10**5, "9" * 5000]
)
def test_values_that_clients_cannot_take_are_no_json(value):
    call = read_call(f'{{"name": "write", "arguments": {{"text": {value}}}}}')
    assert call.name == "write" and call.problem and isinstance(call.arguments, str)


def test_half_a_surrogate_pair_is_replaced():
    call = read_call('{"name": "write", "arguments": {"\\udfff": ["a\\uD800b", "\\ud83d\\ude42"]}}')
    (key,) = call.arguments
    first, second = call.arguments[key]
    text = json.dumps(call.arguments, ensure_ascii=False)
    assert text.encode() and first[0] + first[-1] == "ab" and second == "🙂"


STRING = {"type": "string"}
NULL = {"type": "null"}
PARAMETERS = [
    (STRING, "12", "12"),
    (STRING, '"a"', '"a"'),
    ({"anyOf": [STRING, NULL]}, "12", "12"),  # Optional[str] of pydantic
    ({"anyOf": [STRING, NULL]}, '{"a": 1}', '{"a": 1}'),
    ({"anyOf": [STRING, NULL]}, "true", "true"),
    ({"anyOf": [STRING, NULL]}, "null", None),
    ({"oneOf": [STRING, NULL]}, "12", "12"),
    ({"type": ["string", "null"]}, "12", "12"),
    ({"type": "string", "nullable": True}, "12", "12"),
    ({"type": "STRING"}, "12", "12"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"const": "1"}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"$ref": "#/$defs/Color"}, "1", "1"),
    ({"allOf": [{"$ref": "#/$defs/Color"}], "default": "1"}, "1", "1"),
    ({"$ref": "#/$defs/Maybe"}, "1", "1"),
    ({"$ref": "#/$defs/Loop"}, "1", 1),
    ({"$ref": "elsewhere.json#/a"}, "1", 1),
    ({"anyOf": [STRING, {"type": "integer"}]}, "12", 12),
    ({"anyOf": [STRING, {"type": "array"}]}, '["a"]', ["a"]),
    ({"anyOf": [STRING, {"type": "array"}]}, "12", "12"),
    ({"anyOf": [STRING, {"type": "number"}]}, "12", 12),
    ({"type": "integer"}, "12", 12),
    ({"type": "integer"}, "twelve", "twelve"),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "false", False),
    ({"type": "number"}, "NaN", "NaN"),
    ({}, "12", 12),
    ({}, "twelve", "twelve"),
]
DEFINITIONS = {
    "Color": {"enum": ["1", "2"], "type": "string"},
    "Maybe": {"anyOf": [{"$ref": "#/$defs/Color"}, NULL]},
    "Loop": {"$ref": "#/$defs/Loop"},
}


@pytest.mark.parametrize(("schema", "written", "value"), PARAMETERS)
def test_a_parameter_has_the_type_of_its_schema(schema, written, value):
    shown = tool(text=schema)
    shown["function"]["parameters"]["$defs"] = DEFINITIONS
    (call,) = read_turn(as_xml(text=written), [shown]).tool_calls
    assert json.loads(call.arguments) == {"text": value}
    assert ToolGrammar().read_calls(as_xml(text=written), [shown]) == [
        FunctionCall("write", {"text": value})
    ]


ODD_TOOLS = [
    None,
    {},
    {"function": 1},
    {"function": {"name": "write", "parameters": 1}},
    tool(text=1),
]


@pytest.mark.parametrize("shown", ODD_TOOLS)
def test_tools_without_a_schema_do_no_harm(shown):
    assert read_call(
        "<function=write><parameter=text>1</parameter></function>", [shown]
    ).arguments == {"text": 1}


# --- anything -------------------------------------------------------------------------------------

texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=14).map("".join)


@settings(max_examples=500, deadline=None)
@given(texts)
def test_any_text_is_a_turn(text):
    parts = split_turn(text)
    for call in parts.calls:
        assert parts.visible[call.start : call.end].strip().startswith("<tool_call>")
        assert parts.visible[call.start : call.end].endswith("</tool_call>")
        read_call(call.body, [TOOL])
    if not parts.is_cut:
        assert text.endswith(parts.visible)
    turn = ToolGrammar().parse(text)
    assert (turn.kind == "act") <= bool(parts.calls)
    read_turn(text, [TOOL])


CALL_READERS = {
    "read_turn": lambda text: read_turn(text, [ADD]),
    "ToolGrammar": ToolGrammar().parse,
    "SearchGrammar": SearchGrammar().parse,
}
OTHER_READERS = {
    "read_turn without tools": lambda text: read_turn(text, []),
    "read_calls": ToolGrammar().read_calls,
    "Dialogue": Dialogue().parse,
    "TagGrammar": parse_turn,
    "remove_closed_thoughts": remove_closed_thoughts,
    "read_call": read_call,
    "escape": lambda text: (
        TagGrammar().escape(text),
        ToolGrammar().escape(text),
        SearchGrammar().escape(text),
    ),
}


@pytest.mark.parametrize("reader", CALL_READERS.values(), ids=CALL_READERS)
def test_readers_of_calls_take_linear_time(reader):
    for piece in PIECES:
        for opening, closing in FRAMES:
            assert_linear(reader, piece, opening, closing)


@pytest.mark.parametrize("reader", OTHER_READERS.values(), ids=OTHER_READERS)
def test_other_readers_take_linear_time(reader):
    for piece in PIECES:
        assert_linear(reader, piece)


def test_tokens_of_observations_take_linear_time():
    form = byte_format()
    for piece in ("<think>", "<|im_end|>", "<", " ", "a", "\u200b", "é", "\ud800"):
        assert_linear(form.plain_ids, piece)
        assert_linear(lambda text: form.observation_ids(text, after=[]), piece)
        assert_linear(form.prompt_ids, piece)
