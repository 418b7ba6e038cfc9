"""The reference LLM of the guarded world: reads the real reflection prompts, answers in the real
format, can err.

It knows nothing about that world: no words, no relations, no facts. Its advice, and its mistakes
too, come from the attempts in the prompt. Like an LLM it recognises a refusal, a principle, and a
request that asks everything at once.
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

# The words of a refusal, and those of a principle that names a guarding word.
_NEED = re.compile(r"the (\w+) needs the word (\w+)")
_SAY = re.compile(r"say (\w+) (\w+)")
# A line of the instructions, a line of the proposals, and a set of a crossover.
_PRINCIPLE = re.compile(r"^\[(G\d+)\]\. (.+)$", re.MULTILINE)
_MODIFY = re.compile(r"^- modify (G\d+): (.+)$", re.MULTILINE)
_SET = re.compile(
    r'<set name="(\w+)".*?>\n<instructions>\n(.*?)</instructions>\n(.*?)</set>', re.DOTALL
)

# The principles about how to proceed that do harm.
_HARMFUL = (WHOLE, HASTY)

EditFields = dict[str, Any]
"""One edit of a reply, as in its JSON: `op` with `id`, `ids`, `text` or `reason`."""


class GuardedReflector(ScriptedChat):
    """A [`ScriptedChat`] that reflects on episodes in the guarded world.

    Args:
        mistakes (`float`, *optional*, defaults to `0.1`): Share of its critiques, consolidations,
            crossovers and revisions that are bad advice: a relation with the word of another, a
            word that was not asked for, a harmful principle.
        seed (`int`, *optional*, defaults to `0`): Decides with the request which ones are bad.
        **options: Options of [`ScriptedChat`], such as `latency`.

    Raises:
        `ValueError`: `mistakes` is not a probability.
    """

    def __init__(self, mistakes: float = 0.1, seed: int = 0, **options: Any):
        if not 0 <= mistakes <= 1:
            raise ValueError(f"mistakes must be between 0 and 1, got {mistakes}")
        self.mistakes = mistakes
        self.seed = seed
        super().__init__(self._reply_to, **options)

    def _reply_to(self, messages: Sequence[Message]) -> str:
        request = messages[-1]["content"]

        # Whether this reply is a mistake follows from the request.
        rng = random.Random(f"{self.seed} {request}")
        is_mistaken = rng.random() < self.mistakes
        mistake_rng = rng if is_mistaken else None

        # The first words of a request tell its kind.
        if request.startswith("Task: retell"):
            return retell(request)
        if request.startswith("Task: turn many"):
            return edit_block(unite(request, mistake_rng))
        if request.startswith(("Task: draw lessons", "Task: revise")):
            if is_mistaken:
                return edit_block(mislead(principles_in(request), request, rng))
            is_critique = request.startswith("Task: draw lessons")
            return edit_block(draw_lessons(request) if is_critique else revise(request))
        if request.startswith("I provided an assistant"):
            # GEPA wants the new instructions, not edits.
            instructions, examples = read_gepa_request(request)
            principles = principles_in(instructions)
            if is_mistaken:
                edits = mislead(principles, "\n".join(examples), rng)
            else:
                edits = lessons(principles, "\n".join(retell(example) for example in examples))
            return rewrite_instructions(instructions, edits)
        # Every other request is a crossover.
        return edit_block(learn_from_others(request, mistake_rng))


def edit_block(edits: list[EditFields]) -> str:
    """Write a reply to E-SPL."""
    return f"Having compared them:\n```json\n{json.dumps(edits)}\n```"


def retell(request: str) -> str:
    """Write a summary of one attempt."""
    attempt = between(request, "<attempt>", "</attempt>")
    steps = [
        f'It was refused: "the {relation} needs the word {word}".'
        for relation, word in _NEED.findall(attempt)
    ]
    if WHOLE in attempt:
        steps.append("It asked everything at once and took a guess for the answer.")
    if "[reply]" not in attempt:
        steps.append("It answered at once, without asking anybody.")
    # Not every request states a reward.
    reward = re.search(r"^Reward of the attempt: (\S+)", request, re.MULTILINE)
    if reward and float(reward[1]) >= 1:
        steps.append("It arrived at the right answer.")
    if not steps:
        steps.append("It went astray.")
    return "\n".join(f"{number}. {step}" for number, step in enumerate(steps, start=1))


def draw_lessons(request: str) -> list[EditFields]:
    """Good advice from the attempts at one problem: the words that the refusals name, then how to
    proceed.
    """
    return lessons(principles_in(request), request.partition("Right answer:")[2])


def lessons(principles: Mapping[str, str], summaries: str) -> list[EditFields]:
    """Good advice from summaries of attempts."""
    edits = []

    # The missing words, the most frequent refusal first.
    for (relation, word), _ in Counter(_NEED.findall(summaries)).most_common():
        edit = _state_word(principles, relation, word)
        if edit is not None:
            edits.append(edit)

    # The good way to proceed, in place of a harmful one if there is one.
    if "everything at once" in summaries or "answered at once" in summaries:
        harmful_ids = [name for name, text in principles.items() if text in _HARMFUL]
        if harmful_ids:
            edits.append({"op": "modify", "id": harmful_ids[0], "text": STEPWISE})
        elif STEPWISE not in principles.values():
            edits.append({"op": "add", "text": STEPWISE})
    return edits


def _state_word(principles: Mapping[str, str], relation: str, word: str) -> EditFields | None:
    """Return the edit that states the word of a relation: it replaces a principle with another word
    for it, if there is one.

    `None` if the principles state this word already, and no other.
    """
    new_text = say(relation, word)
    about_relation = {
        name: text for name, text in principles.items() if text.startswith(say(relation, ""))
    }
    # Replace another word for the relation, so that no two principles contradict each other.
    for name, text in about_relation.items():
        if text != new_text:
            return {"op": "modify", "id": name, "text": new_text}
    return None if about_relation else {"op": "add", "text": new_text}


def revise(request: str) -> list[EditFields]:
    """Good advice from attempts at several problems, by one call of `reflection="one_call"`."""
    attempts = re.split(r"<attempt reward=.*>", request)[1:]
    summaries = [retell(f"<attempt>{attempt}") for attempt in attempts]
    return lessons(principles_in(request), "\n".join(summaries))


def read_gepa_request(request: str) -> tuple[str, list[str]]:
    """Read the instructions and the examples in GEPA's request for new instructions; each example
    is an attempt in the form that [`retell`] reads.
    """
    _, instructions, examples_text = request.split("```", 2)
    examples = examples_text.split("# Example ")[1:]
    return instructions, [f"<attempt>{example}</attempt>" for example in examples]


def rewrite_instructions(instructions: str, edits: list[EditFields]) -> str:
    """Write a reply to GEPA: the instructions after these edits."""
    draft = Draft(SystemPrompt.of(instructions.strip()))
    draft.apply(parse_edits(edit_block(edits)).edits)
    return f"```\n{draft.finish().text}\n```"


def mislead(principles: Mapping[str, str], attempts: str, rng: random.Random) -> list[EditFields]:
    """Bad advice from these attempts: a relation with the word of another one, or a harmful
    principle.
    """
    # Relations and words of the refusals and of the principles.
    pairs = _NEED.findall(attempts)
    for text in principles.values():
        pairs += _SAY.findall(text)
    relations = sorted({relation for relation, _ in pairs})
    words = sorted({word for _, word in pairs})

    # A relation with any of these words, or a harmful principle.
    if len(words) > 1 and rng.random() < 0.6:
        edit = _state_word(principles, rng.choice(relations), rng.choice(words))
        return [] if edit is None else [edit]
    return [{"op": "add", "text": rng.choice(_HARMFUL)}]


def unite(request: str, mistake_rng: random.Random | None) -> list[EditFields]:
    """Take over the proposed wordings.

    Of several wordings for one principle, or several words for one relation, the one that was
    proposed most often wins. Of contrary ways to proceed the good one stays.

    A mistake, where there is a generator for one, keeps a random wording of a conflict.
    """
    principles = principles_in(request)
    proposals = between(request, "<proposals>", "</proposals>")

    # The new wording of each principle; the most frequent proposal is applied last and so wins.
    revised = dict(principles)
    counts = Counter(_MODIFY.findall(proposals)).most_common()
    for (name, text), _ in reversed(counts):
        revised[name] = text

    # Merge principles that contradict each other.
    edits: list[EditFields] = []
    merged_ids: set[str] = set()
    for names in _find_conflicts(revised):
        texts = [revised[name] for name in names]
        if mistake_rng is None:
            winner = min(texts, key=lambda text: (-proposals.count(text), text in _HARMFUL))
        else:
            winner = mistake_rng.choice(texts)
        edits.append({"op": "merge", "ids": names, "text": winner})
        merged_ids.update(names)

    # Take over the new wordings of the others.
    for name, text in revised.items():
        if text != principles.get(name) and name not in merged_ids:
            edits.append({"op": "modify", "id": name, "text": text})
    return edits


def _find_conflicts(principles: dict[str, str]) -> list[list[str]]:
    """Groups of ids whose principles are about the same relation, or all about how to proceed."""
    ids_by_subject: dict[str, list[str]] = {}
    for name, text in principles.items():
        word_rule = _SAY.fullmatch(text)
        subject = word_rule[1] if word_rule else "how to proceed"
        ids_by_subject.setdefault(subject, []).append(name)
    return [names for names in ids_by_subject.values() if len(names) > 1]


def learn_from_others(request: str, mistake_rng: random.Random | None) -> list[EditFields]:
    """Take over the principles that set A lacks from sets that won problems, and remove its harmful
    ones.

    A mistake, where there is a generator for one, adds a harmful principle or drops any other.
    """
    (_, instructions, _), *other_sets = _SET.findall(request)
    principles = principles_in(instructions)

    # A mistake: add a harmful principle, or remove any.
    if mistake_rng is not None:
        harmful_text = mistake_rng.choice(_HARMFUL)
        mistakes = [{"op": "add", "text": harmful_text, "reason": "it is quicker"}]
        mistakes += [
            {"op": "remove", "id": f"A.{name}", "reason": "not needed"} for name in principles
        ]
        return [mistake_rng.choice(mistakes)]

    edits: list[EditFields] = [
        {"op": "remove", "id": f"A.{name}", "reason": "it loses problems"}
        for name, text in principles.items()
        if text in _HARMFUL
    ]

    # Add words for relations that set A has none for, and the good way to proceed.
    word_rules = [_SAY.fullmatch(text) for text in principles.values()]
    covered = {rule[1] for rule in word_rules if rule}
    has_stepwise = STEPWISE in principles.values()

    for letter, instructions, victories in other_sets:
        # A set that won no problem has nothing to teach.
        if "<problem>" not in victories:
            continue
        for text in principles_in(instructions).values():
            word_rule = _SAY.fullmatch(text)
            if word_rule:
                # The first set with a word for a relation decides.
                is_new = word_rule[1] not in covered
                covered.add(word_rule[1])
            else:
                is_new = text == STEPWISE and not has_stepwise
            if is_new:
                edits.append({"op": "add", "text": text, "reason": f"set {letter} won by it"})
    return edits


def principles_in(text: str) -> dict[str, str]:
    """Return the principles of the first instructions in a prompt, by id."""
    if "<instructions>" in text:
        text = between(text, "<instructions>", "</instructions>")
    return dict(_PRINCIPLE.findall(text))


def between(text: str, opening: str, closing: str) -> str:
    """Return the text after the first `opening`, up to `closing`."""
    return text.partition(opening)[2].partition(closing)[0]
