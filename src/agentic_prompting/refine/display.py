"""A refinement as plain text for people: what each step changed in the prompt, and how it ended."""

from __future__ import annotations

import difflib
import re

from .result import RefinementResult, RefinementStep

_PIECE_ENDS = re.compile(r"(?<=[.!?:;])\s+|\n+")


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
    parts = [f"Question: {_short(result.query, width)}", f"Prompt:\n{_indented(result.initial_prompt)}"]
    if result.verdict is not None:
        parts.append(f"First answer: {_short(result.initial_answer or '', width)}\nVerdict: {result.verdict}")
    parts += [_described(number, step, width) for number, step in enumerate(result.steps, start=1)]
    changed = sum(step.new_prompt != step.prompt for step in result.steps)
    parts.append(f"Ended: {result.stop_reason}, {len(result.steps)} steps, prompt changed {changed} times")
    if result.error is not None:
        parts.append(f"Error: {result.error}")
    parts.append(f"Answer: {result.answer}")
    return "\n\n".join(parts)


def _described(number: int, step: RefinementStep, width: int) -> str:
    lines = [f"Step {number}"]
    if step.output is not None:
        lines.append(f"  output{'' if step.complete else ' (cut off)'}: {_short(step.output, width)}")
    if step.feedback is not None:
        lines.append(f"  feedback: {_short(step.feedback, width)}")
    if step.problem is not None:
        lines.append(f"  prompt kept: {step.problem}")
    elif step.new_prompt == step.prompt:
        lines.append("  prompt unchanged")
    else:
        lines.append(_indented(prompt_diff(step.prompt, step.new_prompt)))
    return "\n".join(lines)


def _pieces(text: str) -> list[str]:
    return [piece for piece in _PIECE_ENDS.split(text) if piece.strip()]


def _short(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 4] + " ..."


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
