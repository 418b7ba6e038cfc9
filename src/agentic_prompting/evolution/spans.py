"""Where the JSON is in a reply: a scanner that knows strings, comments and brackets, and nothing else.

Not a parser: it must find the end of JSON that no parser would take. Linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_COMMENT = re.compile(r"//[^\n]*|/\*.*?(?:\*/|\Z)|(?<![^\s,\[{}\]])#[^\n]*", re.DOTALL)
_QUOTE = re.compile(r"\\.|\"", re.DOTALL)
_QUOTES = {'"': '\\"', "\\'": "'"}
_SPACE = " \t\r\n"
_CLOSES = {"[": "]", "{": "}"}


class Span(NamedTuple):
    """A piece of the text that begins with a bracket and ends with the one that closes it.

    Args:
        start (`int`), end (`int`): Where it is.
        text (`str`): The piece without comments, every string that is closed in double quotes.
        cut_off (`bool`): The text ended inside a string of it.
    """

    start: int
    end: int
    text: str
    cut_off: bool


def json_spans(text: str) -> Iterator[Span]:
    """The outermost bracketed pieces of `text`, in order. Pieces that cannot be JSON (`{x}`) are among them.

    A piece that is never closed reaches to the end of the text, unless it began in the prose: then the search goes on
    behind its bracket.
    """
    position = 0
    while (start := _next_bracket(text, position)) is not None:
        span = _scan(text, start)
        if span is None:
            position = start + 1
            continue
        yield span
        position = span.end


def _next_bracket(text: str, position: int) -> int | None:
    found = [at for at in (text.find("[", position), text.find("{", position)) if at >= 0]
    return min(found) if found else None


def _scan(text: str, start: int) -> Span | None:
    """The span that begins at `start`; `None` if what follows the bracket cannot be the inside of JSON."""
    if not _looks_like_json(text, start):
        return None
    stack: list[str] = []
    kept: list[str] = []
    position = start
    while position < len(text):
        char = text[position]
        if char in "\"'" and (end := _string_end(text, position)) is not None:
            if end == len(text) and not _closed(text, position):
                return Span(start, end, "".join(kept) + text[position:], True)
            kept.append(_double_quoted(text[position + 1 : end - 1]))
            position = end
            continue
        comment = _COMMENT.match(text, position) if char in "/#" else None
        if comment:
            position = comment.end()
            continue
        kept.append(char)
        position += 1
        if char in _CLOSES:
            stack.append(_CLOSES[char])
        elif stack and char == stack[-1]:
            stack.pop()
            if not stack:
                return Span(start, position, "".join(kept), False)
    return Span(start, len(text), "".join(kept), False)


def _looks_like_json(text: str, start: int) -> bool:
    """Whether a bracket is followed by what may come first in JSON of edits: a string, a bracket, a name, its end."""
    inside = _skip(text, start + 1)
    if inside >= len(text):
        return True
    if text[start] == "[":
        return text[inside] in "[{]\"'"
    return text[inside] in "\"'}" or re.match(r"\w+\s*:", text[inside : inside + 40]) is not None


def _skip(text: str, position: int) -> int:
    """The first place from `position` on that is neither white space nor comment."""
    while position < len(text):
        comment = _COMMENT.match(text, position)
        if comment:
            position = comment.end()
        elif text[position] in _SPACE:
            position += 1
        else:
            break
    return position


def _string_end(text: str, start: int) -> int | None:
    """Behind the quote that closes the string at `start`; `None` if the quote there opens none (an apostrophe).

    A quote inside a string that somebody forgot to escape is followed by a word, one that closes it by a comma, a
    colon, a bracket, or a comment.
    """
    quote = text[start]
    before = start - 1
    while before >= 0 and text[before] in _SPACE:
        before -= 1
    if quote == "'" and not (before >= 0 and text[before] in "[{,:/"):
        return None
    position = start + 1
    while position < len(text):
        if text[position] == "\\":
            position += 2
            continue
        if text[position] == quote and _ends_here(text, position + 1):
            return position + 1
        position += 1
    return len(text)


def _double_quoted(inside: str) -> str:
    """The string as JSON has it: in double quotes, those inside of it escaped."""
    return '"' + _QUOTE.sub(lambda match: _QUOTES.get(match[0], match[0]), inside) + '"'


def _ends_here(text: str, position: int) -> bool:
    while position < len(text) and text[position] in _SPACE:
        position += 1
    return position >= len(text) or text[position] in ",:]}" or _COMMENT.match(text, position) is not None


def _closed(text: str, start: int) -> bool:
    """Whether a string that reaches the end of the text ends with a quote of its own."""
    return len(text) > start + 1 and text[-1] == text[start]
