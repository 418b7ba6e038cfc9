"""A harness's own record against our calls: every shape that was seen, and what counts as a
difference.
"""

import json
import os
import sqlite3
from contextlib import closing

import pytest

from agentic_prompting.harnesses.session_records import compare_turns, read_turns
from agentic_prompting.programs import Call, ChatMessage, CompletionRequest, ToolCall
from support.programs import ADD

ARGS = {"path": "a.txt", "size": 1}
TEXT = json.dumps(ARGS, separators=(",", ":"))
CALLED = ChatMessage(
    "assistant", tool_calls=(ToolCall("call_1", "write", '{"size": 1.0, "path": "a.txt"}'),)
)
SAID = ChatMessage("assistant", "It is done.")


def items(*payloads):
    return [{"type": "response_item", "payload": payload} for payload in payloads]


RECORDS = {
    "codex": [
        {
            "type": "session_meta",
            "payload": {"id": "x", "base_instructions": {"text": "You code."}},
        },
        *items(
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "do"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "I write now."}],
            },
            {"type": "function_call", "name": "write", "arguments": TEXT, "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "ok"},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "It is done."}],
            },
        ),
    ],
    "pi": [
        {
            "type": "message",
            "message": {"role": "user", "content": [{"type": "text", "text": "do"}]},
        },
        {
            "type": "message",
            "message": {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm"},
                    {"type": "text", "text": "I write now."},
                    {"type": "toolCall", "id": "call_1", "name": "write", "arguments": ARGS},
                ],
            },
        },
        {
            "type": "message",
            "message": {"role": "toolResult", "content": [{"type": "text", "text": "ok"}]},
        },
        {
            "type": "message",
            "message": {"role": "assistant", "content": [{"type": "text", "text": "It is  done."}]},
        },
    ],
    "claude-code": [
        {"type": "user", "message": {"role": "user", "content": "do"}},
        *(
            {
                "type": "assistant",
                "message": {"role": "assistant", "id": "msg_1", "content": [block]},
            }
            for block in (
                {"type": "thinking", "thinking": "hm"},
                {"type": "text", "text": "I write now."},
                {"type": "tool_use", "id": "call_1", "name": "write", "input": ARGS},
            )
        ),
        {
            "type": "user",
            "message": {"role": "user", "content": [{"type": "tool_result", "content": "ok"}]},
        },
        {
            "type": "assistant",
            "message": {
                "role": "assistant",
                "id": "msg_2",
                "content": [{"type": "text", "text": "It is done."}],
            },
        },
    ],
    "qwen-code": [
        {
            "type": "assistant",
            "message": {
                "role": "model",
                "parts": [
                    {"text": "hm", "thought": True},
                    {"functionCall": {"id": "call_1", "name": "write", "args": ARGS}},
                ],
            },
        },
        {
            "type": "tool_result",
            "message": {"role": "user", "parts": [{"functionResponse": {"name": "write"}}]},
        },
        {"type": "assistant", "message": {"role": "model", "parts": [{"text": "It is done."}]}},
    ],
    "gemini-cli": [
        {"$set": {"messages": [{"type": "user", "content": [{"text": "do"}]}]}},
        {"id": "a", "type": "gemini", "content": ""},
        {
            "id": "a",
            "type": "gemini",
            "content": "",
            "toolCalls": [{"id": "write__1", "name": "write", "args": ARGS}],
        },
        {"id": "b", "type": "gemini", "content": "It is done."},
    ],
    "mini by chat": {
        "info": {},
        "messages": [
            {"role": "system", "content": "You code."},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "write", "arguments": TEXT},
                    }
                ],
            },
            {"role": "tool", "content": "ok"},
            {"role": "assistant", "content": "It is done."},
        ],
    },
    "mini by responses": {
        "messages": [
            {
                "object": "response",
                "output": [
                    {"type": "reasoning", "summary": []},
                    {"type": "function_call", "name": "write", "arguments": TEXT},
                ],
            },
            {"type": "function_call_output", "output": "ok"},
            {
                "object": "response",
                "output": [
                    {
                        "type": "message",
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": "It is done."}],
                    }
                ],
            },
        ]
    },
}


def recorded(tmp_path, record):
    file = tmp_path / "record"
    lines = (
        [json.dumps(record, indent=1)]
        if isinstance(record, dict)
        else [*map(json.dumps, record), '{"cut']
    )
    file.write_text("\n".join(lines))
    return read_turns([file])


