"""Supervised traces of mixed quality: what the tiny policy is warm-started on. Text only, no torch.

Mixed, because a policy that has seen nothing but good episodes has nothing left to learn by reward,
and one that has seen none would never find them by chance. A turn does what its thought says, so
that what GRPO has to learn is mostly which thought to have.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TypedDict

from ..llm import ChatModel, Message, complete
from ..rollout.grammar import TagGrammar
from .world import (
    ANSWER,
    NOT_UNDERSTOOD,
    SOUGHT,
    Question,
    World,
    load_world,
    parse_question,
    question_text,
    sought,
    value_of,
)

DEFAULT_MIX = {"decompose": 0.3, "pass_on": 0.4, "bare": 0.08, "impatient": 0.1, "partial": 0.12}
"""Share of each kind.

Passing the question on is the habit to be unlearned: it is the likeliest first move, so an
imitator is mostly wrong whether it samples or takes its likeliest words. About a third of these
traces end on the right answer.
"""

# All thoughts that occur in traces.
FIRST = "first find the {sought}"
NEXT = "now find the {sought}"
PASS_ON = "ask the whole question"
IMPATIENT = "i know this"
DONE = "done"


class Trace(TypedDict):
    """One episode to imitate.

    Args:
        kind (`str`): A key of `KINDS`.
        question (`str`): The question.
        answers (`list[str]`): The right answers, whatever the episode ends on.
        turns (`list[str]`): The agent's texts, turn by turn; the last one answers.
        observations (`list[str]`): The replies in between, without tags; one fewer than turns.
    """

    kind: str
    question: str
    answers: list[str]
    turns: list[str]
    observations: list[str]


class Episode:
    """An episode while it is being written: its turns, and the conversation with the oracle.

    Args:
        oracle ([`ChatModel`]): The model that replies.
        grammar ([`TagGrammar`]): The tags to write.
    """

    def __init__(self, oracle: ChatModel, grammar: TagGrammar):
        self.oracle = oracle
        self.grammar = grammar
        self.turns: list[str] = []
        self.messages: list[Message] = []

    def ask(self, thought: str, request: str) -> str:
        """Write a request; returns the value in the reply."""
        # The turn, as the policy is to write it.
        self.turns.append(
            f"{_tagged(self.grammar.think, thought)} {_tagged(self.grammar.act, request)}"
        )

        # The oracle's reply in this conversation.
        self.messages.append({"role": "user", "content": request})
        reply = complete(self.oracle, self.messages)
        if reply.error is not None:
            raise reply.error
        self.messages.append({"role": "assistant", "content": reply.text})
        # A reply that is not an answer is taken whole: these are traces of mixed quality.
        return value_of(reply.text) or reply.text

    def finish(self, thought: str, answer: str) -> None:
        self.turns.append(
            f"{_tagged(self.grammar.think, thought)} {_tagged(self.grammar.answer, answer)}"
        )

    def trace(self, kind: str, question: Question) -> Trace:
        """Return the complete episode as a trace."""
        replies = [
            message["content"] for message in self.messages if message["role"] == "assistant"
        ]
        return Trace(
            kind=kind,
            question=question.text,
            answers=[question.answer],
            turns=self.turns,
            observations=replies,
        )


def _tagged(tag: str, text: str) -> str:
    """Write spaces around every tag: each is one word to the tokenizer."""
    return f"<{tag}> {text} </{tag}>"


def _find(thought: str, relation: str) -> str:
    return thought.replace("{sought}", sought(relation))


def _decompose(episode: Episode, question: Question, world: World, rng: random.Random) -> None:
    """Ask for one fact after the other, each question made from the reply before it."""
    value = question.start
    thought = FIRST
    for relation in question.chain:
        value = episode.ask(_find(thought, relation), question_text(value, (relation,)))
        thought = NEXT
    episode.finish(DONE, value)


def _pass_on(episode: Episode, question: Question, world: World, rng: random.Random) -> None:
    """Ask the question as it came; the answer is the oracle's guess."""
    guess = episode.ask(PASS_ON, question.text)
    episode.finish(DONE, guess)


def _bare(episode: Episode, question: Question, world: World, rng: random.Random) -> None:
    """Play one of the two above that ends without a thought: it can be acted on, but is not well
    formed.
    """
    write_episode = rng.choice((_decompose, _pass_on))
    write_episode(episode, question, world, rng)
    # Cut the thought off the last turn.
    episode.turns[-1] = episode.turns[-1].partition(f"</{episode.grammar.think}> ")[2]


