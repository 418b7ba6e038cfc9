"""What is evaluated: a [`System`], questions in, [`Answer`]s out. A function of texts is one, too ([`as_system`]).

An answer keeps three outcomes apart: an answer (a text), none (the system was asked and gave none: wrong), and a
failure (an outage, a spent budget: not the system's doing, no score).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..llm import LLMError, Reply
from ..llm.loop import in_parallel

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """One system's answer to one question.

    Args:
        text (`str`, *optional*): The answer itself; `None` if the system gave none.
        whole (`str`, *optional*): The reply that it was read from, for metrics that read it in their own way.
        error (`str`, *optional*): Why there is nothing to score.
        fatal (`bool`, *optional*, defaults to `False`): Whether no later question can go better.
        calls (`int`), cached (`int`): Model calls, and those of them that were replayed, unpaid.
        tokens (`int`), cost_usd (`float`): Read and written, and what they cost.
        seconds (`float`): From question to answer.
        trajectory (*optional*): JSON-able; how it came about.
    """

    text: str | None = None
    whole: str | None = None
    error: str | None = None
    fatal: bool = False
    calls: int = 0
    cached: int = 0
    tokens: int = 0
    cost_usd: float = 0.0
    seconds: float = 0.0
    trajectory: Any = None

    def to_json(self) -> dict[str, Any]:
        """Its fields, those that say nothing left out."""
        return {name: value for name, value in asdict(self).items() if value not in (None, False)}


class System:
    """Something that answers questions: a sub-class has an `async def answer`, or answers many together in its own
    [`System.answer_each`].

    Attributes:
        fit_calls (`int`): Model calls it took to make it (prompt optimisation), for the table.
        max_in_flight (`int`): Questions on their way at once.
    """

    fit_calls: int = 0
    max_in_flight: int = 64

    async def answer(self, row: Row, seed: int) -> Answer:
        """Answer one row with a `question`. What it raises fails this question; another seed is another sample."""
        raise NotImplementedError(f"{type(self).__name__} has neither `answer` nor `answer_each`")

    async def _answered(self, row: Row, seed: int) -> Answer:
        try:
            return await self.answer(row, seed)
        except Exception as error:  # whatever is inside is not ours, and its question is not answered wrong
            return Answer(error=f"{type(error).__name__}: {error}")

    def answer_each(self, rows: Sequence[Row], seed: int = 0) -> Iterator[tuple[int, Answer]]:
        """Answer rows with a `question`, yielding `(position, answer)` as each is there.

        Args:
            rows (`Sequence[Mapping]`): The questions.
            seed (`int`, *optional*, defaults to `0`): Another seed is another run: other samples.
        """
        return in_parallel((self._answered(row, seed) for row in rows), self.max_in_flight)

    @property
    def settings(self) -> Mapping[str, Any]:
        """What makes it this system, JSON-able: results of other settings are not continued."""
        return {"class": type(self).__name__}

    def __call__(self, questions: Sequence[str | Row], seed: int = 0) -> list[Answer]:
        """All answers, in the order of the questions."""
        rows = [{"question": question} if isinstance(question, str) else question for question in questions]
        answers = dict(self.answer_each(rows, seed))
        return [answers[number] for number in range(len(rows))]


class FunctionSystem(System):
    """A function of texts as a system.

    Args:
        function (`Callable[[list[str]], Sequence[str | None]]`): Questions to answers, in order. What it raises fails
            the questions it was given.
        batch_size (`int`, *optional*, defaults to `32`): Questions it is given at once; what is answered is saved.
    """

    def __init__(self, function: Callable[[list[str]], Sequence[str | None]], batch_size: int = 32):
        self.function, self.batch_size = function, batch_size

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"function": getattr(self.function, "__qualname__", type(self.function).__name__)}

    def answer_each(self, rows: Sequence[Row], seed: int = 0) -> Iterator[tuple[int, Answer]]:
        for start in range(0, len(rows), self.batch_size):
            batch = rows[start : start + self.batch_size]
            yield from enumerate(self._answers([row["question"] for row in batch]), start)

    def _answers(self, questions: list[str]) -> list[Answer]:
        started = time.perf_counter()
        try:
            texts = list(self.function(questions))
        except Exception as error:  # whatever is inside is not ours, and its questions are not answered wrong
            return [Answer(error=f"{type(error).__name__}: {error}")] * len(questions)
        if len(texts) != len(questions):
            raise ValueError(f"the system gave {len(texts)} answers to {len(questions)} questions")
        seconds = (time.perf_counter() - started) / len(questions)
        return [Answer(text, seconds=seconds) for text in texts]


def as_system(system: System | Callable[..., Any]) -> System:
    """A system as it is, or a function of texts made one.

    Raises:
        `TypeError`: If it is neither.
    """
    if isinstance(system, System):
        return system
    if not callable(system):
        raise TypeError(f"a system is a System or a function from questions to answers, got {system!r:.100}")
    return FunctionSystem(system)


_BOXED = re.compile(r"\\boxed\s*\{")
_ANSWER_LINE = re.compile(r"answer\s*:[ \t*]*(.+)", re.IGNORECASE)
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def read_answer(reply: str) -> str:
    """The answer in a reply: in answer tags, in the last `\\boxed{...}`, or the rest of the line after the last
    `Answer:`; the whole reply where there is none of these. A full stop and markup around it are not part of it."""
    if tagged := _ANSWER_TAG.findall(reply):
        return tagged[-1].strip()
    if boxes := list(_BOXED.finditer(reply)):
        return _to_closing_brace(reply[boxes[-1].end() :])
    if lines := _ANSWER_LINE.findall(reply):
        return lines[-1].strip().strip("*").removesuffix(".").strip()
    return reply.strip()


def _to_closing_brace(text: str) -> str:
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if not depth:
            return text[:place].strip()
    return text.strip()


def answer_of_replies(replies: Sequence[Reply], seconds: float, trajectory: Any = None) -> Answer:
    """The answer in the last of the replies, with what all of them took. A failed call is a failed answer."""
    used = {
        "calls": len(replies),
        "cached": sum(reply.cached for reply in replies),
        "tokens": sum(reply.usage.tokens for reply in replies),
        "cost_usd": sum(reply.usage.cost_usd for reply in replies),
        "seconds": seconds,
        "trajectory": trajectory,
    }
    error: LLMError | None = next((reply.error for reply in replies if reply.error is not None), None)
    if error is not None:
        return Answer(error=f"{error.kind}: {error}", fatal=error.fatal, **used)
    whole = replies[-1].text
    return Answer(read_answer(whole), whole, **used)
