"""Splits the reply of a thinking model into its thought and the visible text.

Servers without a reasoning parser leave the thought in the text. Text that a model tries out in its
thought is not an answer, an edit or a verdict, so every reader of a reply calls [`strip_thoughts`]
first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from .types import BadReply, Reply

# Opening bracket, name and closing bracket; a closing mark has a slash after the opening bracket.
# The marks of Qwen and DeepSeek, EXAONE, Seed, Magistral and Kimi. Models that are asked to think
# write `<thinking>` or `<reasoning>`.
_MARKS = (
    ("<", "think", ">"),
    ("<", "thinking", ">"),
    ("<", "thought", ">"),
    ("<", "reasoning", ">"),
    ("<", "seed:think", ">"),
    ("[", "think", "]"),
    ("◁", "think", "▷"),
)
_OPENING_MARKS = tuple("".join(mark) for mark in _MARKS)
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
        visible (`str`): The text outside of thoughts, unchanged.
    """

    thought: str
    visible: str


class _Mark(NamedTuple):
    start: int
    end: int
    opening_mark: str  # the pair that it belongs to
    is_opening: bool


def split_thoughts(text: str, payload: re.Pattern[str] | None = None) -> SplitReply:
    """Split a reply into its thoughts and the visible text.

    Takes time linear in the length of the text, and never raises.

    A thought ends at its own closing mark, so it may mention a pair of marks. A closing mark
    without an opening one, in a reply that does not begin with an opening mark, means that the chat
    template opened the thought. A thought without an end was cut off: the rest of the reply belongs
    to it. A mark in backticks is only a mention.

    Args:
        text (`str`): A reply, as the model wrote it.
        payload (`re.Pattern`, *optional*): Matches the beginning of a part that may itself contain
            such marks: a tool call, a proposed prompt. After its first match in the visible text no
            thought begins.

    Example:

        >>> split_thoughts("<think>Two and two.</think> 4")
        SplitReply(thought='Two and two.', visible=' 4')
        >>> split_thoughts("Two and two.</think> 4").visible
        ' 4'
        >>> split_thoughts("<think>Perhaps 3, unless").visible
        ''
    """
    marks = _find_marks(text)
    closing_marks = _find_closing_marks(marks)
    thoughts: list[str] = []
    visible: list[str] = []
    position = 0

    # A closing mark without an opening one: the chat template opened the thought.
    begins_with_mark = bool(marks) and marks[0].is_opening and not text[: marks[0].start].strip()
    unopened = _find_unopened_mark(marks)
    if unopened is not None and not begins_with_mark:
        thoughts.append(text[: unopened.start])
        position = unopened.end

    # Each opening mark outside of a thought begins one.
    for mark, closing_mark in zip(marks, closing_marks, strict=True):
        if mark.start < position or not mark.is_opening:
            continue
        if payload is not None and payload.search(text, position, mark.start):
            break
        visible.append(text[position : mark.start])
        if closing_mark is None:  # cut off
            thoughts.append(text[mark.end :])
            position = len(text)
        else:
            thoughts.append(text[mark.end : closing_mark.start])
            position = closing_mark.end
    visible.append(text[position:])

    stripped_thoughts = [thought.strip() for thought in thoughts]
    return SplitReply("\n\n".join(filter(None, stripped_thoughts)), "".join(visible))


def strip_thoughts(text: str, payload: re.Pattern[str] | None = None) -> str:
    """Return the visible text of a reply, stripped.

    Empty if the reply was cut off inside its thought.

    Args:
        text (`str`): A reply, as the model wrote it.
        payload (`re.Pattern`, *optional*): See [`split_thoughts`].
    """
    return split_thoughts(text, payload).visible.strip()


def without_thoughts(reply: Reply) -> Reply:
    """Return a reply with the visible text alone, as it is shown to an agent.

    A text without thoughts stays unchanged. A reply that is nothing but a thought, because it was
    cut off inside of it, has no text to show: its error is a [`BadReply`], as from an endpoint that
    keeps thoughts out of the text.

    Args:
        reply ([`Reply`]): The reply of a model.
    """
    thought, visible = split_thoughts(reply.text)
    if reply.error is not None or not thought:
        return reply
    if visible.strip():
        return replace(reply, text=visible.strip())
    error = BadReply(
        "the reply ended inside of its thought: raise max_tokens, or turn thinking off at the "
        "endpoint"
    )
    return replace(reply, text="", error=error)


def _find_marks(text: str) -> list[_Mark]:
    """Return the marks in a text, in order; those in backticks are left out."""
    marks = []
    for match in _ANY_MARK.finditer(text):
        # A mark in backticks is a mention.
        preceding = text[match.start() - 1 : match.start()]
        following = text[match.end() : match.end() + 1]
        if preceding == "`" and following == "`":
            continue
        mark = match[0].lower()
        marks.append(
            _Mark(
                start=match.start(),
                end=match.end(),
                opening_mark=mark.replace("/", ""),
                is_opening="/" not in mark,
            )
        )
    return marks


def _find_closing_marks(marks: Sequence[_Mark]) -> list[_Mark | None]:
    """Return for each opening mark the mark that ends its thought, or `None` if there is none.

    This is the partner of the opening mark, or else the next closing mark of its pair (the thought
    mentions an opening mark). The entry of a closing mark is `None`.
    """
    # Pair the marks as brackets are paired.
    partners: dict[int, _Mark] = {}
    open_indices: dict[str, list[int]] = {mark: [] for mark in _OPENING_MARKS}
    for index, mark in enumerate(marks):
        if mark.is_opening:
            open_indices[mark.opening_mark].append(index)
        elif open_indices[mark.opening_mark]:
            partners[open_indices[mark.opening_mark].pop()] = mark

    # From the end, so that the next closing mark of each pair is known.
    closing_marks: list[_Mark | None] = [None] * len(marks)
    next_closing_mark: dict[str, _Mark] = {}
    for index in reversed(range(len(marks))):
        mark = marks[index]
        if mark.is_opening:
            closing_marks[index] = partners.get(index) or next_closing_mark.get(mark.opening_mark)
        else:
            next_closing_mark[mark.opening_mark] = mark
    return closing_marks


def _find_unopened_mark(marks: Sequence[_Mark]) -> _Mark | None:
    """Return the first closing mark without an opening one."""
    open_counts = dict.fromkeys(_OPENING_MARKS, 0)
    for mark in marks:
        if mark.is_opening:
            open_counts[mark.opening_mark] += 1
        elif open_counts[mark.opening_mark]:
            open_counts[mark.opening_mark] -= 1
        else:
            return mark
    return None
