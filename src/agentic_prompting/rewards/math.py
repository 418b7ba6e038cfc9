"""Mathematics: is the answer equal to the accepted one, as an expression. Graded by `math-verify` (extra `[math]`).

A grader that crashes, runs out of time or cannot read the accepted answer has not found the answer wrong: the reward is
then `None`, and the rollout left out.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from ..llm import strip_thoughts
from ..llm.numbers import number_text
from ..rollout import Rollout
from . import math_grading
from .answers import accepted_answers, find_box, last_match, strip_marks
from .qa import scorable

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 5
"""For the comparison of one answer with one accepted answer."""

_MAX_ANSWER_LENGTH = 1_000  # math-verify's regular expressions take quadratic time
_LEADING_CURRENCY = re.compile(r"(?:(?:US)?\\\$|US\$|[€£¥₹₽₩]|(?:USD|EUR|GBP)\b)\s?(?=[-+.\d\\(])")
_TRAILING_CURRENCY = re.compile(r"(?<=\d)\s?(?:[€£¥₹₽₩]|(?:USD|EUR|GBP)\b)")
_DEGREES = re.compile(r"\s?(?:°|\^\s?\\circ|\^\s?\{\s?\\circ\s?\}|\\degrees?)\s?$")
_WITH_EXPONENT = re.compile(
    r"(?<![\w.\\])(?:\d{1,40}\.?\d{0,40}|\.\d{1,40})[eE][-+]?\d{1,3}(?![\w.])"
)
# "The final answer is", "Answer:", "the answer to this is:". The repeat is bounded.
_PHRASE = re.compile(r"answer(?:[ \t*_`]{0,20}[:：]|[^\n.:]{0,100}?\sis\b:?)", re.IGNORECASE)
_JOINING_WORDS = frozenset(("or", "and", "to", "through", "vs"))
_LEADING_WORDS = re.compile(r"(?:[A-Za-z]+[,:]?\s+)++")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s(?=[A-Z])")
_MULTIPLIERS = frozenset(
    ("hundred", "thousand", "million", "billion", "trillion", "dozen", "squared", "cubed")
)
_NEGATIONS = frozenset(("not", "isn't", "never", "neither", "nor"))


def math_reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    answers: Sequence[Sequence[str]],
    rollout: Sequence[Rollout] | None = None,
    **_: Any,
) -> list[float | None]:
    """1.0 if the final answer equals an accepted one mathematically, else 0.0, with TRL's reward signature.

    The final answer is the last `\\boxed{...}` or what follows words like "the final answer is"; in a rollout, what
    stands in the answer tags, if there are any. A number somewhere in the text or in the thought is none.

    Args:
        prompts (`Sequence`): Not read.
        completions (`Sequence`): Texts or conversations; read where there is no rollout.
        answers (`Sequence[Sequence[str]]`): Accepted answers per row, LaTeX or plain.
        rollout (`Sequence[Rollout]`, *optional*): One episode per row.

    Returns:
        `list[float | None]`: `None` where the rollout failed or the grader did.

    Raises:
        `ImportError`: math-verify is not installed.
    """
    _require_library()  # a missing library is an error, not a grader that failed
    rewards: list[float | None] = []
    if rollout is None:
        for completion, accepted in zip(completions, answers, strict=True):
            rewards.append(_grade(_find_final_answer(_text(completion)), accepted))
    else:
        for episode, accepted in zip(rollout, answers, strict=True):
            rewards.append(
                _grade(_final_answer_of(episode), accepted) if scorable(episode) else None
            )
    return rewards


def math_match(prediction: str, answers: Sequence[str]) -> float | None:
    """1.0 if an answer equals an accepted one mathematically, else 0.0; `None` if the comparison fails.

    Args:
        prediction (`str`): The answer given, and nothing but the answer; or a text with its answer in `\\boxed{...}`.
        answers (`Sequence[str]`): The accepted answers, LaTeX or plain, at least one.

    Raises:
        `ImportError`: math-verify is not installed.
        `ValueError`: If there is no accepted answer, or a bare string is passed for the list.
    """
    _require_library()
    return _grade(strip_thoughts(prediction), answers)


def math_equal(
    text: str, answer: str, timeout_seconds: int | None = TIMEOUT_SECONDS
) -> bool | None:
    """Whether the final answer in `text` equals `answer`; `None` if the comparison fails.

    Args:
        text (`str`): A text with a final answer; without one the result is `False`.
        answer (`str`): The accepted answer, LaTeX or plain, with or without dollar signs.
        timeout_seconds (`int`, *optional*, defaults to `5`): For the comparison. `None`: no limit.

    Raises:
        `ImportError`: math-verify is not installed.
    """
    _require_library()
    final = _find_final_answer(text)
    return _compare("" if final is None else final, answer, timeout_seconds)


def math_problem(answer: str) -> str:
    """Why no reply could match an accepted answer of [`math_match`]; empty if one can."""
    cleaned = _clean(answer)
    if not cleaned:
        return "there is nothing in it to compare with"
    if len(cleaned) > _MAX_ANSWER_LENGTH:
        return f"it is longer than {_MAX_ANSWER_LENGTH:,} characters"
    return ""


def _grade(answer: str | None, accepted: Sequence[str]) -> float | None:
    verdicts = [
        _compare(answer or "", gold, TIMEOUT_SECONDS) for gold in accepted_answers(accepted)
    ]
    if True in verdicts:
        return 1.0
    return None if None in verdicts else 0.0


# Answers as they are written ------------------------------------------------------------------------------------------


def _final_answer_of(rollout: Rollout) -> str | None:
    """The final answer of an episode: all of what stands in answer tags is one, a whole turn only holds one."""
    text, answer = rollout.texts[-1], rollout.answer
    has_tags = answer is not None and answer not in (text.strip(), strip_thoughts(text))
    return answer if has_tags else _find_final_answer(text)


def _find_final_answer(text: str) -> str | None:
    """What is in the last box of a reply, or else follows the last phrase that announces an answer."""
    visible = strip_thoughts(text)
    boxed = find_box(visible)
    if boxed is not None:
        return f"\\boxed{{{boxed}}}"
    phrase = last_match(_PHRASE, visible)
    if phrase is None:
        return None
    for line in visible[phrase.end() :].split("\n"):
        if strip_marks(line).strip("$[]\\"):  # not only the beginning of a block
            return _SENTENCE_END.split(line, maxsplit=1)[0]
    return None


def _clean(answer: str) -> str:
    """An answer without what stands around it: a box, markup, delimiters, a full stop, the sign of a currency."""
    boxed = find_box(answer)
    cleaned = strip_marks(answer if boxed is None else boxed)
    cleaned = cleaned.replace("−", "-").replace("\u00a0", " ")
    cleaned = _LEADING_CURRENCY.sub("", cleaned)
    cleaned = _TRAILING_CURRENCY.sub("", cleaned).replace("\\$", "").strip()
    cleaned = _DEGREES.sub("", cleaned)
    if cleaned.count("$") == 1:  # no delimiter, which come in pairs
        cleaned = cleaned.replace("$", "").strip()
    return _WITH_EXPONENT.sub(lambda number: number_text(Decimal(number[0])), cleaned)


def _plain_text(answer: str) -> str | None:
    """The text in which math-verify may look for the answer if all of it is none: a number beside words, or LaTeX
    behind words or between delimiters. `None` where it would pick one of several numbers, or a wrong one."""
    tokens = answer.split()
    lowered = [token.lower().strip("*_,.") for token in tokens]
    if not _NEGATIONS.isdisjoint(lowered):
        return None

    # LaTeX behind words, as in "about \\frac{1}{2}" or "the answer is $\\pi$".
    if "\\" in answer or "$" in answer:
        behind_words = _LEADING_WORDS.sub("", answer)
        has_several = behind_words.count("$") > 2 or not _JOINING_WORDS.isdisjoint(lowered)
        if behind_words == answer or has_several:
            return None
        return behind_words if "$" in behind_words else f"${behind_words}$"

    # The last number.
    numbers = [
        place
        for place, token in enumerate(tokens)
        if any(character.isdigit() for character in token)
    ]
    if not numbers:
        return None
    last = numbers[-1]
    if not _MULTIPLIERS.isdisjoint(lowered[last + 1 :]):
        return None
    before = tokens[last - 1] if last else ""
    is_joined = before.lower() in _JOINING_WORDS or (
        before.endswith((",", ";")) and last - 1 in numbers
    )
    return None if is_joined and len(numbers) > 1 else answer


# The comparison -------------------------------------------------------------------------------------------------------


def _compare(answer: str, gold: str, timeout_seconds: int | None) -> bool | None:
    """The verdict on an answer; `None` where there is none."""
    accepted, given = _clean(gold), _clean(answer)
    if not accepted:
        logger.warning("math-verify cannot read the accepted answer %r", gold[:80])
        return None
    if not given or max(len(given), len(accepted)) > _MAX_ANSWER_LENGTH:
        return accepted == given
    plain = _plain_text(given)
    try:
        if threading.current_thread() is threading.main_thread() and hasattr(os, "fork"):
            verdict = math_grading.compare(accepted, given, plain, timeout_seconds)
        else:
            verdict = _grader().compare(accepted, given, plain, timeout_seconds)
        return True if accepted == given else verdict
    except (
        Exception,
        _timeout_exception(),
    ) as error:  # sympy fails in many ways on what models write
        logger.warning("math-verify gave up on %r: %r", answer[-80:], error)
        return None


class _Grader:
    """A process that compares answers. One that takes too long is killed, and another one started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def compare(
        self, gold: str, answer: str, plain: str | None, timeout_seconds: int | None
    ) -> bool | None:
        """See `math_grading.compare`.

        Raises:
            `TimeoutError`: The process took too long.
            `RuntimeError`: The comparison failed.
        """
        seconds = 3600 if timeout_seconds is None else timeout_seconds
        request = {"gold": gold, "answer": answer, "plain": plain, "seconds": seconds + 1}
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            timer = threading.Timer(seconds, process.kill)
            timer.start()
            try:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except OSError:
                line = ""
            finally:
                timer.cancel()
            if not line:
                self._end()
                raise TimeoutError(f"no verdict in {seconds} s")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["equal"]  # type: ignore[no-any-return]

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        # Without the environment's secrets. `-P` keeps this folder, which has a `math.py`, out of the search path.
        kept = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR", "TEMP")
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUTF8": "1"}
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(math_grading.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=environment,
        )
        assert process.stdout is not None
        if not process.stdout.readline():
            process.kill()
            process.wait()
            raise RuntimeError("the process of math-verify did not start")
        self._process = process
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


_graders: dict[int, _Grader] = {}


def _grader() -> _Grader:
    """The grader of this process: a fork must not share its parent's pipes."""
    return _graders.setdefault(os.getpid(), _Grader())


def _require_library() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("math_reward needs math-verify: pip install 'agentic-prompting[math]'")


def _timeout_exception() -> type[BaseException]:
    from math_verify.errors import TimeoutException

    return TimeoutException  # type: ignore[no-any-return]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]
