"""The large LLM of the sandbox: knows single facts, guesses when it would have to combine them.

This is Prompt-R1's premise with nothing else left in it: the large model has the knowledge, and whether it comes out
depends on how it is asked. A guess looks like an answer, so that only what it earns tells the agent which is which. How
often a guess is right: one in the number of different values of its kind, so about 1/6 for a continent, 1/70 for a
currency or language, 1/170 for a country; about 6 % over all questions of two and three hops.

It keeps no state: what it says follows from its seed and the conversation alone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from ..llm.types import Message, Reply, Usage
from .world import ParsedQuestion, Question, World, load_world, parse_question, solve

ANSWER = "the answer is {value} ."
"""Every answer, right or guessed; `{value}` is the answer itself, which the agent can copy."""

NOT_UNDERSTOOD = "i do not understand ."
"""What is said to anything that is no question of the sandbox."""


class Oracle:
    """A [`ChatModel`] over the [`World`].

    It answers the last user message; what was said before does not help it. One-hop questions it answers right, others
    with a guess of the right kind, the same guess whenever it is asked the same question. Sampling arguments are
    ignored.

    Args:
        world ([`World`], *optional*): What it knows; the whole world by default.
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
        self, messages: Sequence[Message], *, repeat: int | None = None, session: str | None = None, **sampling: Any
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
        solved = solve(question, self.world)
        value = self._recalled(question, solved, draw) if solved.hops == 1 else self._guessed(question, solved)
        return ANSWER.replace("{value}", value)

    def _recalled(self, question: ParsedQuestion, solved: Question, draw: str) -> str:
        rng = random.Random(f"noise {self.seed} {solved.text} {draw}")
        wrong = [value for value in self.world.values[question.chain[-1]] if value != solved.answer]
        return rng.choice(wrong) if wrong and rng.random() < self.noise else solved.answer

    def _guessed(self, question: ParsedQuestion, solved: Question) -> str:
        rng = random.Random(f"guess {self.seed} {solved.text}")
        if rng.random() < self.guess_right:
            return solved.answer
        return rng.choice(self.world.values[question.chain[-1]])

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
