"""The sandbox's world: countries, a few facts about each, and the questions made of them.

Real facts, so that whoever looks over a run can check it; few, so that a policy of under a million parameters can learn
all the words. They are in `countries.csv`. Not an atlas: a country is left out where a fact about it is contested,
about to change or not a single one (several capitals, a capital of the country's own name, a continent or an official
language in dispute).

A question is two things: where it starts, and the chain of relations to follow from there. `("NBO", ("capital", "name",
"currency"))` is "what is the currency of the country whose capital is served by airport NBO ?". One relation, one hop.
Writing ([`question_text`]) and reading ([`parse_question`]) are inverse to each other. Every text is made for a
tokenizer that splits at spaces: ASCII, a question mark that stands alone, no other punctuation but hyphens in names.
"""

from __future__ import annotations

import csv
import hashlib
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

NAMING_FIELDS = ("name", "capital", "airport")
"""The fields of [`Country`] that a question may start from: each value belongs to one country."""

CONTINENTS = ("Africa", "Asia", "Europe", "North America", "Oceania", "South America")

# A relation is the field of a country that it leads to. Chains of one relation are what the oracle knows.
_WAYS: dict[tuple[str, ...], str] = {
    ("capital",): "which city is served by airport {start} ?",
    ("name",): "which country has the capital {start} ?",
    ("capital", "name"): "which country has the capital served by airport {start} ?",
}
# The chains that end on one of the world's `last_relations`, by how they get to the country.
_ENDS: dict[tuple[str, ...], str] = {
    (): "what is the {relation} of {start} ?",
    ("name",): "what is the {relation} of the country whose capital is {start} ?",
    ("capital", "name"): "what is the {relation} of the country whose capital is served by airport {start} ?",
}

SOUGHT = {"capital": "city", "name": "country"}
"""What a relation's value is called where it is not called by the relation's own name."""


@dataclass(frozen=True)
class Country:
    """One line of `countries.csv`. The last four are international standards, compared with pycountry, phonenumbers and
    Babel in November 2026; only the guarded world asks for them.

    Args:
        name (`str`): In English, without an article.
        capital (`str`): No two countries share one, and none is also the name of a country.
        currency (`str`): Its name without the country's: `shilling`, `CFA franc`.
        continent (`str`): One of `CONTINENTS`; Russia and Turkey lie where their capital lies.
        language (`str`): An official one, or the main one where the law names none.
        airport (`str`): The IATA code of one that serves the capital; empty where that is not beyond doubt.
        domain (`str`): Its internet domain, `.ke`.
        code (`str`): Its telephone code, without a plus sign; some countries share one.
        symbol (`str`): The code of its currency in ISO 4217, `KES`.
        letters (`str`): Its own code in ISO 3166, `KEN`.
    """

    name: str
    capital: str
    currency: str
    continent: str
    language: str
    airport: str
    domain: str
    code: str
    symbol: str
    letters: str


@dataclass(frozen=True)
class World:
    """Countries and the ways to find them. A slice of one, `World(world.countries[:20])`, is a world as well.

    Args:
        countries (`tuple[Country, ...]`): In a fixed order.
        last_relations (`tuple[str, ...]`, *optional*): The fields that nothing starts from: where a chain ends once it
            has reached a country. By default currency, continent and language.
    """

    countries: tuple[Country, ...]
    last_relations: tuple[str, ...] = ("currency", "continent", "language")

    @cached_property
    def by_name(self) -> dict[str, Country]:
        return {country.name: country for country in self.countries}

    @cached_property
    def by_capital(self) -> dict[str, Country]:
        return {country.capital: country for country in self.countries}

    @cached_property
    def by_airport(self) -> dict[str, Country]:
        return {country.airport: country for country in self.countries if country.airport}

    @cached_property
    def values(self) -> dict[str, tuple[str, ...]]:
        """Every different value of each field that is asked about, sorted; an absent airport is none."""
        return {
            field: tuple(sorted({getattr(country, field) for country in self.countries} - {""}))
            for field in (*NAMING_FIELDS, *self.last_relations)
        }

    @cached_property
    def names(self) -> dict[str, dict[str, str]]:
        """What each name, in lower case, is a name of: `{"nairobi": {"capital": "Nairobi"}}`."""
        names: dict[str, dict[str, str]] = {}
        for field in NAMING_FIELDS:
            for value in self.values[field]:
                names.setdefault(value.lower(), {})[field] = value
        return names

    @cached_property
    def longest_name(self) -> int:
        """Words in the longest name."""
        return max(len(name.split()) for name in self.names)


def parse_facts(lines: Iterable[str]) -> tuple[Country, ...]:
    """Countries from lines of comma-separated values, without a head.

    Raises:
        `TypeError`: If a line has too few or too many fields.
    """
    return tuple(Country(*row) for row in csv.reader(lines))


@cache
def load_world() -> World:
    """The whole world, parsed once."""
    lines = Path(__file__).with_name("countries.csv").read_text(encoding="utf-8").splitlines()
    return World(parse_facts(lines[1:]))


def sought(relation: str) -> str:
    """The word for what a relation leads to: a city, a country, a currency."""
    return SOUGHT.get(relation, relation)


def texts_of(world: World) -> dict[tuple[str, ...], str]:
    """The wording of every chain that there is in a world; `{start}` is the airport, city or country it starts from."""
    ends = {
        (*before, relation): text.replace("{relation}", relation)
        for before, text in _ENDS.items()
        for relation in world.last_relations
    }
    return {**_WAYS, **ends}


