"""Threads for long requests: parsing and rendering them would hold up the event loop of all
rollouts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

T = TypeVar("T")

_THREADS = 4  # few, because they share one interpreter with the event loop


async def run_in_request_thread(function: Callable[[], T]) -> T:
    """Run a function in a thread, and return its result."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_executor(os.getpid()), function)


@cache
def _executor(pid: int) -> ThreadPoolExecutor:
    """Return this process's executor: threads do not survive a fork."""
    return ThreadPoolExecutor(_THREADS, "agentic-prompting-requests")
