"""A refinement as plain text for people: what each step changed in the prompt, and how it ended."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Literal

from .result import RefinementResult, RefinementStep

Mark = Literal["", "-", "+", "#"]
_MARKS: dict[str, Mark] = {"-": "-", "+": "+"}

_PIECE_ENDS = re.compile(r"(?<=[.!?])\s+|\n+")


def prompt_diff(old: str, new: str) -> str:
    """What changed between two prompts, a sentence a line: `- ` before what is gone, `+ ` before what is new."""
    lines = difflib.ndiff(_pieces(old), _pieces(new))
    return "\n".join(line.rstrip() for line in lines if not line.startswith("?"))


def describe(result: RefinementResult, width: int = 300) -> str:
    """A result as text: the steps with the prompt's changes, then the answer.

    Args:
        result ([`RefinementResult`]): One query's.
        width (`int`, *optional*, defaults to `300`): Outputs and feedback are shortened to this many characters.
    """
    return "\n".join(text for _, text in described_lines(result, width))


def described_lines(result: RefinementResult, width: int = 300) -> Iterator[tuple[Mark, str]]:
    """The lines of [`describe`], each with what it is: `-` gone from a prompt, `+` new in it, `#` a heading."""
    yield "#", f"Question: {_short(result.query, width)}"
    yield "", ""
    yield "#", "Prompt:"
    yield from (("", f"  {line}") for line in result.initial_prompt.splitlines())
    if result.verdict is not None:
        yield "", ""
        yield "", f"First answer: {_short(result.initial_answer or '', width)}"
        yield "", f"Verdict: {result.verdict}"
    for number, step in enumerate(result.steps, start=1):
        yield "", ""
        yield "#", f"Step {number}"
        yield from _of_step(step, width)
    changed = sum(step.new_prompt != step.prompt for step in result.steps)
    yield "", ""
    yield "", f"Ended: {result.stop_reason}, {len(result.steps)} steps, prompt changed {changed} times"
    if result.error is not None:
        yield "", f"Error: {result.error}"
    yield "", ""
    yield "#", "Answer:"
    yield from (("", f"  {line}") for line in result.answer.splitlines())


def _of_step(step: RefinementStep, width: int) -> Iterator[tuple[Mark, str]]:
    if step.output is not None:
        yield "", f"  output{'' if step.complete else ' (cut off)'}: {_short(step.output, width)}"
    if step.feedback is not None:
        yield "", f"  feedback: {_short(step.feedback, width)}"
    if step.problem is not None:
        yield "", f"  prompt kept: {step.problem}"
    elif step.new_prompt == step.prompt:
        yield "", "  prompt unchanged"
    else:
        for line in prompt_diff(step.prompt, step.new_prompt).splitlines():
            yield _MARKS.get(line[:1], ""), f"  {line}"


def _pieces(text: str) -> list[str]:
    return [piece for piece in _PIECE_ENDS.split(text) if piece.strip()]


def _short(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 4] + " ..."
