"""The sandbox's world: countries with a few facts each, questions about them, and an oracle that
knows the facts.

The facts are real, so that the reader of a run can check it, and few, so that a policy of under a
million parameters can learn all the words. They are in `countries.csv`. It is not an atlas: a
country is left out if a fact about it is contested, about to change or not unique (several
capitals, a capital with the country's own name, a continent or an official language in dispute).

A question is where it starts, and the chain of relations to follow from there. `("NBO", ("capital",
"name", "currency"))` is "what is the currency of the country whose capital is served by airport NBO
?". One relation, one hop. Every text is made for a tokenizer that splits at spaces: ASCII, a
question mark that stands alone, no other punctuation but hyphens in names.
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

# A relation is the field of a country that it leads to. Chains of one relation are what the oracle
# knows.
_WAYS: dict[tuple[str, ...], str] = {
    ("capital",): "which city is served by airport {start} ?",
    ("name",): "which country has the capital {start} ?",
    ("capital", "name"): "which country has the capital served by airport {start} ?",
}
# The chains that end on one of the world's `last_relations`, by how they get to the country.
_ENDS: dict[tuple[str, ...], str] = {
    (): "what is the {relation} of {start} ?",
    ("name",): "what is the {relation} of the country whose capital is {start} ?",
    ("capital", "name"): (
        "what is the {relation} of the country whose capital is served by airport {start} ?"
    ),
}

SOUGHT = {"capital": "city", "name": "country"}
"""The nouns for values of relations, where they differ from the relation's name."""

ANSWER = "the answer is {value} ."
"""Every answer, right or guessed; `{value}` is the answer itself, which the agent can copy."""

NOT_UNDERSTOOD = "i do not understand ."
"""The reply to anything that is not a question of the sandbox."""


@dataclass(frozen=True)
class Country:
    """One line of `countries.csv`.

    The last four are international standards, compared with pycountry, phonenumbers and Babel in
    November 2026; only the guarded world asks for them.

    Args:
        name (`str`): In English, without an article.
        capital (`str`): No two countries share one, and none is also the name of a country.
        currency (`str`): Its name without the country's: `shilling`, `CFA franc`.
        continent (`str`): One of `CONTINENTS`; Russia and Turkey lie where their capital lies.
        language (`str`): An official one, or the main one where the law names none.
        airport (`str`): The IATA code of one that serves the capital; empty where that is not
            beyond doubt.
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
    """A question about one country: every start belongs to exactly one country, and so does the
    whole chain.

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
        """The number of facts that the question needs."""
        return len(self.chain)

    @property
    def path(self) -> tuple[tuple[str, str], ...]:
        """The one-hop questions that solve it, in order, each with its answer; the last answer is
        the question's.
        """
        steps = []
        start = self.start
        for relation in self.chain:
            # The answer to each step is the start of the next one.
            value = getattr(self.country, relation)
            steps.append((question_text(start, (relation,)), value))
            start = value
        return tuple(steps)


@dataclass(frozen=True)
class World:
    """Countries and the ways to find them. A part of one is a world as well, see [`world_of`].

    Args:
        countries (`tuple[Country, ...]`): In a fixed order.
        last_relations (`tuple[str, ...]`, *optional*): The fields that nothing starts from: where a
            chain ends once it has reached a country. By default currency, continent and language.
    """

    countries: tuple[Country, ...]
    last_relations: tuple[str, ...] = ("currency", "continent", "language")

    @cached_property
    def by(self) -> dict[str, dict[str, Country]]:
        """Each country by its name, capital and airport: `world.by["capital"]["Nairobi"]`."""
        # Each naming value belongs to one country, so no entry replaces another.
        by_field: dict[str, dict[str, Country]] = {field: {} for field in NAMING_FIELDS}
        for field, countries in by_field.items():
            for country in self.countries:
                name = getattr(country, field)
                if name:  # some airports are missing
                    countries[name] = country
        return by_field

    @cached_property
    def values(self) -> dict[str, tuple[str, ...]]:
        """The distinct values of each field that questions use, sorted; a missing airport is not a
        value.
        """
        by_field = {}
        for field in (*NAMING_FIELDS, *self.last_relations):
            distinct = {getattr(country, field) for country in self.countries}
            by_field[field] = tuple(sorted(distinct - {""}))
        return by_field

    @cached_property
    def names(self) -> dict[str, tuple[str, str]]:
        """The field and the spelling of each name, in lower case: `{"nairobi": ("capital",
        "Nairobi")}`.
        """
        spellings = {}
        for field in NAMING_FIELDS:
            for name in self.values[field]:
                spellings[name.lower()] = (field, name)
        return spellings

    @cached_property
    def texts(self) -> dict[tuple[str, ...], str]:
        """The wording of every chain that there is; `{start}` is the airport, city or country it
        starts from.
        """
        # The ways to a country, and the chains that go on from there to a last relation.
        wordings = dict(_WAYS)
        for way, template in _ENDS.items():
            for relation in self.last_relations:
                wordings[(*way, relation)] = template.replace("{relation}", relation)
        return wordings


