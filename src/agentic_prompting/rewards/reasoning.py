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

from ..llm import Message, as_chat, fill
from .judges import Judge
from .qa import accepted_answers

JUDGE_ROLE = """\
You compare a prediction with the known right answer to a question. The prediction is right if its final result is \
the same in content; how it got there, its form and its wording do not matter. End your reply with \
<ACCURACY>1</ACCURACY> if it is right or <ACCURACY>0</ACCURACY> if it is not."""
"""The judge's system prompt, in our words. No variables."""

JUDGE_TEMPLATE = "Question:\n{question}\n\nRight answer:\n{gold}\n\nPrediction:\n{prediction}"
"""The judge's request. Variables: `{question}`, `{gold}`, `{prediction}` (str)."""

_ACCURACY = re.compile(r"<\s*accuracy\s*>(.*?)<\s*/\s*accuracy\s*>", re.IGNORECASE | re.DOTALL)
_ANSWER = re.compile(r"answer\s*:", re.IGNORECASE)
_LETTER = re.compile(r"[\s*_`$({\[\"']*([A-E])(?![A-Za-z])")
_SIGNS = "*_`$\"'“”‘’()[]{}<>.,;:!?-–—•"
_NUMBERING = re.compile(r"\d+[.)]?")


def parse_integer(text: str) -> int:
    """The integer that the released evaluation reads in a text.

    It takes the digits of the last token that has any, up to its first point: `"Answer: $1,240.50"` gives 1240. As
    there, a minus sign is ignored, a range becomes one number, and a text without a number is 0.
    """
    tokens = [token for token in text.split() if any(character.isdigit() for character in token)]
    digits = "".join(character for character in tokens[-1].split(".")[0] if character.isdigit()) if tokens else ""
    try:
        return int(digits)
    except ValueError:  # nothing before the point, digits of another kind, or more of them than Python converts
        return 0


def integer_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 if prediction and one of the accepted answers have the same [`parse_integer`], else 0.0.

    Args:
        prediction (`str`): The answer given, reasoning and all.
        answers (`Sequence[str]`): The accepted answers, at least one.

    Raises:
        `ValueError`: If there is no accepted answer, or a bare string is passed for the list.
    """
    predicted = parse_integer(prediction)
    return float(any(predicted == parse_integer(answer) for answer in accepted_answers(answers)))


def letter_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 if the option's letter after the last `Answer:` is an accepted one, else 0.0. Our rule.

    The letter is a capital A to E that no letter follows; brackets and markup before it make no difference.

    Args:
        prediction (`str`), answers (`Sequence[str]`): As in [`integer_match`]; answers are letters.

    Raises:
        `ValueError`: As in [`integer_match`].
    """
    letters, found = accepted_answers(answers), _LETTER.match(_after_answer(prediction) or "")
    return float(found is not None and found[1] in letters)


def word_sorting_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 if the words after the last `Answer:` are those of an accepted answer, in its order, else 0.0.

    Our deterministic stand-in for the language-model judge of the released evaluation: a deviation, and stricter. Case,
    commas, quotation marks, bullets and numbering make no difference. Without `Answer:` the last line counts.

    Args:
        prediction (`str`), answers (`Sequence[str]`): As in [`integer_match`]; answers are words with spaces between.

    Raises:
        `ValueError`: As in [`integer_match`].
    """
    lines = [line for line in prediction.splitlines() if line.strip()] or [""]
    given = _after_answer(prediction)
    predicted = _words(lines[-1] if given is None else given)
    return float(any(predicted == _words(answer) for answer in accepted_answers(answers)))


def read_verdict(reply: str) -> bool | None:
    """The 0 or 1 in a judge's last `<ACCURACY>` tags; `None` if there is none or something else is in them."""
    found = _ACCURACY.findall(reply)
    verdict = re.fullmatch(r"\s*([01])(\.0*)?\s*", found[-1]) if found else None
    return None if verdict is None else verdict[1] == "1"


class AccuracyJudge(Judge):
    """A language model as the judge of an answer, as the released evaluation does for word sorting.

    Args:
        chat ([`ChatModel`]): The judge.
        **sampling: Sent with every call; `temperature=0` by default.
    """

    async def __call__(self, question: str, prediction: str, answers: Sequence[str]) -> float | None:
        """1.0 or 0.0; `None` if the judge failed or did not say: a missing value, not a wrong answer.

        Raises:
            `ValueError`: As in [`integer_match`].
        """
        gold = "\nor: ".join(accepted_answers(answers))
        shown = fill(JUDGE_TEMPLATE, question=question, gold=gold, prediction=prediction)
        messages: list[Message] = [{"role": "system", "content": JUDGE_ROLE}, {"role": "user", "content": shown}]
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


def _after_answer(text: str) -> str | None:
    *_, last = [None, *_ANSWER.finditer(text)]
    return None if last is None else text[last.end() :]


def _words(text: str) -> list[str]:
    """Words in lower case, without the signs around them; those within stay ("it&t", "we're")."""
    tokens = text.lower().replace("’", "'").replace(",", " ").split()
    words = (token.strip(_SIGNS) for token in tokens if not _NUMBERING.fullmatch(token))
    return [word for word in words if word]
