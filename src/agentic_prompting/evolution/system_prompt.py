"""A system prompt as a value: what is evolved, shown to the policy and kept in the lineage.

Two kinds. *Principles*: a preamble and numbered rules, edited one by one (the paper's maths prompts). *Free text*:
edited by search and replace (its search prompt). Immutable: an operator makes a new one, with the ids of its parents.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..llm import Message

Place = Literal["system", "user"]

_MARK = re.compile(r"^[ \t]*(?:\[G(\d+)\][.:]?|G(\d+)[.:])[ \t]*", re.MULTILINE)


@dataclass(frozen=True)
class SystemPrompt:
    """One system prompt.

    Args:
        preamble (`str`): What comes before the principles; the whole text if there are none.
        principles (`tuple[str, ...]`, *optional*): The rules, one line each (white space is folded), numbered from 0 by
            their place. May be empty. `None` makes it free text.
        id (`int`, *optional*): Given by the [`Population`] it joins; `None` before.
        parents (`tuple[int, ...]`, *optional*): Ids of the prompts it was made from.
        operator (`str`, *optional*, defaults to `"root"`): What made it: `root`, `mutation`, `crossover`.
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
        folded = tuple(" ".join(principle.split()) for principle in self.principles)
        if not all(folded):
            raise ValueError(f"principle {folded.index('')} of the system prompt is empty")
        if _MARK.search(self.preamble):
            raise ValueError("the preamble has a line that begins like a principle: use SystemPrompt.parse on the text")
        object.__setattr__(self, "preamble", self.preamble.strip())
        object.__setattr__(self, "principles", folded)

    @property
    def text(self) -> str:
        """What the policy reads: for principles the preamble and a line `[G0]. ...` for each."""
        if self.principles is None:
            return self.preamble
        lines = [f"[G{number}]. {principle}" for number, principle in enumerate(self.principles)]
        return "\n".join([self.preamble, *lines] if self.preamble else lines)

    def __str__(self) -> str:
        return self.text

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
            parts = re.split(r"\n[ \t]*\n", body, maxsplit=1)
            if len(parts) > 1:
                raise ValueError(
                    f"text after principle {number} belongs to none: {parts[1].strip()[:80]!r}. Move it in front of "
                    "the first principle, or use free text: SystemPrompt(text)"
                )
        return cls(text[: marks[0].start()], tuple(bodies))

    def messages(self, conversation: Sequence[Message] | str, place: Place = "system") -> list[Message]:
        """The conversation under this prompt.

        Args:
            conversation (`Sequence[Message]` or `str`): What is asked; a string is one user message.
            place (`str`, *optional*, defaults to `"system"`): `system`: in the system message, in front of what one
                says that is already there. `user`: in front of the first user message, as in the paper's maths tasks.

        Raises:
            `ValueError`: `place` is neither, or it is `user` and there is no user message.
        """
        if place not in ("system", "user"):
            raise ValueError(f"place must be 'system' or 'user', got {place!r}")
        messages: list[Message] = (
            [{"role": "user", "content": conversation}] if isinstance(conversation, str) else list(conversation)
        )
        if not self.text:
            return messages
        for position, message in enumerate(messages):
            if message["role"] == place:
                messages[position] = {"role": place, "content": f"{self.text}\n\n{message['content']}"}
                return messages
        if place == "user":
            raise ValueError("no user message to put the system prompt into")
        return [{"role": "system", "content": self.text}, *messages]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; [`SystemPrompt.from_json`] gives an equal prompt back."""
        saved = asdict(self)
        saved["parents"] = list(self.parents)
        saved["principles"] = None if self.principles is None else list(self.principles)
        return saved

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> SystemPrompt:
        """The inverse of [`SystemPrompt.to_json`]."""
        principles = saved["principles"]
        return cls(**{**saved, "principles": None if principles is None else tuple(principles)})
