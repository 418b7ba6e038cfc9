"""What the roles' replies say, read with tolerance: pure functions of texts."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Unit = Literal["tokens", "sentence", "paragraph"]

_OPEN = re.compile(r"<\s*improved[_ -]?prompt\s*>", re.IGNORECASE)
_CLOSE = re.compile(r"<\s*/\s*improved[_ -]?prompt\s*>", re.IGNORECASE)

_ENDS = {
    # After the sentence's closing marks, or after a line. "3.5" and "e.g.," end nothing; "Dr. Who" does, harmlessly.
    "sentence": re.compile(r"(?<![.!?…])[.!?…]++[\"'”’)\]*_]*+(?=\s)|(?<=\S)(?=\n)|[。！？]"),
    "paragraph": re.compile(r"(?<=\S)(?=[^\S\n]*\n[^\S\n]*\n)"),
}


class Improved(NamedTuple):
    """What an optimizer's reply holds: a prompt or the reason why there is none, never both."""

    prompt: str | None
    problem: str | None


def read_improved_prompt(reply: str) -> Improved:
    """The prompt between `<IMPROVED_PROMPT>` tags, stripped.

    Upper and lower case, spaces in the tags and text around them make no difference. Of several prompts the last
    complete one counts: models tend to speak of the tags before they use them.

    Args:
        reply (`str`): What the optimizer wrote.

    Returns:
        [`Improved`]: `problem` is `no tag`, `unclosed tag` or `empty prompt`.
    """
    openings = [match.end() for match in _OPEN.finditer(reply)]
    closings = [match.start() for match in _CLOSE.finditer(reply)]
    if not openings:
        return Improved(None, "no tag")
    if not closings or closings[-1] < openings[0]:
        return Improved(None, "unclosed tag")
    start = max(opening for opening in openings if opening <= closings[-1])
    end = min(closing for closing in closings if closing >= start)
    prompt = reply[start:end].strip()
    return Improved(prompt, None) if prompt else Improved(None, "empty prompt")


def says_correct(feedback: str) -> bool:
    """Whether a critic's reply says that nothing is to be improved: `CORRECT` alone on its first line."""
    first = feedback.strip().split("\n", 1)[0]
    return first.strip(" *_`\"'.!:#").upper() == "CORRECT"


def first_units(text: str, count: int, unit: Unit) -> str:
    """The beginning of `text`: its first `count` sentences or paragraphs, as they stand.

    Args:
        text (`str`): A text.
        count (`int`): How many, >= 1.
        unit (`str`): `sentence` (a line's end is one too) or `paragraph` (up to an empty line).

    Returns:
        `str`: A prefix of `text`; all of it where it has no more than `count`.
    """
    end, seen = 0, 0
    for match in _ENDS[unit].finditer(text):
        if not text[end : match.end()].strip():
            continue  # the line that ends right after its last sentence's mark
        end, seen = match.end(), seen + 1
        if seen == count:
            return text[:end] if text[end:].strip() else text
    return text
