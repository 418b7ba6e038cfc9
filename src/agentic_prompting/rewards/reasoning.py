"""Scores of ProRefine's five datasets: pure functions of an answer's text and the accepted answers.

The integer rule and the judge are those of the released evaluation. It has none for SVAMP and AQuA,
so theirs are ours, as is [`word_sorting_match`], which needs no judge.

| dataset | score |
|---|---|
| object counting, GSM8K, SVAMP | [`integer_match`] |
| word sorting | [`AccuracyJudge`] (as released) or [`word_sorting_match`] (ours) |
| AQuA | [`letter_match`] (ours) |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ..llm import strip_thoughts
from .answers import ANSWER_MARK, accepted_answers, find_answer, find_box, last_match, strip_marks

# Markup, brackets, LaTeX and a word like "option" before the letter. The alternatives begin with
# different characters and the repeat is possessive, so the time is linear.
_BEFORE_LETTER = (
    r"(?:[\s*_`$({\[\"'“‘]"
    r"|\\(?:boxed|fbox|text|math)(?:bf|rm|it|sf|tt)?(?=\s*+\{)"
    r"|\\[(\[]"
    r"|(?i:option|choice)\b:?)*+"
)
# An option's letter, with no other letter after it: neither "Because" nor "I'm".
_LETTER = re.compile(_BEFORE_LETTER + r"([A-Za-z])(?![^\W\d_]|['’][^\W\d_])")
# Signs after a letter that is all of a reply.
_AFTER_LETTER = " \t\r\n.):*_`$}]\"'”’"
# Signs around a word that are not part of it.
_SIGNS = "*_`$\"'“”‘’()[]{}<>.,;:!?-–—•"
# The number of an item: "2", "2.", "2)".
_NUMBERING = re.compile(r"\d+[.)]?")
# The number of a list item or a step at the beginning of a line: "2.", "**2)**", "(2)", "### 2.",
# "Step 2:", "Item 2:".
_LIST_NUMBER = re.compile(
    r"[ \t#>*_(\-]{0,20}((?:step|part|case|item|point|question|problem)\s?|#)?(\d{1,3})[*_]{0,3}[.):][*_)]{0,3}(?!\S)",
    re.IGNORECASE,
)
# A word whose only number is whole: "$1,240.00", "7%".
_INTEGER = re.compile(r"\D*(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.0+)?\D*")


def parse_integer(text: str) -> int:
    """Return the integer that the released evaluation reads in a text.

    These are the digits of the last token that has any, up to its first point:
    `"Answer: $1,240.50"` gives 1240. As in the released code, a minus sign is ignored, a range
    becomes one number, and a text without a number is 0.
    """
    whole_part = _last_token_with_digits(text).split(".")[0]
    digits = "".join(character for character in whole_part if character.isdigit())
    try:
        return int(digits)
    except ValueError:  # no digits, digits of another kind, or more of them than Python converts
        return 0


def integer_match(prediction: str, answers: Sequence[str]) -> float:
    """Return 1.0 if prediction and an accepted answer have the same [`parse_integer`], else 0.0.

    Unlike the released evaluation this ignores the model's thought and the numbers of lists and
    steps: a reply that was cut off after "3." has not answered 3. If the reply has a
    `\\boxed{...}` with a digit, the integer is read in the last of them: many models end with
    "Leo will be \\boxed{16} years old in 3 years".

    Args:
        prediction (`str`): The answer given, reasoning and all.
        answers (`Sequence[str]`): The accepted answers, at least one.

    Raises:
        `ValueError`: If there is no accepted answer, or a string is passed for the list.
    """
    visible = strip_thoughts(prediction)
    boxed = find_box(visible)
    if boxed is not None and _last_token_with_digits(boxed):
        predicted = parse_integer(boxed)
    else:
        # The numbers of lists and steps are not answers.
        predicted = parse_integer(_without_list_numbers(visible))
    return float(any(predicted == parse_integer(answer) for answer in accepted_answers(answers)))


def letter_match(prediction: str, answers: Sequence[str]) -> float:
    """Return 1.0 if the option's letter after the last `Answer:` is an accepted one, else 0.0.

    Our rule.

    The letter is a capital that no letter follows; brackets, markup, LaTeX and the word "option"
    before it make no difference. Without `Answer:` it is read in the last `\\boxed{...}` or answer
    tags, or the reply is nothing but the letter. A small letter counts only if the accepted answer
    is one.

    Args:
        prediction (`str`): The answer given, reasoning and all.
        answers (`Sequence[str]`): The accepted letters, at least one; `(B)` and `B) 42` are read as
            `B`.

    Raises:
        `ValueError`: As in [`integer_match`], or if an accepted answer is not a letter, which no
            reply could match.
    """
    accepted = {_option_letter(answer) for answer in accepted_answers(answers)}

    letter = _read_letter(strip_thoughts(prediction))
    if letter is None:
        return 0.0
    # Some datasets write their letters small.
    return float(letter in accepted or letter.lower() in accepted)


def word_sorting_match(prediction: str, answers: Sequence[str]) -> float:
    """Return 1.0 if the words after the last `Answer:` are an accepted answer, in order, else 0.0.

    A deterministic rule of ours in place of the language-model judge of the released evaluation: a
    deviation, and stricter. Case, commas, quotation marks, bullets and numbering make no
    difference. Without `Answer:` the last line counts.

    Args:
        prediction (`str`), answers (`Sequence[str]`): As in [`integer_match`]; answers are words
            separated by spaces.

    Raises:
        `ValueError`: As in [`integer_match`].
    """
    # The words after the last mark, else the last line.
    visible = strip_thoughts(prediction)
    answer = _read_after_answer_mark(visible)
    if answer is None:
        lines = [line for line in visible.splitlines() if line.strip()]
        answer = lines[-1] if lines else ""

    # A box around the words is not part of them.
    boxed = find_box(answer)
    if boxed is not None:
        answer = strip_marks(boxed)
    predicted = _words(answer)
    return float(any(predicted == _words(accepted) for accepted in accepted_answers(answers)))


def integer_problem(answer: str) -> str:
    """Return why no reply can match an accepted answer of [`integer_match`].

    An empty text if one can.
    """
    if _INTEGER.fullmatch(_last_token_with_digits(answer)):
        return ""
    return "integer_match compares whole numbers"


def letter_problem(answer: str) -> str:
    """Return why no reply can match an accepted answer of [`letter_match`].

    An empty text if one can.
    """
    try:
        _option_letter(answer)
    except ValueError as error:
        return str(error)
    return ""


def word_sorting_problem(answer: str) -> str:
    """Return why no reply can match an accepted answer of [`word_sorting_match`].

    An empty text if one can.
    """
    if _words(answer):
        return ""
    return "word_sorting_match compares words"


Scorer = Callable[[str, Sequence[str]], float]

REASONING_SCORERS: dict[str, Scorer] = {
    "bbh_object_counting": integer_match,
    "bbh_word_sorting": word_sorting_match,
    "gsm8k_dspy": integer_match,
    "svamp": integer_match,
    "aqua": letter_match,
}
"""The score of each of ProRefine's datasets that needs no judge, by its name in `load_task`."""


