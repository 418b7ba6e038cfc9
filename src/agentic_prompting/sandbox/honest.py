"""A reference LLM of the guarded world that does not flatter: it reads little, and errs in the same way again.

[`GuardedReflector`] reads everything that it is shown, and its mistakes are drawn anew for every request, so that
asking often outvotes them. An LLM skims long requests, and what misleads it once misleads it again.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..llm import Message, ScriptedChat
from .reflector import (
    between,
    edit_block,
    gepas_request,
    learn_from_others,
    lessons,
    mislead,
    principles_in,
    retell,
    rewritten,
    unite,
)

READ_ATTEMPTS = 2
"""Attempts of a request that it reads: the first that fell short."""
READ_CHARS = 400
"""Of a longer attempt it does not see the end: a refusal of the third fact, mostly."""

_PROBLEM = re.compile(r"<problem>\n(.*?)\n</problem>", re.DOTALL)
_ATTEMPT = re.compile(r'<attempt reward="(.*?)">\n(.*?)\n</attempt>', re.DOTALL)

Case = tuple[str, str]
"""A problem, and an attempt at it that fell short, retold."""


class HonestReflector(ScriptedChat):
    """A [`ScriptedChat`] that reflects on episodes in the guarded world, from little evidence and often wrong.

    It answers all requests that [`GuardedReflector`] answers. Its advice after an attempt at a problem is right or
    wrong in the same way in each kind of request: a critique, a reflection of one call, GEPA's request. Where it unites
    proposals it reads no evidence, and makes no mistake of its own.

    Args:
        accuracy (`float`, *optional*, defaults to `0.7`): Share of its advice that is right; the rest is as bad as that
            of [`GuardedReflector`].
        seed (`int`, *optional*, defaults to `0`): Which advice. It follows from it and from the evidence.
        **options: Of [`ScriptedChat`], `latency` for one.

    Raises:
        `ValueError`: `accuracy` is not a probability.
    """

    def __init__(self, accuracy: float = 0.7, seed: int = 0, **options: Any):
        if not 0 <= accuracy <= 1:
            raise ValueError(f"accuracy must be between 0 and 1, got {accuracy}")
        self.accuracy, self.seed = accuracy, seed
        super().__init__(self._say, **options)

    def _say(self, messages: Sequence[Message]) -> str:
        asked = messages[-1]["content"]
        if asked.startswith("Task: retell"):
            attempt, rest = (
                between(asked, "<attempt>", "</attempt>"),
                asked.partition("</attempt>")[2],
            )
            return _retold(attempt.strip(), rest)
        if asked.startswith("Task: turn many"):
            return edit_block(unite(asked, None))
        if asked.startswith("I provided an assistant"):
            instructions, examples = gepas_request(asked)
            cases = [_example(one) for one in examples if "score 1;" not in one]
            return rewritten(instructions, self._advise(principles_in(instructions), cases))
        if asked.startswith(("Task: draw lessons", "Task: revise")):
            return edit_block(self._advise(principles_in(asked), _cases(asked)))
        return edit_block(learn_from_others(asked, self._mistaken(asked)))

    def _advise(self, principles: Mapping[str, str], cases: Sequence[Case]) -> list[dict[str, Any]]:
        edits: list[dict[str, Any]] = []
        for question, told in cases[:READ_ATTEMPTS]:
            rng = self._mistaken(f"{question} {told}")
            advice = (
                lessons(dict(principles), told) if rng is None else mislead(principles, told, rng)
            )
            edits += [edit for edit in advice if edit not in edits]
        return edits

    def _mistaken(self, evidence: str) -> random.Random | None:
        """A generator of the mistake if this evidence misleads it, the same one every time."""
        rng = random.Random(f"{self.seed} {evidence}")
        return rng if rng.random() >= self.accuracy else None


def _cases(asked: str) -> list[Case]:
    """The failed attempts of a critique, which shows one problem and summaries beside it, or of a request with several
    problems and the attempts themselves."""
    if asked.startswith("Task: draw lessons"):
        question = between(asked, "<problem>", "</problem>").strip()
        return [(question, told) for reward, told in _ATTEMPT.findall(asked) if float(reward) < 1]
    return [
        (_first_line(problem), _retold(text))
        for problem in _PROBLEM.findall(asked)
        for reward, text in _ATTEMPT.findall(problem)
        if float(reward) < 1
    ]


def _example(example: str) -> Case:
    """An example of GEPA's request."""
    question, _, attempt = example.partition("## Inputs")[2].partition("## Generated Outputs")
    return _first_line(question), _retold(attempt.partition("## Feedback")[0].strip())


def _retold(attempt: str, rest: str = "") -> str:
    """Its advice on the part of an attempt that it reads, and on the text behind it in the request."""
    return retell(f"<attempt>{attempt[:READ_CHARS]}</attempt>{rest}")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
