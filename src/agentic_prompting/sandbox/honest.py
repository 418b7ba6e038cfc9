"""A reference LLM of the guarded world that does not flatter: it reads little, and repeats its
mistakes.

[`GuardedReflector`] reads every request in full, and its mistakes are drawn anew for every request,
so that asking often outvotes them. An LLM skims long requests, and what misleads it once misleads
it again.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..llm import Message, ScriptedChat
from .reflector import (
    EditFields,
    between,
    edit_block,
    learn_from_others,
    lessons,
    mislead,
    principles_in,
    read_gepa_request,
    retell,
    rewrite_instructions,
    unite,
)

READ_ATTEMPTS = 2
"""The number of failed attempts of a request that it reads: the first ones."""
READ_CHARS = 400
"""The characters of an attempt that it reads.

The end of a longer one is mostly the refusal of the third fact.
"""

_PROBLEM = re.compile(r"<problem>\n(.*?)\n</problem>", re.DOTALL)
_ATTEMPT = re.compile(r'<attempt reward="(.*?)">\n(.*?)\n</attempt>', re.DOTALL)


class FailedAttempt(NamedTuple):
    """A failed attempt at a problem, in summary."""

    problem: str
    summary: str


class HonestReflector(ScriptedChat):
    """A [`ScriptedChat`] that reflects on episodes in the guarded world, from little evidence and
    often wrong.

    It answers all requests that [`GuardedReflector`] answers. Its advice after an attempt at a
    problem is right or wrong in the same way in each kind of request: a critique, a reflection of
    one call, GEPA's request. Where it unites proposals it reads no evidence, and makes no mistake
    of its own.

    Args:
        accuracy (`float`, *optional*, defaults to `0.7`): Share of its advice that is right; the
            rest is as bad as the mistakes of [`GuardedReflector`].
        seed (`int`, *optional*, defaults to `0`): Decides with the evidence which advice is right.
        **options: Options of [`ScriptedChat`], such as `latency`.

    Raises:
        `ValueError`: `accuracy` is not a probability.
    """

    def __init__(self, accuracy: float = 0.7, seed: int = 0, **options: Any):
        if not 0 <= accuracy <= 1:
            raise ValueError(f"accuracy must be between 0 and 1, got {accuracy}")
        self.accuracy = accuracy
        self.seed = seed
        super().__init__(self._reply_to, **options)

    def _reply_to(self, messages: Sequence[Message]) -> str:
        request = messages[-1]["content"]

        # A summary, of the beginning of the attempt.
        if request.startswith("Task: retell"):
            attempt = between(request, "<attempt>", "</attempt>")
            remainder = request.partition("</attempt>")[2]
            return _retell_beginning(attempt.strip(), remainder)

        # Proposals are united without evidence, and so without a mistake.
        if request.startswith("Task: turn many"):
            return edit_block(unite(request, None))

        # Advice from the failed attempts, for GEPA or for E-SPL.
        if request.startswith("I provided an assistant"):
            instructions, examples = read_gepa_request(request)
            attempts = [_read_example(example) for example in examples if "score 1;" not in example]
            edits = self._advise(principles_in(instructions), attempts)
            return rewrite_instructions(instructions, edits)
        if request.startswith(("Task: draw lessons", "Task: revise")):
            attempts = _read_failed_attempts(request)
            return edit_block(self._advise(principles_in(request), attempts))

        # A crossover.
        return edit_block(learn_from_others(request, self._mistake_rng(request)))

    def _advise(
        self, principles: Mapping[str, str], attempts: Sequence[FailedAttempt]
    ) -> list[EditFields]:
        edits: list[EditFields] = []
        for attempt in attempts[:READ_ATTEMPTS]:
            # The same evidence misleads it every time.
            rng = self._mistake_rng(f"{attempt.problem} {attempt.summary}")
            if rng is None:
                advice = lessons(principles, attempt.summary)
            else:
                advice = mislead(principles, attempt.summary, rng)
            # Two attempts may lead to the same advice.
            edits += [edit for edit in advice if edit not in edits]
        return edits

    def _mistake_rng(self, evidence: str) -> random.Random | None:
        """Return a generator for the mistake if this evidence misleads the model, always the same
        one; else `None`.
        """
        rng = random.Random(f"{self.seed} {evidence}")
        return rng if rng.random() >= self.accuracy else None


def _read_failed_attempts(request: str) -> list[FailedAttempt]:
    """Return the failed attempts in a critique, which has one problem and summaries of its
    attempts, or in a request with several problems and the attempts themselves.
    """
    attempts = []

    # A critique has summaries already.
    if request.startswith("Task: draw lessons"):
        problem = between(request, "<problem>", "</problem>").strip()
        for reward, summary in _ATTEMPT.findall(request):
            if float(reward) < 1:
                attempts.append(FailedAttempt(problem, summary))
        return attempts

    # Other requests have the attempts themselves: summarise them.
    for problem in _PROBLEM.findall(request):
        for reward, text in _ATTEMPT.findall(problem):
            if float(reward) < 1:
                attempts.append(FailedAttempt(_first_line(problem), _retell_beginning(text)))
    return attempts


def _read_example(example: str) -> FailedAttempt:
    """Return the attempt in an example of GEPA's request."""
    inputs, _, outputs = example.partition("## Inputs")[2].partition("## Generated Outputs")
    attempt = outputs.partition("## Feedback")[0].strip()
    return FailedAttempt(_first_line(inputs), _retell_beginning(attempt))


def _retell_beginning(attempt: str, remainder: str = "") -> str:
    """Return a summary of the part of an attempt that the model reads, followed by the rest of the
    request.
    """
    return retell(f"<attempt>{attempt[:READ_CHARS]}</attempt>{remainder}")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
