"""The oracle of a house: serves guarded relations only to requests that carry the word, and names it when it refuses.

A refusal is the end of a conversation: whatever is asked after it is not answered. Else an agent could use the word it
has just been told, and nobody would have to know it beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...llm.types import Message, Reply
from ..oracle import Oracle
from ..questions import parse_question, sought
from ..world import World
from .world import WORDS, House, load_house_world

REFUSAL = "no . the {relation} needs the word {word} ."
"""What is said to a request for a guarded fact without its word, with another one, or with several."""

CLOSED = "i said no . good bye ."
"""What is said to everything after a refusal."""


class HouseOracle(Oracle):
    """An [`Oracle`] that keeps the rules of a [`House`].

    Questions of several hops it guesses at, as every oracle does, and asks no word for that.

    Args:
        house ([`House`]): Its rules.
        world ([`World`], *optional*): What it knows; [`load_house_world`] by default.
        **options: `noise`, `guess_right`, `latency` and `seed`, as of [`Oracle`].
    """

    def __init__(self, house: House, world: World | None = None, **options: Any):
        super().__init__(world or load_house_world(), **options)
        self.house = house

    def answer(self, text: str, draw: str = "") -> str:
        return self._refusal(text) or super().answer(text, draw)

    def _refusal(self, text: str) -> str | None:
        question = parse_question(text, self.world)
        word = self.house.words.get(question.chain[0]) if question is not None and question.hops == 1 else None
        if question is None or word is None or {said for said in text.split() if said in WORDS} == {word}:
            return None
        return REFUSAL.replace("{relation}", sought(question.chain[0])).replace("{word}", word)

    def _reply(self, messages: Sequence[Message], repeat: int | None) -> Reply:
        if any(message["role"] == "assistant" and is_refusal(message["content"]) for message in messages):
            return Reply(text=CLOSED)
        return super()._reply(messages, repeat)


def is_refusal(reply: str) -> bool:
    """Whether a reply is a `REFUSAL`."""
    return reply.startswith(REFUSAL.partition("{")[0])
