"""The sandbox's world: countries, a few facts about each, the questions made of them, and an oracle that knows them.

The facts are real, so that the reader of a run can check it, and few, so that a policy of under a million parameters
can learn all the words. They are in `countries.csv`. It is not an atlas: a country is left out if a fact about it is
contested, about to change or not unique (several capitals, a capital with the country's own name, a continent or an
official language in dispute).

A question is where it starts, and the chain of relations to follow from there. `("NBO", ("capital", "name",
"currency"))` is "what is the currency of the country whose capital is served by airport NBO ?". One relation, one hop.
Every text is made for a tokenizer that splits at spaces: ASCII, a question mark that stands alone, no other punctuation
but hyphens in names.
"""

from __future__ import annotations

import asyncio
import csv
import hashlib
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from ..llm.types import Message, Reply, Usage

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
    (
        "capital",
        "name",
    ): "what is the {relation} of the country whose capital is served by airport {start} ?",
}

SOUGHT = {"capital": "city", "name": "country"}
"""What a relation's value is called where it is not called by the relation's own name."""

ANSWER = "the answer is {value} ."
"""Every answer, right or guessed; `{value}` is the answer itself, which the agent can copy."""

NOT_UNDERSTOOD = "i do not understand ."
"""What is said to anything that is no question of the sandbox."""


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
class Question:
    """A question about one country: every start belongs to exactly one country, and so does the whole chain.

    Args:
        start (`str`): An airport code, a capital or a country, spelled as the world spells it.
        chain (`tuple[str, ...]`): The relations to follow from there; a key of [`World.texts`].
        country ([`Country`]): The one that `start` belongs to.
    """

    start: str
    chain: tuple[str, ...]
    country: Country

    @property
    def text(self) -> str:
        return question_text(self.start, self.chain)

    @property
    def answer(self) -> str:
        return str(getattr(self.country, self.chain[-1]))

    @property
    def hops(self) -> int:
        """How many facts it takes."""
        return len(self.chain)

    @property
    def path(self) -> tuple[tuple[str, str], ...]:
        """The one-hop questions that solve it, in order, each with its answer; the last answer is the question's."""
        found = [self.start, *(getattr(self.country, relation) for relation in self.chain)]
        steps = zip(found, self.chain, found[1:], strict=False)
        return tuple((question_text(start, (relation,)), value) for start, relation, value in steps)


@dataclass(frozen=True)
class World:
    """Countries and the ways to find them. A part of one is a world as well, see [`world_of`].

    Args:
        countries (`tuple[Country, ...]`): In a fixed order.
        last_relations (`tuple[str, ...]`, *optional*): The fields that nothing starts from: where a chain ends once it
            has reached a country. By default currency, continent and language.
    """

    countries: tuple[Country, ...]
    last_relations: tuple[str, ...] = ("currency", "continent", "language")

    @cached_property
    def by(self) -> dict[str, dict[str, Country]]:
        """Each country by its name, capital and airport: `world.by["capital"]["Nairobi"]`."""
        return {
            field: {
                value: country for country in self.countries if (value := getattr(country, field))
            }
            for field in NAMING_FIELDS
        }

    @cached_property
    def values(self) -> dict[str, tuple[str, ...]]:
        """Every different value of each field that is asked about, sorted; an absent airport is none."""
        return {
            field: tuple(sorted({getattr(country, field) for country in self.countries} - {""}))
            for field in (*NAMING_FIELDS, *self.last_relations)
        }

    @cached_property
    def names(self) -> dict[str, tuple[str, str]]:
        """The field and the spelling of each name, in lower case: `{"nairobi": ("capital", "Nairobi")}`."""
        return {
            value.lower(): (field, value) for field in NAMING_FIELDS for value in self.values[field]
        }

    @cached_property
    def texts(self) -> dict[tuple[str, ...], str]:
        """The wording of every chain that there is; `{start}` is the airport, city or country it starts from."""
        ends = {
            (*before, relation): text.replace("{relation}", relation)
            for before, text in _ENDS.items()
            for relation in self.last_relations
        }
        return {**_WAYS, **ends}


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


