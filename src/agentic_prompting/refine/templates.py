"""The messages of ProRefine's four roles, and the parsing of their replies.

The wording is ours; the division of labour is the paper's. Each template has variables. They are
filled in once, and never inside the text of another variable:

| template | variables |
|---|---|
| `task` | `{query}`: the question. The prompt to refine is the task model's system message |
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
_NUMBER = _LAST_LINE.format("N', where N is the number, in digits")
_WORDS = _LAST_LINE.format(
    "WORDS', where WORDS are all the words in order, with one space between them"
)
_LETTER = _LAST_LINE.format("L', where L is the letter of the right option")

START_PROMPTS = {
    "bbh_object_counting": "You are asked to count things." + _NUMBER,
    "bbh_word_sorting": "You are asked to sort words." + _WORDS,
    "gsm8k_dspy": "You are asked a mathematical question." + _NUMBER,
    "svamp": "You are asked a mathematical question." + _NUMBER,
    "aqua": "You are asked a mathematical question with five options." + _LETTER,
}
"""A plain chain-of-thought prompt to start from for each of the paper's five sets, by the name that
`load_task` knows."""


@dataclass(frozen=True)
class RolePrompts:
    """The messages of the four roles; the table at the top of this module lists their variables.

    Args:
        task (`str`, *optional*, defaults to `"{query}"`): The task model's user message.
        feedback_role (`str`, *optional*): The critic's system message.
        feedback (`str`, *optional*): The critic's user message.
        complete (`str`, *optional*): The value of `{state}` for a complete output.
        cut_off (`str`, *optional*): The value of `{state}` for an output that was cut off.
        optimizer_role (`str`, *optional*): The optimizer's system message.
        optimizer (`str`, *optional*): The optimizer's user message.
        verifier_role (`str`, *optional*): The system message of a verifier that is a model.
        verifier (`str`, *optional*): Its user message.

    Raises:
        `ValueError`: A template lacks one of its variables (`{state}` may be left out).
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
        # A role that does not get one of these texts cannot do its part.
        required_variables = {
            "task": ["{query}"],
            "optimizer": ["{prompt}", "{feedback}"],
            "feedback": ["{query}", "{output}"],
            "verifier": ["{query}", "{output}"],
        }
        for name, variables in required_variables.items():
            template = getattr(self, name)
            missing = [variable for variable in variables if variable not in template]
            if missing:
                raise ValueError(
                    f"the {name} template has no {' and no '.join(missing)}: {template[:80]!r}"
                )

    def role(self, name: str) -> str:
        """Return the system message of a role other than `task`."""
        return getattr(self, f"{name}_role")


# ---- the replies ----

Unit = Literal["tokens", "sentence", "paragraph"]

_OPENING_TAG = re.compile(r"<\s{0,9}improved[_ -]?prompt\s{0,9}>", re.IGNORECASE)
_CLOSING_TAG = re.compile(r"<\s{0,9}/\s{0,9}improved[_ -]?prompt\s{0,9}>", re.IGNORECASE)

_UNIT_ENDS = {
    # After the closing marks of a sentence, or after a line. "3.5" and "e.g.," end nothing; the dot
    # of "Dr. Who" does, harmlessly.
    "sentence": re.compile(r"(?<![.!?…])[.!?…]++[\"'”’)\]*_]*+(?=\s)|(?<=\S)(?=\n)|[。！？]"),
    "paragraph": re.compile(r"(?<=\S)(?=[^\S\n]*\n[^\S\n]*\n)"),
}


def read_improved_prompt(reply: str) -> tuple[str, None] | tuple[None, str]:
    """Return the prompt between `<IMPROVED_PROMPT>` tags, or the reason why there is none.

    Case, blanks in the tags, and text around them make no difference. Of several prompts the last
    complete one counts, because models tend to mention the tags before they use them. A draft in
    the optimizer's thoughts does not count, even if the reply was cut off inside of them.

    Args:
        reply (`str`): The optimizer's reply.

    Returns:
        `tuple`: The stripped prompt and `None`; or `None` and `no tag`, `unclosed tag` or
        `empty prompt`.
    """
    # Thoughts are left out, but a prompt may itself contain marks of thoughts.
    visible = strip_thoughts(reply, payload=_OPENING_TAG)
    starts = [match.end() for match in _OPENING_TAG.finditer(visible)]
    ends = [match.start() for match in _CLOSING_TAG.finditer(visible)]
    if not starts:
        return None, "no tag"
    if not ends or ends[-1] < starts[0]:
        return None, "unclosed tag"

    # The last opening tag that is closed, and the first closing tag after it.
    start = max(start for start in starts if start <= ends[-1])
    end = min(end for end in ends if end >= start)
    prompt = visible[start:end].strip()
    if not prompt:
        return None, "empty prompt"
    return prompt, None


def first_units(text: str, count: int, unit: Unit) -> str:
    """Return the first sentences or paragraphs of a text, unchanged.

    Args:
        text (`str`): The text.
        count (`int`): The number of units. If the text has no more, it is returned as a whole.
        unit (`str`): `"sentence"`, which a line end ends too; `"paragraph"`, up to an empty line;
            or `"tokens"`, which the model has counted itself: the whole text.
    """
    if unit == "tokens":
        return text
    # Move on from one end of a unit to the next.
    end = 0
    units = 0
    for match in _UNIT_ENDS[unit].finditer(text):
        # A line may end right after the mark of its last sentence.
        if not text[end : match.end()].strip():
            continue
        end = match.end()
        units += 1
        if units == count:
            # If only blanks are left, the text is returned as a whole.
            has_more = bool(text[end:].strip())
            return text[:end] if has_more else text
    return text
