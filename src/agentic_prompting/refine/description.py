"""Shows the result of a refinement as text for people."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Literal

from ..llm.numbers import count_in_words
from .types import RefinementResult, RefinementStep

# The marks of lines: plain, gone from a prompt, new in it, or a heading.
Mark = Literal["", "-", "+", "#"]

_PIECE_ENDS = re.compile(r"(?<=[.!?])\s+|\n+")


def prompt_diff(old: str, new: str) -> str:
    """Compare two prompts sentence by sentence: `- ` marks a removed sentence, `+ ` a new one."""
    # Lines with `?` point at characters within a sentence.
    lines = difflib.ndiff(_split_sentences(old), _split_sentences(new))
    return "\n".join(line.rstrip() for line in lines if not line.startswith("?"))


def describe(result: RefinementResult, width: int = 300) -> str:
    """Return a result as text: each step with the changes of the prompt, then the answer.

    Args:
        result ([`RefinementResult`]): The result.
        width (`int`, *optional*, defaults to `300`): Outputs and feedback are shortened to this
            many characters.
    """
    return "\n".join(line for _, line in describe_lines(result, width))


def describe_lines(result: RefinementResult, width: int = 300) -> Iterator[tuple[Mark, str]]:
    """Yield the lines of [`describe`], each with its mark.

    The marks: `-` a sentence removed from the prompt, `+` a new one, `#` a heading.
    """
    # The question, the prompt and the first answer.
    yield "#", f"Question: {_shorten(result.query, width)}"
    yield "", ""
    yield "#", "Prompt:"
    for line in result.initial_prompt.splitlines():
        yield "", f"  {line}"
    if result.verdict is not None:
        yield "", f"\nFirst answer: {_shorten(result.initial_answer or '', width)}"
        yield "", f"Verdict: {result.verdict}"

    # Each step: what the roles wrote, and what changed in the prompt.
    for number, step in enumerate(result.steps, start=1):
        yield "#", f"\nStep {number}"
        yield from _describe_step(step, width)

    # The end and the answer.
    changes = sum(step.new_prompt != step.prompt for step in result.steps)
    yield (
        "",
        f"\nEnded: {result.stop_reason}, {count_in_words(len(result.steps), 'step')}, "
        f"prompt changed {count_in_words(changes, 'time')}",
    )
    if result.error is not None:
        yield "", f"Error: {result.error}"
    yield "#", "\nAnswer:"
    for line in result.answer.splitlines():
        yield "", f"  {line}"


def _describe_step(step: RefinementStep, width: int) -> Iterator[tuple[Mark, str]]:
    # A role that failed wrote nothing.
    if step.output is not None:
        note = "" if step.complete else " (cut off)"
        yield "", f"  output{note}: {_shorten(step.output, width)}"
    if step.feedback is not None:
        yield "", f"  feedback: {_shorten(step.feedback, width)}"
    # The prompt: kept, unchanged, or the sentences that changed.
    if step.problem is not None:
        yield "", f"  prompt kept: {step.problem}"
        return
    if step.new_prompt == step.prompt:
        yield "", "  prompt unchanged"
        return
    for line in prompt_diff(step.prompt, step.new_prompt).splitlines():
        mark: Mark = ""
        if line.startswith("-"):
            mark = "-"
        elif line.startswith("+"):
            mark = "+"
        yield mark, f"  {line}"


def _split_sentences(text: str) -> list[str]:
    return [piece for piece in _PIECE_ENDS.split(text) if piece.strip()]


def _shorten(text: str, width: int) -> str:
    # On one line, whatever line breaks it has.
    text = " ".join(text.split())
    if len(text) <= width:
        return text
    return text[: width - 4] + " ..."
