"""Who decides whether a query is refined at all: nobody, a language model, or any callable.

A verifier judges the first answer, the one under the prompt as it was given. Right: it is used as it is. Wrong: the
prompt is refined. There is a third state, no verdict: the verifier failed or did not say. It is counted, and by default
the prompt is refined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..llm import ChatModel
from .query import Query

Judge = Callable[[Query, str], "bool | None"]
"""A verifier that is no model: query and answer in; `True` (right), `False` (wrong) or `None` (no verdict) out.

It is called between the models' calls and must be quick. What it raises is a failure of the verifier, not of the run.
One that cannot work without accepted answers says so with an attribute `needs_answers = True`; a query without any is
then an error before the first call."""

Verifier = ChatModel | Judge


class LabelVerifier:
    """The paper's optimal verifier: compares with the accepted answers. An upper bound, for experiments.

    Args:
        score (`Callable[[str, Sequence[str]], float]`): Score of an answer given the accepted ones, such as
            [`exact_match`] or [`integer_match`].
        threshold (`float`, *optional*, defaults to `1.0`): The least score that is right.
    """

    needs_answers = True

    def __init__(self, score: Callable[[str, Sequence[str]], float], threshold: float = 1.0):
        if not callable(score):
            raise ValueError(f"score must be a function of an answer and the accepted answers, got {score!r}")
        self.score, self.threshold = score, threshold

    def __call__(self, query: Query, answer: str) -> bool:
        return self.score(answer, query.answers) >= self.threshold

    def __repr__(self) -> str:
        return f"LabelVerifier({getattr(self.score, '__name__', repr(self.score))}, threshold={self.threshold})"


def judged(judge: Judge, query: Query, answer: str) -> bool | None:
    """The verdict of a callable.

    Raises:
        `TypeError`: If it is none of the three, a text for example, which would count as true.
        Whatever `judge` raises.
    """
    verdict = judge(query, answer)
    if verdict is None:
        return None
    if isinstance(verdict, str) or verdict not in (True, False):
        raise TypeError(f"a verifier returns True, False or None, not {verdict!r:.100}")
    return bool(verdict)


def check_answers(verifier: Verifier | None, queries: Sequence[Query]) -> None:
    """Raises `ValueError` if the verifier compares with accepted answers and a query has none; names the first."""
    if getattr(verifier, "needs_answers", False):
        for number, query in enumerate(queries):
            if not query.answers:
                raise ValueError(
                    f"{verifier!r} compares with accepted answers, and query {number} has none: pass a row with "
                    "`question` and `answers`, or another verifier"
                )
