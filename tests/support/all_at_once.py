"""Whether calls are made together, told without a clock: who makes them one by one waits for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from agentic_prompting.llm import ChatModel, Reply


class AllAtOnce:
    """A [`ChatModel`] that answers nobody before `n` calls are waiting, on one event loop.

    Args:
        chat ([`ChatModel`]): What it says then.
        n (`int`): How many calls have to wait at the same time.
    """

    def __init__(self, chat: ChatModel, n: int):
        self.chat, self.n = chat, n
        self._waiting: list[asyncio.Future[None]] = []

    async def __call__(self, messages: Any, **options: Any) -> Reply:
        here: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(here)
        if len(self._waiting) == self.n:
            together, self._waiting = self._waiting, []
            for one in together:
                one.set_result(None)
        await here
        return await self.chat(messages, **options)
