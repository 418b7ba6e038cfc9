"""The prompts of the reference LLM (the roles of A.2 to A.5 and Algorithm 2; the wording is ours).

Each template begins with a line `Task: ...` that tells them apart. Variables, all filled in at once
by [`fill`], so braces in a problem or an attempt do no harm:

- `{prompt}` (str): the system prompt's text; `{question}`, `{truth}` (str): a problem and its
  accepted answer;
- `{attempt}`, `{reward}` (str): one rollout and its reward; `{principle}` (str): one principle with
  its id;
- `{summaries}`, `{proposals}`, `{sets}` (str): made by [`render_summaries`], [`render_proposals`]
  and [`render_sets`];
- `{max_ops}`, `{max_words}` (int): the limits that are enforced when the edits are applied;
- `{failures}` (str): made by [`render_failures`];
- `{answer_format}` (str): one of the `FORMATS` below; `{schema}` (str): the `SCHEMA` of a reply in
  one JSON object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

# Mutation: a summary of each attempt (A.3), a critique of each problem (A.4), and a plan (A.5).
SUMMARISE = """\
Task: retell one attempt

A model tried to solve a problem under the instructions below. Retell what it did, so that somebody who will never see \
the attempt can learn from it.

<instructions>
{prompt}
</instructions>
<problem>
{question}
</problem>
<attempt>
{attempt}
</attempt>
Reward of the attempt: {reward}
Right answer: {truth}

Write a short numbered list, one item for each step of the attempt: what was done; which of the instructions it \
follows, by id where they have one; and where it was a detour or a mistake, what exactly went wrong. End with the \
result that the attempt arrived at. Quote literally whatever the attempt was told from outside that would help \
somebody else: names, formats, words that were demanded. Report only what is there."""

CRITIQUE = """\
Task: draw lessons from the attempts at one problem

A model works under these instructions, the same for every problem it gets:
<instructions>
{prompt}
</instructions>

Several attempts at one problem under these instructions:
<problem>
{question}
</problem>
Right answer: {truth}
{summaries}

Think it through first: What did the better attempts do that the others did not? Which mistake keeps coming back, and \
which guidance would have prevented it? Is there an instruction that covers it but is unclear, wrong or not followed?

Then propose changes to the instructions, {max_ops} at most, fewer if fewer are worth it. A change must help with \
problems that are not this one: a strategy, a check, a fact or a format of the task, never this problem's own numbers \
or answer.

{answer_format}"""

CONSOLIDATE = """\
Task: turn many proposed changes into one revision

These are the instructions of a model. Changes to them were proposed after its attempts at several problems, each by a \
reader who saw only one of the problems.
<instructions>
{prompt}
</instructions>
<proposals>
{proposals}
</proposals>

Make one coherent revision of it. Where proposals agree, the point is important: state it once, in its best form. \
Where they contradict each other, keep what is safe in general. Unite instructions that say nearly the same in a more \
general one. Every instruction should be short, abstract and about how to proceed.

{answer_format}"""

# Mutation in one call (`one_call.py`).
REVISE = """\
Task: revise instructions after failures

A model works under these instructions, the same for every problem it gets:
<instructions>
{prompt}
</instructions>

These are attempts of it that fell short, at several problems:
{failures}

First find out why, from what the attempts and the replies to them say: which causes come back from problem to \
problem, and which of them could an instruction have prevented? Is there an instruction that is wrong, or that misled \
the model?

Then revise the instructions, with {max_ops} changes at most, fewer if fewer are worth it. The model will work on \
other problems of the same kind: give it the strategies, checks, facts, names and formats that the task demands, but \
no answer to a problem above. Do not add what an instruction says already.

{answer_format}"""

# Crossover (Algorithm 2).
CROSSOVER = """\
Task: let one set of instructions learn from others

The same model worked on the same problems under different sets of instructions. For each set you see the problems on \
which it alone did best. Set A did best over all.

{sets}

