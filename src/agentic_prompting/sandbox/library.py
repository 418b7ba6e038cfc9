"""A searchable library of facts that no language model can know: facts about invented towns.

The agent has to learn to ask instead of guessing, and to answer with the fact alone. Every name is
drawn from syllables, so no model has read about these towns. Settings are chosen on the countries
of `world.py` instead ([`country_facts`]), whose facts are worded in the same way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..environments import BM25Retriever
from ..rewards import exact_match, token_f1
from ..rollout import Environment, QuestionGrammar, Rollout
from .world import load_world

# The parts of all invented names: of towns, rivers, inns, saints and mayors.
_BEGINNINGS = """Al Ar Bel Bran Cal Cor Dal Dor El Fen Gal Hal Ir Jor Kel Lor Mar Nel Or Pel Quil Ral Sel Tor Ul Vel
Wen Yor Zel""".split()  # noqa: SIM905
_MIDDLES = """a an ba den do en fi gar go i ka la le lin mo na no or ra ri sa se ta ti tra u va ve""".split()  # noqa: SIM905
_ENDINGS = """bridge burg by dale fell field ford gate ham holm hurst mere mond more port stead thorpe ton vale
wick""".split()  # noqa: SIM905
_ADJECTIVES = """Amber Blind Brazen Copper Crooked Golden Hollow Idle Jolly Merry Old Painted Quiet Red Silver
Sleepy""".split()  # noqa: SIM905
_ANIMALS = """Badger Bear Crow Eel Fox Goose Hare Heron Lynx Mole Otter Owl Pike Raven Stag Swan Toad Wolf Wren
Zebra""".split()  # noqa: SIM905
_FIRST_NAMES = """Anselm Berit Cyra Dorian Edda Florin Greta Hilde Ivo Jarek Katla Lorin Mirel Nilo Odette Piers Rosa
Silas Tilda Ulf""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Fact:
    """One fact about one subject.

    Args:
        subject (`str`): The town or country that it is about.
        relation (`str`): The name of its relation: `mayor`, `river`, ...
        question (`str`): The question that it answers.
        document (`str`): The sentence that states it.
        value (`str`): The answer.
    """

    subject: str
    relation: str
    question: str
    document: str
    value: str

    def as_row(self) -> dict[str, Any]:
        """The fact as a row of a data set."""
        return {
            "question": self.question,
            "answers": [self.value],
            "subject": self.subject,
            "relation": self.relation,
        }


@dataclass(frozen=True)
class Relation:
    """Templates for the question and the statement of a relation's facts, with `{subject}` and
    `{value}`.
    """

    question: str
    document: str

    def fact(self, subject: str, relation: str, value: str) -> Fact:
        """Build the fact that `subject` has this value."""
        question = self.question.format(subject=subject)
        document = self.document.format(subject=subject, value=value)
        return Fact(subject, relation, question, document, value)


# The six facts about a town. Each document shares words with its question, which BM25 needs.
_TOWN_RELATIONS = {
    "mayor": Relation("Who is the mayor of {subject}?", "The mayor of {subject} is {value}."),
    "river": Relation(
        "Which river flows through {subject}?", "The river {value} flows through {subject}."
    ),
    "twin": Relation(
        "What is the twin town of {subject}?", "{value} is the twin town of {subject}."
    ),
    "founded": Relation(
        "In which year was {subject} founded?", "{subject} was founded in {value}."
    ),
    "inn": Relation(
        "What is the oldest inn in {subject}?", "The oldest inn in {subject} is the {value}."
    ),
    "saint": Relation(
        "Who is the patron saint of {subject}?", "The patron saint of {subject} is {value}."
    ),
}
# Each of these names is a field of [`Country`].
_COUNTRY_RELATIONS = {
    "currency": Relation(
        "What is the currency of {subject}?", "The currency of {subject} is the {value}."
    ),
    "language": Relation(
        "Which language is spoken in {subject}?",
        "The language that is spoken in {subject} is {value}.",
    ),
    "code": Relation(
        "What is the telephone code of {subject}?", "The telephone code of {subject} is {value}."
    ),
    "symbol": Relation(
        "What is the currency symbol of {subject}?", "The currency symbol of {subject} is {value}."
    ),
    "domain": Relation(
        "What is the internet domain of {subject}?", "{value} is the internet domain of {subject}."
    ),
    "capital": Relation(
        "Which city is the capital of {subject}?", "The capital of {subject} is {value}."
    ),
}