def parse_facts(lines: Iterable[str]) -> tuple[Country, ...]:
    """Countries from lines of comma-separated values, without a head.

    Raises:
        `TypeError`: If a line has too few or too many fields.
    """
    return tuple(Country(*row) for row in csv.reader(lines))


@cache
def load_world() -> World:
    """Return the whole world, parsed once."""
    lines = Path(__file__).with_name("countries.csv").read_text(encoding="utf-8").splitlines()
    # The first line names the fields.
    return World(parse_facts(lines[1:]))


def sought(relation: str) -> str:
    """Return the noun for the value of a relation: a city, a country, a currency."""
    return SOUGHT.get(relation, relation)


def starts_from(chain: Sequence[str]) -> str:
    """Return the field of [`Country`] that a chain starts from."""
    # A question about any other relation names the country itself.
    return {"capital": "airport", "name": "capital"}.get(chain[0], "name")


def question_text(start: str, chain: Sequence[str]) -> str:
    """Return the wording of a question.

    Raises:
        `KeyError`: If there is no such way to follow.
    """
    # A way to a country has its own wording; the other chains end on a last relation.
    template = _WAYS.get(tuple(chain))
    if template is None:
        *way, relation = chain
        template = _ENDS[tuple(way)].replace("{relation}", relation)
    return template.replace("{start}", start)


def parse_question(text: str, world: World | None = None) -> Question | None:
    """Find a question of the sandbox in a request.

    Case, punctuation, an article before a country and words around the question do not matter; its
    wording and the spelling of its names do. Of several questions the first one counts, so a
    request gets one answer.

    Args:
        text (`str`): The agent's request.
        world ([`World`], *optional*): The world whose names are recognised; the whole one by
            default.

    Returns:
        [`Question`] or `None`: `None` if there is no question, or it is about a name the world does
            not have.
    """
    world = world or load_world()
    # Words between single spaces, so that a phrase is found only as whole words.
    request = f" {' '.join(re.findall(r'[a-z0-9-]+', text.lower()))} "

    # The first question of the request; at the same position, the first of the world's wordings.
    first_question: Question | None = None
    first_position = len(request)
    for chain, wording in world.texts.items():
        # Everything before the place of the name has to be there word for word.
        beginning = wording.partition(" {start}")[0]
        before, phrase, after = request.partition(f" {beginning} ")
        if not phrase or len(before) >= first_position:
            continue
        # The name after the wording must be one that the chain can start from.
        field, start = _leading_name(after, world)
        if start and field == starts_from(chain):
            first_question = Question(start, chain, world.by[field][start])
            first_position = len(before)
    return first_question


def _leading_name(text: str, world: World) -> tuple[str, str]:
    """Field and spelling of the longest name at the beginning of `text`: Mexico City is a city, not
    Mexico.
    """
    # No name has more than eight words.
    words = text.removeprefix("the ").split(maxsplit=8)[:8]
    for length in range(len(words), 0, -1):
        name = " ".join(words[:length])
        if name in world.names:
            return world.names[name]
    return "", ""