@dataclass(frozen=True)
class ParsedQuestion:
    """What a question asks for.

    Args:
        start (`str`): An airport code, a capital or a country, spelled as the world spells it.
        chain (`tuple[str, ...]`): The relations to follow from there; a key of [`texts_of`] its world.
    """

    start: str
    chain: tuple[str, ...]

    @property
    def hops(self) -> int:
        return len(self.chain)

    @property
    def text(self) -> str:
        return question_text(self.start, self.chain)

    @property
    def start_field(self) -> str:
        """The field of [`Country`] that `start` is a value of."""
        return {"capital": "airport", "name": "capital"}.get(self.chain[0], "name")


@dataclass(frozen=True)
class Question:
    """A question with its answer and the way there.

    Args:
        text (`str`): The question.
        answer (`str`): The answer.
        hops (`int`): How many facts it takes.
        path (`tuple[tuple[str, str], ...]`): The one-hop questions that solve it, in order, each with its answer; the
            last answer is the question's.
    """

    text: str
    answer: str
    hops: int
    path: tuple[tuple[str, str], ...]


def question_text(start: str, chain: Sequence[str]) -> str:
    """The wording of a question.

    Raises:
        `KeyError`: If there is no such way to follow.
    """
    *before, last = chain
    text = _WAYS.get(tuple(chain)) or _ENDS[tuple(before)].replace("{relation}", last)
    return text.replace("{start}", start)


def parse_question(text: str, world: World | None = None) -> ParsedQuestion | None:
    """Find a question of the sandbox in a request.

    Case, punctuation, an article before a country and words around the question do not matter; its wording and the
    spelling of its names do. Of several questions the first one counts, so that a request gets one answer.

    Args:
        text (`str`): What the agent asked.
        world ([`World`], *optional*): The world whose names are known; the whole one by default.

    Returns:
        [`ParsedQuestion`] or `None`: `None` if there is no question, or it is about a name the world does not have.
    """
    world = world or load_world()
    request = f" {' '.join(re.findall(r'[a-z0-9-]+', text.lower()))} "
    found = []
    for chain, wording in texts_of(world).items():
        before, phrase, after = request.partition(f" {wording.partition(' {start}')[0]} ")
        start = _leading_name(after, ParsedQuestion("", chain).start_field, world) if phrase else None
        if start is not None:
            found.append((len(before), ParsedQuestion(start, chain)))
    return min(found, key=lambda item: item[0])[1] if found else None


def _leading_name(text: str, field: str, world: World) -> str | None:
    """The longest name at the beginning of `text`, if it is one of this field: Mexico City is a city, not Mexico."""
    words = text.removeprefix("the ").split(maxsplit=world.longest_name)[: world.longest_name]
    for length in range(len(words), 0, -1):
        known = world.names.get(" ".join(words[:length]))
        if known is not None:
            return known.get(field)
    return None


def solve(question: ParsedQuestion, world: World | None = None) -> Question:
    """Answer a question of any number of hops, and say how.

    Raises:
        `KeyError`: If the world has no such start.
    """
    world = world or load_world()
    by_start = {"airport": world.by_airport, "capital": world.by_capital, "name": world.by_name}[question.start_field]
    country = by_start[question.start]  # the whole chain is about one country: every start belongs to exactly one
    start, path = question.start, []
    for relation in question.chain:
        step = question_text(start, (relation,))
        start = getattr(country, relation)
        path.append((step, start))
    return Question(question.text, start, question.hops, tuple(path))


def all_questions(hops: Iterable[int] = (2, 3), world: World | None = None) -> list[Question]:
    """Every question of these numbers of hops, in a fixed order."""
    world, wanted = world or load_world(), set(hops)
    parsed = [
        ParsedQuestion(start, chain)
        for chain in texts_of(world)
        if len(chain) in wanted
        for start in world.values[ParsedQuestion("", chain).start_field]
    ]
    return [solve(question, world) for question in parsed]


def make_split(
    seed: int, n_test: int = 200, hops: Iterable[int] = (2, 3), world: World | None = None
) -> tuple[list[Question], list[Question]]:
    """Shuffle the questions and set some aside.

    Single facts may occur on both sides (the currency of Kenya, say, reached from Nairobi here and from NBO there):
    what is tested is whether the policy asks well, not whether it knows.

    Args:
        seed (`int`): The same seed gives the same split.
        n_test (`int`, *optional*, defaults to `200`): Number of test questions.
        hops (`Iterable[int]`, *optional*, defaults to `(2, 3)`): Numbers of hops.
        world ([`World`], *optional*): The whole world by default.

    Returns:
        `tuple[list[Question], list[Question]]`: Train and test, with no question in both.

    Raises:
        `ValueError`: If there would be nothing left to train on.
    """
    questions = all_questions(hops, world)
    if not 0 <= n_test < len(questions):
        raise ValueError(f"n_test={n_test}, but there are {len(questions)} questions in all; keep some to train on")
    random.Random(seed).shuffle(questions)
    return questions[n_test:], questions[:n_test]


def as_rows(questions: Iterable[Question]) -> list[dict[str, Any]]:
    """Questions in the schema of every data set here: `id`, `question`, `answers`, `task`, `meta`."""
    return [
        {
            # From the text, so that a question keeps its id in every split.
            "id": f"sandbox-{hashlib.blake2b(question.text.encode(), digest_size=6).hexdigest()}",
            "question": question.text,
            "answers": [question.answer],
            "task": "sandbox",
            "meta": {"hops": question.hops},
        }
        for question in questions
    ]