Compare the sets: what in a set explains its success on its problems, and does set A lack it? Take over into set A \
what the others do better, sharpen what is vague in it, and remove what the results speak against. Change nothing \
without evidence in the problems above.

{answer_format}"""

# Correction of learned principles (Table 1).
CHECK = """\
Task: check one instruction

A model works under these instructions, which were drawn from its own attempts at some problems:
<instructions>
{prompt}
</instructions>
One of them is to be checked:
<instruction>
{principle}
</instruction>

Is it right for every problem that it speaks about? Try to find a case in which following it leads astray: a condition \
that is missing, a bound taken for the value itself, a method that works only for the case it was seen in. If there is \
one, put the instruction right, as general as it can be while it holds; if nothing is left of it, remove it. What is \
only a matter of style stays as it is.

{answer_format}"""

# The end of every format for principles.
_JSON_RULES = """\
Ids are those in the instructions. A text has at most {max_words} words, on one line, and does not begin with an id. \
If nothing should change, the list is empty: []"""

# One form for all operations: which of the other fields an edit has depends on `op`.
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "edits": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "op": {"enum": ["add", "modify", "merge", "remove", "replace"]},
                        "ids": {"type": "array", "items": {"type": "string"}},
                        "search": {"type": "string"},
                        "text": {"type": "string"},
                    },
                    "required": ["op"],
                },
            }
        },
        "required": ["edits"],
    }
)
"""The JSON schema of a reply to `REVISE`, also for an endpoint that holds replies to a schema."""

# The beginning of both formats of `REVISE`.
_OBJECT_RULES = """\
End your reply with one JSON object of this schema: {schema}
"""

# The format of edits of a free text, except in `REVISE`.
_BLOCK_RULES = """\
Write each change as a block of this form:
<<<<<<< SEARCH
lines copied from the text, character by character
=======
the lines that take their place
>>>>>>> REPLACE
The lines under SEARCH must occur exactly once in the text, or the change is lost. To add something, search for the \
line it should follow and repeat that line in the replacement. If nothing should change, write the line: NO CHANGE"""

# The format of instructions that are written anew (`reflection="rewrite"`), whatever their form.
_WHOLE_RULES = """\
Write the complete new instructions, the unchanged parts included, between <instructions> and </instructions>. State \
in them what you have found out, as rules that the model can follow."""

_WHOLE = re.compile(r"<instructions>(.*?)</instructions>", re.DOTALL)


def read_instructions(reply: str) -> str:
    """Return the last instructions in a reply, in the form of `_WHOLE_RULES`; empty if it has none."""
    instructions = _WHOLE.findall(reply)
    return instructions[-1].strip() if instructions else ""


# Principles are edited by their ids. Free text has none: its edits quote what they replace.
FORMATS = {
    ("critique", "principles"): """\
End your reply with one JSON list in a ```json block. Its items are of these two forms:
{"op": "add", "text": "a new instruction"}
{"op": "modify", "id": "G2", "text": "the new wording of an instruction that exists"}
"""
    + _JSON_RULES,
    ("consolidate", "principles"): """\
New instructions that were proposed are in the list above already, with the highest ids. New wordings are not: to take \
one over, write it as a "modify" of your own, one for each id, of what its proposals have in common. End your reply \
with one JSON list in a ```json block. Its items are of these two forms:
{"op": "modify", "id": "G2", "text": "the new wording"}
{"op": "merge", "ids": ["G1", "G4"], "text": "one instruction in place of all of these"}
What you do not mention stays as it is. """
    + _JSON_RULES,
    ("crossover", "principles"): """\
End your reply with one JSON list in a ```json block, with changes to set A. Its items are of these three forms:
{"op": "add", "text": "a new instruction", "reason": "the set and the problem that speak for it"}
{"op": "modify", "id": "A.G2", "text": "the new wording", "reason": "..."}
{"op": "remove", "id": "A.G5", "reason": "..."}
"""
    + _JSON_RULES,
    ("check", "principles"): """\
End your reply with one JSON list in a ```json block. It has one item at most, of one of these two forms:
{"op": "modify", "id": "G2", "text": "the instruction put right", "reason": "the case in which it was wrong"}
{"op": "remove", "id": "G2", "reason": "..."}
"""
    + _JSON_RULES,
    ("revise", "principles"): _OBJECT_RULES
    + """\
