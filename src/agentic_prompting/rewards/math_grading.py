"""The comparison of two mathematical answers by math-verify, and a program that serves it.

`math.py` calls it on the main thread, and `math_process.py` runs this file as a program for calls
on other threads. There nothing can interrupt a computation such as 10^(10^10), which a policy may
write: it would hold the interpreter's lock forever. This file imports nothing of the package. As a
program it reads requests and writes replies, each one line of JSON.
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
_FLOAT_DECIMALS = 6  # math-verify's default: decimals to which floats are rounded for a comparison
_DIGITS = 15  # math-verify's default for other expressions


def compare(
    gold: str, answer: str, text: str | None, timeout_seconds: int | None = None
) -> bool | None:
    """Return whether an answer equals the accepted one.

    `None` if math-verify cannot read the accepted one.

    Args:
        gold (`str`): The accepted answer, LaTeX or plain, without delimiters around it.
        answer (`str`): The answer, in the same form.
        text (`str`, *optional*): A text in which math-verify looks for the answer if `answer` as a
            whole is not equal.
        timeout_seconds (`int`, *optional*): Only on the main thread and not on Windows.
    """
    from math_verify import grader, parser
    from math_verify.utils import timeout

    # Silence its warning that parsing and comparing have no limits: one limit is around both.
    grader.TIMEOUT_WARNING_SHOWN = True
    parser.TIMEOUT_WARNING_SHOWN = True
    return timeout(timeout_seconds)(_compare)(gold, answer, text)  # type: ignore[no-any-return]


def _compare(gold: str, answer: str, text: str | None) -> bool | None:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    options: dict[str, Any] = {"parsing_timeout": None, "raise_on_error": True}

    # The whole answer as one expression.
    has_delimiters = "$" in gold or "\\boxed" in gold
    parsed_gold = parse(gold if has_delimiters else f"${gold}$", **options)
    if not parsed_gold:
        return None
    targets = [
        LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False),
        ExprExtractionConfig(try_extract_without_anchor=False),
    ]
    parsed_answer = parse(f"\\boxed{{{answer}}}", targets, **options)
    if _is_equal(parsed_gold, parsed_answer):
        return True
    if text is None:
        return False

    # A number beside a unit or words, in the answer or in the accepted one.
    if _is_equal(parsed_gold, parse(text, **options)):
        return True
    # Words in the accepted answer: its number must be the whole answer.
    if not _has_words(gold) or _has_words(answer):
        return False
    return _is_equal(parse(gold, [ExprExtractionConfig()], **options), parsed_answer)


def _has_words(text: str) -> bool:
    return any(word.isalpha() and len(word) > 1 for word in text.split())


def _is_equal(gold: list[Any], answer: list[Any]) -> bool:
    """Return whether two results of math-verify's parser are equal."""
    from math_verify import verify

    if not gold or not answer:
        return False
    # math-verify rounds floats to six decimals, by which all numbers below 5e-7 would be equal.
    # Round to six significant digits of the smallest number instead.
    smallest = min([*_magnitudes(gold), *_magnitudes(answer)], default=1.0)
    leading_zeros = max(0, -math.floor(math.log10(smallest)) - 1)
    shift = min(leading_zeros, _MAX_DECIMALS)
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
    """Yield the absolute values of the numbers other than 0 in expressions and sets of them."""
    # Sets and tuples are compared part by part.
    pending = list(expressions)
    while pending:
        expression = pending.pop()
        if getattr(expression, "is_number", False):
            try:
                value = abs(complex(expression.evalf(_DIGITS)))
            except (TypeError, ValueError, OverflowError, AttributeError):
                continue
            if 0 < value < math.inf:
                yield value
        else:
            pending.extend(getattr(expression, "args", ()))


def serve() -> None:
    """Answer requests, a line of JSON each, until the input ends.

    The first line written is `"ready"`.
    """
    import signal

    import math_verify  # noqa: F401  # takes a second, which the first request should not wait for

    # Ctrl-C is for the parent process, which closes the input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    # Limit the memory of a computation.
    has_limits = hasattr(signal, "alarm")  # not on Windows
    if has_limits:
        import resource

        hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
        memory = _MEMORY_BYTES
        if hard_limit != resource.RLIM_INFINITY:
            memory = min(memory, hard_limit)
        resource.setrlimit(resource.RLIMIT_AS, (memory, hard_limit))

    # Keep texts that libraries print out of the replies.
    replies = os.fdopen(os.dup(1), "w")
    sys.stdout = sys.stderr
    print(json.dumps("ready"), file=replies, flush=True)

    # One reply to each request.
    for line in sys.stdin:
        request = json.loads(line)
        if has_limits:  # ends this process, even in the middle of a computation
            signal.alarm(request["seconds"])
        try:
            is_equal = compare(request["gold"], request["answer"], request["text"])
            reply: dict[str, Any] = {"equal": is_equal}
        except Exception as error:  # sympy fails in many ways on what models write
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        if has_limits:
            signal.alarm(0)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    serve()