def starts_from(chain: Sequence[str]) -> str:
    """The field of [`Country`] that a chain starts from."""
    return {"capital": "airport", "name": "capital"}.get(chain[0], "name")


def question_text(start: str, chain: Sequence[str]) -> str:
    """The wording of a question.

    Raises:
        `KeyError`: If there is no such way to follow.
    """
    *before, last = chain
    text = _WAYS.get(tuple(chain)) or _ENDS[tuple(before)].replace("{relation}", last)
    return text.replace("{start}", start)


def parse_question(text: str, world: World | None = None) -> Question | None:
    """Find a question of the sandbox in a request.

    Case, punctuation, an article before a country and words around the question do not matter; its wording and the
    spelling of its names do. Of several questions the first one counts, so that a request gets one answer.

    Args:
        text (`str`): What the agent asked.
        world ([`World`], *optional*): The world whose names are known; the whole one by default.

    Returns:
        [`Question`] or `None`: `None` if there is no question, or it is about a name the world does not have.
    """
    world = world or load_world()
    request = f" {' '.join(re.findall(r'[a-z0-9-]+', text.lower()))} "
    found = []
    for chain, wording in world.texts.items():
        before, phrase, after = request.partition(f" {wording.partition(' {start}')[0]} ")
        field, start = _leading_name(after, world) if phrase else ("", "")
        if start and field == starts_from(chain):
            found.append((len(before), Question(start, chain, world.by[field][start])))
    return min(found, key=lambda item: item[0])[1] if found else None


def _leading_name(text: str, world: World) -> tuple[str, str]:
    """Field and spelling of the longest name at the beginning of `text`: Mexico City is a city, not Mexico."""
    words = text.removeprefix("the ").split(maxsplit=8)[:8]
    beginnings = (" ".join(words[:length]) for length in range(len(words), 0, -1))
    return next((world.names[name] for name in beginnings if name in world.names), ("", ""))


def all_questions(hops: Iterable[int] = (2, 3), world: World | None = None) -> list[Question]:
    """Every question of these numbers of hops, in a fixed order."""
    world, wanted = world or load_world(), set(hops)
    return [
        Question(start, chain, country)
        for chain in world.texts
        if len(chain) in wanted
        for start, country in sorted(world.by[starts_from(chain)].items())
    ]


def make_split(
    seed: int,
    n_test: int = 200,
    hops: Iterable[int] = (2, 3),
    world: World | None = None,
    by: Literal["country", "question"] = "country",
) -> tuple[list[Question], list[Question]]:
    """Shuffle the questions and set some aside.

    Args:
        seed (`int`): The same seed gives the same split.
        n_test (`int`, *optional*, defaults to `200`): Number of test questions.
        hops (`Iterable[int]`, *optional*, defaults to `(2, 3)`): Numbers of hops.
        world ([`World`], *optional*): The whole world by default.
        by (`str`, *optional*, defaults to `"country"`): The unit that is held out. Whole countries, as many as
            needed, so that no training question is about a test country (surplus questions of the last country are in
            neither part); or `"question"`: the same fact may then occur on both sides.

    Returns:
        `tuple[list[Question], list[Question]]`: Train and test, with no question in both.

    Raises:
        `ValueError`: If there would be nothing left to train on.
    """
    world = world or load_world()
    questions, rng = all_questions(hops, world), random.Random(seed)
    rng.shuffle(questions)
    train, test = questions[n_test:], questions[:n_test]
    if by == "country":
        held, test = set(), []
        for country in rng.sample(world.countries, len(world.countries)):
            if len(test) < n_test:
                held.add(country)
                test = [question for question in questions if question.country in held][:n_test]
        train = [question for question in questions if question.country not in held]
    if n_test < 0 or not train:
        raise ValueError(
            f"n_test={n_test}, but there are {len(questions)} questions in all; keep some to train on"
        )
    return train, test


