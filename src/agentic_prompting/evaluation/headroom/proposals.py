"""System prompts and requests to compare.

A reference LLM writes the system prompts from examples.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...llm import ChatModel, Message, Reply, as_chat, fill
from ..systems import Row

_ANSWER_LINE = "End with a line 'Answer: ...' that has the answer alone, as short as it can be."

DEFAULT_REQUESTS = (
    f"{{question}}\n\n{_ANSWER_LINE}",
    f"{{question}}\n\nThink step by step, and check each step. {_ANSWER_LINE}",
    "First state the facts that you know and that bear on this question. Then answer it.\n\n"
    f"{{question}}\n\n{_ANSWER_LINE}",
    "Split this question into smaller ones, answer them one after another, then combine the "
    "answers.\n\n"
    f"{{question}}\n\n{_ANSWER_LINE}",
)
"""Templates of requests to a large LLM, the plain one first; `{question}` is filled in."""

# Variables: count, start, examples.
PROPOSE_TEMPLATE = """\
A language model answers questions of the kind below. Write {count} system prompts for it that differ from each other \
as much as they can: in the method that they ask for, in the mistakes that they warn of, in the rules of the task that \
they state, and in their length. Each must work for questions of this kind that are not shown here.

The system prompt so far:
<prompt>{start}</prompt>

Questions with their accepted answers:
{examples}

Write each system prompt between <prompt> and </prompt>, and nothing else between them."""

_MAX_EXAMPLE_LENGTH = 2000


async def ask_for_prompts(
    reference: ChatModel, start: str, examples: Sequence[Row], count: int
) -> Reply:
    """Ask an LLM for system prompts.

    Args:
        reference ([`ChatModel`]): The LLM.
        start (`str`): The current system prompt.
        examples (`Sequence[dict]`): Rows with `question` and `answers`. They must not be used to
            measure a gain.
        count (`int`): Number of prompts to ask for.
    """
    # Long questions and answers are truncated.
    lines = []
    for row in examples:
        question = str(row["question"])[:_MAX_EXAMPLE_LENGTH]
        accepted = "; ".join(map(str, row["answers"]))[:_MAX_EXAMPLE_LENGTH]
        lines.append(f"- {question}\n  accepted: {accepted}")
    # A single call writes all prompts, so that they can differ from each other.
    text = fill(PROPOSE_TEMPLATE, count=count, start=start, examples="\n".join(lines))
    return await as_chat(reference)([Message(role="user", content=text)])


def read_proposals(reply: str) -> list[str]:
    """Return the texts between `<prompt>` and `</prompt>` that are not empty; one may be repeated."""
    prompts = []
    # A prompt without its closing mark was cut off, and is skipped.
    for piece in reply.split("<prompt>")[1:]:
        text, closing, _ = piece.partition("</prompt>")
        if closing and text.strip():
            prompts.append(text.strip())
    return prompts
