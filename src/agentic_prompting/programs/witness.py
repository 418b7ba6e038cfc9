"""An independent witness: the harness's own record of its session, compared with the calls that we captured."""

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

from .call_tree import Call, normalize_arguments, normalize_text
from .fields import arguments_text, as_dict, is_json, read_text
from .folders import walk
from .harness import LARGEST_RECORD
from .protocol import ChatMessage, Refusal, ToolCall

_Key = tuple[Any, ...]
# What an agent can make of a record: another shape than any harness writes.
_SPOILT = (
    sqlite3.Error,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    Refusal,
)
_MOST_STEPS = (
    10**7
)  # of sqlite's machine: a second or so. An agent can write a view without an end.
_MOST_FILES = 1000
_MOST_ENTRIES = 10**5  # that are looked at for files
_MOST_DIFFERENCES = 1000


def find_records(home: Path, pattern: str) -> list[Path]:
    """The files below a home folder that a pattern names, in the order of their paths.

    An agent can fill its home with folders and files, so that a limited number is looked at, and files of at most
    `LARGEST_RECORD` bytes together are returned.

    Args:
        home (`Path`): The home folder of a rollout, without links that lead out of it.
        pattern (`str`): A relative path with `*` in its parts; one part may be `**`, for any number of folders.
    """
    parts = pattern.split("/")
    fixed = next((i for i, part in enumerate(parts) if "*" in part), None)
    if fixed is None:
        return [home / pattern]
    top = home.joinpath(*parts[:fixed])
    paths = []
    for entry in islice(walk(top), _MOST_ENTRIES):
        relative = entry.path[len(str(top)) + 1 :].split("/")
        if entry.is_file(follow_symlinks=False) and _matches(relative, parts[fixed:]):
            paths.append(Path(entry.path))
    total, records = 0, []
    for path in sorted(paths)[:_MOST_FILES]:
        total += path.stat().st_size
        if total > LARGEST_RECORD:
            break
        records.append(path)
    return records


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a path match those of a pattern."""
    if "**" not in pattern:
        return len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern))
    before = pattern.index("**")
    after = len(pattern) - before - 1
    return (
        len(parts) >= before + after
        and _matches(parts[:before], pattern[:before])
        and _matches(parts[len(parts) - after :], pattern[before + 1 :])
    )


def turns_in(files: Iterable[Path]) -> list[ChatMessage]:
    """The model's turns in records of sessions: JSON, or a JSON object in each line, in any of the dialects' shapes."""
    turns: dict[Any, ChatMessage] = {}
    for file in files:
        with suppress(*_SPOILT):
            for number, record in enumerate(_records(file)):
                for i, turn in enumerate(_turns_of(record)):
                    # A record that is written again, when its calls have results, has the id of the first.
                    turns[
                        file, record.get("id") if record.get("type") == "gemini" else number, i
                    ] = turn
    return [turn for turn in turns.values() if turn.text or turn.tool_calls]


def _records(file: Path) -> Iterator[dict[str, Any]]:
    if file.is_symlink() or not file.is_file() or file.stat().st_size > LARGEST_RECORD:
        return
    with file.open("rb") as opened:
        is_database = opened.read(15) == b"SQLite format 3"
    if is_database:
        yield from _in_database(file)
        return
    text = file.read_text(encoding="utf-8", errors="replace")
    with suppress(ValueError):
        yield from map(as_dict, as_dict(json.loads(text)).get("messages") or ())
        return
    for line in text.split("\n"):
        with suppress(ValueError):  # the last one may be cut
            yield as_dict(json.loads(line))


def _in_database(file: Path) -> list[dict[str, Any]]:
    """opencode's messages with their parts; a call whose arguments it could not read as one without any."""
    records: dict[str, dict[str, Any]] = {}
    with closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)) as database:
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_RECORD)
        database.set_progress_handler(lambda: 1, _MOST_STEPS)
        for name, data in database.execute("SELECT id, data FROM message ORDER BY time_created"):
            records[name] = {"role": as_dict(json.loads(data)).get("role"), "parts": []}
        for name, data in database.execute("SELECT message_id, data FROM part ORDER BY id"):
            part = as_dict(json.loads(data))
            given = as_dict(as_dict(part.get("state")).get("input"))
            if part.get("tool") == "invalid":
                part, given = {"type": "tool", "tool": given.get("tool")}, {}
            is_call = part.get("type") == "tool"
            records[name]["parts"].append(
                {"name": part["tool"], "args": given} if is_call else part
            )
    return list(records.values())