def town_facts(seed: int = 0, count: int = 96) -> list[Fact]:
    """Draw facts about invented towns, six for each.

    Args:
        seed (`int`, *optional*, defaults to `0`): Decides every name and fact.
        count (`int`, *optional*, defaults to `96`): How many towns.
    """
    rng = random.Random(seed)
    # Two names for each town: its own, and that of its twin.
    names = _draw_place_names(rng, 2 * count)
    facts = []
    for town, twin in zip(names[:count], names[count:], strict=True):
        # The order of these values is the order of the draws.
        values = {
            "mayor": f"{rng.choice(_FIRST_NAMES)} {_surname(rng)}",
            "river": rng.choice(_BEGINNINGS) + rng.choice(_MIDDLES) + rng.choice(_MIDDLES),
            "twin": twin,
            "founded": str(rng.randint(1050, 1899)),
            "inn": f"{rng.choice(_ADJECTIVES)} {rng.choice(_ANIMALS)}",
            "saint": f"Saint {rng.choice(_BEGINNINGS)}{rng.choice(_MIDDLES)}{rng.choice('mnrs')}",
        }
        for relation, value in values.items():
            facts.append(_TOWN_RELATIONS[relation].fact(town, relation, value))
    return facts


def country_facts() -> list[Fact]:
    """List facts about the sandbox's countries, on which settings are chosen."""
    facts = []
    for country in load_world().countries:
        for name, relation in _COUNTRY_RELATIONS.items():
            value = getattr(country, name)
            if value:
                facts.append(relation.fact(country.name, name, value))
    return facts


def split_by_subject(
    facts: Sequence[Fact], held_out: int, seed: int = 0
) -> tuple[list[Fact], list[Fact]]:
    """Split facts into train and test, which share no subject.

    Args:
        facts (`Sequence[Fact]`): All facts.
        held_out (`int`): The number of subjects in the test part.
        seed (`int`, *optional*, defaults to `0`): Decides the subjects, and the order of the facts.

    Raises:
        `ValueError`: If no subject would be left to train on.
    """
    # Sort before shuffling: the order of a set differs between processes.
    subjects = sorted({fact.subject for fact in facts})
    if not 0 < held_out < len(subjects):
        raise ValueError(f"held_out must be from 1 to {len(subjects) - 1}, got {held_out}")
    rng = random.Random(seed)
    rng.shuffle(subjects)
    test_subjects = set(subjects[:held_out])
    # Mix the facts of different subjects.
    shuffled = list(facts)
    rng.shuffle(shuffled)
    train = [fact for fact in shuffled if fact.subject not in test_subjects]
    test = [fact for fact in shuffled if fact.subject in test_subjects]
    return train, test


