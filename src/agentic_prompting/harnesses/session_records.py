"""A harness's own record of its session, compared with the calls that the gateway has captured.

The record is an independent witness: a difference means that a call was missed, or that a reply was
not delivered as it was sampled.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..programs import Call, ChatMessage, Refusal, ToolCall
from ..programs.call_tree import normalize_arguments, normalize_text
from ..programs.dialects.shared_fields import arguments_text, as_dict, is_json, read_text
from .folders import walk
from .harness import MAX_RECORD_BYTES

_TurnKey = tuple[str, ...]  # the name and the arguments of a tool call; or the text alone

# The errors of reading a record in whose place an agent has written something else.
_MALFORMED_RECORD = (
    sqlite3.Error,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    Refusal,
)
# Steps of sqlite's machine: a second or so. An agent can write a view without an end.
_MAX_DATABASE_STEPS = 10**7
_MAX_FILES = 1000
_MAX_ENTRIES = 10**5  # files and folders that are looked at
_MAX_DIFFERENCES = 1000

_ITEMS_WITH_CALLS = ("function_call", "custom_tool_call")
_ARGUMENT_FIELDS = ("arguments", "args", "input")


def find_records(home: Path, pattern: str) -> list[Path]:
    """Return the files below a home folder that a pattern names, in the order of their paths.

    An agent can fill its home with folders and files, so a limited number is looked at, and
    files of at most `MAX_RECORD_BYTES` bytes together are returned.

    Args:
        home (`Path`): The home folder of a rollout, without links that lead out of it.
        pattern (`str`): A relative path with `*` in its parts; one part may be `**`, for any number
            of folders.
    """
    # Begin at the deepest folder that the pattern names without a `*`.
    parts = pattern.split("/")
    fixed_parts = 0
    while fixed_parts < len(parts) and "*" not in parts[fixed_parts]:
        fixed_parts += 1
    if fixed_parts == len(parts):
        return [home / pattern]
    top = home.joinpath(*parts[:fixed_parts])

    # Find the files that match the rest of the pattern.
    paths = []
    for entry in islice(walk(top), _MAX_ENTRIES):
        relative_parts = entry.path[len(str(top)) + 1 :].split("/")
        if entry.is_file(follow_symlinks=False) and _matches(relative_parts, parts[fixed_parts:]):
            paths.append(Path(entry.path))

    # Return as many as can be read.
    total_bytes = 0
    records = []
    for path in sorted(paths)[:_MAX_FILES]:
        total_bytes += path.stat().st_size
        if total_bytes > MAX_RECORD_BYTES:
            break
        records.append(path)
    return records


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the parts of a path match those of a pattern."""
    if "**" not in pattern:
        return len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern))

    # `**` takes any number of parts: compare those before it and those after it.
    before = pattern.index("**")
    after = len(pattern) - before - 1
    if len(parts) < before + after:
        return False
    head = parts[:before]
    tail = parts[len(parts) - after :]
    return _matches(head, pattern[:before]) and _matches(tail, pattern[before + 1 :])


def read_turns(files: Iterable[Path]) -> list[ChatMessage]:
    """Return the model's turns in records of sessions: JSON, or a JSON object in each line, in any
    of the dialects' shapes.
    """
    turns: dict[tuple[Path, Any, int], ChatMessage] = {}
    for file in files:
        # Where a file is malformed, the turns that were read up to there are kept.
        with suppress(*_MALFORMED_RECORD):
            for number, entry in enumerate(_load_entries(file)):
                # gemini-cli writes an entry again when its calls have results: the last one counts.
                is_rewritten = entry.get("type") == "gemini"
                entry_id = entry.get("id") if is_rewritten else number
                for position, turn in enumerate(_turns_of_entry(entry)):
                    turns[file, entry_id, position] = turn
    return [turn for turn in turns.values() if turn.text or turn.tool_calls]


def _load_entries(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a record: of a database, of an object with `messages`, or an object in
    each line.
    """
    if file.is_symlink() or not file.is_file() or file.stat().st_size > MAX_RECORD_BYTES:
        return

    # A database is recognised by its content, whatever its name.
    with file.open("rb") as opened:
        is_database = opened.read(15) == b"SQLite format 3"
    if is_database:
        yield from _load_opencode_messages(file)
        return

    # One object for the whole session; if that is not JSON, an object in each line.
    text = file.read_text(encoding="utf-8", errors="replace")
    with suppress(ValueError):
        session = as_dict(json.loads(text))
        yield from map(as_dict, session.get("messages") or ())
        return
    for line in text.split("\n"):
        with suppress(ValueError):  # the last one may be cut
            yield as_dict(json.loads(line))


def _load_opencode_messages(file: Path) -> list[dict[str, Any]]:
    """Return the messages in opencode's database, with their parts."""
    entries: dict[str, dict[str, Any]] = {}
    with closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)) as database:
        # An agent may have written the database.
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_RECORD_BYTES)
        database.set_progress_handler(lambda: 1, _MAX_DATABASE_STEPS)

        # Messages in the order of their creation, then the parts of each one.
        messages = database.execute("SELECT id, data FROM message ORDER BY time_created")
        for message_id, data in messages:
            role = as_dict(json.loads(data)).get("role")
            entries[message_id] = {"role": role, "parts": []}
        parts = database.execute("SELECT message_id, data FROM part ORDER BY id")
        for message_id, data in parts:
            part = as_dict(json.loads(data))
            entries[message_id]["parts"].append(_convert_opencode_part(part))
    return list(entries.values())


