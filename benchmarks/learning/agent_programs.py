"""Agents of the sandbox, written with the `openai` package alone: what `program.py` and
`program_sandbox.py` train.

[`asks`] does what [`LLMEnvironment`] does: under [`native_seeds`] it makes the same rollouts, token
for token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from agentic_prompting.programs import Call
from agentic_prompting.programs.session import Session
from agentic_prompting.rollout import turn_seed

STOPS = ["</interaction_prompt>", "</answer>"]
TURNS = 5


@cache
def shared() -> Any:
    """One pool of connections for all rollouts of this process: a client of its own costs each
    rollout 30 ms.
    """
    return DefaultAsyncHttpxClient()


async def asks(row: Mapping[str, Any], base_url: str, api_key: str) -> str | None:
    """Prompt-R1's loop: the policy asks, the large LLM replies with its whole history, until the
    policy answers.
    """
    return await _converse(row, base_url, api_key, forgets=False)


async def last_exchange(row: Mapping[str, Any], base_url: str, api_key: str) -> str | None:
    """As [`asks`], with a history that is rewritten each turn: the question and the last exchange."""
    return await _converse(row, base_url, api_key, forgets=True)


async def vote(row: Mapping[str, Any], base_url: str, api_key: str) -> str | None:
    """Two sub-agents at once, each in a context of its own; where they disagree a third decides."""
    first, second = await asyncio.gather(asks(row, base_url, api_key), asks(row, base_url, api_key))
    if first == second:
        return first
    return await asks(row, base_url, api_key)


async def _converse(
    row: Mapping[str, Any], base_url: str, api_key: str, forgets: bool
) -> str | None:
    """One conversation of the policy with the large LLM; one that `forgets` holds only the last
    exchange.
    """
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=shared())
    question: Any = {"role": "user", "content": f"question : {row['question']}"}
    # The policy's conversation, and the large LLM's.
    messages = [question]
    exchanges = list[Any]()
    for turn in range(TURNS):
        completion = await client.chat.completions.create(
            model="agent", messages=messages, stop=STOPS
        )
        message = completion.choices[0].message
        text = message.content or ""
        if "<answer>" in text:
            return text.split("<answer>")[1].strip()
        if "<interaction_prompt>" not in text or turn == TURNS - 1:
            return None

        # Ask the large LLM.
        if forgets:
            messages = [question]
            exchanges = []
        request = text.split("<interaction_prompt>")[1].strip()
        exchanges = [*exchanges, {"role": "user", "content": request}]
        completion = await client.chat.completions.create(model="oracle", messages=exchanges)
        reply = completion.choices[0].message.content
        exchanges = [*exchanges, {"role": "assistant", "content": reply}]

        # Show the policy its reply.
        response = f"<interaction_response>\n{reply}\n</interaction_response>"
        messages = [*messages, message, {"role": "user", "content": response}]
    return None


AGENTS: dict[str, Callable[..., Any]] = {
    "script": asks,
    "vote": vote,
    "last exchange": last_exchange,
}


@contextmanager
def native_seeds() -> Iterator[None]:
    """While it lasts, a program's calls get the seeds that the turns of an episode have: by their
    number.
    """
    compute_seed = Session.compute_seed

    def compute_native_seed(self: Session, call: Call) -> int:
        return turn_seed(self.rollout.seed, call.number - 1)

    Session.compute_seed = compute_native_seed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Session.compute_seed = compute_seed  # type: ignore[method-assign]
