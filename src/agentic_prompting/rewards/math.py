"""Mathematics: whether an answer equals the accepted one as an expression.

Graded by `math-verify` (extra `[math]`).

A grader that crashes, runs out of time or cannot read the accepted answer has not found the answer
wrong: the reward is then `None`, and the rollout is left out.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import threading
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from ..llm import strip_thoughts
from ..llm.numbers import number_text
from ..rollout import Rollout
from . import math_grading
from .answers import accepted_answers, find_box, last_match, strip_marks
from .math_process import grader_process
from .qa import is_scorable

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 5
"""Limit for the comparison of one answer with one accepted answer."""

_MAX_ANSWER_LENGTH = 1_000  # math-verify's regular expressions take quadratic time
# The sign or code of a currency before an amount: "US$ 5", "€5", "EUR 5".
_LEADING_CURRENCY = re.compile(r"(?:(?:US)?\\\$|US\$|[€£¥₹₽₩]|(?:USD|EUR|GBP)\b)\s?(?=[-+.\d\\(])")
# … and after one: "5 €".
_TRAILING_CURRENCY = re.compile(r"(?<=\d)\s?(?:[€£¥₹₽₩]|(?:USD|EUR|GBP)\b)")
# A degree sign at the end, in Unicode or LaTeX.
_DEGREES = re.compile(r"\s?(?:°|\^\s?\\circ|\^\s?\{\s?\\circ\s?\}|\\degrees?)\s?$")
# A number with an exponent, which math-verify does not read: "1.5e-3".
_WITH_EXPONENT = re.compile(
    r"(?<![\w.\\])(?:\d{1,40}\.?\d{0,40}|\.\d{1,40})[eE][-+]?\d{1,3}(?![\w.])"
)
# "The final answer is", "Answer:", "the answer to this is:". The repeat is bounded.
_PHRASE = re.compile(r"answer(?:[ \t*_`]{0,20}[:：]|[^\n.:]{0,100}?\sis\b:?)", re.IGNORECASE)
# Words that join two answers: "3 or 5".
_JOINING_WORDS = frozenset(("or", "and", "to", "through", "vs"))
# Words before a formula: "about \\pi".
_LEADING_WORDS = re.compile(r"(?:[A-Za-z]+[,:]?\s+)++")
# The space between two sentences.
_SENTENCE_END = re.compile(r"(?<=[.!?])\s(?=[A-Z])")
# Words that change the value of the number before them: "3 million".
_MULTIPLIERS = frozenset(
    ("hundred", "thousand", "million", "billion", "trillion", "dozen", "squared", "cubed")
)
# Words that deny an answer: "not 5".
_NEGATIONS = frozenset(("not", "isn't", "never", "neither", "nor"))


def math_reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    answers: Sequence[Sequence[str]],
    rollout: Sequence[Rollout] | None = None,
    **_: object,
) -> list[float | None]:
    """Return 1.0 if the final answer equals an accepted one mathematically, else 0.0, for each row.

    The final answer is the last `\\boxed{...}` or what follows words like "the final answer is"; in
    a rollout it is the content of the answer tags, if there are any. A number elsewhere in the text
    or in the thought does not count.

    Args:
        prompts (`Sequence`): Not read.
        completions (`Sequence`): Texts or conversations; read only without `rollout`.
        answers (`Sequence[Sequence[str]]`): The accepted answers of each row, LaTeX or plain.
        rollout (`Sequence[Rollout]`, *optional*): One rollout per row.

    Returns:
        `list[float | None]`: `None` if the rollout or the grader failed.

    Raises:
        `ImportError`: If math-verify is not installed.
    """
    _require_library()  # a missing library is an error, not a grader that failed
    rewards: list[float | None] = []
    if rollout is None:  # outside of this library's trainers
        for completion, accepted in zip(completions, answers, strict=True):
            final_answer = _find_final_answer(_completion_text(completion))
            rewards.append(_grade(final_answer, accepted))
        return rewards

    for episode, accepted in zip(rollout, answers, strict=True):
        if is_scorable(episode):
            rewards.append(_grade(_final_answer_of(episode), accepted))
        else:
            rewards.append(None)
    return rewards


def math_match(prediction: str, answers: Sequence[str]) -> float | None:
    """Return 1.0 if an answer equals an accepted one mathematically, else 0.0.

    `None` if the grader fails.

    Args:
        prediction (`str`): The answer alone; or a text with its answer in `\\boxed{...}`.
        answers (`Sequence[str]`): The accepted answers, LaTeX or plain, at least one.

    Raises:
        `ImportError`: If math-verify is not installed.
        `ValueError`: If there is no accepted answer, or a string is passed for the list.
    """
    _require_library()
    return _grade(strip_thoughts(prediction), answers)


def math_equal(
    text: str, answer: str, timeout_seconds: int | None = TIMEOUT_SECONDS
) -> bool | None:
    """Return whether the final answer in `text` equals `answer`; `None` if the grader fails.

    Args:
        text (`str`): A text with a final answer. Without one the result is `False`.
        answer (`str`): The accepted answer, LaTeX or plain, with or without dollar signs.
        timeout_seconds (`int`, *optional*, defaults to `5`): Limit for the comparison. `None`: no
            limit.

    Raises:
        `ImportError`: If math-verify is not installed.
    """
    _require_library()
    return _compare(_find_final_answer(text) or "", answer, timeout_seconds)


def math_problem(answer: str) -> str:
    """Return why no reply can match an accepted answer of [`math_match`].

    An empty text if one can.
    """
    cleaned = _clean(answer)
    if not cleaned:
        return "there is nothing in it to compare with"
    if len(cleaned) > _MAX_ANSWER_LENGTH:
        return f"it is longer than {_MAX_ANSWER_LENGTH:,} characters"
    return ""


# ---- reading answers ----


def _final_answer_of(rollout: Rollout) -> str | None:
    """Return the final answer of a rollout.

    This is the content of its answer tags, or else the final answer in its last turn.
    """
    last_text = rollout.texts[-1]
    answer = rollout.answer
    # Without answer tags a rollout's answer is its whole last turn.
    is_whole_turn = answer in (last_text.strip(), strip_thoughts(last_text))
    if answer is not None and not is_whole_turn:
        return answer
    return _find_final_answer(last_text)


def _find_final_answer(text: str) -> str | None:
    """Return the last box of a reply, or else the text after the last phrase like "the answer
    is"."""
    visible = strip_thoughts(text)
    boxed = find_box(visible)
    if boxed is not None:
        return f"\\boxed{{{boxed}}}"
    phrase = last_match(_PHRASE, visible)
    if phrase is None:
        return None
    for line in visible[phrase.end() :].split("\n"):
        is_block_mark = not strip_marks(line).strip("$[]\\")
        if not is_block_mark:
            return _SENTENCE_END.split(line, maxsplit=1)[0]
    return None


