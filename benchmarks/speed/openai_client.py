"""Whether `OpenAIChat` should stand on the `openai` package: one call and 1,024 calls at once, both
ways in one run.

    pip install "openai[aiohttp]"
    python -m benchmarks.speed.openai_client  # about a minute

The package is used at its fastest: aiohttp as its transport, raw responses, no retries of its own.
What our client does on top (budget, prices, circuit breaker, errors as data) is missing from its
figure. The rule was set before the measurement: at up to 1.5 ms of processor time a call, and up to
1.5 times the server's 5 s for 1,024 calls at once, the package replaces `llm/openai_http.py`.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from agentic_prompting.llm import OpenAIChat
from agentic_prompting.llm.loop import run
from benchmarks.speed.program import serving

SEQUENTIAL_CALLS = 1000
CALLS_AT_ONCE = 1024
SERVER_SECONDS = 5.0
REPEATS = 3

Ask = Callable[[int], Awaitable[str]]


@dataclass(frozen=True)
class Figures:
    """What one client takes.

    Args:
        call_ms (`float`): Processor time of a call in milliseconds, the least of three runs.
        in_flight_ratio (`float`): Wall time of 1,024 calls at once, divided by the server's delay.
    """

    call_ms: float
    in_flight_ratio: float


@asynccontextmanager
async def our_client(url: str, connections: int) -> Any:
    chat = OpenAIChat("m", url, api_key="k", price=(1, 1), max_concurrency=connections)

    async def ask(number: int) -> str:
        reply = await chat([{"role": "user", "content": f"number {number} ?"}])
        assert reply.error is None, reply.error
        return reply.text

    try:
        yield ask
    finally:
        await asyncio.to_thread(chat.close)


@asynccontextmanager
async def openai_package(url: str, connections: int) -> Any:
    import httpx
    from openai import AsyncOpenAI, DefaultAioHttpClient

    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    transport = DefaultAioHttpClient(limits=limits, timeout=60)
    client = AsyncOpenAI(api_key="k", base_url=url, max_retries=0, http_client=transport)

    async def ask(number: int) -> str:
        messages: Any = [{"role": "user", "content": f"number {number} ?"}]
        create = client.chat.completions.with_raw_response.create
        response = await create(model="m", messages=messages)
        completion = json.loads(response.text)
        return str(completion["choices"][0]["message"]["content"])

    async with client:
        yield ask


CLIENTS: dict[str, Callable[[str, int], AbstractContextManager[Ask]]] = {
    "OpenAIChat": our_client,
    "openai[aiohttp]": openai_package,
}


async def measure_calls(client: Any, url: str) -> float:
    async with client(url, 64) as ask:
        await asyncio.gather(*(ask(number) for number in range(100)))
        before = time.process_time()
        await asyncio.gather(*(ask(number) for number in range(SEQUENTIAL_CALLS)))
        return 1e3 * (time.process_time() - before) / SEQUENTIAL_CALLS


async def measure_in_flight(client: Any, url: str) -> float:
    async with client(url, CALLS_AT_ONCE) as ask:
        before = time.perf_counter()
        await asyncio.gather(*(ask(number) for number in range(CALLS_AT_ONCE)))
        return (time.perf_counter() - before) / SERVER_SECONDS


def measure() -> dict[str, Figures]:
    # Two clients in turns, so that both see the same machine.
    call_ms: dict[str, list[float]] = {name: [] for name in CLIENTS}
    for _ in range(REPEATS):
        for name, client in CLIENTS.items():
            with serving(0.0) as url:
                call_ms[name].append(run(measure_calls(client, url)))
    figures = {}
    for name, client in CLIENTS.items():
        with serving(SERVER_SECONDS) as url:
            ratio = run(measure_in_flight(client, url))
        figures[name] = Figures(min(call_ms[name]), ratio)
    return figures


def main() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(8192, hard)), hard))
    for name, figure in measure().items():
        print(
            f"{name}: {figure.call_ms:.2f} ms a call, 1,024 calls in {figure.in_flight_ratio:.2f} "
            "x 5 s"
        )


if __name__ == "__main__":
    main()
