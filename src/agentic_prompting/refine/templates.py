"""The messages of ProRefine's four roles, and the readers of their replies. No calls, no state.

The wording is ours; the division of labour is the paper's.

Variables, filled in once and never inside one another's text:

| template | variables |
|---|---|
| `task` | `{query}`: the question. The prompt that is being refined is the task model's system message |
| `feedback` | `{query}`; `{output}`: the task model's output so far; `{state}`: whether it is complete |
| `optimizer` | `{prompt}`: the current prompt; `{feedback}`: the critic's remarks |
| `verifier` | `{query}`; `{output}`: the first answer, under the initial prompt |
| `complete`, `cut_off` | none: the two values of `{state}` |

The `..._role` texts are system messages and have no variables.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ..llm import strip_thoughts

FEEDBACK_ROLE = """\
You read over the shoulder of a writer who is answering a question, and you say what goes wrong. Look at the facts, \
the arithmetic, the steps of the argument, whether the question is understood as it is meant, and whether the answer \
has the form that was asked for.
- Say where the trouble is and what kind of trouble it is, so that somebody else can prevent it.
- Do not write the answer, a corrected version or the next step yourself.
- Be brief: a few sentences, the most serious point first.
- If everything that is there is right, reply with the single word CORRECT."""

FEEDBACK = """\
Question:
{query}

Output:
{output}

{state}"""

COMPLETE = "The output is complete."
CUT_OFF = """\
The output is not finished: it was stopped here and may break off in the middle of a sentence or a number. Judge what \
is there, and do not hold against it what is still to come."""

OPTIMIZER_ROLE = """\
You edit the prompt of a language model. You are given the prompt and a critic's remarks on what the model wrote under \
it. Change the prompt so that the model avoids these faults.
- The task stays the same, and so does everything the prompt demands: the form of the answer above all.
- Turn each remark into advice on how to work. The critic may be wrong about details, so put no answers into the prompt.
- Keep it short and readable, and take out what no longer helps.
- If the critic has nothing to improve, give the prompt back word for word.
Reply with the whole prompt between <IMPROVED_PROMPT> and </IMPROVED_PROMPT>."""

OPTIMIZER = """\
Prompt:
{prompt}

Feedback:
{feedback}"""

VERIFIER_ROLE = """\
You check answers. Work the question out for yourself, then compare: is the final result of the given answer right? An \
answer that breaks off before it gives a result is not right. Explain in at most three sentences and end with \
<ACCURACY>1</ACCURACY> if it is right or <ACCURACY>0</ACCURACY> if it is not."""

VERIFIER = """\
Question:
{query}

Prediction:
{output}"""

DEFAULT_PROMPT = (
    "Answer the question. Think step by step and check each step before you go on to the next."
)

_LAST_LINE = " Reason step by step. Then write a last line of the form 'Answer: {}."
_NUMBER = "You are asked a mathematical question." + _LAST_LINE.format(
    "N', where N is the number, in digits"
)

START_PROMPTS = {
    "bbh_object_counting": _NUMBER.replace("a mathematical question", "to count things"),
    "bbh_word_sorting": "You are asked to sort words."
    + _LAST_LINE.format(
        "WORDS', where WORDS are all the words in order, with one space between them"
    ),
    "gsm8k_dspy": _NUMBER,
    "svamp": _NUMBER,
    "aqua": "You are asked a mathematical question with five options."
    + _LAST_LINE.format("L', where L is the letter of the right option"),
}
"""A plain chain-of-thought prompt to begin with for each of the paper's five sets, by the name `load_task` knows."""


