"""Scores of ProRefine's five data sets: pure functions of an answer's text and the accepted answers.

The integer rule and the judge are those of the released evaluation; it has none for SVAMP and AQuA, so theirs are ours,
as is [`word_sorting_match`], which needs no judge.

| set | score |
|---|---|
| object counting, GSM8K, SVAMP | [`integer_match`] |
| word sorting | [`AccuracyJudge`] (as released) or [`word_sorting_match`] (ours) |
| AQuA | [`letter_match`] (ours) |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ..llm import Message, as_chat, fill, strip_thoughts
from .answers import ANSWER_MARK, accepted_answers, find_answer, find_box, last_match, strip_marks
from .judges import Judge

JUDGE_ROLE = """\
You compare a prediction with the known right answer to a question. The prediction is right if its final result is \
the same in content; how it got there, its form and its wording do not matter. End your reply with \
<ACCURACY>1</ACCURACY> if it is right or <ACCURACY>0</ACCURACY> if it is not."""
"""The judge's system prompt, in our words. No variables."""

JUDGE_TEMPLATE = "Question:\n{question}\n\nRight answer:\n{gold}\n\nPrediction:\n{prediction}"
"""The judge's request. Variables: `{question}`, `{gold}`, `{prediction}` (str)."""

_ACCURACY_OPENING = re.compile(r"<\s{0,9}accuracy\s{0,9}>", re.IGNORECASE)
_ACCURACY_CLOSING = re.compile(r"<\s{0,9}/\s{0,9}accuracy\s{0,9}>", re.IGNORECASE)
_VERDICT = re.compile(r"([01])(?:\.0{0,9})?")
# Markup, brackets, LaTeX and a word like "option" before the letter. The alternatives begin with different characters
# and the repeat is possessive, so that the time is linear.
_BEFORE_LETTER = r"(?:[\s*_`$({\[\"'“]|\\(?:boxed|fbox|text|math)(?:bf|rm|it|sf|tt)?(?=\s*+\{)|\\[(\[]|(?i:option|choice)\b:?)*+"
_LETTER = re.compile(_BEFORE_LETTER + r"([A-Za-z])(?![^\W\d_]|['’][^\W\d_])")
_SIGNS = "*_`$\"'“”‘’()[]{}<>.,;:!?-–—•"
_NUMBERING = re.compile(r"\d+[.)]?")
# The number of a list item or a step at the beginning of a line: "2.", "**2)**", "(2)", "### 2.", "Step 2:".
_LIST_NUMBER = re.compile(
    r"[ \t#>*_(\-]{0,20}(step\s?|part\s?|case\s?|#)?(\d{1,3})[*_]{0,3}[.):][*_)]{0,3}(?!\S)",
    re.IGNORECASE,
)
_INTEGER = re.compile(r"\D*(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.0+)?\D*")


def parse_integer(text: str) -> int:
    """The integer that the released evaluation reads in a text.

    It takes the digits of the last token that has any, up to its first point: `"Answer: $1,240.50"` gives 1240. As
    there, a minus sign is ignored, a range becomes one number, and a text without a number is 0.
    """
    token = _last_token_with_digits(text)
    try:
        return int("".join(character for character in token.split(".")[0] if character.isdigit()))
    except (
        ValueError
    ):  # nothing before the point, digits of another kind, or more of them than Python converts
        return 0


def integer_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 if prediction and one of the accepted answers have the same [`parse_integer`], else 0.0.

    Unlike the released evaluation this leaves out the model's thought and the numbers of lists and steps: a reply that
    was cut off behind "3." has not answered 3.

    Args:
        prediction (`str`): The answer given, reasoning and all.
        answers (`Sequence[str]`): The accepted answers, at least one.

    Raises:
        `ValueError`: If there is no accepted answer, or a bare string is passed for the list.
    """
    predicted = parse_integer(_without_list_numbers(strip_thoughts(prediction)))
    return float(any(predicted == parse_integer(answer) for answer in accepted_answers(answers)))


def letter_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 if the option's letter after the last `Answer:` is an accepted one, else 0.0. Our rule.

    The letter is a capital that no letter follows; brackets, markup, LaTeX and the word "option" before it make no
    difference. Without `Answer:` it is read in the last `\\boxed{...}` or answer tags. A small letter counts only where
    the accepted answer is one.

    Args:
        prediction (`str`): The answer given, reasoning and all.
        answers (`Sequence[str]`): The accepted letters, at least one; `(B)` and `B) 42` are read as `B`.

    Raises:
        `ValueError`: As in [`integer_match`], or an accepted answer is no letter, which no reply could match.
    """
    accepted = {_option_letter(answer) for answer in accepted_answers(answers)}
    letter = _read_letter(strip_thoughts(prediction))
    if letter is None:
        return 0.0
    return float(letter in accepted or letter.lower() in accepted)


