"""The throughput of a served agent: requests a second, one after another and all at once.

    python -m benchmarks.speed.serve http://127.0.0.1:8080/v1 --requests 200

It needs a running `agentic-prompting serve RUN --sandbox`. The questions are the sandbox's.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

import openai

from agentic_prompting.sandbox import as_rows, make_split


async def seconds_for(
    client: openai.AsyncOpenAI, model: str, questions: list[str], at_once: int
) -> float:
    """Wall time until every question is answered, with `at_once` requests in flight at any moment."""
    slots = asyncio.Semaphore(at_once)

    async def ask(question: str) -> None:
        async with slots:
            messages: Any = [{"role": "user", "content": question}]
            await client.chat.completions.create(model=model, messages=messages)

    started = time.perf_counter()
    await asyncio.gather(*(ask(question) for question in questions))
    return time.perf_counter() - started


async def measure(url: str, model: str, requests: int) -> None:
    questions = [row["question"] for row in as_rows(make_split(0, n_test=requests)[1])]
    async with openai.AsyncOpenAI(
        base_url=url, api_key="none", max_retries=0, timeout=300
    ) as client:
        await seconds_for(client, model, questions[:4], 4)  # warm
        for at_once in (1, 8, requests):
            question_count = 20 if at_once == 1 else requests
            batch = questions[:question_count]
            seconds = await seconds_for(client, model, batch, at_once)
            speed = len(batch) / seconds
            print(
                f"{at_once:4} at once: {speed:6.1f} answers a second ({len(batch)} in "
                f"{seconds:.1f} s)"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--model", default="agent")
    parser.add_argument("--requests", type=int, default=200)
    args = parser.parse_args()
    asyncio.run(measure(args.url, args.model, args.requests))
