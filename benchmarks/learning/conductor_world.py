"""A world for a conductor and three workers: facts about countries, digit sums, and the forms of
the house.

A question is an expression: `("form", ("sum", ("code", "Kenya")))` is "what is the form for the
digit sum of the code of Kenya ?". A worker knows the operations of its kind, applied to plain
values. Asked for one of them with something else inside, it guesses, and a guess looks like an
answer. Anything else it does not understand.

Every text is made for a tokenizer that splits at spaces.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from agentic_prompting import Worker, Workers
from agentic_prompting.llm import Message, Reply, ServerFailed, Usage
from agentic_prompting.sandbox.world import (
    ANSWER,
    NOT_UNDERSTOOD,
    Country,
    load_world,
)

Expression = Any
"""A value (`str`), or an operation with its arguments: `("sum", "254")`."""

WORKER_OF = {
    "currency": "facts",
    "language": "facts",
    "code": "facts",
    "record": "facts",
    "country": "facts",
    "sum": "numbers",
    "form": "forms",
}
"""The worker that knows each operation."""

WORDING = {
    "currency": "the currency of {}",
    "language": "the language of {}",
    "code": "the code of {}",
    "record": "the record of {}",
    "country": "the country whose capital is {}",
    "sum": "the digit sum of {}",
    "form": "the form for {}",
}

DESCRIPTION = {"facts": "countries", "numbers": "digits", "forms": "forms"}
PRICE = {"facts": 0.003, "numbers": 0.001, "forms": 0.002}
TWIN = "rumours"
"""Name and description of a cheap twin of `facts`."""
TWIN_PRICE = 0.0005
TWIN_NOISE = 0.15
WORDINGS = (
    ANSWER,
    "{value} is the answer .",
    "i know this answer : {value} .",
    "it must be {value} .",
    "this one is {value} , i am sure .",
    "you asked for {value} .",
)
"""Wordings of the workers in training, where a variant has several."""
OTHER_WORDING = "it is {value} ; the answer is {value} ."
"""A wording that no training shows."""
FORM_COUNT = 64
RECORD_LENGTH = 12
RECORD_WORDS = [f"w{number}" for number in range(64)]

# The letters name the workers in the order of the calls: facts, numbers, forms.
SHARES = {
    "f": 0.1,
    "ff": 0.12,
    "n": 0.06,
    "r": 0.08,
    "fn": 0.16,
    "fr": 0.14,
    "nr": 0.08,
    "fnf": 0.12,
    "fnr": 0.14,
    "record": 0.3,
}
"""How often each type of question is drawn, relative to the others."""

HELD_OUT_COUNTRIES = 40
_UNIT = re.compile(r"(.+?) and (\d+|the code of .+)")


@dataclass(frozen=True)
class Facts:
    """All that the workers know."""

    countries: tuple[Country, ...] = field(default_factory=lambda: load_world().countries)

    @cached_property
    def by_name(self) -> dict[str, Country]:
        return {country.name: country for country in self.countries}

    @cached_property
    def by_capital(self) -> dict[str, Country]:
        return {country.capital: country for country in self.countries}

    @cached_property
    def values(self) -> dict[str, list[str]]:
        """The values of each operation, from which guesses are drawn."""
        values = {}
        for operation in ("currency", "language", "code"):
            values[operation] = sorted({getattr(country, operation) for country in self.countries})
        values["country"] = sorted(self.by_name)
        values["capital"] = sorted(self.by_capital)
        values["sum"] = [str(number) for number in range(1, 40)]
        values["form"] = [f"form-{number}" for number in range(FORM_COUNT)]
        return values

    def apply(self, operation: str, *arguments: str) -> str | None:
        """The value of an operation on plain values; `None` if it has none."""
        if operation == "sum":
            if not all(argument.isdigit() for argument in arguments):
                return None
            digits = map(int, "".join(arguments))
            return str(sum(digits))
        if len(arguments) > 1:
            return None
        if operation == "form":
            return f"form-{random.Random(f'form {arguments[0]}').randrange(FORM_COUNT)}"
        countries = self.by_capital if operation == "country" else self.by_name
        country = countries.get(arguments[0])
        if country is None:
            return None
        if operation == "country":
            return country.name
        if operation == "record":
            generator = random.Random(f"record {country.name}")
            return " ".join(generator.choice(RECORD_WORDS) for _ in range(RECORD_LENGTH))
        return str(getattr(country, operation))

    def solve(self, expression: Expression) -> str:
        """The value of an expression."""
        if isinstance(expression, str):
            return expression
        operation, *arguments = expression
        return str(self.apply(operation, *map(self.solve, arguments)))


# --- expressions and texts ------------------------------------------------------------------------


def phrase(expression: Expression) -> str:
    """An expression in words."""
    if isinstance(expression, str):
        return expression
    operation, *arguments = expression
    return WORDING[operation].format(" and ".join(map(phrase, arguments)))


def question_text(expression: Expression) -> str:
    return f"what is {phrase(expression)} ?"


def read_question(text: str) -> Expression | None:
    """The expression of a question; `None` if the text is none."""
    match = re.search(r"what is (the .+?) \?", text)
    return _read_phrase(match[1]) if match else None


def _read_phrase(text: str) -> Expression:
    for operation, wording in WORDING.items():
        beginning = wording.removesuffix("{}")
        if text.startswith(beginning):
            inside = text[len(beginning) :]
            arguments = (inside,)
            # Only a sum takes two arguments.
            pair = _UNIT.fullmatch(inside)
            if operation == "sum" and pair is not None:
                arguments = pair.groups()
            return (operation, *map(_read_phrase, arguments))
    return text


@dataclass(frozen=True)
class PlanStep:
    """One call of the right plan.

    Args:
        operation (`str`): The operation to ask for.
        arguments (`tuple[str | int, ...]`): Plain values, or the indices of earlier steps.
        depth (`int`): 1 for a step that needs no other.
    """

    operation: str
    arguments: tuple[str | int, ...]
    depth: int

    def request(self, values: Sequence[str]) -> str:
        """The request, with `values[i]` in the place of step i."""
        arguments = [
            argument if isinstance(argument, str) else values[argument]
            for argument in self.arguments
        ]
        return f"what is {WORDING[self.operation].format(' and '.join(arguments))} ?"


def plan_of(expression: Expression) -> list[PlanStep]:
    """The calls that answer a question, each after those that it needs."""
    steps: list[PlanStep] = []

    def visit(part: Expression) -> str | int:
        if isinstance(part, str):
            return part
        operation, *inner = part
        arguments = tuple(map(visit, inner))
        depths = [steps[argument].depth for argument in arguments if isinstance(argument, int)]
        steps.append(PlanStep(operation, arguments, 1 + max(depths, default=0)))
        return len(steps) - 1

    visit(expression)
    return steps


# --- questions ------------------------------------------------------------------------------------


def _draw_expression(
    question_type: str, country: Country, other: Country, generator: random.Random
) -> Expression:
    relation = generator.choice(("currency", "language", "code"))
    code = ("code", country.name)
    expressions: dict[str, Expression] = {
        "f": (relation, country.name),
        "ff": (relation, ("country", country.capital)),
        "n": ("sum", country.code),
        "r": ("form", generator.choice((country.currency, country.code))),
        "fn": ("sum", code),
        "fr": ("form", (relation, country.name)),
        "nr": ("form", ("sum", country.code)),
        "fnf": ("sum", code, ("code", other.name)),
        "fnr": ("form", ("sum", code)),
        "record": ("form", ("record", country.name)),
    }
    return expressions[question_type]


def draw_rows(
    countries: Sequence[Country], n: int, generator: random.Random, facts: Facts
) -> list[dict[str, Any]]:
    """Rows with up to `n` different questions about these countries."""
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(50 * n):
        (question_type,) = generator.choices(list(SHARES), list(SHARES.values()))
        expression = _draw_expression(question_type, *generator.sample(countries, 2), generator)
        question = question_text(expression)
        row = {
            "id": f"conductor {phrase(expression)}",
            "question": question,
            "answers": [facts.solve(expression)],
            "task": "conductor",
            "kind": question_type,
        }
        rows.setdefault(question, row)
        if len(rows) == n:
            break
    return list(rows.values())


def make_split(
    seed: int, train: int, test: int, facts: Facts
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Questions about 128 countries, and about the 40 others.

    Each test question has its own, fixed pool and names.
    """
    generator = random.Random(f"conductor {seed}")
    countries = generator.sample(facts.countries, len(facts.countries))
    train_rows = draw_rows(countries[HELD_OUT_COUNTRIES:], train, generator, facts)
    test_rows = draw_rows(countries[:HELD_OUT_COUNTRIES], test, generator, facts)
    test_rows = [{**row, "reset_seed": number} for number, row in enumerate(test_rows)]
    return train_rows, test_rows


