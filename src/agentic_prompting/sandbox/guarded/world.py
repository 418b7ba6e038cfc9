"""The guarded world: more facts than the sandbox's world, some of which the oracle gives out only to those who say the
word.

Which words, no reasoning can find out, and by trial it takes long; somebody has to be told. That is what a system
prompt is for. Splitting a question into single facts, on the other hand, is a skill that a policy learns by reward. So
this world holds both kinds of thing that E-SPL is meant for, and tells them apart.

A refusal names the word, and ends the conversation: whatever is asked after it is not answered. Otherwise an agent
could use the word it has just been told, and nobody would have to know it beforehand.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from ...llm.types import Message, Reply
from ..oracle import Oracle
from ..world import Question, World, all_questions, load_world, parse_question, sought

WORDS = [
    "amber",
    "birch",
    "cedar",
    "clover",
    "copper",
    "coral",
    "falcon",
    "fern",
    "flint",
    "garnet",
    "hazel",
    "heron",
    "indigo",
    "ivory",
    "jasper",
    "lantern",
    "maple",
    "marble",
    "opal",
    "pebble",
    "quartz",
    "saffron",
    "velvet",
    "willow",
]
"""The words that a rule may ask for; none occurs anywhere else in the world."""

ALWAYS_GUARDED, ENDS_GUARDED = "capital", 3

REFUSAL = "no . the {relation} needs the word {word} ."
"""What is said to a request for a guarded fact without its word, with another one, or with several."""

CLOSED = "i said no . good bye ."
"""What is said to everything after a refusal."""


@cache
def load_guarded_world() -> World:
    """Every other country that has an airport, with nine relations.

    Not the whole world: four names more for each country would make a policy of this size spend its warm start on
    learning words.
    """
    world = load_world()
    countries = tuple(country for country in world.countries if country.airport)[::2]
    return World(countries, (*world.last_relations, "domain", "code", "symbol", "letters"))


def relations_of(world: World) -> tuple[str, ...]:
    """All nine: the two on the way to a country, and those that a question may end on."""
    return ("capital", "name", *world.last_relations)


def draw_rules(rng: random.Random, world: World | None = None) -> dict[str, str]:
    """Four guarded relations with a word each: the way from an airport to its city, and three of those that a question
    may end on. Without any word about a third of all questions can still be answered."""
    world = world or load_guarded_world()
    guarded = [ALWAYS_GUARDED, *rng.sample(world.last_relations, ENDS_GUARDED)]
    return dict(zip(guarded, rng.sample(WORDS, len(guarded)), strict=True))


def split_by_country(seed: int, n_test_countries: int = 20) -> tuple[list[Question], list[Question]]:
    """Questions of two and three hops to train on, and those about countries that no training question is about.

    Raises:
        `ValueError`: There would be nothing left to train on.
    """
    world = load_guarded_world()
    if not 0 < n_test_countries < len(world.countries):
        raise ValueError(f"n_test_countries={n_test_countries} must be between 1 and {len(world.countries) - 1}")
    rng = random.Random(f"house split {seed}")  # a seed keeps its name, or figures change
    countries = tuple(rng.sample(world.countries, len(world.countries)))
    parts = (countries[n_test_countries:], countries[:n_test_countries])
    train, test = (all_questions((2, 3), replace(world, countries=part)) for part in parts)
    rng.shuffle(train)
    rng.shuffle(test)
    return train, test


class GuardedOracle(Oracle):
    """An [`Oracle`] that gives guarded facts only to requests that carry their word.

    Questions of several hops it guesses at, as every oracle does, and asks no word for that.

    Args:
        rules (`Mapping[str, str]`): The word for each guarded relation; see [`draw_rules`].
        world ([`World`], *optional*): What it knows; [`load_guarded_world`] by default.
        **options: `noise`, `guess_right`, `latency` and `seed`, as of [`Oracle`].
    """

    def __init__(self, rules: Mapping[str, str], world: World | None = None, **options: Any):
        super().__init__(world or load_guarded_world(), **options)
        self.rules = rules

    def answer(self, text: str, draw: str = "") -> str:
        return self._refusal(text) or super().answer(text, draw)

    def _refusal(self, text: str) -> str | None:
        question = parse_question(text, self.world)
        word = self.rules.get(question.chain[0]) if question is not None and question.hops == 1 else None
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
