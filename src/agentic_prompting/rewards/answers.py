"""Reading answers: the final answer in a reply, and the accepted answers of a row.

All readers take time linear in the reply, whatever a model writes.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import Any

from ..llm import strip_thoughts
from ..llm.numbers import is_missing, is_number, number_text

# "Answer:", "**Final Answer**:", "answer :". The repeats are bounded, so that each match takes constant time.
ANSWER_MARK = re.compile(r"answer[ \t*_`]{0,20}[:：]", re.IGNORECASE)
# A heading without a colon: "### Final answer", "**Answer**".
_HEADING = re.compile(
    r"[ \t]{0,9}(?:#{1,6}|\*\*|__)[ \t*_]{0,9}(?:the )?(?:final )?answer[ \t*_]{0,9}", re.IGNORECASE
)
_OPENING_TAG = re.compile(r"<answer>", re.IGNORECASE)
_CLOSING_TAG = re.compile(r"</answer>", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,9}\{")
# A line that only begins or ends a block: of code, of mathematics, or a rule.
_BLOCK_MARK = re.compile(r"`{3,}\w*|\${1,2}|\\[\[\]()]|-{3,}|>")
_TEXT_COMMAND = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname)\s{0,9}\{"
)
_PAIRS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("`", "`"), ("__", "__"))
_MAX_LAYERS = 8  # of marks around an answer


def read_answer(reply: str) -> str:
    """The answer in a reply, without the thought of the model.

    In this order: the text in the last answer tags; in the last `\\boxed{...}`; behind the last `Answer:` or a heading
    `Answer`, on its line or on the next line with text; the whole visible reply. Markup, math delimiters and a full
    stop around the answer are not part of it. A reply that was cut off inside of its thought has the answer `""`.

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
    """The marked answer in a text without thoughts; `None` where nothing marks one. See [`read_answer`]."""
    tagged = _find_tagged(visible)
    if tagged is not None:
        boxed = find_box(tagged)
        return tagged if boxed is None else strip_marks(boxed)
    boxed = find_box(visible)
    if boxed is not None:
        return strip_marks(boxed)
    return _find_behind_mark(visible)


def find_box(text: str) -> str | None:
    """The content of the last `\\boxed{...}` of a text, as it stands; up to the end of a text that breaks off in it."""
    last = last_match(_BOX, text)
    return None if last is None else _up_to_closing_brace(text[last.end() :])


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last match of a pattern in a text, if there is one."""
    matches = deque(pattern.finditer(text), maxlen=1)
    return matches[0] if matches else None


def strip_marks(text: str) -> str:
    """An answer without the marks around it: markup, math delimiters, `\\text{...}` and a full stop."""
    for _ in range(_MAX_LAYERS):
        stripped = text.strip().strip("*").strip().removesuffix("。")
        if not stripped.endswith(".."):
            stripped = stripped.removesuffix(".")
        stripped = _unwrap_text_command(_unwrap_pair(stripped))
        if stripped == text:
            break
        text = stripped
    return text


def accepted_answers(answers: Sequence[Any]) -> list[str]:
    """The accepted answers as texts; numbers by their canonical text, see [`number_text`].

    Raises:
        `ValueError`: If there is none, or a bare string is passed for the list, or one is neither text nor number.
    """
    if isinstance(answers, str):
        raise ValueError(f"answers must be a list of strings, got the string {answers[:80]!r}")
    if not len(answers):
        raise ValueError("answers is empty: a row without an accepted answer cannot be scored")
    return [answer_text(answer) for answer in answers]


def answer_text(value: Any) -> str:
    """One accepted answer as text: a text as it is, a number by its canonical text.

    Raises:
        `ValueError`: It is something else, which makes the row a broken one.
    """
    if isinstance(value, str):
        return str(value)
    if not is_number(value) or is_missing(value):
        kind = type(value).__name__
        raise ValueError(
            f"an accepted answer must be a text or a number, got {kind}: {value!r:.80}"
        )
    return number_text(value)


def _find_tagged(text: str) -> str | None:
    """The text in the last answer tags."""
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
    answer = None
    has_mark = is_on_next_line = False
    for line in text.split("\n"):
        mark = ANSWER_MARK.search(line)
        if mark is not None or _HEADING.fullmatch(line):
            has_mark = True
            content = strip_marks(line[mark.end() :]) if mark is not None else ""
            is_on_next_line = not content
        elif is_on_next_line and not _BLOCK_MARK.fullmatch(line.strip()):
            content = strip_marks(line)
            is_on_next_line = not content
        else:
            continue
        answer = content or answer
    return answer or ("" if has_mark else None)


def _up_to_closing_brace(text: str) -> str:
    depth = 1
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[: brace.start()].strip()
    return text.strip()


def _unwrap_pair(text: str) -> str:
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
    command = _TEXT_COMMAND.match(text)
    if command is None or not text.endswith("}"):
        return text
    inner = _up_to_closing_brace(text[command.end() :])
    return inner if text[command.end() :].strip() == f"{inner}}}" else text
