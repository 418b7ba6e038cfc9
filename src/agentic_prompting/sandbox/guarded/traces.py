"""What the tiny policy is warm-started on in the guarded world: following the principles of a system prompt. Text only.

Every trace has rules and principles of its own, so that nothing about the rules of any run can be learned here, only
what principles are: `say currency amber` is a word for a kind of request, `ask one fact at a time`
a way to proceed. The policy obeys them most of the time, good ones and bad ones alike. Without a principle it says no
word, now and then a random one, and splits a question now and then.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence

from ...rollout.grammar import TagGrammar
from ..traces import Episode, Trace, trace_of, vocabulary, write_trace
from ..world import Question, World, parse_question, sought
from .world import CLOSED, REFUSAL, WORDS, GuardedOracle, draw_rules, is_refusal, load_guarded_world, relations_of

PREAMBLE = "these are the rules of the house"
SAY = "say {relation} {word}"
"""How a principle gives a word, and how a request carries it."""

STEPWISE, WHOLE, HASTY = "ask one fact at a time", "ask the whole question", "answer at once"
"""Principles about how to proceed. Only the first one is any good."""

GIVE_UP, NOTHING = "they said no", "nothing"
"""The thought and the answer after a refusal."""

MIXES: Mapping[str | None, Mapping[str, float]] = {
    None: {"decompose": 0.35, "pass_on": 0.4, "bare": 0.05, "impatient": 0.1, "partial": 0.1},
    STEPWISE: {"decompose": 0.65, "pass_on": 0.2, "bare": 0.05, "impatient": 0.05, "partial": 0.05},
    WHOLE: {"decompose": 0.1, "pass_on": 0.8, "bare": 0.05, "impatient": 0.05},
    HASTY: {"decompose": 0.1, "pass_on": 0.15, "bare": 0.05, "impatient": 0.7},
}
"""Shares of the kinds of trace under each principle: the good one lifts splitting about half-way, and no further."""

OBEYS = 0.97  # how often a word that a principle gives is said
RANDOM_WORD = 0.1  # how often some word is said where no principle gives one: all that RL has to find words with
MOST_WORDS = 7  # that principles give
ADVISED = 0.4  # share of the traces with a principle about how to proceed
RIGHT = 0.85  # share of the principles whose word is the right one


class _Refused(Exception):
    pass


class _GuardedEpisode(Episode):
    """An episode in the guarded world: requests carry words, and a refusal ends it."""

    def __init__(self, oracle: GuardedOracle, advice: Mapping[str, Sequence[str]], rng: random.Random):
        super().__init__(oracle, TagGrammar())
        self.advice, self.world, self.rng = advice, oracle.world, rng

    def ask(self, thought: str, request: str) -> str:
        value = super().ask(thought, self._with_word(request))
        if is_refusal(value):
            raise _Refused
        return value

    def _with_word(self, request: str) -> str:
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
    """`SAY`, filled in."""
    return SAY.replace("{relation}", relation).replace("{word}", word)


def make_guarded_traces(questions: Sequence[Question], n: int, rng: random.Random) -> list[tuple[list[str], Trace]]:
    """Episodes to imitate, each with the principles it was made under.

    Args:
        questions (`Sequence[Question]`): Questions of two or more hops, drawn with replacement.
        n (`int`): How many.
        rng (`random.Random`): Decides everything.
    """
    return [_make(rng.choice(questions), load_guarded_world(), rng) for _ in range(n)]


def _make(question: Question, world: World, rng: random.Random) -> tuple[list[str], Trace]:
    style, advice, rules = _circumstances(question, world, rng)
    principles = [say(relation, word) for relation, words in advice.items() for word in words]
    rng.shuffle(principles)
    if style is not None:
        principles.insert(rng.randint(0, len(principles)), style)
    mix = MIXES[style]
    (kind,) = rng.choices(list(mix), list(mix.values()))
    episode = _GuardedEpisode(GuardedOracle(rules, world, seed=rng.randrange(2**32)), advice, rng)
    try:
        return principles, write_trace(kind, question, episode, world, rng)
    except _Refused:
        episode.finish(GIVE_UP, NOTHING)
        return principles, trace_of(kind, question, episode)


def _circumstances(
    question: Question, world: World, rng: random.Random
) -> tuple[str | None, dict[str, list[str]], dict[str, str]]:
    """A principle about how to proceed or none, the words that principles give by relation, and the rules.

    The relations of the question come up more often than others: there is nothing to learn from those not asked for.
    """
    rules = draw_rules(rng, world)
    parsed = parse_question(question.text, world)
    assert parsed is not None, question.text
    likely = [relation for relation in parsed.chain if rng.random() < 0.6]
    relations = list(dict.fromkeys([*likely, *rng.sample(relations_of(world), rng.randint(0, MOST_WORDS))]))[
        :MOST_WORDS
    ]
    advice: dict[str, list[str]] = defaultdict(list)
    for relation in relations:
        word = rules.setdefault(relation, rng.choice(WORDS)) if rng.random() < RIGHT else rng.choice(WORDS)
        advice[sought(relation)].append(word)
        if rng.random() < 0.08:  # another principle that contradicts it
            advice[sought(relation)].append(rng.choice([other for other in WORDS if other != word]))
    style = rng.choice([STEPWISE, STEPWISE, WHOLE, HASTY]) if rng.random() < ADVISED else None
    return style, dict(advice), rules


def guarded_vocabulary() -> list[str]:
    """Every word that occurs in the guarded world."""
    marks = [f"[G{number}]." for number in range(32)]
    fixed = [PREAMBLE, SAY, STEPWISE, WHOLE, HASTY, GIVE_UP, NOTHING, REFUSAL, CLOSED, "city country", *marks, *WORDS]
    own = {word for text in fixed for word in text.split()} - {"{relation}", "{word}"}
    return sorted(own | set(vocabulary(load_guarded_world())))
