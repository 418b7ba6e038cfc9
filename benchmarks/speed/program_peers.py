"""The other side of a call for program.py, in a process of its own: only one side's processor time
is counted.

python -m benchmarks.speed.program_peers client BASE_URL CALLS TURNS CHARACTERS     # prints one JSON object
python -m benchmarks.speed.program_peers server DELAY                               # prints its port, until stdin ends
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from typing import Any
from urllib.parse import urlsplit

WIDTH = 16  # connections of the client


async def converse(
    base_url: str, conversations: int, turns: int, characters: int, name: int
) -> None:
    """Conversations over one connection, each of several turns that carry the whole history."""
    url = urlsplit(base_url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=2**24)
    for number in range(conversations):
        words = "what is the population of the town ? " * (characters // 37 + 1)
        messages: list[Any] = [{"role": "user", "content": f"{name} {number} {words}"[:characters]}]
        for _ in range(turns):
            body = json.dumps({"model": "agent", "messages": messages}).encode()
            head = (
                f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: "
                "application/json\r\n"
            )
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            completion = json.loads(await reader.readexactly(await _length(reader)))
            messages += [
                completion["choices"][0]["message"],
                {"role": "user", "content": "and of the next one ? " * 10},
            ]
    writer.close()


async def _length(reader: asyncio.StreamReader) -> int:
    """The size of the body behind the headers that come next."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    return int(head.partition(b"content-length:")[2].split(b"\r\n")[0])


async def client(base_url: str, calls: int, turns: int, characters: int) -> None:
    """Make some calls and print how many, and the seconds that they took."""
    # Conversations of each connection, and connections.
    conversations = max(calls // WIDTH // turns, 1)
    width = min(WIDTH, max(calls // turns, 1))
    started = time.perf_counter()
    await asyncio.gather(
        *(converse(base_url, conversations, turns, characters, name) for name in range(width))
    )
    seconds = time.perf_counter() - started
    print(json.dumps({"calls": conversations * width * turns, "seconds": seconds}))


async def server(delay: float) -> None:
    """Answer every request after a delay, until the standard input ends."""
    message = {"role": "assistant", "content": "the town has 20 people ."}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 40, "completion_tokens": 6, "total_tokens": 46}
    completion = {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }
    body = json.dumps(completion).encode()
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readexactly(await _length(reader))
                if delay:
                    await asyncio.sleep(delay)
                writer.write(head.encode() + body)
        writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=2048)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "server":
        asyncio.run(server(float(arguments[0])))
    else:
        asyncio.run(client(arguments[0], *map(int, arguments[1:])))
