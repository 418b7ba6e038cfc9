"""A system prompt as a value, and its edits, applied like a patch.

Two kinds. *Principles*: a preamble and numbered rules, edited one by one (the paper's maths
prompts) by `add`, `modify`, `merge`, `remove`. *Free text* (its search prompt): edited by
`replace`, whose search text must occur exactly once. An edit that does not fit exactly is refused
and counted, never guessed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from ..llm import Message

Place = Literal["system", "user", "after"]
PLACES = get_args(Place)

# The mark of a principle at the start of a line: `[G0].`, `[G0]` or `G0:`.
_MARK = re.compile(r"^[ \t]*(?:\[G(\d+)\][.:]?|G(\d+)[.:])[ \t]*", re.MULTILINE)


@dataclass(frozen=True)
class SystemPrompt:
    """One system prompt.

    Args:
        preamble (`str`): The text before the principles; the whole text if there are none.
        principles (`tuple[str, ...]`, *optional*): The rules, one line each (white space is
            folded), numbered from 0 by their place. May be empty. `None` makes it free text.
        id (`int`, *optional*): Set by the [`Population`] that it joins; `None` before.
        parents (`tuple[int, ...]`, *optional*): Ids of the prompts it was made from.
        operator (`str`, *optional*, defaults to `"root"`): What made it: `root`, `mutation`, ...
        born_at (`int`, *optional*, defaults to `0`): The step at which it joined.

    Raises:
        `ValueError`: A principle is empty, or the preamble has a line that would be read as a
            principle.

    Example:

        >>> print(SystemPrompt("Solve the problem.", ("Check small cases.", "Name the unknowns.")))
        Solve the problem.
        [G0]. Check small cases.
        [G1]. Name the unknowns.
    """

    preamble: str
    principles: tuple[str, ...] | None = None
    id: int | None = None
    parents: tuple[int, ...] = ()
    operator: str = "root"
    born_at: int = 0

    def __post_init__(self):
        # The dataclass is frozen: this is how it can set its own fields.
        object.__setattr__(self, "parents", tuple(self.parents))
        if self.principles is None:
            return

        # Each principle is one line, and no line of the preamble looks like one.
        principles = tuple(map(_fold, self.principles))
        if not all(principles):
            raise ValueError(f"principle {principles.index('')} of the system prompt is empty")
        if _MARK.search(self.preamble):
            raise ValueError(
                "the preamble has a line that begins like a principle: use SystemPrompt.parse on "
                "the text"
            )
        object.__setattr__(self, "preamble", self.preamble.strip())
        object.__setattr__(self, "principles", principles)

    @property
    def text(self) -> str:
        """The text that the policy reads: the preamble, and a line `[G0]. ...` for each principle."""
        if self.principles is None:
            return self.preamble
        lines = [f"[G{number}]. {principle}" for number, principle in enumerate(self.principles)]
        if self.preamble:
            lines.insert(0, self.preamble)
        return "\n".join(lines)

    @property
    def key(self) -> tuple[str, frozenset[str] | None]:
        """Equal for prompts that say the same.

        The order of principles does not count, nor case and a final full stop in them.
        """
        if self.principles is None:
            return self.preamble, None
        return self.preamble, frozenset(map(_principle_key, self.principles))

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, prompt: SystemPrompt | str) -> SystemPrompt:
        """Return a prompt unchanged, and a text as a prompt with principles.

        A text with lines `[G0]. ...` is parsed; any other is a preamble to add principles to.

        Raises:
            `TypeError`: It is neither.
        """
        if isinstance(prompt, SystemPrompt):
            return prompt
        if not isinstance(prompt, str):
            raise TypeError(
                f"a system prompt is a SystemPrompt or a text, not a {type(prompt).__name__}"
            )
        return cls.parse(prompt) if "[G0]" in prompt else cls(prompt, ())

    @classmethod
    def parse(cls, text: str) -> SystemPrompt:
        """Read a prompt with principles.

        Each is written `[G0]. ...`, `[G0] ...` or `G0: ...` at the start of a line, and may run
        over several lines. Numbers in the text do not matter: the order counts. For every prompt
        `p` with at least one principle, `SystemPrompt.parse(p.text)` has the same text.

        Raises:
            `ValueError`: There is no principle in it, one is empty, or text follows after a blank
                line after one.
        """
        marks = list(_MARK.finditer(text))
        if not marks:
            raise ValueError(
                f"no principle found in {text[:80]!r}: begin each with [G0]. [G1]. ... on a line "
                "of its own; for a preamble without principles yet use SystemPrompt(text, ()), for "
                "free text SystemPrompt(text)"
            )

        # A principle goes up to the next mark, or to the end of the text.
        ends = [mark.start() for mark in marks[1:]] + [len(text)]
        principles = [text[mark.end() : end].strip() for mark, end in zip(marks, ends, strict=True)]

        # A blank line ends a principle, and nothing may follow it.
        for number, principle in enumerate(principles):
            _, *paragraphs = re.split(r"\n[ \t]*\n", principle, maxsplit=1)
            if paragraphs:
                raise ValueError(
                    f"text after principle {number} belongs to none: "
                    f"{paragraphs[0].strip()[:80]!r}. Move it in front of the first principle, or "
                    "use free text: SystemPrompt(text)"
                )
        return cls(text[: marks[0].start()], tuple(principles))

    def messages(
        self, conversation: Sequence[Message] | str, place: Place = "system"
    ) -> list[Message]:
        """Return the conversation under this prompt.

        Args:
            conversation (`Sequence[Message]` or `str`): The messages; a string is one user message.
            place (`str`, *optional*, defaults to `"system"`): `system`: in the system message, in
                front of its text if there is one. `user`: in front of the first user message, as in
                the paper's maths tasks. `after`: after it, as in the released code.

        Raises:
            `ValueError`: `place` is none of these, or there is no user message to put the prompt
                into.
        """
        if place not in PLACES:
            raise ValueError(f"place must be one of {', '.join(PLACES)}, got {place!r}")
        messages = _as_messages(conversation)
        if not self.text:
            return messages

        # Put the prompt into the first message of the role.
        role: Literal["system", "user"] = "system" if place == "system" else "user"
        for position, message in enumerate(messages):
            if message["role"] == role:
                parts = [self.text, message["content"]]
                if place == "after":
                    parts.reverse()
                messages[position] = {"role": role, "content": "\n\n".join(parts)}
                return messages
        # No message has the role. A system message can be added, a user message cannot.
        if place != "system":
            raise ValueError("no user message to put the system prompt into")
        return [{"role": "system", "content": self.text}, *messages]

    def left_out(self, messages: Sequence[Message] | str) -> list[Message]:
        """Return the conversation without this prompt, wherever [`SystemPrompt.messages`] put it.

        A string is one user message.
        """
        conversation = _as_messages(messages)
        if not self.text:
            return conversation
        remaining: list[Message] = []
        for message in conversation:
            content = message["content"]
            # A message that is only the prompt is dropped.
            if content != self.text:
                content = content.removeprefix(f"{self.text}\n\n").removesuffix(f"\n\n{self.text}")
                remaining.append({**message, "content": content})
        return remaining

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types; [`SystemPrompt.from_json`] gives an equal prompt back."""
        saved = dict(vars(self))
        # JSON has lists in the place of tuples.
        saved["parents"] = list(self.parents)
        if self.principles is not None:
            saved["principles"] = list(self.principles)
        return saved

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> SystemPrompt:
        """Return the prompt of a [`SystemPrompt.to_json`]."""
        principles = saved["principles"]
        return cls(**{**saved, "principles": None if principles is None else tuple(principles)})