def world_of(questions: Iterable[Question], world: World | None = None) -> World:
    """The countries of a world that the questions are about, and no other country."""
    world, asked = world or load_world(), {question.country for question in questions}
    return replace(
        world, countries=tuple(country for country in world.countries if country in asked)
    )


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


class Oracle:
    """The large LLM of the sandbox, a [`ChatModel`]: knows single facts, guesses when it would have to combine them.

    This is Prompt-R1's premise with nothing else left in it: the large model has the knowledge, and whether it comes
    out depends on how it is asked. One-hop questions it answers right, others with a guess of the right kind, the same
    whenever it is asked the same question; a guess looks like an answer, so that only what it earns tells the agent
    which is which. It is right about 1 time in 6 for a continent, 70 for a currency or language, 170 for a country:
    6 % over all questions of two and three hops.

    It answers the last user message and ignores the earlier ones. It has no state: its reply follows from its seed and
    the conversation. Sampling arguments are ignored.

    Args:
        world ([`World`], *optional*): The world that it knows; the whole world by default.
        noise (`float`, *optional*, defaults to `0.0`): Probability that the answer to a one-hop question is a wrong
            value of the right kind. Drawn anew for each conversation and `repeat`, so asking again later can help.
        guess_right (`float`, *optional*, defaults to `0.0`): Probability that a guess is right on purpose; the others
            are right by chance alone.
        latency (`float`, *optional*, defaults to `0.0`): Seconds until the reply arrives.
        seed (`int`, *optional*, defaults to `0`): Two oracles with the same seed say the same.

    Raises:
        `ValueError`: If a probability is outside of [0, 1] or the latency is negative.
    """

    def __init__(
        self,
        world: World | None = None,
        noise: float = 0.0,
        guess_right: float = 0.0,
        latency: float = 0.0,
        seed: int = 0,
    ):
        if not (0.0 <= noise <= 1.0 and 0.0 <= guess_right <= 1.0 and latency >= 0.0):
            raise ValueError(
                f"Oracle: noise={noise} and guess_right={guess_right} are probabilities, latency={latency} is seconds"
            )
        self.world = world or load_world()
        self.noise, self.guess_right, self.latency, self.seed = noise, guess_right, latency, seed

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        repeat: int | None = None,
        session: str | None = None,
        **sampling: Any,
    ) -> Reply:
        if self.latency > 0:
            await asyncio.sleep(self.latency)
        return self._reply(messages, repeat)

    def answer(self, text: str, draw: str = "") -> str:
        """What the oracle says to one request.

        Args:
            text (`str`): The request.
            draw (`str`, *optional*, defaults to `""`): What the noise depends on besides the seed and the request.
        """
        question = parse_question(text, self.world)
        if question is None:
            return NOT_UNDERSTOOD
        value, every = question.answer, self.world.values[question.chain[-1]]
        if question.hops == 1:
            rng = random.Random(f"noise {self.seed} {question.text} {draw}")
            wrong = [other for other in every if other != value]
            value = rng.choice(wrong) if wrong and rng.random() < self.noise else value
        else:
            rng = random.Random(f"guess {self.seed} {question.text}")
            value = value if rng.random() < self.guess_right else rng.choice(every)
        return ANSWER.replace("{value}", value)

    def _reply(self, messages: Sequence[Message], repeat: int | None) -> Reply:
        requests = [message["content"] for message in messages if message["role"] == "user"]
        conversation = repr([(message["role"], message["content"]) for message in messages])
        text = self.answer(requests[-1] if requests else "", draw=f"{conversation} {repeat or 0}")
        words_read = sum(len(message["content"].split()) for message in messages)
        return Reply(text=text, usage=Usage(words_read, len(text.split())), seconds=self.latency)


def value_of(reply: str) -> str | None:
    """The answer in a reply of the oracle; `None` if it did not understand."""
    before, after = ANSWER.split("{value}")
    is_answer = reply.startswith(before) and reply.endswith(after)
    return reply[len(before) : -len(after)] if is_answer else None
