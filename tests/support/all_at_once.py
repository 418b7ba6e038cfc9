"""A check without a clock that calls are made together: a caller that makes them one by one never
gets a reply.
"""

from __future__ import annotations

import asyncio
from typing import Any

from agentic_prompting.llm import ChatModel, Reply


class AllAtOnce:
    """A [`ChatModel`] that replies only when `n` calls wait at the same time, on one event loop.

    Args:
        chat ([`ChatModel`]): The model that replies then.
        n (`int`): The number of calls that have to wait.
    """

    def __init__(self, chat: ChatModel, n: int):
        self.chat = chat
        self.n = n
        self._waiting: list[asyncio.Future[None]] = []

    async def __call__(self, messages: Any, **options: Any) -> Reply:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        if len(self._waiting) == self.n:
            calls = self._waiting
            self._waiting = []
            for call in calls:
                call.set_result(None)
        await turn
        return await self.chat(messages, **options)
