"""The inputs of [`evolve`]: problems in any form, and TRL's reward functions on replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ..llm import Reply
from ..llm.guard import call_guarded
from ..llm.numbers import finite_float
from ..rollout import Grammar, Rollout, Sample

Reward = Callable[..., Any]
"""TRL's reward signature: called with `prompts`, `completions`, `rollout` and the columns of the
rows, all lists. A plain function runs on a thread of its own, because it may block; an `async` one
is awaited. In place of a number it may return a pair of the number and a text, its feedback, which
the reference LLM reads with the attempt."""


@dataclass(frozen=True)
class Judgement:
    """The reward function's judgement of one reply.

    Args:
        reward (`float`, *optional*): `None` if there is nothing to judge.
        feedback (`str`, *optional*, defaults to `""`): Its words on the reply.
    """

    reward: float | None
    feedback: str = ""


def read_problems(rows: Sequence[Any], name: str) -> list[Mapping[str, Any]]:
    """Return rows, pairs and questions as mappings.

    Raises:
        `TypeError`: `rows` is not a sequence, or an element is none of these.
    """
    # A text or a mapping has both methods too, but is not a list of problems.
    is_sequence = hasattr(rows, "__getitem__") and hasattr(rows, "__len__")
    if isinstance(rows, (str, Mapping)) or not is_sequence:
        raise TypeError(
            f"{name} must be a list or a Dataset of problems, not a {type(rows).__name__}"
        )
    problems: list[Mapping[str, Any]] = []
    for number, row in enumerate(rows):
        # A question, or a pair of a question and its answer or answers.
        if isinstance(row, str):
            row = {"question": row}
        elif isinstance(row, (tuple, list)) and len(row) == 2:
            question, answers = row
            row = {
                "question": question,
                "answers": answers if isinstance(answers, list) else [answers],
            }

        # Every other form is a mapping with a problem in it.
        if not isinstance(row, Mapping):
            raise TypeError(
                f"{name}[{number}] must be a mapping, a (question, answer) pair or a question, "
                f"not {row!r}"
            )
        if not (row.get("question") or row.get("prompt")):
            raise TypeError(
                f"{name}[{number}] has neither `question` nor `prompt`: {', '.join(map(str, row))}"
            )
        problems.append(row)
    return problems


async def score(
    reward: Reward, rows: Sequence[Mapping[str, Any]], replies: Sequence[Reply], grammar: Grammar
) -> list[Judgement]:
    """Return one judgement per reply, by one call of the reward function.

    Its reward is `None` for NaN, infinite rewards and a reply that is an error.

    Raises:
        `TypeError`: The function does not return one number, `None`, or a pair of a number and a
            text per completion.
    """
    # A reply that is an error has no reward, and is not passed to the function.
    judgements = [Judgement(None)] * len(replies)
    scorable = [number for number, reply in enumerate(replies) if reply.error is None]
    if not scorable:
        return judgements

    # The arguments of TRL's reward signature.
    scorable_rows = [rows[number] for number in scorable]
    texts = [replies[number].text for number in scorable]
    columns: dict[str, list[Any]] = {}
    for name in dict.fromkeys(chain.from_iterable(scorable_rows)):
        # These two are passed as `prompts` and `completions`.
        if name not in ("prompt", "completion"):
            columns[name] = [row.get(name) for row in scorable_rows]
    columns["prompts"] = [row.get("prompt") or row["question"] for row in scorable_rows]
    columns["completions"] = [[{"role": "assistant", "content": text}] for text in texts]
    columns["rollout"] = [
        _as_rollout(row, text, grammar) for row, text in zip(scorable_rows, texts, strict=True)
    ]

    returned = await call_guarded(reward, **columns)
    try:
        for number, value in zip(scorable, returned, strict=True):
            judgements[number] = _read_judgement(value)
    except (TypeError, ValueError):
        name = getattr(reward, "__name__", type(reward).__name__)
        raise TypeError(
            f"the reward {name} must return one number or None for each of the {len(scorable)} "
            f"completions, not {repr(returned)[:80]}; with words, a pair of the number and a text"
        ) from None
    return judgements


def _read_judgement(value: Any) -> Judgement:
    """Read a number, `None`, or a pair of one of them and a text."""
    feedback = ""
    if isinstance(value, tuple):
        value, feedback = value
        if not isinstance(feedback, str):
            raise TypeError("the feedback is not a text")
    return Judgement(None if value is None else finite_float(value), feedback)


def _as_rollout(row: Mapping[str, Any], text: str, grammar: Grammar) -> Rollout:
    """Return a reply as an episode of one turn, for rewards that read rollouts.

    One token stands for the whole turn.
    """
    rollout = Rollout([0], dict(row))
    turn = grammar.parse(text)
    rollout.add_turn(Sample([0]), turn)
    return rollout.finish("answered" if turn.kind == "answer" else "malformed")
