"""A system prompt as a value, and its edits, applied like a patch.

Two kinds. *Principles*: a preamble and numbered rules, edited one by one (the paper's maths prompts) by `add`,
`modify`, `merge`, `remove`. *Free text* (its search prompt): edited by `replace`, whose search text must occur exactly
once. An edit that does not fit exactly is refused and counted, never guessed.
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

_MARK = re.compile(r"^[ \t]*(?:\[G(\d+)\][.:]?|G(\d+)[.:])[ \t]*", re.MULTILINE)


@dataclass(frozen=True)
class SystemPrompt:
    """One system prompt.

    Args:
        preamble (`str`): The text before the principles; the whole text if there are none.
        principles (`tuple[str, ...]`, *optional*): The rules, one line each (white space is folded), numbered from 0 by
            their place. May be empty. `None` makes it free text.
        id (`int`, *optional*): Given by the [`Population`] it joins; `None` before.
        parents (`tuple[int, ...]`, *optional*): Ids of the prompts it was made from.
        operator (`str`, *optional*, defaults to `"root"`): What made it: `root`, `mutation`, ...
        born_at (`int`, *optional*, defaults to `0`): The step at which it joined.

    Raises:
        `ValueError`: A principle is empty, or the preamble has a line that would be read as a principle.

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
        object.__setattr__(self, "parents", tuple(self.parents))
        if self.principles is None:
            return
        folded = tuple(map(_folded, self.principles))
        if not all(folded):
            raise ValueError(f"principle {folded.index('')} of the system prompt is empty")
        if _MARK.search(self.preamble):
            raise ValueError(
                "the preamble has a line that begins like a principle: use SystemPrompt.parse on the text"
            )
        object.__setattr__(self, "preamble", self.preamble.strip())
        object.__setattr__(self, "principles", folded)

    @property
    def text(self) -> str:
        """The text that the policy reads: the preamble, and a line `[G0]. ...` for each principle."""
        if self.principles is None:
            return self.preamble
        lines = [f"[G{number}]. {principle}" for number, principle in enumerate(self.principles)]
        return "\n".join([self.preamble, *lines] if self.preamble else lines)

    @property
    def key(self) -> tuple[str, frozenset[str] | None]:
        """Equal for prompts that say the same: the order of principles does not count, nor case and a final full stop
        in them."""
        return self.preamble, None if self.principles is None else frozenset(
            map(_key, self.principles)
        )

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, prompt: SystemPrompt | str) -> SystemPrompt:
        """A prompt as it is; of a text with lines `[G0]. ...` its principles, any other as a preamble to add them to.

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
        """Read a prompt with principles, written `[G0]. ...`, `[G0] ...` or `G0: ...`, each at the start of a line.

        A principle may run over several lines. Numbers in the text do not matter: the order counts. For every prompt
        `p` with at least one principle, `SystemPrompt.parse(p.text)` has the same text.

        Raises:
            `ValueError`: There is no principle in it, one is empty, or text follows after a blank line behind one.
        """
        marks = list(_MARK.finditer(text))
        if not marks:
            raise ValueError(
                f"no principle found in {text[:80]!r}: begin each with [G0]. [G1]. ... on a line of its own; for a "
                "preamble without principles yet use SystemPrompt(text, ()), for free text SystemPrompt(text)"
            )
        ends = [mark.start() for mark in marks[1:]] + [len(text)]
        bodies = [text[mark.end() : end].strip() for mark, end in zip(marks, ends, strict=True)]
        for number, body in enumerate(bodies):
            if rest := re.split(r"\n[ \t]*\n", body, maxsplit=1)[1:]:
                raise ValueError(
                    f"text after principle {number} belongs to none: {rest[0].strip()[:80]!r}. Move it in front of the "
                    "first principle, or use free text: SystemPrompt(text)"
                )
        return cls(text[: marks[0].start()], tuple(bodies))

    def messages(
        self, conversation: Sequence[Message] | str, place: Place = "system"
    ) -> list[Message]:
        """The conversation under this prompt.

        Args:
            conversation (`Sequence[Message]` or `str`): The messages; a string is one user message.
            place (`str`, *optional*, defaults to `"system"`): `system`: in the system message, in front of its
                present text if there is one. `user`: in front of the first user message, as in the paper's maths tasks.
                `after`: behind it, as in the released code.

        Raises:
            `ValueError`: `place` is none of these, or there is no user message to put the prompt into.
        """
        if place not in PLACES:
            raise ValueError(f"place must be one of {', '.join(PLACES)}, got {place!r}")
        messages: list[Message] = (
            [{"role": "user", "content": conversation}]
            if isinstance(conversation, str)
            else list(conversation)
        )
        if not self.text:
            return messages
        for position, message in enumerate(messages):
            if message["role"] == (role := "system" if place == "system" else "user"):
                parts = (
                    [message["content"], self.text]
                    if place == "after"
                    else [self.text, message["content"]]
                )
                messages[position] = {"role": role, "content": "\n\n".join(parts)}
                return messages
        if place != "system":
            raise ValueError("no user message to put the system prompt into")
        return [{"role": "system", "content": self.text}, *messages]

    def left_out(self, messages: Sequence[Message] | str) -> list[Message]:
        """The conversation without this prompt, wherever [`SystemPrompt.messages`] has put it; a string is one user
        message."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        rest: list[Message] = []
        for message in messages if self.text else ():
            content = message["content"]
            if content != self.text:
                content = content.removeprefix(f"{self.text}\n\n").removesuffix(f"\n\n{self.text}")
                rest.append({**message, "content": content})
        return rest if self.text else list(messages)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; [`SystemPrompt.from_json`] gives an equal prompt back."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> SystemPrompt:
        """The inverse of [`SystemPrompt.to_json`]."""
        principles = saved["principles"]
        return cls(**{**saved, "principles": None if principles is None else tuple(principles)})


