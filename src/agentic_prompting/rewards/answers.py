"""Reads the final answer in a reply, and the accepted answers of a row.

All readers take time linear in the length of the reply.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import Any

from ..llm import strip_thoughts
from ..llm.numbers import answer_text

# "Answer:", "**Final Answer**:", "answer :". The repeats are bounded, so each match takes
# constant time.
ANSWER_MARK = re.compile(r"answer[ \t*_`]{0,20}[:：]", re.IGNORECASE)
# A heading without a colon: "### Final answer", "**Answer**".
_HEADING = re.compile(
    r"[ \t]{0,9}(?:#{1,6}|\*\*|__)[ \t*_]{0,9}(?:the )?(?:final )?answer[ \t*_]{0,9}", re.IGNORECASE
)
# Tags around an answer.
_OPENING_TAG = re.compile(r"<answer>", re.IGNORECASE)
_CLOSING_TAG = re.compile(r"</answer>", re.IGNORECASE)
# The beginning of LaTeX's box.
_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,9}\{")
# A line that only begins or ends a block: of code, of mathematics, or a rule.
_BLOCK_MARK = re.compile(r"`{3,}\w*|\${1,2}|\\[\[\]()]|-{3,}|>")
# The beginning of a LaTeX command whose content is text.
_TEXT_COMMAND = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname)\s{0,9}\{"
)
# Delimiters of formulas, code and emphasis.
_PAIRS = (
    ("$$", "$$"),
    ("$", "$"),
    ("\\(", "\\)"),
    ("\\[", "\\]"),
    ("`", "`"),
    ("__", "__"),
    ("_", "_"),
)
_MAX_LAYERS = 8  # layers of marks around an answer


def read_answer(reply: str) -> str:
    """Return the answer in a reply, without the thought of the model.

    The answer is the first of these that the reply has: the text in the last answer tags; the text
    in the last `\\boxed{...}`; the text after the last `Answer:` or heading `Answer`, on its line
    or on the next line with text; the whole visible reply. Markup, math delimiters and a full stop
    around the answer are removed. A reply that was cut off in its thought has the answer `""`.

    Args:
        reply (`str`): The reply, as the model wrote it.

    Example:

        >>> read_answer("<think>Is it \\\\boxed{3}?</think>\\n**Answer:**\\n4.")
        '4'
    """
    visible = strip_thoughts(reply)
    answer = find_answer(visible)
    return visible if answer is None else answer


def find_answer(visible: str) -> str | None:
    """Return the marked answer in a text without thoughts; `None` if nothing marks one.

    See [`read_answer`].
    """
    # Answer tags, with or without a box in them.
    tagged = _find_tagged(visible)
    if tagged is not None:
        boxed = find_box(tagged)
        if boxed is None:
            return tagged
        return strip_marks(boxed)

    # A box, or a mark such as `Answer:`.
    boxed = find_box(visible)
    if boxed is not None:
        return strip_marks(boxed)
    return _find_behind_mark(visible)


def find_box(text: str) -> str | None:
    """Return the unchanged content of the last `\\boxed{...}`.

    If it is not closed, up to the end of the text.
    """
    box = last_match(_BOX, text)
    if box is None:
        return None
    return _read_to_closing_brace(text[box.end() :])


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the last match of a pattern in a text, if there is one."""
    matches = deque(pattern.finditer(text), maxlen=1)
    return matches[0] if matches else None


def strip_marks(text: str) -> str:
    """Return an answer without the markup, math delimiters, `\\text{...}` and stop around it."""
    for _ in range(_MAX_LAYERS):
        # The full stop of a sentence, but not an ellipsis.
        stripped = text.strip().strip("*").strip().removesuffix("。")
        if not stripped.endswith(".."):
            stripped = stripped.removesuffix(".")
        # Delimiters and commands around the whole answer.
        stripped = _unwrap_text_command(_unwrap_pair(stripped))
        if stripped == text:
            break
        text = stripped
    return text


def accepted_answers(answers: Sequence[Any]) -> list[str]:
    """Return the accepted answers as texts; see [`answer_text`].

    Raises:
        `ValueError`: If there is none, if a string is passed for the list, or if an answer is
            neither a text nor a number.
    """
    if isinstance(answers, str):
        raise ValueError(f"answers must be a list of strings, got the string {answers[:80]!r}")
    if not len(answers):
        raise ValueError("answers is empty: a row without an accepted answer cannot be scored")
    return [answer_text(answer) for answer in answers]


def _find_tagged(text: str) -> str | None:
    """Return the text in the last answer tags; `None` if there are none."""
    # The last pair of which the opening tag stands before the last closing one.
    closings = [match.start() for match in _CLOSING_TAG.finditer(text)]
    if not closings:
        return None
    start = None
    for opening in _OPENING_TAG.finditer(text, 0, closings[-1]):
        start = opening.end()
    if start is None:
        return None
    end = next(closing for closing in closings if closing >= start)
    return text[start:end].strip()


def _find_behind_mark(text: str) -> str | None:
    """Return the text after the last `Answer:` or heading `Answer` that a text follows.

    `None` without such a mark, and `""` if no text follows any of them.
    """
    answer = None
    is_on_next_line = False
    for line in text.split("\n"):
        # The text after a mark is on the same line, or on the next one that has any.
        mark = ANSWER_MARK.search(line)
        is_heading = mark is None and _HEADING.fullmatch(line) is not None
        if mark is not None:
            content = strip_marks(line[mark.end() :])
        elif is_heading:
            content = ""
        elif is_on_next_line and not _BLOCK_MARK.fullmatch(line.strip()):
            content = strip_marks(line)
        else:
            continue
        # A later mark without text does not replace an earlier answer.
        is_on_next_line = not content
        answer = content or answer or ""
    return answer


def _read_to_closing_brace(text: str) -> str:
    """Return the text before the brace that closes one opened before it.

    All of it without that brace.
    """
    depth = 1
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[: brace.start()].strip()
    return text.strip()


def _unwrap_pair(text: str) -> str:
    """Return a text without the pair of delimiters around it, if it has one."""
    for opening, closing in _PAIRS:
        inner = text[len(opening) : -len(closing)]
        is_wrapped = (
            len(text) > len(opening) + len(closing)
            and text.startswith(opening)
            and text.endswith(closing)
        )
        if is_wrapped and opening not in inner and closing not in inner:
            return inner
    return text


def _unwrap_text_command(text: str) -> str:
    """Return the content of a text that is all one LaTeX command for text.

    Other texts unchanged.
    """
    command = _TEXT_COMMAND.match(text)
    if command is None or not text.endswith("}"):
        return text
    inner = _read_to_closing_brace(text[command.end() :])
    is_whole = text[command.end() :].strip() == f"{inner}}}"
    return inner if is_whole else text
