"""The words a Prompt-R1 agent is given with its question (the role of Table 1 in the paper; the wording is ours).

Variables: `{question}` (str), the user's question; `{think}`, `{act}`, `{observation}`, `{answer}` (str), the tag names
of the grammar, filled in by [`prompt_r1_template`]. `{question}` comes last so that prompts share a prefix.
"""

from __future__ import annotations

import re
from dataclasses import asdict

from .grammar import TagGrammar

PROMPT_R1_TEMPLATE = """\
You answer a question together with a large language model that knows more than you do. You talk to it by writing \
requests; it sees your requests and its own replies, but not your thoughts and not this text.

Write exactly one of these two things each time it is your turn.
To ask: <{think}>a short thought</{think}> and then <{act}>your request</{act}>
To finish: <{think}>why you are done</{think}> and then <{answer}>the answer, as short as it can be</{answer}>
What you ask is answered in <{observation}>...</{observation}>.

How to work:
- At first, say in under 50 words of thought what the question is after, without trying to solve it; then put the \
question and this explanation into your first request.
- Read each reply critically. Then ask for what is still missing, for more detail, for a correction or for a check. \
Build every request on what you have learned, and never send the same one twice.
- Finish as soon as the replies support an answer.

Question: {question}"""


def prompt_r1_template(grammar: TagGrammar = TagGrammar()) -> str:
    """The default agent template with the grammar's tags filled in and `{question}` left open."""
    text = PROMPT_R1_TEMPLATE
    for role, tag in asdict(grammar).items():
        # `<{think}>` and so on: only the tag positions, never `{question}`.
        text = text.replace(f"<{{{role}}}>", f"<{tag}>").replace(f"</{{{role}}}>", f"</{tag}>")
    return text


def fill(template: str, **values: object) -> str:
    """Put values into a template, all at once: braces in the values, and other braces in the template, stay."""
    names = "|".join(map(re.escape, values))
    return re.sub(rf"\{{({names})\}}", lambda match: str(values[match[1]]), template)


def fill_template(template: str, question: str) -> str:
    """Put the question into a template. Braces in either are left alone.

    Raises:
        `ValueError`: If the template has no `{question}`.
    """
    check_template(template)
    return template.replace("{question}", question)


def check_template(template: str) -> None:
    """Raises `ValueError` if the template has no place for the question."""
    if "{question}" not in template:
        raise ValueError(
            f"the prompt template has no {{question}} in it, so the agent would never see it: {template[:80]!r}"
        )
