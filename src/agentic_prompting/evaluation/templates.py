"""What the systems that are only prompted are told, and what their critics are. The wording is ours.

Prompts without variables are system messages; the question is the user message as it is.
"""

from __future__ import annotations

DIRECT = "Answer the question at once, without explanation. Write one line of the form 'Answer: ...'."
"""Baseline: the answer and nothing else."""

CHAIN_OF_THOUGHT = (
    "Answer the question. Think step by step, then write a last line of the form 'Answer: ...' with the answer alone."
)
"""Baseline: zero-shot chain of thought."""

REFLECT = (
    "Read your answer again as a stern examiner would. Is the question understood as it is meant? Is every fact and "
    "every step right? List what is wrong, or say that nothing is."
)
"""Self-reflection, second message. No variables."""

REVISE = "Now answer the question once more, mending what you found. End with a last line of the form 'Answer: ...'."
"""Self-reflection, third message. No variables."""