# --- workers --------------------------------------------------------------------------------------


def read_value(reply: str) -> str | None:
    """The answer in a reply, in any of the wordings."""
    match = re.search(r"the answer is (.+) \.$", reply)
    if match is not None:
        return match[1]
    for wording in WORDINGS:
        prefix, suffix = wording.split("{value}")
        match = re.fullmatch(f"{re.escape(prefix)}(.+){re.escape(suffix)}", reply)
        if match is not None:
            return match[1]
    return None


def is_expert(member: str | None, operation: str) -> bool:
    """Whether a worker knows an operation."""
    expert = WORKER_OF[operation]
    return member == expert or (member == TWIN and expert == "facts")


class ScriptedWorker:
    """A worker with one specialty, a [`ChatModel`].

    It reads quoted replies (`#1 : the answer is 254 .`) as a large model does.

    Args:
        facts ([`Facts`]): Its knowledge.
        specialty (`str`): The operations that it knows: those of `facts`, `numbers` or `forms`.
        noise (`float`, *optional*, defaults to `0.0`): The share of requests that it answers with a
            guess.
        down (`float`, *optional*, defaults to `0.0`): The share of calls that fail.
        wordings (`Sequence[str]`, *optional*): Its answers, with `{value}`; the request decides
            which one.
        resamples (`bool`, *optional*, defaults to `False`): Whether another call with the same
            request has guesses of its own.
    """

    def __init__(
        self,
        facts: Facts,
        specialty: str,
        noise: float = 0.0,
        down: float = 0.0,
        wordings: Sequence[str] = (ANSWER,),
        resamples: bool = False,
    ):
        self.facts = facts
        self.specialty = specialty
        self.noise = noise
        self.down = down
        self.wordings = wordings
        self.resamples = resamples

    def answer(self, text: str, repeat: int | None = None) -> str:
        """The answer to a request with its quotations. `repeat` tells equal requests apart."""
        # Replace references by the answers in the quoted replies.
        *quoted, request = text.split("\n")
        for line in quoted:
            number, _, reply = line.partition(" : ")
            if number.startswith("#"):
                value = read_value(reply) or reply
                request = re.sub(rf"{number}\b", lambda _, value=value: value, request)

        expression = read_question(request)
        if expression is None or isinstance(expression, str):
            return NOT_UNDERSTOOD
        operation, *arguments = expression
        if WORKER_OF[operation] != self.specialty:
            return NOT_UNDERSTOOD
        seed = f"{self.specialty} {request}"
        if self.resamples:
            seed = f"{self.specialty} {repeat} {request}"
        generator = random.Random(seed)
        wording = random.Random(f"wording {request}").choice(self.wordings)
        guess = generator.choice(self.facts.values.get(operation, RECORD_WORDS))
        if not all(isinstance(argument, str) for argument in arguments):
            return wording.replace("{value}", guess)
        value = self.facts.apply(operation, *arguments)
        if value is None:
            return NOT_UNDERSTOOD
        if generator.random() < self.noise:
            value = guess
        return wording.replace("{value}", value)

    async def __call__(
        self, messages: Sequence[Message], *, repeat: int | None = None, **options: Any
    ) -> Reply:
        text = messages[-1]["content"]
        if random.Random(f"down {self.specialty} {repeat}").random() < self.down:
            return Reply(error=ServerFailed("down", self.specialty))
        answer = self.answer(text, repeat)
        return Reply(answer, usage=Usage(len(text.split()), len(answer.split())))