def uneven_demonstrations(
    facts: Sequence[Fact],
    count: int,
    seed: int = 0,
    guesses: float = 0.5,
    repeats: float = 0.7,
) -> list[dict[str, Any]]:
    """Write conversations to imitate, as uneven as those that people have lying around.

    In half of them the agent does not ask, and is wrong. In the others it asks the question; only
    about one in three of these gives the fact alone, while the others repeat the whole sentence. So
    their imitation shows a model what can be done, and rewards have to teach it what is worth
    doing.

    Args:
        facts (`Sequence[Fact]`): What the conversations are about.
        count (`int`): How many.
        seed (`int`, *optional*, defaults to `0`): Decides the facts, and what becomes of each.
        guesses (`float`, *optional*, defaults to `0.5`): The share in which the agent does not ask.
        repeats (`float`, *optional*, defaults to `0.7`): Of those in which it asks, the share that
            repeat the sentence.

    Returns:
        `list[dict]`: Traces, as [`rollout_from_trace`] takes them.

    Raises:
        `ValueError`: If there are fewer facts than `count`.
    """
    if count > len(facts):
        raise ValueError(f"count must be at most {len(facts)}, the number of facts, got {count}")
    rng = random.Random(seed)
    traces = []
    for fact in rng.sample(list(facts), count):
        draw = rng.random()
        if draw < guesses:
            # A guess: the value of another fact of the same kind.
            similar = [other for other in facts if other.relation == fact.relation]
            guess = rng.choice(similar).value
            turns, observations = [fact.document.replace(fact.value, guess)], []
        elif draw < guesses + repeats * (1 - guesses):
            turns, observations = [fact.question, fact.document], [fact.document]
        else:
            turns, observations = [fact.question, fact.value], [fact.document]
        traces.append({**fact.as_row(), "turns": turns, "observations": observations})
    return traces


class Library(Environment):
    """An expert who looks facts up: answers a question with the sentence that fits it best (BM25).

    Args:
        facts (`Sequence[Fact]`): The facts in the library.

    Raises:
        `ImportError`: Without `agentic-prompting[search]`.
    """

    card_note = "The environment was a library of invented facts, in the place of a search engine."
    grammar = QuestionGrammar(
        frame=("The expert says: ", "\nWrite only the answer, in as few words as possible.")
    )
    prompt_template = (
        "You do not know the answer to this: {question} Write one question to an expert."
    )

    def __init__(self, facts: Sequence[Fact]):
        self._search = BM25Retriever([fact.document for fact in facts])

    def step(self, rollout: Rollout) -> str:
        """The best document for the question."""
        return self.look_up(rollout.turns[-1].request or "")

    def look_up(self, request: str) -> str:
        """The document that fits a request best."""
        (documents,) = self._search([request], 1)
        return documents[0].text if documents else "Nothing was found."


def brief_answer_reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    rollout: Sequence[Rollout],
    answers: Sequence[Sequence[str]],
    log_metric: Callable[[str, float], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """The mean of exact match and token F1, so that the fact alone earns more than the sentence
    that states it.

    Args:
        prompts (`Sequence`), completions (`Sequence`): Not read.
        rollout (`Sequence[Rollout]`): One episode per row.
        answers (`Sequence[Sequence[str]]`): Accepted answers per row.
        log_metric (`Callable`, *optional*): TRL's; gets the shares of rollouts that asked and that
            match exactly.

    Returns:
        `list[float | None]`: `None` for a rollout that failed through no fault of the agent, 0.0
        without an answer.
    """
    rewards: list[float | None] = []
    for episode, accepted in zip(rollout, answers, strict=True):
        # A failure is not the agent's fault: no reward, rather than a bad one.
        if episode.status == "failed":
            rewards.append(None)
            continue

        answer = episode.answer or ""
        matches = exact_match(answer, accepted)
        # A sentence with the fact in it does not match exactly, and has only a part of the F1.
        rewards.append((matches + token_f1(answer, accepted)) / 2)
        if log_metric is not None:
            # Only an agent that asked has an observation.
            log_metric("asked", float(bool(episode.observations)))
            log_metric("exact_match", matches)
    return rewards


def _draw_place_names(rng: random.Random, count: int) -> list[str]:
    """Draw distinct names, in the order of their first draw."""
    names: dict[str, None] = {}
    while len(names) < count:
        name = rng.choice(_BEGINNINGS) + rng.choice(_MIDDLES) + rng.choice(_ENDINGS)
        # A name that was drawn before changes nothing.
        names[name] = None
    return list(names)


def _surname(rng: random.Random) -> str:
    return (rng.choice(_BEGINNINGS) + rng.choice(_MIDDLES) + rng.choice(_ENDINGS)).capitalize()