# Edits ----------------------------------------------------------------------------------------------------------------

OPERATIONS = ("add", "modify", "merge", "remove", "replace")
MAX_WORDS = 32
"""A principle's length limit in words: short, abstract, about strategy (A.5)."""


@dataclass(frozen=True)
class Edit:
    """One edit.

    Args:
        op (`str`): `add`, `modify`, `merge` or `remove` of principles, `replace` in free text.
        ids (`tuple[str, ...]`, *optional*): The principles concerned, `"G3"`. Several only for `merge`.
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
    """Which edits were applied and which refused; together they are all that were given.

    Args:
        applied (`list[Edit]`): In the order given.
        refused (`list[tuple[Edit, str]]`): With the reason, one of: `not_allowed` (this operation is not asked for
            here, or is not for this kind of prompt), `too_many`, `unknown_id`, `merged` and `removed` (the principle
            is gone), `empty`, `too_long`, `duplicate` (such a principle exists), `unchanged`, `too_few_ids` and
            `too_many_ids`, and for free text `not_found` and `ambiguous`.
    """

    applied: list[Edit] = field(default_factory=list)
    refused: list[tuple[Edit, str]] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        """How many were refused, by reason."""
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
        self.prompt, self.max_words = prompt, max_words
        self.principles = {
            f"G{number}": text for number, text in enumerate(prompt.principles or ())
        }
        self.text = prompt.preamble
        self._next = len(self.principles)
        self._gone: dict[str, str] = {}  # how by id

    def apply(
        self,
        edits: Iterable[Edit],
        allowed: Collection[str] = OPERATIONS,
        limit: int | None = None,
        known: Collection[str] | None = None,
        suggested: Collection[str] = (),
    ) -> EditReport:
        """Apply what can be applied, in order; each edit sees the result of those before it.

        Args:
            edits (`Iterable[Edit]`): The edits.
            allowed (`Collection[str]`, *optional*): The operations that were asked for.
            limit (`int`, *optional*): At most so many are applied (K_ops), the first that can be.
            known (`Collection[str]`, *optional*): The ids that the writer of the edits could see, where the draft has
                moved on since: an id of another writer's new principle is unknown to it.
            suggested (`Collection[str]`, *optional*): Operations that are checked and reported, but not carried out.
        """
        report = EditReport()
        for edit in edits:
            full = limit is not None and len(report.applied) >= limit
            if reason := "too_many" if full else self._refusal(edit, allowed, known):
                report.refused.append((edit, reason))
                continue
            report.applied.append(edit)
            if edit.op not in suggested:
                self._carry_out(edit)
        return report

    def finish(self) -> SystemPrompt:
        """The revised prompt, renumbered: the parent itself if nothing changed, else a new one that names it."""
        principles = None if self.prompt.principles is None else tuple(self.principles.values())
        child = replace(self.prompt, preamble=self.text, principles=principles)
        if child == self.prompt:
            return self.prompt
        parents = () if self.prompt.id is None else (self.prompt.id,)
        return replace(child, id=None, parents=parents, operator="edit", born_at=0)

    def _refusal(self, edit: Edit, allowed: Collection[str], known: Collection[str] | None) -> str:
        """Why an edit does not fit, or `""`."""
        free_text = self.prompt.principles is None
        if edit.op not in allowed or (edit.op == "replace") != free_text:
            return "not_allowed"
        if free_text:
            return self._block_refusal(edit)
        ids = (
            set() if edit.op == "add" else set(edit.ids)
        )  # one given with `add` is the LLM's idea of the next
        for name in edit.ids if ids else ():
            if name not in self.principles or (known is not None and name not in known):
                return self._gone.get(name, "unknown_id")
        if len(ids) < {"add": 0, "merge": 2}.get(edit.op, 1):
            return "too_few_ids"
        if len(ids) > 1 and edit.op != "merge":
            return "too_many_ids"
        return "" if edit.op == "remove" else self._text_refusal(_folded(edit.text), ids)

    def _text_refusal(self, text: str, ids: set[str]) -> str:
        if not text:
            return "empty"
        if len(text.split()) > self.max_words:
            return "too_long"
        if len(ids) == 1 and self.principles[min(ids)] == text:
            return "unchanged"
        others = {_key(other) for name, other in self.principles.items() if name not in ids}
        return "duplicate" if _key(text) in others else ""

    def _block_refusal(self, edit: Edit) -> str:
        if not edit.search.strip():
            return "empty"
        if edit.search == edit.text:
            return "unchanged"
        first = self.text.find(edit.search)
        if first < 0:
            return "not_found"
        if self.text.find(edit.search, first + 1) >= 0:  # overlapping ones as well
            return "ambiguous"
        return "" if self.text.replace(edit.search, edit.text).strip() else "empty"

    def _carry_out(self, edit: Edit) -> None:
        if edit.op == "replace":
            self.text = self.text.replace(edit.search, edit.text)
        elif edit.op == "modify":
            self.principles[edit.ids[0]] = _folded(edit.text)
        elif edit.op == "add":
            self.principles |= self._new(edit.text)
        else:  # what a merge makes takes the place of its first source
            new = self._new(edit.text) if edit.op == "merge" else {}
            kept: dict[str, str] = {}
            for name, text in self.principles.items():
                kept |= new if name == edit.ids[0] else {} if name in edit.ids else {name: text}
            self._gone |= dict.fromkeys(edit.ids, "merged" if new else "removed")
            self.principles = kept

    def _new(self, text: str) -> dict[str, str]:
        self._next += 1
        return {f"G{self._next - 1}": _folded(text)}


def _folded(text: str) -> str:
    return " ".join(text.split())


def _key(text: str) -> str:
    """The key by which principles are compared: case and a final full stop do not count."""
    return text.casefold().rstrip(" .;")
