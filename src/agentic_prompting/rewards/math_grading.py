"""The comparison of two mathematical answers by math-verify, and a process for it that can be killed.

`math.py` imports this file, and runs it as a program for calls outside of the main thread. There nothing can interrupt
a computation such as 10^(10^10), which a policy may write: it would hold the interpreter's lock for ever. So this file
imports nothing of the package, and reads and writes lines of JSON.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from typing import Any

_MEMORY_BYTES = 4 * 1024**3
_MAX_DECIMALS = 300
_FLOAT_DECIMALS = (
    6  # math-verify's: floats are rounded to so many decimals before they are compared
)
_DIGITS = 15  # math-verify's, for other expressions


def compare(
    gold: str, answer: str, plain: str | None, timeout_seconds: int | None = None
) -> bool | None:
    """Whether an answer equals the accepted one.

    Args:
        gold (`str`): The accepted answer, LaTeX or plain, without delimiters around it.
        answer (`str`): The answer, likewise.
        plain (`str`, *optional*): A text in which math-verify looks for the answer if `answer` is not equal as LaTeX.
        timeout_seconds (`int`, *optional*): Only on the main thread and not on Windows.

    Returns:
        `bool | None`: `None` if math-verify cannot read the accepted answer.
    """
    from math_verify import grader, parser
    from math_verify.utils import timeout

    # Its warning that parsing and comparing have no limits of their own: the limit is around both.
    grader.TIMEOUT_WARNING_SHOWN = parser.TIMEOUT_WARNING_SHOWN = True
    return timeout(timeout_seconds)(_compare)(gold, answer, plain)  # type: ignore[no-any-return]


def _compare(gold: str, answer: str, plain: str | None) -> bool | None:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    unlimited: dict[str, Any] = {"parsing_timeout": None, "raise_on_error": True}
    accepted = parse(_delimited(gold), **unlimited)
    if not accepted:
        return None
    targets = [
        LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False),
        ExprExtractionConfig(try_extract_without_anchor=False),
    ]
    if _is_equal(accepted, parse(f"\\boxed{{{answer}}}", targets, **unlimited)):
        return True
    if plain is None:
        return False

    # Units and words beside a number, of the answer or of the accepted one.
    from_text = parse(plain, **unlimited)
    if _is_equal(accepted, from_text):
        return True
    bare_gold = parse(gold, [ExprExtractionConfig()], **unlimited) if _has_words(gold) else []
    return _is_equal(
        bare_gold, parse(f"\\boxed{{{answer}}}", targets, **unlimited)
    ) and not _has_words(answer)


def _delimited(gold: str) -> str:
    """LaTeX is recognised between dollar signs."""
    return gold if "$" in gold or "\\boxed" in gold else f"${gold}$"


def _has_words(text: str) -> bool:
    return any(word.isalpha() and len(word) > 1 for word in text.split())


def _is_equal(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify

    if not gold or not answer:
        return False
    # math-verify rounds floats to six decimals, by which all numbers below 5e-7 are equal. Six significant digits then.
    smallest = min([*_magnitudes(gold), *_magnitudes(answer)], default=1.0)
    shift = min(max(0, -math.floor(math.log10(smallest)) - 1), _MAX_DECIMALS)
    return bool(
        verify(
            gold,
            answer,
            float_rounding=_FLOAT_DECIMALS + shift,
            numeric_precision=_DIGITS + shift,
            timeout_seconds=None,
            raise_on_error=True,
        )
    )


def _magnitudes(expressions: list[Any]) -> Iterator[float]:
    """The absolute values of the numbers other than 0 that are compared: an expression, or the parts of a set."""
    waiting = list(expressions)
    while waiting:
        expression = waiting.pop()
        if getattr(expression, "is_number", False):
            try:
                value = abs(complex(expression.evalf(_DIGITS)))
            except (TypeError, ValueError, OverflowError, AttributeError):
                continue
            if 0 < value < math.inf:
                yield value
        else:
            waiting.extend(getattr(expression, "args", ()))


def serve() -> None:
    """Answer requests, a line of JSON each, until the input ends. The first line that is written says `ready`."""
    import signal

    import math_verify  # noqa: F401  # takes a second, which is not the first request's

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which closes the input
    if hasattr(signal, "alarm"):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[1]
        memory = _MEMORY_BYTES if limit == resource.RLIM_INFINITY else min(_MEMORY_BYTES, limit)
        resource.setrlimit(resource.RLIMIT_AS, (memory, limit))
    replies = os.fdopen(os.dup(1), "w")
    sys.stdout = sys.stderr  # what libraries print is no reply
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if hasattr(signal, "alarm"):  # ends this process, also in the middle of a computation
            signal.alarm(request["seconds"])
        try:
            reply: dict[str, Any] = {
                "equal": compare(request["gold"], request["answer"], request["plain"])
            }
        except Exception as error:  # sympy fails in many ways on what models write
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        if hasattr(signal, "alarm"):
            signal.alarm(0)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    serve()