For example {"edits": [{"op": "add", "text": "a new instruction"}, {"op": "modify", "ids": ["G2"], "text": "its new \
wording"}, {"op": "merge", "ids": ["G1", "G4"], "text": "one in place of these"}, {"op": "remove", "ids": ["G5"]}]}
"""
    + _JSON_RULES,
    ("revise", "free text"): _OBJECT_RULES
    + """\
For example {"edits": [{"op": "replace", "search": "words copied from the text", "text": "the words in their place"}]}
What is searched for must occur exactly once in the text, or the change is lost. If nothing should change, the list is \
empty: []""",
    ("revise", "whole"): _WHOLE_RULES,
    ("crossover", "whole"): "What you write takes the place of set A.\n" + _WHOLE_RULES,
    ("critique", "free text"): _BLOCK_RULES,
    ("consolidate", "free text"): """\
None of the proposals is applied yet: write every change of the revision yourself. The blocks are applied one after \
another.
"""
    + _BLOCK_RULES,
    ("crossover", "free text"): "All changes are changes to the text of set A.\n" + _BLOCK_RULES,
}
"""The format of edits, by stage and by the form of prompt; `whole` where no edits are written."""

NO_CHANGE = "NO CHANGE"
"""Stands for an empty list where the edits are search and replace blocks."""


def render_summaries(summaries: Iterable[tuple[float, str]]) -> str:
    """Render the attempts at one problem, `(reward, summary)`, best first."""
    # Equal rewards keep their order.
    ordered = sorted(summaries, key=lambda item: -item[0])
    return "\n".join(
        f'<attempt reward="{reward:g}">\n{summary}\n</attempt>' for reward, summary in ordered
    )


def render_failures(failures: Iterable[tuple[str, str, Sequence[tuple[float, str]]]]) -> str:
    """Render problems with failed attempts.

    Args:
        failures (`Iterable[tuple]`): Each question, right answer, and reward and text of the
            attempts.
    """
    parts = []
    for question, truth, attempts in failures:
        attempt_texts = "\n".join(
            f'<attempt reward="{reward:g}">\n{text}\n</attempt>' for reward, text in attempts
        )
        parts.append(f"<problem>\n{question}\nRight answer: {truth}\n{attempt_texts}\n</problem>")
    return "\n".join(parts)


def render_proposals(proposals: Iterable[Sequence[str]]) -> str:
    """Render the proposed changes, problem by problem, each as text."""
    lines = []
    for number, changes in enumerate(proposals, 1):
        # Changes from several problems that agree carry more weight: tell the problems apart.
        lines.append(f"From problem {number}:")
        lines += [f"- {change}" for change in changes]
    return "\n".join(lines)


def render_sets(sets: Iterable[tuple[str, str, float, Sequence[tuple[str, str]]]]) -> str:
    """Render the sets of a crossover.

    Args:
        sets (`Iterable[tuple]`): Each letter, text, mean reward, and the (problem, right answer)
            pairs that it alone won.
    """
    parts = []
    for letter, text, value, wins in sets:
        # The problems that this set alone did best on.
        problems = "".join(
            f"<problem>\n{question}\nRight answer: {truth}\n</problem>\n"
            for question, truth in wins
        )
        parts.append(
            f'<set name="{letter}" mean_reward="{value:.3f}">\n'
            f"<instructions>\n{text}\n</instructions>\n"
            f"It alone did best on {len(wins)} of the problems.\n{problems}</set>"
        )
    return "\n".join(parts)


def shorten(text: str, limit: int) -> str:
    """Return at most about `limit` characters of a text, without its middle.

    The beginning and the end of an attempt say most.
    """
    if len(text) <= limit:
        return text
    # Characters of the beginning, and as many of the end.
    half = limit // 2
    end = text[len(text) - half :]
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{end}"
