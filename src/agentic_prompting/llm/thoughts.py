"""The thought of a thinking model in its reply, and the visible text without it.

Servers without a reasoning parser leave the thought in the text. What a model tries out there is no answer, no edit and
no verdict, so every reader of a reply calls [`strip_thoughts`] first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

# The marks of Qwen and DeepSeek, Seed, Magistral and Kimi; `<thinking>` is what models write that were asked to think.
# As brackets and name; a closing mark has a slash between them.
_MARKS = (
    ("<", "think", ">"),
    ("<", "thinking", ">"),
    ("<", "seed:think", ">"),
    ("[", "think", "]"),
    ("◁", "think", "▷"),
)
_KINDS = tuple("".join(mark) for mark in _MARKS)
_ANY_MARK = re.compile(
    "|".join(
        f"{re.escape(opening)}/?{name}{re.escape(closing)}" for opening, name, closing in _MARKS
    ),
    re.IGNORECASE,
)


class SplitReply(NamedTuple):
    """A reply in two parts.

    Attributes:
        thought (`str`): The thought, stripped; several are joined by an empty line.
        visible (`str`): The text outside of thoughts, as it stands.
    """

    thought: str
    visible: str


class _Mark(NamedTuple):
    start: int
    end: int
    kind: str  # its opening mark
    is_opening: bool


def split_thoughts(text: str, payload: re.Pattern[str] | None = None) -> SplitReply:
    """The thoughts of a reply and the visible text. Takes time linear in the text and never raises.

    A thought ends at its own closing mark, so that it may mention a pair of marks. Where a closing mark has no opening
    one and the reply does not begin with one, the chat template opened the thought. A thought without an end was cut
    off: the rest of the reply belongs to it. A mark in backticks is a mention.

    Args:
        text (`str`): A reply, as the model wrote it.
        payload (`re.Pattern`, *optional*): What a reply begins with that may itself hold such marks: a tool call, a
            proposed prompt. Behind its first match in the visible text no thought begins.

    Example:

        >>> split_thoughts("<think>Two and two.</think> 4")
        SplitReply(thought='Two and two.', visible=' 4')
        >>> split_thoughts("Two and two.</think> 4").visible
        ' 4'
        >>> split_thoughts("<think>Perhaps 3, unless").visible
        ''
    """
    marks = _find_marks(text)
    ends, unopened = _pair_marks(marks)
    thoughts: list[str] = []
    visible: list[str] = []
    position = 0

    # A closing mark without an opening one: the chat template opened the thought.
    begins_with_mark = bool(marks) and marks[0].is_opening and not text[: marks[0].start].strip()
    if unopened is not None and not begins_with_mark:
        thoughts.append(text[: unopened.start])
        position = unopened.end

    for mark, closing in zip(marks, ends, strict=True):
        if mark.start < position or not mark.is_opening:
            continue
        if payload is not None and payload.search(text, position, mark.start):
            break
        visible.append(text[position : mark.start])
        if closing is None:  # cut off
            thoughts.append(text[mark.end :])
            position = len(text)
        else:
            thoughts.append(text[mark.end : closing.start])
            position = closing.end
    visible.append(text[position:])
    stripped = (thought.strip() for thought in thoughts)
    return SplitReply("\n\n".join(filter(None, stripped)), "".join(visible))


def strip_thoughts(text: str, payload: re.Pattern[str] | None = None) -> str:
    """The visible text of a reply, stripped; empty where the reply was cut off inside of its thought.

    Args:
        text (`str`): A reply, as the model wrote it.
        payload (`re.Pattern`, *optional*): See [`split_thoughts`].
    """
    return split_thoughts(text, payload).visible.strip()


def _find_marks(text: str) -> list[_Mark]:
    marks = []
    for match in _ANY_MARK.finditer(text):
        is_mention = (
            text[match.start() - 1 : match.start()] == "`" == text[match.end() : match.end() + 1]
        )
        if not is_mention:
            mark = match[0].lower()
            marks.append(_Mark(match.start(), match.end(), mark.replace("/", ""), "/" not in mark))
    return marks


def _pair_marks(marks: Sequence[_Mark]) -> tuple[list[_Mark | None], _Mark | None]:
    """The mark that ends the thought of each opening mark, and the first closing mark without an opening one.

    A thought ends at the partner of its opening mark, or else at the next closing mark of its kind (the thought
    mentions an opening mark); `None` where there is no other.
    """
    partners: dict[int, _Mark] = {}
    opened: dict[str, list[int]] = {kind: [] for kind in _KINDS}
    unopened = None
    for index, mark in enumerate(marks):
        if mark.is_opening:
            opened[mark.kind].append(index)
        elif opened[mark.kind]:
            partners[opened[mark.kind].pop()] = mark
        elif unopened is None:
            unopened = mark

    ends: list[_Mark | None] = [None] * len(marks)
    next_closing: dict[str, _Mark] = {}
    for index in reversed(range(len(marks))):
        mark = marks[index]
        if mark.is_opening:
            ends[index] = partners.get(index) or next_closing.get(mark.kind)
        else:
            next_closing[mark.kind] = mark
    return ends, unopened