def all_questions(hops: Iterable[int] = (2, 3), world: World | None = None) -> list[Question]:
    """List every question with these numbers of hops, in a fixed order."""
    world = world or load_world()
    hop_counts = set(hops)
    questions = []
    for chain in world.texts:
        if len(chain) in hop_counts:
            starts = sorted(world.by[starts_from(chain)].items())
            questions += [Question(start, chain, country) for start, country in starts]
    return questions


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
        by (`str`, *optional*, defaults to `"country"`): The unit that is held out. Whole countries,
            as many as needed, so that no training question is about a test country (surplus
            questions of the last country are in neither part); or `"question"`: the same fact may
            then occur on both sides.

    Returns:
        `tuple[list[Question], list[Question]]`: Train and test, with no question in both.

    Raises:
        `ValueError`: If there would be nothing left to train on.
    """
    world = world or load_world()
    questions = all_questions(hops, world)
    rng = random.Random(seed)
    rng.shuffle(questions)
    if by == "country":
        # Hold out one country after the other until there are enough test questions.
        test: list[Question] = []
        test_countries: set[Country] = set()
        for country in rng.sample(world.countries, len(world.countries)):
            if len(test) >= n_test:
                break
            test_countries.add(country)
            test = [question for question in questions if question.country in test_countries]
        test = test[:n_test]
        train = [question for question in questions if question.country not in test_countries]
    else:
        # Hold out single questions.
        test = questions[:n_test]
        train = questions[n_test:]

    # A split without training questions is of no use.
    if n_test < 0 or not train:
        raise ValueError(
            f"n_test={n_test} leaves nothing to train on: there are {len(questions)} questions in "
            "all"
        )
    return train, test


def world_of(questions: Iterable[Question], world: World | None = None) -> World:
    """Return the part of a world that these questions are about."""
    world = world or load_world()
    # The countries stay in the order of the world.
    wanted_countries = {question.country for question in questions}
    countries = tuple(country for country in world.countries if country in wanted_countries)
    return replace(world, countries=countries)


def as_rows(questions: Iterable[Question]) -> list[dict[str, Any]]:
    """Convert questions to rows in the schema of every data set here: `id`, `question`, `answers`,
    `task`, `meta`.
    """
    rows = []
    for question in questions:
        # The id follows from the text, so a question keeps it in every split.
        digest = hashlib.blake2b(question.text.encode(), digest_size=6).hexdigest()
        rows.append(
            {
                "id": f"sandbox-{digest}",
                "question": question.text,
                "answers": [question.answer],
                "task": "sandbox",
                "meta": {"hops": question.hops},
            }
        )
    return rows


class Oracle:
    """The large LLM of the sandbox, a [`ChatModel`]: knows single facts, guesses when it would have
    to combine them.

    This is Prompt-R1's premise and nothing else: the large model has the knowledge, and whether it
    comes out depends on the request. It answers one-hop questions right and others with a guess of
    the right kind, always the same for the same question. A guess looks like an answer: only the
    reward tells the agent which is which. A guess is right about 1 time in 6 for a continent, 70
    for a currency or language, 170 for a country: 6 % over all questions of two and three hops.

    It answers the last user message and ignores the earlier ones. It has no state: its reply
    follows from its seed and the conversation. Sampling arguments are ignored.

    Args:
        world ([`World`], *optional*): The world whose facts it has; the whole world by default.
        noise (`float`, *optional*, defaults to `0.0`): Probability that the answer to a one-hop
            question is a wrong value of the right kind. Drawn anew for each conversation and
            `repeat`, so asking again later can help.
        guess_right (`float`, *optional*, defaults to `0.0`): Probability that a guess is right on
            purpose; the others are right by chance alone.
        latency (`float`, *optional*, defaults to `0.0`): Seconds until the reply arrives.
        seed (`int`, *optional*, defaults to `0`): Two oracles with the same seed give the same
            replies.

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
        if not 0.0 <= noise <= 1.0:
            raise ValueError(f"noise must be a probability, got {noise}")
        if not 0.0 <= guess_right <= 1.0:
            raise ValueError(f"guess_right must be a probability, got {guess_right}")
        if not latency >= 0.0:
            raise ValueError(f"latency must be a number of seconds, at least 0, got {latency}")
        self.world = world or load_world()
        self.noise = noise
        self.guess_right = guess_right
        self.latency = latency
        self.seed = seed

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
        """Answer one request.

        Args:
            text (`str`): The request.
            draw (`str`, *optional*, defaults to `""`): Varies the noise beyond the seed and the
                request.
        """
        question = parse_question(text, self.world)
        if question is None:
            return NOT_UNDERSTOOD
        value = question.answer
        # The values of the right kind, from which a wrong answer or a guess is drawn.
        candidates = self.world.values[question.chain[-1]]
        if question.hops == 1:
            # A single fact: right, but for the noise.
            rng = random.Random(f"noise {self.seed} {question.text} {draw}")
            wrong_values = [candidate for candidate in candidates if candidate != value]
            if wrong_values and rng.random() < self.noise:
                value = rng.choice(wrong_values)
        else:
            # A combination of facts: a guess, the same for every conversation.
            rng = random.Random(f"guess {self.seed} {question.text}")
            if rng.random() >= self.guess_right:
                value = rng.choice(candidates)
        return ANSWER.replace("{value}", value)

    def _reply(self, messages: Sequence[Message], repeat: int | None) -> Reply:
        requests = [message["content"] for message in messages if message["role"] == "user"]
        conversation = repr([(message["role"], message["content"]) for message in messages])
        # The noise is drawn anew for each conversation and repeat.
        request = requests[-1] if requests else ""
        text = self.answer(request, draw=f"{conversation} {repeat or 0}")
        # A token of the oracle is a word.
        prompt_words = sum(len(message["content"].split()) for message in messages)
        usage = Usage(prompt_words, len(text.split()))
        return Reply(text=text, usage=usage, seconds=self.latency)


def value_of(reply: str) -> str | None:
    """Return the answer in a reply of the oracle; `None` if it did not understand."""
    prefix, suffix = ANSWER.split("{value}")
    if not reply.startswith(prefix) or not reply.endswith(suffix):
        return None
    return reply[len(prefix) : -len(suffix)]
