"""Episodes with tools: calls as a policy writes them, and environments that answer them."""

import asyncio
import json

from agentic_prompting.interop import (
    ToolEnvironment,
)
from agentic_prompting.llm.loop import run
from agentic_prompting.rollout import (
    Rollout,
    Sample,
)


def capital(country: str) -> str:
    """The capital of a country.

    Args:
        country: Its English name.
    """
    return {"Kenya": "Nairobi", "Peru": "Lima"}[country]


async def currency(country: str, years: int = 1) -> dict:
    """The currency of a country.

    Args:
        country: Its English name.
        years: Since when.
    """
    await asyncio.sleep(0)
    return {"currency": {"Kenya": "shilling"}[country], "years": years}


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def asked(environment: ToolEnvironment, *turns: str, row: dict | None = None) -> Rollout:
    """A rollout that has said these turns, the last not yet answered."""
    rollout = Rollout([1], row=row or {}, seed=7)
    for text in turns:
        rollout.add_turn(Sample([1]), environment.grammar.parse(text))
    return rollout


def step(environment: ToolEnvironment, *turns: str, row: dict | None = None):
    return run(environment.step(asked(environment, *turns, row=row)))


class Guess:
    """As in TRL's documentation: state per episode, methods as tools, a reward of its own."""

    def reset(self, secret: int = 3, **row: object) -> str:
        if secret < 0:
            raise ConnectionError("the game's server is down")
        self.secret = secret
        self.tries = 0
        return " Guess a number."

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: The guess.
        """
        self.tries += 1
        return "right" if number == self.secret else "wrong"

    def get_reward(self) -> float:
        return 1.0 / self.tries