def _as_messages(conversation: Sequence[Message] | str) -> list[Message]:
    if isinstance(conversation, str):
        return [{"role": "user", "content": conversation}]
    return list(conversation)


# Edits --------------------------------------------------------------------------------------------

OPERATIONS = ("add", "modify", "merge", "remove", "replace")
MAX_WORDS = 32
"""A principle's length limit in words: short, abstract, about strategy (A.5)."""


@dataclass(frozen=True)
class Edit:
    """One edit.

    Args:
        op (`str`): `add`, `modify`, `merge` or `remove` of principles, `replace` in free text.
        ids (`tuple[str, ...]`, *optional*): The principles concerned, `"G3"`. Several only for
            `merge`.
        text (`str`, *optional*): The new principle, or the replacement.
        search (`str`, *optional*): For `replace`: what is replaced.
        reason (`str`, *optional*): The LLM's reason, if it gave one. For logs.
    """

    op: str
    ids: tuple[str, ...] = ()
    text: str = ""
    search: str = ""
    reason: str = ""


@dataclass
class EditReport:
    """Which edits were applied and which refused.

    Args:
        applied (`list[Edit]`): In their order.
        refused (`list[tuple[Edit, str]]`): With the reason, one of: `not_allowed` (this operation
            is not asked for here, or is not for this kind of prompt), `too_many`, `unknown_id`,
            `merged` and `removed` (the principle is gone), `empty`, `too_long`, `duplicate` (a
            principle or the preamble says so), `unchanged`, `too_few_ids` and `too_many_ids`, and
            for free text `not_found` and `ambiguous`.
    """

    applied: list[Edit] = field(default_factory=list)
    refused: list[tuple[Edit, str]] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        """The number of refused edits by reason."""
        return Counter(reason for _, reason in self.refused)