@dataclass(frozen=True)
class RolePrompts:
    """The messages of the four roles; see the table at the top of this module for the variables.

    Args:
        task (`str`, *optional*, defaults to `"{query}"`): The task model's user message.
        feedback_role (`str`, *optional*), feedback (`str`, *optional*): The critic's system and user message.
        complete (`str`, *optional*), cut_off (`str`, *optional*): The two values of `{state}`.
        optimizer_role (`str`, *optional*), optimizer (`str`, *optional*): The same for the optimizer.
        verifier_role (`str`, *optional*), verifier (`str`, *optional*): The same for a verifier that is a model.

    Raises:
        `ValueError`: If a template lacks one of its variables (`{state}` may be left out).
    """

    task: str = "{query}"
    feedback_role: str = FEEDBACK_ROLE
    feedback: str = FEEDBACK
    complete: str = COMPLETE
    cut_off: str = CUT_OFF
    optimizer_role: str = OPTIMIZER_ROLE
    optimizer: str = OPTIMIZER
    verifier_role: str = VERIFIER_ROLE
    verifier: str = VERIFIER

    def __post_init__(self):
        needed = {"task": ["query"], "optimizer": ["prompt", "feedback"]}
        needed |= {"feedback": ["query", "output"], "verifier": ["query", "output"]}
        for name, variables in needed.items():
            missing = [
                f"{{{variable}}}"
                for variable in variables
                if f"{{{variable}}}" not in getattr(self, name)
            ]
            if missing:
                raise ValueError(
                    f"the {name} template has no {' and no '.join(missing)}: {getattr(self, name)[:80]!r}"
                )

    def role(self, name: str) -> str:
        """The system message of a role other than `task`."""
        return getattr(self, f"{name}_role")


# The replies ---------------------------------------------------------------------------------------------------------

Unit = Literal["tokens", "sentence", "paragraph"]

_OPEN = re.compile(r"<\s{0,9}improved[_ -]?prompt\s{0,9}>", re.IGNORECASE)
_CLOSE = re.compile(r"<\s{0,9}/\s{0,9}improved[_ -]?prompt\s{0,9}>", re.IGNORECASE)

_ENDS = {
    # After the sentence's closing marks, or after a line. "3.5" and "e.g.," end nothing; "Dr. Who" does, harmlessly.
    "sentence": re.compile(r"(?<![.!?…])[.!?…]++[\"'”’)\]*_]*+(?=\s)|(?<=\S)(?=\n)|[。！？]"),
    "paragraph": re.compile(r"(?<=\S)(?=[^\S\n]*\n[^\S\n]*\n)"),
}


def read_improved_prompt(reply: str) -> tuple[str, None] | tuple[None, str]:
    """The prompt between `<IMPROVED_PROMPT>` tags, stripped, or the reason why there is none.

    Upper and lower case, spaces in the tags and text around them make no difference. Of several prompts the last
    complete one counts: models tend to speak of the tags before they use them. A draft in the optimizer's thought is no
    prompt, also where the reply was cut off inside of it.

    Args:
        reply (`str`): The optimizer's reply.

    Returns:
        `tuple`: Prompt and `None`; or `None` and `no tag`, `unclosed tag` or `empty prompt`.
    """
    visible = strip_thoughts(reply, payload=_OPEN)
    openings = [match.end() for match in _OPEN.finditer(visible)]
    closings = [match.start() for match in _CLOSE.finditer(visible)]
    if not openings:
        return None, "no tag"
    if not closings or closings[-1] < openings[0]:
        return None, "unclosed tag"
    start = max(opening for opening in openings if opening <= closings[-1])
    end = min(closing for closing in closings if closing >= start)
    prompt = visible[start:end].strip()
    return (prompt, None) if prompt else (None, "empty prompt")


def first_units(text: str, count: int, unit: Unit) -> str:
    """The first `count` sentences (a line's end is one too) or paragraphs (up to an empty line), as they stand.

    The whole text if it has no more, or if `unit` is `"tokens"`, which the model has counted itself.
    """
    if unit == "tokens":
        return text
    end, seen = 0, 0
    for match in _ENDS[unit].finditer(text):
        if not text[end : match.end()].strip():
            continue  # the line that ends right after its last sentence's mark
        end, seen = match.end(), seen + 1
        if seen == count:
            return text[:end] if text[end:].strip() else text
    return text
