"""Which conversations are the same, however a client's framework has copied them.

Thoughts and white space in a reply do not count, nor do the ids of calls and how their arguments are written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from ..rollout import remove_closed_thoughts
from .protocol import Entry


def keys_of(tools: Sequence[Any], entries: Sequence[Entry]) -> Iterator[bytes]:
    """A fingerprint of the conversation up to each of its messages."""
    key = key_of_tools(tools)
    for entry in entries:
        key = key_of(key, entry)
        yield key


def key_of_tools(tools: Sequence[Any]) -> bytes:
    """A fingerprint of the tools of a request."""
    return hashlib.blake2b(json.dumps(tools, sort_keys=True).encode(), digest_size=16).digest()


def key_of(before: bytes, entry: Entry) -> bytes:
    """The fingerprint of a conversation, from that of the conversation before its last message."""
    if entry.role != "assistant":
        said = f"{entry.role}\0{entry.text.strip()}"
    elif entry.calls:  # some clients drop the text beside calls
        said = json.dumps([[call.name, canonical(call.arguments)] for call in entry.calls])
    else:
        said = plain(entry.text)
    return hashlib.blake2b(before + entry.role.encode() + said.encode("utf-8", "replace"), digest_size=16).digest()


def plain(text: str) -> str:
    """A text without thoughts and white space."""
    return " ".join(remove_closed_thoughts(text).split())


def contains_words(text: str, words: str) -> bool:
    """Whether a text contains other words, not as parts of longer ones. No words are in no text."""
    position = text.find(words) if words else -1
    while position >= 0:
        before, after = text[position - 1 : position], text[position + len(words) : position + len(words) + 1]
        if not (words[0].isalnum() and before.isalnum()) and not (words[-1].isalnum() and after.isalnum()):
            return True
        position = text.find(words, position + 1)
    return False


def canonical(arguments: str) -> str:
    """Arguments by their values, however a client has written them again; 1.0 is 1, as JavaScript has one number."""
    try:
        value = json.loads(arguments or "{}", parse_float=lambda text: _whole(float(text)))
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError, OverflowError):
        return arguments.strip()


def _whole(number: float) -> float | int:
    return int(number) if number.is_integer() and abs(number) < 2**53 else number
