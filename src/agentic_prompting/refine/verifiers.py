"""Verifiers that are not models: functions of the query and the answer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import cache

from ..llm import ChatModel, TimedOut
from ..llm.guard import call_guarded_on, is_async
from ..llm.threads import DaemonThreads
from .types import Query

VERIFIER_SECONDS = 600.0
"""The time limit, for one answer, of a verifier that is not a model."""

VerifierFunction = Callable[[Query, str], "bool | Awaitable[bool | None] | None"]
"""A verifier that is not a model.

Gets the query and the answer; returns `True` (right), `False` (wrong) or `None` (no verdict).

Plain functions share one thread in each process, so they need not be thread-safe; an `async` one
runs on the event loop. An exception is a failure of the verifier and does not end the run; so is an
answer that takes it more than ten minutes. A verifier that needs accepted answers has an attribute
`needs_answers = True`; a query without any is then an error before the first call."""

Verifier = ChatModel | VerifierFunction
"""Decides whether a query is refined at all, by judging the first answer, which is given under the
initial prompt.

Right: the answer is final. Wrong, or no verdict: the prompt is refined. Missing verdicts are
counted."""


async def call_verifier(verifier: VerifierFunction, query: Query, answer: str) -> bool | None:
    """Return the verdict of a verifier that is not a model.

    Raises:
        `Exception`: Whatever the verifier raises.
        `TypeError`: It returned something else than a truth value or `None`. A text would count as
            true.
        [`TimedOut`]: It took longer than [`VERIFIER_SECONDS`].
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as time_limit:

            def start_time_limit() -> None:
                # A verifier that has been given up may still start.
                with suppress(RuntimeError):
                    time_limit.reschedule(loop.time() + VERIFIER_SECONDS)

            def call_plain_verifier() -> object:
                # The time in which the call waited for the thread does not count.
                loop.call_soon_threadsafe(start_time_limit)
                return verifier(query, answer)

            # An `async` verifier runs at once on the event loop, a plain one waits for the thread.
            if is_async(verifier):
                start_time_limit()
                verdict = await call_guarded_on(None, verifier, query, answer)
            else:
                verdict = await call_guarded_on(_verifier_thread(os.getpid()), call_plain_verifier)
    except TimeoutError:
        # The verifier itself may raise a `TimeoutError`.
        if time_limit.expired():
            message = f"the verifier did not return within {VERIFIER_SECONDS:g} s"
            raise TimedOut(message) from None
        raise
    # NumPy's truth values are fine.
    if isinstance(verdict, str) or verdict not in (True, False, None):
        raise TypeError(f"a verifier returns True, False or None, not {verdict!r:.100}")
    return None if verdict is None else bool(verdict)


@cache
def _verifier_thread(process: int) -> DaemonThreads:
    """Return the thread for plain verifiers in this process; a verifier that hangs is replaced.

    Other functions have threads of their own, because a verifier may wait for one of those.
    """
    return DaemonThreads(1, "agentic-prompting-verifier")


class LabelVerifier:
    """The paper's optimal verifier: compares with the accepted answers. An upper bound.

    Args:
        score (`Callable[[str, Sequence[str]], float]`): Scores an answer, given the accepted ones;
            for example [`exact_match`] or [`integer_match`].
        threshold (`float`, *optional*, defaults to `1.0`): The lowest score that counts as right.
    """

    needs_answers = True

    def __init__(self, score: Callable[[str, Sequence[str]], float], threshold: float = 1.0):
        if not callable(score):
            raise ValueError(
                f"score must be a function of an answer and the accepted answers, got {score!r}"
            )
        self.score = score
        self.threshold = threshold

    def __call__(self, query: Query, answer: str) -> bool:
        return self.score(answer, query.answers) >= self.threshold

    def __repr__(self) -> str:
        name = getattr(self.score, "__name__", repr(self.score))
        return f"LabelVerifier({name}, threshold={self.threshold})"