class SandboxWorkers(Workers):
    """[`Workers`] whose description a policy of two layers can copy from: each name follows its
    description.
    """

    def describe(self, workers: Mapping[str, str], row: Mapping[str, Any]) -> str:
        words = ["workers :"]
        words += [f"{self.pool[member].description} {name}" for name, member in workers.items()]
        budget = row.get("budget")
        if budget:
            words += ["budget :", budget]
        return " ".join(words)


def make_environment(
    facts: Facts,
    /,
    names: Iterable[str] = "ABCDEF",
    unavailable: Literal["failed", "visible"] = "failed",
    has_twin: bool = False,
    **changed: ScriptedWorker,
) -> SandboxWorkers:
    """The three workers.

    Args:
        facts ([`Facts`]): Their knowledge.
        names (`Iterable[str]`, *optional*): Names to draw from.
        unavailable (`str`, *optional*): As in [`Workers`].
        has_twin (`bool`, *optional*, defaults to `False`): Whether there is a cheap and noisy twin
            of `facts`.
        **changed ([`ScriptedWorker`]): Workers that replace the usual ones, by their names in the
            pool.
    """
    pool = {}
    for name, description in DESCRIPTION.items():
        chat = changed.get(name) or ScriptedWorker(facts, name)
        pool[name] = Worker(chat, description, usd=PRICE[name])
    if has_twin:
        twin = ScriptedWorker(facts, "facts", noise=TWIN_NOISE, resamples=True)
        pool[TWIN] = Worker(twin, TWIN, usd=TWIN_PRICE)
    return SandboxWorkers(pool, names=list(names), unavailable=unavailable)