def database(tmp_path, *messages):
    """opencode's: messages, and their parts in a table of their own.

    It is written as a log beside it (WAL).
    """
    with closing(sqlite3.connect(tmp_path / "opencode.db")) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE message (id TEXT, time_created INTEGER, data TEXT)")
        connection.execute("CREATE TABLE part (id TEXT, message_id TEXT, data TEXT)")
        for number, (role, *parts) in enumerate(messages):
            connection.execute(
                "INSERT INTO message VALUES (?, ?, ?)",
                (f"m{number}", number, json.dumps({"role": role})),
            )
            for i, part in enumerate(parts):
                connection.execute(
                    "INSERT INTO part VALUES (?, ?, ?)",
                    (f"p{number}{i}", f"m{number}", json.dumps(part)),
                )
        connection.commit()
    return tmp_path / "opencode.db"


def tool(name, given):
    return {
        "type": "tool",
        "tool": name,
        "callID": "call_1",
        "state": {"status": "completed", "input": given},
    }


def said(text):
    return {"type": "text", "text": text}


def test_a_record_in_a_database(tmp_path):
    file = database(
        tmp_path,
        ("user", said("do")),
        (
            "assistant",
            {"type": "reasoning", "text": "hm"},
            said("I write now."),
            tool("write", ARGS),
        ),
        ("assistant", tool("invalid", {"tool": "write", "error": "no JSON"})),
        ("assistant", {"type": "step-start"}, said("It is done.")),
    )
    broken = ChatMessage("assistant", tool_calls=(ToolCall("c", "write", '{"path": '),))
    ours = [
        call(ChatMessage("assistant", "I write now.", tool_calls=CALLED.tool_calls)),
        call(broken),
        call(SAID),
    ]
    assert compare_turns(ours, read_turns([file])) == []
    assert compare_turns(ours[:2], read_turns([file])) == ["only the harness has ('It is done.',)"]


def test_a_record_that_an_agent_has_spoilt_is_no_record(tmp_path):
    """It can write to its home what it likes: a table without an end, a pipe, a link, no database
    at all.
    """
    endless, pipe, link, no_database = (
        tmp_path / name for name in ("a.db", "pipe", "link", "b.db")
    )
    with closing(sqlite3.connect(endless)) as connection:
        connection.execute(
            "CREATE VIEW message AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM "
            "n) SELECT i AS id, i AS time_created, '{}' AS data FROM n"
        )
        connection.execute("CREATE TABLE part (id TEXT, message_id TEXT, data TEXT)")
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "record")
    no_database.write_bytes(b"SQLite format 3\0" + b"x" * 200)
    recorded(tmp_path, RECORDS["pi"])
    assert read_turns([endless, pipe, link, no_database]) == []


@pytest.mark.parametrize(
    "line",
    [
        '{"role": "assistant", "content": 5}',
        '{"type": "gemini", "content": [{"type": "image"}], "toolCalls": 7}',
        '{"output": [1, {"type": "message", "content": 3}]}',
        "[" * 100_000,
        '{"role": "assistant", "tool_calls": 5}',
    ],
)
def test_lines_that_no_harness_writes_end_no_run(tmp_path, line):
    file = tmp_path / "a.jsonl"
    file.write_text('{"role": "assistant", "content": "fine"}\n' + line)
    assert [turn.text for turn in read_turns([file])] == ["fine"]


def call(reply, tools=(ADD,)):
    made = Call(CompletionRequest("agent", (), tools), 1)
    made.reply = reply
    return made


@pytest.mark.parametrize("name", RECORDS)
def test_records_hold_what_we_have(tmp_path, name):
    turns = recorded(tmp_path, RECORDS[name])
    ours = ChatMessage("assistant", "I write now.", tool_calls=CALLED.tool_calls)
    assert compare_turns([call(ours), call(SAID)], turns) == []
    missed = compare_turns([call(ours)], turns)
    assert missed == ["only the harness has ('It is done.',)"]
    lost = compare_turns([call(ours), call(SAID), call(CALLED)], turns)
    assert lost == ["""only the gateway has ('write', '{"path": "a.txt", "size": 1}')"""]


def test_titles_and_broken_arguments_are_no_difference(tmp_path):
    title = ChatMessage("assistant", "A title")
    broken = ChatMessage("assistant", tool_calls=(ToolCall("c", "write", '{"path": '),))
    turns = recorded(tmp_path, RECORDS["pi"])
    assert compare_turns([call(broken), call(SAID), call(title, ())], turns) == []
    assert compare_turns([call(CALLED), call(SAID), call(broken)], turns) == [], (
        "a client may drop what it cannot read"
    )
    mended = ChatMessage("assistant", tool_calls=(ToolCall("c", "write", '{"path": ""}'),))
    assert compare_turns([call(broken)] * 2, [mended] * 2) == []
    other = ChatMessage("assistant", tool_calls=(ToolCall("c", "read", '{"path": '),))
    assert len(compare_turns([call(other), call(SAID)], turns)) == 1