def _clean(answer: str) -> str:
    """Return an answer without the box, markup, delimiters and units around it."""
    # A box, markup and delimiters.
    boxed = find_box(answer)
    cleaned = strip_marks(answer if boxed is None else boxed)

    # Characters that math-verify does not read.
    cleaned = cleaned.replace("−", "-").replace("\u00a0", " ")

    # Units that do not change the value.
    cleaned = _LEADING_CURRENCY.sub("", cleaned)
    cleaned = _TRAILING_CURRENCY.sub("", cleaned).replace("\\$", "").strip()
    cleaned = _DEGREES.sub("", cleaned)
    if cleaned.count("$") == 1:  # a currency sign, because delimiters come in pairs
        cleaned = cleaned.replace("$", "").strip()

    # Write numbers with an exponent as decimals.
    return _WITH_EXPONENT.sub(lambda number: number_text(Decimal(number[0])), cleaned)


def _searchable_text(answer: str) -> str | None:
    """Return the text in which math-verify may look for an answer that is not one expression.

    This is a number beside words, or LaTeX after words or between delimiters. `None` if math-verify
    would pick one of several numbers, or a wrong one.
    """
    tokens = answer.split()
    words = [token.lower().strip("*_,.") for token in tokens]
    if not _NEGATIONS.isdisjoint(words):
        return None

    # LaTeX after words, as in "about \\frac{1}{2}" or "the answer is $\\pi$".
    if "\\" in answer or "$" in answer:
        formula = _LEADING_WORDS.sub("", answer)
        has_several = formula.count("$") > 2 or not _JOINING_WORDS.isdisjoint(words)
        if formula == answer or has_several:
            return None
        return formula if "$" in formula else f"${formula}$"

    # A single number, or the last of several that are not joined.
    number_indices = []
    for index, token in enumerate(tokens):
        if any(character.isdigit() for character in token):
            number_indices.append(index)
    if not number_indices:
        return None
    last_index = number_indices[-1]
    if not _MULTIPLIERS.isdisjoint(words[last_index + 1 :]):
        return None
    if len(number_indices) > 1:
        previous_token = tokens[last_index - 1]
        is_listed = previous_token.endswith((",", ";")) and last_index - 1 in number_indices
        if previous_token.lower() in _JOINING_WORDS or is_listed:
            return None
    return answer


def _completion_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """Return the text of a completion in TRL's format, or of the last message of a conversation."""
    if isinstance(completion, str):
        return completion
    return completion[-1]["content"]  # type: ignore[no-any-return]


# ---- comparing answers ----


def _grade(answer: str | None, accepted: Sequence[str]) -> float | None:
    """Return the reward of an answer; `None` if it equals none and a comparison failed."""
    verdicts = []
    for gold in accepted_answers(accepted):
        verdicts.append(_compare(answer or "", gold, TIMEOUT_SECONDS))
    if True in verdicts:
        return 1.0
    # Without the failed comparison it is not known whether the answer is wrong.
    return None if None in verdicts else 0.0


def _compare(answer: str, gold: str, timeout_seconds: int | None) -> bool | None:
    """Return whether an answer equals the accepted one; `None` if the comparison fails."""
    cleaned_gold = _clean(gold)
    cleaned_answer = _clean(answer)
    if not cleaned_gold:
        logger.warning("math-verify cannot read the accepted answer %r", gold[:80])
        return None
    # Texts that math-verify cannot compare are compared as they are.
    if not cleaned_answer or max(len(cleaned_answer), len(cleaned_gold)) > _MAX_ANSWER_LENGTH:
        return cleaned_gold == cleaned_answer

    # On the main thread a signal limits the time. Elsewhere only another process can be stopped.
    has_signals = threading.current_thread() is threading.main_thread() and hasattr(os, "fork")
    text = _searchable_text(cleaned_answer)
    try:
        if has_signals:
            verdict = math_grading.compare(cleaned_gold, cleaned_answer, text, timeout_seconds)
        else:
            process = grader_process()
            verdict = process.compare(cleaned_gold, cleaned_answer, text, timeout_seconds)
    except (Exception, _timeout_exception()) as error:  # sympy fails in many ways on models' text
        logger.warning("math-verify gave up on %r: %r", answer[-80:], error)
        return None
    # Equal texts are equal, even those that math-verify cannot read.
    if cleaned_gold == cleaned_answer:
        return True
    return verdict


def _require_library() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("math_reward needs math-verify: pip install 'agentic-prompting[math]'")


def _timeout_exception() -> type[BaseException]:
    from math_verify.errors import TimeoutException

    return TimeoutException  # type: ignore[no-any-return]
