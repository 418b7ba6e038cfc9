"""The question that a prompt is refined for, and how the callers' forms of it are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..llm import Message


@dataclass(frozen=True)
class Query:
    """One question.

    Args:
        text (`str`): The question itself.
        id (`str`, *optional*, defaults to `""`): For people; carried into the result.
        answers (`tuple[str, ...]`, *optional*): Accepted answers. Only a verifier that compares with them reads them.
        context (`tuple[Message, ...]`, *optional*): What was said before the question, system messages left out.
        repeat (`int`, *optional*, defaults to `0`): Which of several refinements of the same question, for replay.
    """

    text: str
    id: str = ""
    answers: tuple[str, ...] = ()
    context: tuple[Message, ...] = ()
    repeat: int = 0

    @property
    def shown(self) -> str:
        """The question as critic and verifier read it: with the conversation before it, where there is one."""
        if not self.context:
            return self.text
        turns: list[Message] = [*self.context, {"role": "user", "content": self.text}]
        return "\n\n".join(f"{turn['role'].capitalize()}: {turn['content']}" for turn in turns)

    def digest(self, prompt: str) -> str:
        """64 hexadecimal digits that say which prompt is refined for which question."""
        parts = [prompt, self.text, self.answers, self.context, self.repeat]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read_query(query: str | Mapping[str, Any], number: int = 0) -> Query:
    """A question, or a row with `question` and, where there are any, `answers` and `id`.

    Raises:
        `ValueError`: If there is no question in it; names the row.
    """
    row = {"question": query} if isinstance(query, str) else query
    if not isinstance(row, Mapping) or not isinstance(row.get("question"), str):
        raise ValueError(f"query {number} must be a text or a row with a text `question`, got {query!r:.200}")
    if not row["question"].strip():
        raise ValueError(f"query {number} is empty: there is nothing to answer")
    answers = row.get("answers") or ()
    if isinstance(answers, str) or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(f"`answers` of query {number} must be a list of texts, got {answers!r:.200}")
    return Query(row["question"], str(row.get("id", number)), tuple(answers))


def check_prompt(prompt: str) -> None:
    """Raises `ValueError` if there is no prompt to refine."""
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(
            "the prompt is empty, so there is nothing to refine; DEFAULT_PROMPT is a plain one to begin with"
        )


def distinct_keys(prompt: str, queries: Sequence[Query]) -> list[str]:
    """What identifies each query of a run in its file: prompt and question, and a number among equal ones."""
    seen: dict[str, int] = {}
    keys = []
    for query in queries:
        digest = query.digest(prompt)
        seen[digest] = seen.get(digest, 0) + 1
        keys.append(f"{digest[:32]}-{seen[digest]}")
    return keys
