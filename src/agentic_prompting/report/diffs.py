"""What changed between two prompts, word by word, as data that a page can show."""

from __future__ import annotations

import difflib
import re
from typing import Literal

Change = Literal["=", "-", "+"]

_WORDS = re.compile(r"\s+|\w+|[^\w\s]")
_LINES = re.compile(r"[^\n]*\n|[^\n]+")
_MOST_WORDS = 3000  # the comparison is quadratic: longer texts are compared by lines, then as wholes


def word_diff(old: str, new: str) -> list[tuple[Change, str]]:
    """The pieces of both texts in reading order: `=` in both, `-` gone, `+` new.

    The pieces marked `=` and `-` put together are `old`, those marked `=` and `+` are `new`.

    Example:

        >>> word_diff("Check small cases.", "Check all cases.")
        [('=', 'Check '), ('-', 'small'), ('+', 'all'), ('=', ' cases.')]
    """
    for pieces in (_WORDS, _LINES):
        before, after = pieces.findall(old), pieces.findall(new)
        if len(before) + len(after) <= _MOST_WORDS:
            break
    else:
        before, after = [old], [new]
    changes: list[tuple[Change, str]] = []
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, start, end, new_start, new_end in matcher.get_opcodes():
        if kind == "equal":
            changes.append(("=", "".join(before[start:end])))
            continue
        changes += [("-", "".join(before[start:end]))] if end > start else []
        changes += [("+", "".join(after[new_start:new_end]))] if new_end > new_start else []
    return _without_lone_spaces(changes)


def _without_lone_spaces(changes: list[tuple[Change, str]]) -> list[tuple[Change, str]]:
    """Unchanged white space between two changes joins both: `-a +b = -c +d` reads better as `-a c +b d`."""
    runs: list[list[tuple[Change, str]]] = []
    for place, change in enumerate(changes):
        between = 0 < place < len(changes) - 1 and change[0] == "=" and change[1].strip(" ") == ""
        if change[0] == "=" and not between:
            runs.append([change])
        elif runs and runs[-1][0][0] != "=":
            runs[-1].append(change)
        else:
            runs.append([change])
    return [merged for run in runs for merged in _merged(run)]


def _merged(run: list[tuple[Change, str]]) -> list[tuple[Change, str]]:
    if len(run) < 3:
        return run
    gone = "".join(text for kind, text in run if kind != "+")
    new = "".join(text for kind, text in run if kind != "-")
    pairs: list[tuple[Change, str]] = [("-", gone), ("+", new)]
    return [pair for pair in pairs if pair[1]]
