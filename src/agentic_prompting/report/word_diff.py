"""The difference of two texts, word by word."""

from __future__ import annotations

import difflib
import re
from typing import Literal

Change = Literal["=", "-", "+"]

# Words with the blanks after them, so that unchanged blanks part no changes. A line's end stands
# alone, because the last line has none.
_WORDS = re.compile(r"\w+[^\S\n]*|[^\w\s][^\S\n]*|\s+")
_LINES = re.compile(r"[^\n]*\n|[^\n]+")

# The comparison is quadratic: longer texts are compared by lines, then as wholes.
_MAX_PIECES = 3000


def word_diff(old: str, new: str) -> list[tuple[Change, str]]:
    """Return the pieces of both texts in reading order: `=` in both, `-` only in the old one, `+`
    only in the new one.

    The pieces marked `=` and `-` put together are `old`, those marked `=` and `+` are `new`.

    Example:

        >>> word_diff("Check small cases.", "Check all cases.")
        [('=', 'Check '), ('-', 'small '), ('+', 'all '), ('=', 'cases.')]
    """
    # Choose the finest pieces of which there are not too many.
    old_pieces = [old]
    new_pieces = [new]
    for pattern in (_WORDS, _LINES):
        old_candidates = pattern.findall(old)
        new_candidates = pattern.findall(new)
        if len(old_candidates) + len(new_candidates) <= _MAX_PIECES:
            old_pieces = old_candidates
            new_pieces = new_candidates
            break

    # Put neighbouring pieces of the same kind together.
    changes: list[tuple[Change, str]] = []
    matcher = difflib.SequenceMatcher(None, old_pieces, new_pieces, autojunk=False)
    for opcode, old_start, old_end, new_start, new_end in matcher.get_opcodes():
        removed = "".join(old_pieces[old_start:old_end])
        added = "".join(new_pieces[new_start:new_end])
        if opcode == "equal":
            changes.append(("=", removed))
            continue
        # A replacement is a removal followed by an addition.
        if removed:
            changes.append(("-", removed))
        if added:
            changes.append(("+", added))
    return changes