class Draft:
    """A prompt under revision: `git.apply` of the paper (Algorithm 1).

    Ids stay valid, and are never given twice, until [`Draft.finish`] renumbers.

    Args:
        prompt ([`SystemPrompt`]): Where it starts from; never changed.
        max_words (`int`, *optional*, defaults to `32`): Principles with more words are refused.

    Example:

        >>> draft = Draft(SystemPrompt("Solve it.", ("Check small cases.",)))
        >>> report = draft.apply([Edit("add", text="Name the unknowns."), Edit("remove", ("G7",))])
        >>> draft.finish().principles, dict(report.counts)
        (('Check small cases.', 'Name the unknowns.'), {'unknown_id': 1})
    """

    def __init__(self, prompt: SystemPrompt, max_words: int = MAX_WORDS):
        self.prompt = prompt
        self.max_words = max_words
        # The preamble, or the whole of a free text; and the principles by id.
        self.text = prompt.preamble
        self.principles = {
            f"G{number}": text for number, text in enumerate(prompt.principles or ())
        }
        # The number of a principle that is gone is not used again.
        self._next_number = len(self.principles)
        # By the id of each principle that is gone: "merged" or "removed".
        self._gone: dict[str, str] = {}

    def apply(
        self,
        edits: Iterable[Edit],
        allowed: Collection[str] = OPERATIONS,
        limit: int | None = None,
        visible_ids: Collection[str] | None = None,
        suggested: Collection[str] = (),
    ) -> EditReport:
        """Apply every edit that fits, in order; each edit sees the result of those before it.

        Args:
            edits (`Iterable[Edit]`): The edits.
            allowed (`Collection[str]`, *optional*): The operations that were asked for.
            limit (`int`, *optional*): The largest number of applied edits (K_ops), the first that
                fit.
            visible_ids (`Collection[str]`, *optional*): The ids that the writer of the edits could
                see, if the draft has changed since: the id of another writer's new principle is
                unknown to it.
            suggested (`Collection[str]`, *optional*): Operations that are checked and reported, but
                not carried out.
        """
        report = EditReport()
        for edit in edits:
            reason = self._find_refusal(edit, allowed, visible_ids)
            # Beyond the limit every edit is refused, for that reason alone.
            if limit is not None and len(report.applied) >= limit:
                reason = "too_many"
            if reason:
                report.refused.append((edit, reason))
                continue
            report.applied.append(edit)
            # A suggestion is reported as applied, and changes nothing.
            if edit.op not in suggested:
                self._carry_out(edit)
        return report

    def finish(self) -> SystemPrompt:
        """Return the revised prompt, renumbered.

        It is the parent itself if nothing changed, else a new prompt that names its parent.
        """
        principles = None
        if self.prompt.principles is not None:
            principles = tuple(self.principles.values())
        child = replace(self.prompt, preamble=self.text, principles=principles)
        if child == self.prompt:
            return self.prompt
        # A prompt outside of a population has no id to be named by.
        parents = () if self.prompt.id is None else (self.prompt.id,)
        return replace(child, id=None, parents=parents, operator="edit", born_at=0)

    def _find_refusal(
        self, edit: Edit, allowed: Collection[str], visible_ids: Collection[str] | None
    ) -> str:
        """Return why an edit does not fit, or `""`."""
        is_free_text = self.prompt.principles is None
        # `replace` is the only operation on free text, and none on principles.
        if edit.op not in allowed or (edit.op == "replace") != is_free_text:
            return "not_allowed"
        if is_free_text:
            return self._find_block_refusal(edit)

        # An id in an `add` is the LLM's idea of the next one.
        ids = set() if edit.op == "add" else set(edit.ids)
        for principle_id in edit.ids if ids else ():
            is_visible = visible_ids is None or principle_id in visible_ids
            if principle_id not in self.principles or not is_visible:
                return self._gone.get(principle_id, "unknown_id")
        # Each operation has its number of ids; one that is listed twice counts once.
        min_ids = {"add": 0, "merge": 2}.get(edit.op, 1)
        if len(ids) < min_ids:
            return "too_few_ids"
        if len(ids) > 1 and edit.op != "merge":
            return "too_many_ids"
        # A removal has no text to check.
        if edit.op == "remove":
            return ""
        return self._find_text_refusal(_fold(edit.text), ids)

    def _find_text_refusal(self, text: str, ids: set[str]) -> str:
        if not text:
            return "empty"
        if len(text.split()) > self.max_words:
            return "too_long"
        if len(ids) == 1 and self.principles[min(ids)] == text:
            return "unchanged"
        # Compare the text with the principles that the edit leaves unchanged.
        other_texts = [other for name, other in self.principles.items() if name not in ids]
        if self.text:
            other_texts.append(_fold(self.text))  # repeating the preamble adds nothing
        other_keys = set(map(_principle_key, other_texts))
        return "duplicate" if _principle_key(text) in other_keys else ""

    def _find_block_refusal(self, edit: Edit) -> str:
        if not edit.search.strip():
            return "empty"
        if edit.search == edit.text:
            return "unchanged"
        first = self.text.find(edit.search)
        if first < 0:
            return "not_found"
        # Occurrences that overlap count too.
        if self.text.find(edit.search, first + 1) >= 0:
            return "ambiguous"
        # A free text is never edited away altogether.
        new_text = self.text.replace(edit.search, edit.text)
        return "" if new_text.strip() else "empty"

    def _carry_out(self, edit: Edit) -> None:
        if edit.op == "replace":
            self.text = self.text.replace(edit.search, edit.text)
        elif edit.op == "modify":
            self.principles[edit.ids[0]] = _fold(edit.text)
        elif edit.op == "add":
            self.principles[self._new_id()] = _fold(edit.text)
        elif edit.op == "merge":
            self._merge(edit.ids, _fold(edit.text))
        else:
            self._remove(edit.ids, "removed")

    def _merge(self, ids: Sequence[str], text: str) -> None:
        # The merged principle takes the position of its first source.
        principles: dict[str, str] = {}
        for principle_id, old_text in self.principles.items():
            if principle_id == ids[0]:
                principles[self._new_id()] = text
            else:
                principles[principle_id] = old_text
        self.principles = principles
        self._remove(ids, "merged")

    def _remove(self, ids: Sequence[str], reason: str) -> None:
        self.principles = {
            principle_id: text
            for principle_id, text in self.principles.items()
            if principle_id not in ids
        }
        # Later edits of these principles are refused for this reason.
        self._gone |= dict.fromkeys(ids, reason)

    def _new_id(self) -> str:
        principle_id = f"G{self._next_number}"
        self._next_number += 1
        return principle_id


def _fold(text: str) -> str:
    """Return the text with single spaces for all white space."""
    return " ".join(text.split())


def _principle_key(text: str) -> str:
    """Return the key by which principles are compared, without case and a final full stop."""
    return text.casefold().rstrip(" .;")
