"""Agents that workers import."""

import asyncio
import os
import sys
import time

from openai import AsyncOpenAI, OpenAI

ASK = [{"role": "user", "content": "q"}]


class Unreadable(ValueError):
    """An exception that cannot be made of its text, as those of some parsers."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


async def answers(row, base_url, api_key, system_prompt=None):
    """Asks once, then does what its row says."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        completion = await client.chat.completions.create(model="agent", messages=ASK)
    return {**do(row, completion), "system_prompt": system_prompt}


def answers_plainly(row, base_url, api_key):
    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        return do(row, client.chat.completions.create(model="agent", messages=ASK))


def do(row, completion):
    match row.get("do"):
        case "raise":
            raise Unreadable("this", "that")
        case "exit":
            os._exit(3)
        case "sys.exit":
            sys.exit(4)
        case "unreadable":
            return {"answer": "x", "value": Unreadable("cannot be made of", "one argument")}
        case "unpicklable":
            return {"answer": lambda: None}
    return {
        "answer": completion.choices[0].message.content,
        "pid": os.getpid(),
        "torch": "torch" in sys.modules,
    }


async def waits(row, base_url, api_key):
    """For its row's seconds, and notes when it is cancelled."""
    await answers(row, base_url, api_key)
    try:
        await asyncio.sleep(row["seconds"])
    except asyncio.CancelledError:
        with open(row["file"], "w") as file:
            file.write("cancelled")
        raise


def computes(row, base_url, api_key):
    """Holds its interpreter for a while."""
    end = time.perf_counter() + row["seconds"]
    while time.perf_counter() < end:
        pass
    return answers_plainly(row, base_url, api_key)
