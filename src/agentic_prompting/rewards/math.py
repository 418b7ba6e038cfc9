"""Mathematics: is the answer equal to the accepted one, as an expression. Graded by `math-verify` (extra `[math]`).

A grader that crashes, runs out of time or cannot read the accepted answer has not found the answer wrong: the reward is
then `None`, and the rollout left out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from ..rollout import Rollout
from .answers import accepted_answers
from .qa import scorable

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 5
"""For reading one answer, and again for comparing it."""


def math_reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    answers: Sequence[Sequence[str]],
    rollout: Sequence[Rollout] | None = None,
    **_: Any,
) -> list[float | None]:
    """1.0 if the final answer equals an accepted one mathematically, else 0.0, with TRL's reward signature.

    The final answer is the last `\\boxed{...}` or what follows words like "the final answer is"; in a rollout, what
    stands in the answer tags, if there are any. A number somewhere in the text is none.

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
    _library()  # a missing library is an error, not a grader that failed
    if rollout is None:
        return [_grade(_text(one), accepted) for one, accepted in zip(completions, answers, strict=True)]
    return [
        _grade(_final(episode), accepted) if scorable(episode) else None
        for episode, accepted in zip(rollout, answers, strict=True)
    ]


def math_match(prediction: str, answers: Sequence[str]) -> float | None:
    """1.0 if an answer equals an accepted one mathematically, else 0.0; `None` if the comparison fails.

    Args:
        prediction (`str`): The answer given, and nothing but the answer; or a text with its answer in `\\boxed{...}`.
        answers (`Sequence[str]`): The accepted answers, LaTeX or plain, at least one.

    Raises:
        `ImportError`: math-verify is not installed.
        `ValueError`: If there is no accepted answer, or a bare string is passed for the list.
    """
    return _grade(_boxed(prediction), answers)


def math_equal(text: str, answer: str, timeout_seconds: int | None = TIMEOUT_SECONDS) -> bool | None:
    """Whether the final answer in `text` equals `answer`; `None` if the comparison fails.

    Args:
        text (`str`): A text with a final answer; without one the result is `False`.
        answer (`str`): The accepted answer, LaTeX or plain, with or without dollar signs.
        timeout_seconds (`int`, *optional*, defaults to `5`): For reading, and again for comparing. `None`: no limit.

    Raises:
        `ImportError`: math-verify is not installed.
    """
    if timeout_seconds is None or threading.current_thread() is threading.main_thread():
        return _compare(text, answer, timeout_seconds)
    return _in_time(text, answer, 3 * timeout_seconds)  # math-verify's own limit needs the main thread's signals


def _grade(text: str, accepted: Sequence[str]) -> float | None:
    verdicts = [math_equal(text, answer) for answer in accepted_answers(accepted)]
    if True in verdicts:
        return 1.0
    return None if None in verdicts else 0.0


def _compare(text: str, answer: str, timeout_seconds: int | None) -> bool | None:
    parse, verify, targets, timeout = _library()
    try:
        gold = parse(_dollars(answer), parsing_timeout=timeout_seconds, raise_on_error=True)
        if not gold:
            logger.warning("math-verify cannot read the accepted answer %r", answer[:80])
            return None
        final = text[max(0, text.rfind("\\boxed")) :]  # of several boxes math-verify would make a set
        parsed = parse(final, targets, parsing_timeout=timeout_seconds, raise_on_error=True)
        return bool(parsed) and bool(verify(gold, parsed, timeout_seconds=timeout_seconds, raise_on_error=True))
    except (Exception, timeout) as error:  # sympy fails in many ways on what models write
        logger.warning("math-verify gave up on %r: %r", text[-80:], error)
        return None


def _in_time(text: str, answer: str, seconds: float) -> bool | None:
    """[`_compare`] on a thread of its own, given up when the time is over (the thread may go on for a while)."""
    verdict: list[bool | None] = []
    thread = threading.Thread(target=lambda: verdict.append(_compare(text, answer, None)), daemon=True)
    thread.start()
    thread.join(seconds)
    return verdict[0] if verdict else None


def _library() -> tuple[Any, Any, Any, Any]:
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
        from math_verify.errors import TimeoutException
    except ImportError as error:
        raise ImportError("math_reward needs math-verify: pip install 'agentic-prompting[math]'") from error
    targets = [
        LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False),
        ExprExtractionConfig(try_extract_without_anchor=False),
    ]
    return parse, verify, targets, TimeoutException


def _final(rollout: Rollout) -> str:
    """The text to read the final answer from: all of what stands in answer tags is one, a whole turn only holds one."""
    text, answer = rollout.texts[-1], rollout.answer
    if answer is None or answer == text.strip():  # no tags, as in FreeText
        return text
    return _boxed(answer)


def _boxed(answer: str) -> str:
    """An answer as math-verify finds it: all of it is one."""
    return answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _dollars(answer: str) -> str:
    """LaTeX is recognised between dollar signs."""
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
