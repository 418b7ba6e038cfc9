"""The guarded world, E-SPL's sandbox: the oracle gives some facts only to requests that carry the
right word.

No reasoning finds these words, and trial takes long, so a system prompt has to state them.
Splitting a question into single facts, on the other hand, is a skill that a policy learns by
reward. This world has both kinds of thing that E-SPL is meant for, and keeps them apart.

A refusal names the word and ends the conversation: later requests get no answer. Otherwise an agent
could use the word of the refusal, and no system prompt would need it.

The module also makes the warm-start traces of the tiny policy: following the principles of a system
prompt. Every trace has rules and principles of its own, so the policy learns nothing about the
rules of any run, only the meaning of principles: `say currency amber` is a word for a kind of
request, `ask one fact at a time` a way to proceed. The policy obeys them most of the time, good
ones and bad ones alike. Without a principle it uses no word, now and then a random one, and splits
a question now and then. Text only, no torch.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from ..llm.types import Message, Reply
from ..rollout.grammar import TagGrammar
from .traces import Episode, Trace, vocabulary, write_trace
from .world import (
    Oracle,
    Question,
    World,
    all_questions,
    load_world,
    parse_question,
    sought,
    world_of,
)

WORDS = """
amber birch cedar clover copper coral falcon fern flint garnet hazel heron indigo
ivory jasper lantern maple marble opal pebble quartz saffron velvet willow
""".split()  # noqa: SIM905
"""The words that a rule may ask for; none occurs anywhere else in the world."""

ALWAYS_GUARDED = "capital"  # the relation that every draw of rules guards
ENDS_GUARDED = 3  # how many of the relations that questions end on are guarded

REFUSAL = "no . the {relation} needs the word {word} ."
"""The reply to a request for a guarded fact without its word, with another one, or with several."""

CLOSED = "i said no . good bye ."
"""The reply to everything after a refusal."""

PREAMBLE = "these are the rules of the house"
SAY = "say {relation} {word}"
"""How a principle gives a word, and how a request carries it."""

# Principles about how to proceed. Only the first one is any good.
STEPWISE = "ask one fact at a time"
WHOLE = "ask the whole question"
HASTY = "answer at once"

# The thought and the answer after a refusal.
GIVE_UP = "they said no"
NOTHING = "nothing"

MIXES: Mapping[str | None, Mapping[str, float]] = {
    None: {"decompose": 0.35, "pass_on": 0.4, "bare": 0.05, "impatient": 0.1, "partial": 0.1},
    STEPWISE: {"decompose": 0.65, "pass_on": 0.2, "bare": 0.05, "impatient": 0.05, "partial": 0.05},
    WHOLE: {"decompose": 0.1, "pass_on": 0.8, "bare": 0.05, "impatient": 0.05},
    HASTY: {"decompose": 0.1, "pass_on": 0.15, "bare": 0.05, "impatient": 0.7},
}
"""Shares of the kinds of trace under each principle: the good one lifts splitting about half-way,
and no further.
"""

OBEYS = 0.97  # share of the words of principles that the traces use
# Share of requests with a random word, without a principle: RL finds words by these alone.
RANDOM_WORD = 0.25
MOST_WORDS = 7  # words in the principles of a trace
ADVISED = 0.4  # share of the traces with a principle about how to proceed
RIGHT = 0.85  # share of the principles whose word is the right one


# ---- the world and its rules ----


@cache
def load_guarded_world() -> World:
    """Load the guarded world: every other country that has an airport, with nine relations.

    Not the whole world: four names more for each country would make a policy of this size spend its
    warm start on learning words.
    """
    world = load_world()
    countries = tuple(country for country in world.countries if country.airport)[::2]
    return World(countries, (*world.last_relations, "domain", "code", "symbol", "letters"))


def relations_of(world: World) -> tuple[str, ...]:
    """Return all nine: the two on the way to a country, and those that a question may end on."""
    return ("capital", "name", *world.last_relations)


def draw_rules(
    rng: random.Random, world: World | None = None, ends: int = ENDS_GUARDED
) -> dict[str, str]:
    """Draw the guarded relations, and a word for each: the way from an airport to its city, and
    some of the seven relations that a question may end on.

    With three of them, about a third of all questions need no word.
    """
    world = world or load_guarded_world()
    guarded = [ALWAYS_GUARDED, *rng.sample(world.last_relations, ends)]
    return dict(zip(guarded, rng.sample(WORDS, len(guarded)), strict=True))


def split_by_country(
    seed: int, n_test_countries: int = 20
) -> tuple[list[Question], list[Question]]:
    """Split the questions of two and three hops into train and test, which share no country.

    Raises:
        `ValueError`: There would be nothing left to train on.
    """
    world = load_guarded_world()
    if not 0 < n_test_countries < len(world.countries):
        raise ValueError(
            f"n_test_countries={n_test_countries} must be between 1 and {len(world.countries) - 1}"
        )
    rng = random.Random(f"house split {seed}")  # a seed keeps its name, or figures change
    countries = tuple(rng.sample(world.countries, len(world.countries)))
    # Two worlds without a common country, and all questions of each.
    train_world = replace(world, countries=countries[n_test_countries:])
    test_world = replace(world, countries=countries[:n_test_countries])
    train = all_questions((2, 3), train_world)
    test = all_questions((2, 3), test_world)
    rng.shuffle(train)
    rng.shuffle(test)
    return train, test


class GuardedOracle(Oracle):
    """An [`Oracle`] that gives guarded facts only to requests that carry their word.

    It guesses at questions of several hops, as every oracle does, and needs no word for that.

    Args:
        rules (`Mapping[str, str]`): The word for each guarded relation; see [`draw_rules`].
        world ([`World`], *optional*): The world whose facts it has; [`load_guarded_world`] by
            default.
        **options: `noise`, `guess_right`, `latency` and `seed`, as of [`Oracle`].
    """

    def __init__(self, rules: Mapping[str, str], world: World | None = None, **options: Any):
        super().__init__(world or load_guarded_world(), **options)
        self.rules = rules

    def answer(self, text: str, draw: str = "") -> str:
        # Only single facts are guarded.
        question = parse_question(text, self.world)
        if question is None or question.hops != 1:
            return super().answer(text, draw)
        relation = question.chain[0]
        word = self.rules.get(relation)

        # The word opens the fact if no other word of the world stands beside it.
        words_in_request = set(text.split()).intersection(WORDS)
        if word is None or words_in_request == {word}:
            return super().answer(text, draw)
        return REFUSAL.replace("{relation}", sought(relation)).replace("{word}", word)

    def _reply(self, messages: Sequence[Message], repeat: int | None) -> Reply:
        replies = [message["content"] for message in messages if message["role"] == "assistant"]
        # After a refusal the oracle is closed for the rest of the conversation.
        if any(is_refusal(reply) for reply in replies):
            return Reply(text=CLOSED)
        return super()._reply(messages, repeat)


def is_refusal(reply: str) -> bool:
    """Return whether a reply is a `REFUSAL`."""
    return reply.startswith(REFUSAL.partition("{")[0])


# ---- traces to imitate ----


class _EpisodeRefused(Exception):
    """The oracle refused a request, which ends the episode."""


class _GuardedEpisode(Episode):
    """An episode in the guarded world: requests carry words, and a refusal ends it."""

    def __init__(
        self, oracle: GuardedOracle, advice: Mapping[str, Sequence[str]], rng: random.Random
    ):
        super().__init__(oracle, TagGrammar())
        self.advice = advice
        self.world = oracle.world
        self.rng = rng

    def ask(self, thought: str, request: str) -> str:
        value = super().ask(thought, self._with_word(request))
        if is_refusal(value):
            raise _EpisodeRefused
        return value

    def _with_word(self, request: str) -> str:
        """Add the word that the principles give for this relation; without a principle, now and
        then a random one.
        """
        question = parse_question(request, self.world)
        if question is None or question.hops > 1:
            return request
        relation = sought(question.chain[0])
        words = self.advice.get(relation, ())
        if words and self.rng.random() < OBEYS:
            word = self.rng.choice(words)
        elif not words and self.rng.random() < RANDOM_WORD:
            word = self.rng.choice(WORDS)
        else:
            return request
        return f"{request} {say(relation, word)}"


def say(relation: str, word: str) -> str:
    """Fill in the principle `SAY`."""
    return SAY.replace("{relation}", relation).replace("{word}", word)


def make_guarded_traces(
    questions: Sequence[Question], n: int, rng: random.Random, heeds: bool = True
) -> list[tuple[list[str], Trace]]:
    """Write episodes to imitate, each with the principles it was made under, in a world without the
    countries that no question is about.

    Args:
        questions (`Sequence[Question]`): Questions of two or more hops, drawn with replacement.
        n (`int`): Number of episodes.
        rng (`random.Random`): Decides everything.
        heeds (`bool`, *optional*, defaults to `True`): Whether principles about how to proceed are
            heeded; words are.
    """
    world = world_of(questions, load_guarded_world())
    return [_write_guarded_trace(rng.choice(questions), world, rng, heeds) for _ in range(n)]


def _write_guarded_trace(
    question: Question, world: World, rng: random.Random, heeds: bool
) -> tuple[list[str], Trace]:
    # Rules and principles of this trace alone.
    rules = draw_rules(rng, world)
    advice = _draw_advice(question, world, rules, rng)
    style = None
    if rng.random() < ADVISED:
        style = rng.choice([STEPWISE, STEPWISE, WHOLE, HASTY])

    # The principles in any order, the one about how to proceed among them.
    principles: list[str] = []
    for relation, words in advice.items():
        principles += [say(relation, word) for word in words]
    rng.shuffle(principles)
    if style is not None:
        principles.insert(rng.randint(0, len(principles)), style)

    # An episode of a kind that the style makes likely.
    mix = MIXES[style if heeds else None]
    (kind,) = rng.choices(list(mix), list(mix.values()))
    oracle = GuardedOracle(rules, world, seed=rng.randrange(2**32))
    episode = _GuardedEpisode(oracle, advice, rng)
    try:
        trace = write_trace(kind, question, episode, world, rng)
    except _EpisodeRefused:
        episode.finish(GIVE_UP, NOTHING)
        trace = episode.trace(kind, question)
    return principles, trace


def _draw_advice(
    question: Question, world: World, rules: dict[str, str], rng: random.Random
) -> dict[str, list[str]]:
    """Draw the words that principles give by relation.

    A right word for a relation without a rule adds the rule.

    The relations of the question come up more often than others: there is nothing to learn from the
    rest.
    """
    likely = [relation for relation in question.chain if rng.random() < 0.6]
    other_relations = rng.sample(relations_of(world), rng.randint(0, MOST_WORDS))
    relations = list(dict.fromkeys([*likely, *other_relations]))

    advice: dict[str, list[str]] = defaultdict(list)
    for relation in relations[:MOST_WORDS]:
        # The word of the rule, or any word.
        is_right = rng.random() < RIGHT
        word = rng.choice(WORDS)
        if is_right:
            word = rules.setdefault(relation, word)
        advice[sought(relation)].append(word)

        # Now and then a second principle contradicts the first.
        if rng.random() < 0.08:
            other_words = [candidate for candidate in WORDS if candidate != word]
            advice[sought(relation)].append(rng.choice(other_words))
    return dict(advice)


def guarded_vocabulary() -> list[str]:
    """Return every word that occurs in the guarded world."""
    texts = [PREAMBLE, SAY, STEPWISE, WHOLE, HASTY, GIVE_UP, NOTHING, REFUSAL, CLOSED]
    texts += ["city country", *WORDS]
    texts += [f"[G{number}]." for number in range(32)]
    guarded_words = set(" ".join(texts).split()) - {"{relation}", "{word}"}
    return sorted(guarded_words | set(vocabulary(load_guarded_world())))
