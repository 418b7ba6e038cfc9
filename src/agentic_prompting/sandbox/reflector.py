"""The reference LLM of the guarded world: reads the real reflection prompts, answers in the real format, can err.

It knows nothing about that world: no words, no relations, no facts. Its advice, and its mistakes too, come from the
attempts that it is shown. Like an LLM it recognises a refusal, a principle, and a request that asks everything at once.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..evolution import Draft, SystemPrompt, parse_edits
from ..llm import Message, ScriptedChat
from .guarded import HASTY, STEPWISE, WHOLE, say

_NEED = re.compile(r"the (\w+) needs the word (\w+)")
_SAY = re.compile(r"say (\w+) (\w+)")
_PRINCIPLE = re.compile(r"^\[(G\d+)\]\. (.+)$", re.MULTILINE)
_MODIFY = re.compile(r"^- modify (G\d+): (.+)$", re.MULTILINE)
_HARM = (WHOLE, HASTY)


class GuardedReflector(ScriptedChat):
    """A [`ScriptedChat`] that reflects on episodes in the guarded world.

    Args:
        mistakes (`float`, *optional*, defaults to `0.1`): Share of its critiques, consolidations, crossovers and
            revisions that are bad advice: a relation with the word of another, a word that was not asked for, a
            harmful principle.
        seed (`int`, *optional*, defaults to `0`): Which ones. They follow from it and from what is read.
        **options: Of [`ScriptedChat`], `latency` for one.

    Raises:
        `ValueError`: `mistakes` is not a probability.
    """

    def __init__(self, mistakes: float = 0.1, seed: int = 0, **options: Any):
        if not 0 <= mistakes <= 1:
            raise ValueError(f"mistakes must be between 0 and 1, got {mistakes}")
        self.mistakes, self.seed = mistakes, seed
        super().__init__(self._say, **options)

    def _say(self, messages: Sequence[Message]) -> str:
        asked = messages[-1]["content"]
        rng = random.Random(f"{self.seed} {asked}")
        wrong = rng.random() < self.mistakes
        if asked.startswith("Task: retell"):
            return retell(asked)
        if asked.startswith("Task: draw lessons"):
            return edit_block(
                mislead(principles_in(asked), asked, rng) if wrong else draw_lessons(asked)
            )
        if asked.startswith("Task: turn many"):
            return edit_block(unite(asked, rng if wrong else None))
        if asked.startswith("Task: revise"):
            return edit_block(mislead(principles_in(asked), asked, rng) if wrong else revise(asked))
        if asked.startswith("I provided an assistant"):
            instructions, examples = gepas_request(asked)
            given, told = principles_in(instructions), "\n".join(map(retell, examples))
            edits = mislead(given, "\n".join(examples), rng) if wrong else lessons(given, told)
            return rewritten(instructions, edits)
        return edit_block(learn_from_others(asked, rng if wrong else None))


def edit_block(edits: list[dict[str, Any]]) -> str:
    """A reply to E-SPL."""
    return f"Having compared them:\n```json\n{json.dumps(edits)}\n```"


def retell(asked: str) -> str:
    """A summary of one attempt."""
    attempt = between(asked, "<attempt>", "</attempt>")
    reward = re.search(r"^Reward of the attempt: (\S+)", asked, re.MULTILINE)
    steps = [
        f'It was refused: "the {relation} needs the word {word}".'
        for relation, word in _NEED.findall(attempt)
    ]
    if WHOLE in attempt:
        steps.append("It asked everything at once and took a guess for the answer.")
    if "[reply]" not in attempt:
        steps.append("It answered at once, without asking anybody.")
    if reward and float(reward[1]) >= 1:
        steps.append("It arrived at the right answer.")
    return "\n".join(
        f"{number}. {step}" for number, step in enumerate(steps or ["It went astray."], 1)
    )


def draw_lessons(asked: str) -> list[dict[str, Any]]:
    """Good advice from the attempts at one problem: the words they were refused for want of, then how to proceed."""
    return lessons(principles_in(asked), asked.partition("Right answer:")[2])


def lessons(principles: Mapping[str, str], told: str) -> list[dict[str, Any]]:
    """Good advice from retold attempts."""
    needed = [pair for pair, _ in Counter(_NEED.findall(told)).most_common()]
    edits = [edit for edit in (_put(principles, *pair) for pair in needed) if edit is not None]
    if "everything at once" in told or "answered at once" in told:
        harmful = [name for name, text in principles.items() if text in _HARM]
        if harmful:
            edits.append({"op": "modify", "id": harmful[0], "text": STEPWISE})
        elif STEPWISE not in principles.values():
            edits.append({"op": "add", "text": STEPWISE})
    return edits


def _put(principles: Mapping[str, str], relation: str, word: str) -> dict[str, Any] | None:
    """The edit that gives a relation its word, in place of another one if one is there; `None` if it has it alone."""
    texts = {name: text for name, text in principles.items() if text.startswith(say(relation, ""))}
    rivals = [name for name, text in texts.items() if text != say(relation, word)]
    if rivals:
        return {"op": "modify", "id": rivals[0], "text": say(relation, word)}
    return None if texts else {"op": "add", "text": say(relation, word)}


def revise(asked: str) -> list[dict[str, Any]]:
    """Good advice from attempts at several problems, by one call of `reflection="one_call"`."""
    told = (retell(f"<attempt>{one}") for one in re.split(r"<attempt reward=.*>", asked)[1:])
    return lessons(principles_in(asked), "\n".join(told))


def gepas_request(asked: str) -> tuple[str, list[str]]:
    """The instructions and the examples in a request of GEPA, which wants the instructions anew; each example is an
    attempt as [`retell`] takes it."""
    _, instructions, examples = asked.split("```", 2)
    return instructions, [f"<attempt>{one}</attempt>" for one in examples.split("# Example ")[1:]]


def rewritten(instructions: str, edits: list[dict[str, Any]]) -> str:
    """A reply to GEPA: the instructions after these edits."""
    draft = Draft(SystemPrompt.of(instructions.strip()))
    draft.apply(parse_edits(edit_block(edits)).edits)
    return f"```\n{draft.finish().text}\n```"


def mislead(principles: Mapping[str, str], told: str, rng: random.Random) -> list[dict[str, Any]]:
    """Bad advice, of what there is to read: words and relations that do not belong together, or a harmful principle."""
    pairs = [
        *_NEED.findall(told),
        *(pair for text in principles.values() for pair in _SAY.findall(text)),
    ]
    relations, words = (
        sorted({relation for relation, _ in pairs}),
        sorted({word for _, word in pairs}),
    )
    if len(words) > 1 and rng.random() < 0.6:
        edit = _put(principles, rng.choice(relations), rng.choice(words))
        return [] if edit is None else [edit]
    return [{"op": "add", "text": rng.choice(_HARM)}]


def unite(asked: str, wrong: random.Random | None) -> list[dict[str, Any]]:
    """Takes over the new wordings that were proposed, of several for one principle the one proposed most often; and of
    several words for one relation too. Of contrary ways to proceed the good one stays.

    A mistake keeps the wrong one.
    """
    principles, proposals = principles_in(asked), between(asked, "<proposals>", "</proposals>")
    revised = dict(principles)
    for name, text in [
        pair for pair, _ in reversed(Counter(_MODIFY.findall(proposals)).most_common())
    ]:
        revised[name] = text
    edits, merged = [], set()
    for names in _conflicts(revised).values():
        texts = [revised[name] for name in names]
        order = sorted(texts, key=lambda text: (-proposals.count(text), text in _HARM))
        kept = wrong.choice(texts) if wrong is not None else order[0]
        edits.append({"op": "merge", "ids": names, "text": kept})
        merged |= {*names}
    changed = [
        name
        for name, text in revised.items()
        if text != principles.get(name) and name not in merged
    ]
    return [*edits, *({"op": "modify", "id": name, "text": revised[name]} for name in changed)]


def _conflicts(principles: dict[str, str]) -> dict[str, list[str]]:
    """The ids of principles about the same thing, where there are several."""
    about: dict[str, list[str]] = {}
    for name, text in principles.items():
        given = _SAY.fullmatch(text)
        about.setdefault(given[1] if given else "how to proceed", []).append(name)
    return {thing: names for thing, names in about.items() if len(names) > 1}


def learn_from_others(asked: str, wrong: random.Random | None) -> list[dict[str, Any]]:
    """What sets that won problems have and set A lacks. A mistake adds a harmful principle, or drops a good one."""
    sets = re.findall(
        r'<set name="(\w+)".*?>\n<instructions>\n(.*?)</instructions>\n(.*?)</set>',
        asked,
        re.DOTALL,
    )
    own = principles_in(sets[0][1])
    if wrong is not None:
        ways: list[dict[str, Any]] = [
            {"op": "add", "text": wrong.choice(_HARM), "reason": "it is quicker"}
        ]
        ways += [{"op": "remove", "id": f"A.{name}", "reason": "not needed"} for name in own]
        return [wrong.choice(ways)]
    edits: list[dict[str, Any]] = [
        {"op": "remove", "id": f"A.{name}", "reason": "it loses problems"}
        for name, text in own.items()
        if text in _HARM
    ]
    covered = {given[1] for given in map(_SAY.fullmatch, own.values()) if given}
    for letter, instructions, won in sets[1:]:
        for text in principles_in(instructions).values() if "<problem>" in won else ():
            given = _SAY.fullmatch(text)
            new = (
                given[1] not in covered
                if given
                else text == STEPWISE and STEPWISE not in own.values()
            )
            if new:
                edits.append({"op": "add", "text": text, "reason": f"set {letter} won by it"})
                covered.add(given[1] if given else STEPWISE)
    return edits


def principles_in(text: str) -> dict[str, str]:
    """The principles of the first instructions in a prompt, by id."""
    instructions = (
        between(text, "<instructions>", "</instructions>") if "<instructions>" in text else text
    )
    return dict(_PRINCIPLE.findall(instructions))


def between(text: str, opening: str, closing: str) -> str:
    """The text behind the first `opening`, up to `closing`."""
    return text.partition(opening)[2].partition(closing)[0]
