"""The prompts of prompted systems and optimisers. The wording is ours."""

from __future__ import annotations

OPRO_META = """\
Below are instructions that were given to a language model, each with the score it earned (0 to 100), the best last.

{history}

Here are examples of what it has to do; the instruction is put in front of each question.

{examples}

Write a new instruction that is different from those above and earns a higher score. {form} Write it between <INS> \
and </INS>."""
"""OPRO's meta-prompt (Yang et al.

2023, section 4.2). Variables: `{history}` (str), instructions with scores in rising order;
`{examples}` (str), questions with their answers; `{form}` (str), one of the two sentences below.
"""

OPRO_ANSWER_LINE = "Keep the demand for a last line of the form 'Answer: ...'."
"""For OPRO's meta-prompt, if the first instruction has this demand."""

OPRO_SAME_FORM = "Keep what the instructions above demand of the form of the answer."
"""For OPRO's meta-prompt, if the first instruction asks for no such line."""

CRITIQUE_FEEDBACK = "The answer should have been: {answers}. The score is {score:.2f} of 1."
"""What optimisers are told of one answer. Variables: `{answers}` (str), `{score}` (float)."""

# Prompts without variables, in our words: system messages of the baselines, later messages of
# self-reflection.
DIRECT = (
    "Answer the question at once, without explanation. Write one line of the form 'Answer: ...'."
)
"""Baseline: the answer and nothing else."""

CHAIN_OF_THOUGHT = (
    "Answer the question. Think step by step, then write a last line of the form 'Answer: ...' "
    "with the answer alone."
)
"""Baseline: zero-shot chain of thought."""

REFLECT = (
    "Read your answer again as a stern examiner would. Is the question understood as it is meant? "
    "Is every fact and every step right? List what is wrong, or say that nothing is."
)

REVISE = (
    "Now answer the question once more, mending what you found. End with a last line of the form "
    "'Answer: ...'."
)