def _turns_of(record: dict[str, Any]) -> Iterator[ChatMessage]:
    said = as_dict(record.get("message") or record.get("payload") or record)
    if record.get("type") == "gemini":
        yield _turn([{"text": read_text(record.get("content"))}, *(record.get("toolCalls") or ())])
    elif isinstance(said.get("output"), list):  # a response, as a whole
        yield _turn([part for item in said["output"] for part in _parts_of(item)])
    elif said.get("role") in ("assistant", "model") or said.get("type") in (
        "function_call",
        "custom_tool_call",
    ):
        yield _turn(_parts_of(said))


def _parts_of(said: dict[str, Any]) -> list[Any]:
    """Texts and calls of a message or an item."""
    if said.get("type") in ("function_call", "custom_tool_call"):
        return [said]
    content = said.get("content") or said.get("parts") or ()
    parts = [{"text": content}] if isinstance(content, str) else list(content)
    return parts + [as_dict(one.get("function")) for one in said.get("tool_calls") or ()]


def _turn(parts: Sequence[Any]) -> ChatMessage:
    text, calls = "", list[ToolCall]()
    for part in map(as_dict, parts):
        call = as_dict(part.get("functionCall") or part)
        if "name" in call:
            given = next(
                (call[name] for name in ("arguments", "args", "input") if name in call), None
            )
            custom = call.get("type") == "custom_tool_call"
            calls.append(
                ToolCall(
                    "", str(call["name"]), arguments_text({"input": given} if custom else given)
                )
            )
        elif not part.get("thought") and part.get("type") not in ("thinking", "reasoning"):
            text += str(part.get("text") or "")
    return ChatMessage("assistant", text, tool_calls=tuple(calls))


def differences(calls: Sequence[Call], turns: Sequence[ChatMessage]) -> list[str]:
    """The turns that only the calls or only the record has, in words; empty if they agree.

    Calls without tools may be absent from a record (titles, summaries). Broken arguments are not compared, because each
    client writes them down in a way of its own. Replies that call several tools may be recorded as several turns.
    """
    theirs = Counter(key for turn in turns for key in _keys(turn))
    asked = Counter(key for call in calls if call.request.tools for key in _keys(call.reply))
    beside = Counter(key for call in calls if not call.request.tools for key in _keys(call.reply))
    beside += Counter((normalize_text(call.reply.text),) for call in calls if call.reply.tool_calls)
    only_ours, only_theirs = asked - theirs, theirs - asked - beside
    theirs_by_name: dict[Any, list[_Key]] = {}
    for key in only_theirs:
        theirs_by_name.setdefault(key[0], []).append(key)
    for key in list(only_ours):
        if len(key) != 2 or is_json(key[1]):
            continue
        # Broken arguments: compared by name alone.
        only_ours[key] = 0
        other = next(
            (other for other in theirs_by_name.get(key[0], ()) if only_theirs[other]), None
        )
        if other is not None:
            only_theirs[other] -= 1
    in_words = [f"only we have {key!r}" for key in only_ours.elements()]
    in_words += [
        f"only the harness has {key!r}" for key in islice(only_theirs.elements(), _MOST_DIFFERENCES)
    ]
    return in_words


def _keys(turn: ChatMessage) -> list[_Key]:
    """A turn by its calls; by its text only where it has none, as some clients drop that beside calls."""
    if turn.tool_calls:
        return [(call.name, normalize_arguments(call.arguments)) for call in turn.tool_calls]
    return [(text,)] if (text := normalize_text(turn.text)) else []