def word_sorting_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 if the words after the last `Answer:` are those of an accepted answer, in its order, else 0.0.

    Our deterministic stand-in for the language-model judge of the released evaluation: a deviation, and stricter. Case,
    commas, quotation marks, bullets and numbering make no difference. Without `Answer:` the last line counts.

    Args:
        prediction (`str`), answers (`Sequence[str]`): As in [`integer_match`]; answers are words with spaces between.

    Raises:
        `ValueError`: As in [`integer_match`].
    """
    visible = strip_thoughts(prediction)
    lines = [line for line in visible.splitlines() if line.strip()] or [""]
    marked = _after_answer(visible)
    answer = lines[-1] if marked is None else marked
    boxed = find_box(answer)
    if boxed is not None:
        answer = strip_marks(boxed)
    predicted = _words(answer)
    return float(any(predicted == _words(accepted) for accepted in accepted_answers(answers)))


def read_verdict(reply: str) -> bool | None:
    """The 0 or 1 in a judge's last `<ACCURACY>` tags; `None` if there is none or something else is in them. A verdict
    in the judge's thought is none."""
    visible = strip_thoughts(reply)
    closings = [match.start() for match in _ACCURACY_CLOSING.finditer(visible)]
    openings = [match.end() for match in _ACCURACY_OPENING.finditer(visible)]
    pairs = [opening for opening in openings if closings and opening <= closings[-1]]
    if not pairs:
        return None
    end = next(closing for closing in closings if closing >= pairs[-1])
    verdict = _VERDICT.fullmatch(visible[pairs[-1] : end].strip())
    return None if verdict is None else verdict[1] == "1"


def integer_problem(answer: str) -> str:
    """Why no reply could rightly match an accepted answer of [`integer_match`]; empty if one can."""
    return (
        ""
        if _INTEGER.fullmatch(_last_token_with_digits(answer))
        else "integer_match compares whole numbers"
    )


def letter_problem(answer: str) -> str:
    """As [`integer_problem`], of [`letter_match`]."""
    try:
        _option_letter(answer)
    except ValueError as error:
        return str(error)
    return ""


def word_sorting_problem(answer: str) -> str:
    """As [`integer_problem`], of [`word_sorting_match`]."""
    return "" if _words(answer) else "word_sorting_match compares words"


class AccuracyJudge(Judge):
    """A language model as the judge of an answer, as the released evaluation does for word sorting.

    Args:
        chat ([`ChatModel`]): The judge.
        **sampling: Sent with every call; `temperature=0` by default.
    """

    async def __call__(
        self, question: str, prediction: str, answers: Sequence[str]
    ) -> float | None:
        """1.0 or 0.0; `None` if the judge failed or did not say: a missing value, not a wrong answer.

        Raises:
            `ValueError`: As in [`integer_match`].
        """
        gold = "\nor: ".join(accepted_answers(answers))
        shown = fill(JUDGE_TEMPLATE, question=question, gold=gold, prediction=prediction)
        messages: list[Message] = [
            {"role": "system", "content": JUDGE_ROLE},
            {"role": "user", "content": shown},
        ]
        reply = await as_chat(self.chat)(messages, repeat=0, **self.sampling)
        verdict = read_verdict(reply.text) if reply.error is None else None
        return None if verdict is None else float(verdict)


Scorer = Callable[[str, Sequence[str]], float]

REASONING_SCORERS: dict[str, Scorer] = {
    "bbh_object_counting": integer_match,
    "bbh_word_sorting": word_sorting_match,
    "gsm8k_dspy": integer_match,
    "svamp": integer_match,
    "aqua": letter_match,
}
"""The score of each of ProRefine's sets that needs no judge, by the name `load_task` knows."""


def _last_token_with_digits(text: str) -> str:
    """The last word of a text that has a digit; empty without any."""
    for token in reversed(text.split()):
        if any(character.isdigit() for character in token):
            return token
    return ""


def _after_answer(text: str) -> str | None:
    """The text after the last `Answer:`."""
    last = last_match(ANSWER_MARK, text)
    return None if last is None else text[last.end() :]


def _read_letter(visible: str) -> str | None:
    """The letter of an option in a reply without thoughts."""
    answer = _after_answer(visible)
    if answer is None:
        answer = find_answer(visible)
    match = _LETTER.match(answer or "")
    if match is None:
        return None
    letter, rest = match[1], answer[match.end() :]  # type: ignore[index]
    # "I think", "a dog": a word, where another one follows. "A because ..." is an option.
    is_word = letter in "aI" and re.match(r"[ \t]{1,9}[a-z]", rest) is not None
    return None if is_word else letter


def _option_letter(answer: str) -> str:
    """The letter of an accepted answer as datasets write it: `B`, `(b)`, `B.`, `\\text{(B)}`, `B) 42`.

    Raises:
        `ValueError`: It is no letter.
    """
    match = _LETTER.match(answer)
    rest = answer[match.end() :].lstrip(" \t*_`\"'”}$") if match else ""
    if match is None or (rest and rest[0] not in ").:]"):
        raise ValueError(f"letter_match compares the letters of options, not {answer[:80]!r}")
    return match[1]


def _without_list_numbers(text: str) -> str:
    """A text without the numbers of its list items and steps.

    A number counts as an item's if the item before it is there, if it is a 1 with text behind it, or if a word such as
    "step" is in front of it. On the line behind `Answer:` there is an answer and no item.
    """
    lines: list[str] = []
    items: set[int] = set()
    line_before = ""
    for line in text.split("\n"):
        match = _LIST_NUMBER.match(line)
        if match is not None and not ANSWER_MARK.search(line_before):
            number = int(match[2])
            rest = line[match.end() :].strip()
            is_item = bool(match[1]) or number - 1 in items or (number == 1 and bool(rest))
            if is_item or (number == 1 and line_before.endswith(":")):
                items.add(number)
                line = line[match.end() :]
        lines.append(line)
        line_before = line.strip() or line_before
    return "\n".join(lines)


def _words(text: str) -> list[str]:
    """Words in lower case, without the signs around them; those within stay ("it&t", "we're")."""
    tokens = text.lower().replace("’", "'").replace(",", " ").split()
    words = (token.strip(_SIGNS) for token in tokens if not _NUMBERING.fullmatch(token))
    return [word for word in words if word]