def _last_token_with_digits(text: str) -> str:
    """Return the last word of a text that has a digit; an empty text if there is none."""
    for token in reversed(text.split()):
        if any(character.isdigit() for character in token):
            return token
    return ""


def _read_after_answer_mark(text: str) -> str | None:
    """Return the text after the last `Answer:`; `None` without one."""
    mark = last_match(ANSWER_MARK, text)
    if mark is None:
        return None
    return text[mark.end() :]


def _read_letter(visible: str) -> str | None:
    """Return the letter of the option in a reply without thoughts; `None` if there is none."""
    answer = _read_after_answer_mark(visible)
    if answer is None:
        answer = find_answer(visible)
    is_unmarked = answer is None
    if answer is None:
        answer = visible
    match = _LETTER.match(answer)
    if match is None:
        return None
    # Without a mark the letter must be all of the reply.
    if is_unmarked and answer[match.end() :].strip(_AFTER_LETTER):
        return None
    letter = match[1]
    # "I think" and "a dog" are words, where another word follows. "A because ..." is an option.
    is_word = letter in "aI" and re.match(r"[ \t]{1,9}[a-z]", answer[match.end() :]) is not None
    return None if is_word else letter


def _option_letter(answer: str) -> str:
    """Return the letter of an accepted answer: of `B`, `(b)`, `B.`, `\\text{(B)}` or `B) 42`.

    Raises:
        `ValueError`: If it is not a letter.
    """
    match = _LETTER.match(answer)
    if match is not None:
        following = answer[match.end() :].lstrip(" \t*_`\"'”}$")
        if not following or following[0] in ").:]":
            return match[1]
    raise ValueError(f"letter_match compares the letters of options, not {answer[:80]!r}")


def _without_list_numbers(text: str) -> str:
    """Return a text without the numbers of its list items and steps.

    A number is an item's if the text has the item before it, if it is a 1 with text after it or a
    colon on the line before, or if a word such as "step" precedes it. The line after `Answer:` has
    an answer and no item.
    """
    lines: list[str] = []
    items: set[int] = set()
    previous_line = ""
    is_after_mark = False
    for line in text.split("\n"):
        match = _LIST_NUMBER.match(line)
        if match is not None and not is_after_mark:
            # Decide whether the number is an item's or the answer.
            number = int(match[2])
            content = line[match.end() :]
            has_word = bool(match[1])
            is_first = number == 1 and (bool(content.strip()) or previous_line.endswith(":"))
            if has_word or is_first or number - 1 in items:
                items.add(number)
                line = content
        lines.append(line)
        # Look for the mark once in each line with text: many empty items may follow a long one.
        if line.strip():
            previous_line = line.strip()
            is_after_mark = ANSWER_MARK.search(previous_line) is not None
    return "\n".join(lines)


def _words(text: str) -> list[str]:
    """Return the words in lower case, without the signs around them.

    Signs inside stay ("it&t", "we're").
    """
    words = []
    for token in text.lower().replace("’", "'").replace(",", " ").split():
        word = token.strip(_SIGNS)
        if word and not _NUMBERING.fullmatch(token):
            words.append(word)
    return words