def _impatient(episode: Episode, question: Question, world: World, rng: random.Random) -> None:
    """Answer with a value of the right kind, out of nowhere."""
    episode.finish(IMPATIENT, rng.choice(world.values[question.chain[-1]]))


def _partial(episode: Episode, question: Question, world: World, rng: random.Random) -> None:
    """Ask for the first fact, and then go astray: it is taken for the answer, or something else is
    asked than the next hop.
    """
    # The first fact, as in a good episode.
    first, *rest = question.chain
    value = episode.ask(_find(FIRST, first), question_text(question.start, (first,)))

    # Half of these go on, but with the wrong request.
    if rng.random() < 0.5:
        thought = PASS_ON
        if len(rest) == 2:
            # Two hops at once.
            request = question_text(value, rest)
        elif rest[0] in world.last_relations:
            # Another relation than the question's.
            other_relations = [relation for relation in world.last_relations if relation != rest[0]]
            wrong_relation = rng.choice(other_relations)
            thought = _find(NEXT, wrong_relation)
            request = question_text(value, (wrong_relation,))
        else:
            # The whole question.
            request = question.text
        value = episode.ask(thought, request)
    episode.finish(DONE, value)


KINDS: dict[str, Callable[[Episode, Question, World, random.Random], None]] = {
    "decompose": _decompose,
    "pass_on": _pass_on,
    "bare": _bare,
    "impatient": _impatient,
    "partial": _partial,
}


def make_traces(
    questions: Sequence[Question],
    n: int,
    mix: Mapping[str, float],
    oracle: ChatModel,
    rng: random.Random,
    grammar: TagGrammar = TagGrammar(),
    world: World | None = None,
) -> list[Trace]:
    """Write episodes for the policy to imitate.

    Args:
        questions (`Sequence[Question]`): Questions of two hops or more; drawn with replacement.
        n (`int`): Number of traces.
        mix (`Mapping[str, float]`): How often each kind is drawn, relative to the others;
            `DEFAULT_MIX`, for example.
        oracle ([`ChatModel`]): The model that replies. A noisy one makes the good traces worse.
        rng (`random.Random`): Draws questions, kinds and slips.
        grammar ([`TagGrammar`], *optional*): The tags to write.
        world ([`World`], *optional*): The world that impatient answers are drawn from; the whole
            world by default.

    Returns:
        `list[Trace]`: In the order they were drawn.

    Raises:
        `ValueError`: If `mix` has an unknown kind, or a question is not the sandbox's or has a
            single hop.
        `LLMError`: If the oracle fails.
    """
    unknown = set(mix) - set(KINDS)
    if unknown:
        raise ValueError(f"mix: unknown kinds {sorted(unknown)}; the kinds are {list(KINDS)}")
    world = world or load_world()
    # All kinds are drawn first: this order of draws decides what a seed stands for.
    kinds = rng.choices(list(mix), weights=list(mix.values()), k=n)
    return [
        write_trace(kind, rng.choice(questions), Episode(oracle, grammar), world, rng)
        for kind in kinds
    ]


def write_trace(
    kind: str, question: Question, episode: Episode, world: World, rng: random.Random
) -> Trace:
    """Write one trace into a fresh `episode`; see [`make_traces`]."""
    if question.hops < 2 or parse_question(question.text, world) is None:
        raise ValueError(
            f"traces need questions of the sandbox with two hops or more, got {question.text!r}"
        )
    KINDS[kind](episode, question, world, rng)
    return episode.trace(kind, question)


def vocabulary(world: World | None = None, grammar: TagGrammar = TagGrammar()) -> list[str]:
    """Return every word that occurs in a question, a reply, a trace or a name, sorted; names are
    split at their spaces.
    """
    world = world or load_world()
    # Questions, replies and thoughts.
    texts = [*world.texts.values(), ANSWER, NOT_UNDERSTOOD, *SOUGHT.values()]
    texts += [FIRST, NEXT, PASS_ON, IMPATIENT, DONE]
    # Tags, names and nouns.
    texts += [
        _tagged(tag, "")
        for tag in (grammar.think, grammar.act, grammar.observation, grammar.answer)
    ]
    texts += chain.from_iterable(world.values.values())
    texts += world.last_relations

    # Their words, without the placeholders of the templates.
    words = set(" ".join(texts).split())
    return sorted(words - {"{start}", "{value}", "{sought}"})