def _convert_opencode_part(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of opencode's message; a call with `name` and `args`."""
    arguments = as_dict(as_dict(part.get("state")).get("input"))
    # A call whose arguments opencode could not read: it names the tool that was meant.
    if part.get("tool") == "invalid":
        return {"name": arguments.get("tool"), "args": {}}
    if part.get("type") == "tool":
        return {"name": part["tool"], "args": arguments}
    return part


def _turns_of_entry(entry: dict[str, Any]) -> Iterator[ChatMessage]:
    """Yield the model's turns in an entry."""
    # In some formats the message lies below a key of the entry.
    item = as_dict(entry.get("message") or entry.get("payload") or entry)
    if entry.get("type") == "gemini":
        text_part = {"text": read_text(entry.get("content"))}
        yield _build_turn([text_part, *(entry.get("toolCalls") or ())])
    elif isinstance(item.get("output"), list):  # a response, as a whole
        parts: list[Any] = []
        for output_item in item["output"]:
            parts += _message_parts(output_item)
        yield _build_turn(parts)
    elif item.get("role") in ("assistant", "model") or item.get("type") in _ITEMS_WITH_CALLS:
        yield _build_turn(_message_parts(item))


def _message_parts(item: dict[str, Any]) -> list[Any]:
    """Return texts and calls of a message or an item."""
    if item.get("type") in _ITEMS_WITH_CALLS:
        return [item]
    content = item.get("content") or item.get("parts") or ()
    parts = [{"text": content}] if isinstance(content, str) else list(content)
    for tool_call in item.get("tool_calls") or ():
        parts.append(as_dict(tool_call.get("function")))
    return parts


def _build_turn(parts: Sequence[Any]) -> ChatMessage:
    """Return a turn from its texts and calls; thoughts are left out."""
    text = ""
    tool_calls: list[ToolCall] = []
    for part in map(as_dict, parts):
        # Google's parts have the call below a key; in other dialects the part is the call.
        call = as_dict(part.get("functionCall") or part)
        if "name" in call:
            tool_calls.append(ToolCall("", str(call["name"]), arguments_text(_arguments_of(call))))
        elif not part.get("thought") and part.get("type") not in ("thinking", "reasoning"):
            text += str(part.get("text") or "")
    return ChatMessage("assistant", text, tool_calls=tuple(tool_calls))


def _arguments_of(call: dict[str, Any]) -> Any:
    """Return a call's arguments, for which each dialect has its own name."""
    fields = [field for field in _ARGUMENT_FIELDS if field in call]
    arguments = call[fields[0]] if fields else None
    # A custom tool takes a text: it is compared as an object with the field `input`.
    return {"input": arguments} if call.get("type") == "custom_tool_call" else arguments


def compare_turns(calls: Sequence[Call], recorded_turns: Sequence[ChatMessage]) -> list[str]:
    """Return the turns that only the calls or only the record has, in words; empty if they agree.

    Calls without tools may be absent from a record (titles, summaries). Broken arguments are not
    compared, because each client writes them down in a way of its own. Replies that call several
    tools may be recorded as several turns.
    """
    # Turns of the record, of calls with tools, and others that the record may have.
    recorded: Counter[_TurnKey] = Counter()
    for turn in recorded_turns:
        recorded.update(_turn_keys(turn))
    captured: Counter[_TurnKey] = Counter()
    optional: Counter[_TurnKey] = Counter()
    for call in calls:
        if call.request.tools:
            captured.update(_turn_keys(call.reply))
        else:
            optional.update(_turn_keys(call.reply))
        # A record may have the text beside tool calls as a turn of its own.
        if call.reply.tool_calls:
            optional[(normalize_text(call.reply.text),)] += 1

    # Differences of multisets: a turn that occurs twice must be recorded twice.
    only_captured = captured - recorded
    only_recorded = recorded - captured - optional

    _pair_broken_calls(only_captured, only_recorded)

    # Put the rest into words; an agent can write any number of turns into its record.
    differences = [f"only the gateway has {key!r}" for key in only_captured.elements()]
    for key in islice(only_recorded.elements(), _MAX_DIFFERENCES):
        differences.append(f"only the harness has {key!r}")
    return differences


def _pair_broken_calls(only_captured: Counter[_TurnKey], only_recorded: Counter[_TurnKey]) -> None:
    """Take calls with broken arguments out of the differences, each with a recorded call of its
    name, if there is one.
    """
    recorded_by_name: dict[str, list[_TurnKey]] = {}
    for key in only_recorded:
        recorded_by_name.setdefault(key[0], []).append(key)
    for key in list(only_captured):
        is_broken_call = len(key) == 2 and not is_json(key[1])
        if not is_broken_call:
            continue
        unpaired = only_captured.pop(key)
        for recorded_key in recorded_by_name.get(key[0], ()):
            paired = min(unpaired, only_recorded[recorded_key])
            only_recorded[recorded_key] -= paired
            unpaired -= paired


def _turn_keys(turn: ChatMessage) -> list[_TurnKey]:
    """Return a turn by its calls; by its text only where it has none, as some clients drop that
    beside calls.
    """
    if turn.tool_calls:
        return [(call.name, normalize_arguments(call.arguments)) for call in turn.tool_calls]
    text = normalize_text(turn.text)
    return [(text,)] if text else []
