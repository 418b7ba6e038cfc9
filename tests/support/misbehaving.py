"""An endpoint in OpenAI's format that misbehaves on purpose, one way at a time or at random: every
fault by name.

A real HTTP server on the loopback interface, written on plain asyncio streams, because a server
library would prevent most of its faults. Tests run it on a thread,
`benchmarks/reliability/faults.py` as a process of its own (`python -m support.misbehaving --help`
in tests/), so that it measures the client alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import email.utils
import gzip
import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from support.servers import completion

# --- how a fault is sent --------------------------------------------------------------------------


class Exchange:
    """One request, its connection, and the means for a fault to answer it badly."""

    def __init__(
        self,
        server: MisbehavingServer,
        writer: asyncio.StreamWriter,
        request: dict[str, Any],
        text: str,
    ):
        self.server = server
        self.writer = writer
        self.request = request
        self.text = text
        self.keep_alive = True

    def send(self, body: bytes | dict[str, Any], status: int = 200, **headers: str) -> None:
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", "content-length": str(len(body))}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        self.writer.write(f"HTTP/1.1 {status} Status\r\n{head}\r\n".encode() + body)

    def fail(
        self, status: int, message: str = "try later", code: str | None = None, **headers: str
    ) -> None:
        error = {"message": message, "type": "error", "code": code}
        self.send({"error": error}, status, **headers)

    def say(self, content: Any, finish_reason: str = "stop", **message: Any) -> None:
        self.send(completion(content, finish_reason, **message))

    def good(self) -> bytes:
        return json.dumps(completion(self.text)).encode()

    def reset(self) -> None:
        """End the connection with RST: earlier bytes may be lost."""
        self.keep_alive = False
        connection = self.writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        self.keep_alive = False
        self.writer.close()


# --- the faults -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """One way to misbehave.

    Args:
        send (`Callable[[Exchange], Awaitable | None]`): Answers the request in this way.
        error (`str`, *optional*): The kind of error if the fault persists; `None` if it gives a
            reply.
        passes (`bool`, *optional*, defaults to `True`): Whether a retry may help, so that the
            client has to retry.
    """

    send: Callable[[Exchange], Awaitable[None] | None]
    error: str | None
    passes: bool = True


async def _hang(exchange: Exchange) -> None:
    await asyncio.sleep(exchange.server.hang_seconds)


async def _drip(exchange: Exchange) -> None:
    body = exchange.good()
    exchange.send(body[:1], content_length=str(len(body)))
    for i in range(1, len(body)):
        await asyncio.sleep(exchange.server.hang_seconds / len(body))
        if exchange.writer.transport.is_closing():  # the client has hung up
            return
        exchange.writer.write(body[i : i + 1])


async def _half_a_body(exchange: Exchange, end: Callable[[Exchange], None]) -> None:
    body = exchange.good()
    exchange.send(body[: len(body) // 2], content_length=str(len(body)))
    await exchange.writer.drain()
    end(exchange)


async def _half_a_head(exchange: Exchange) -> None:
    exchange.writer.write(b"HTTP/1.1 200 OK\r\ncontent-ty")
    await exchange.writer.drain()
    exchange.reset()


async def _stale(exchange: Exchange) -> None:
    """A good reply that promises to keep the connection, which is then closed: the next request on
    it fails.
    """
    exchange.send(exchange.good(), connection="keep-alive")
    await exchange.writer.drain()
    exchange.close()


async def _write_without_end(exchange: Exchange, piece: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        while not exchange.writer.transport.is_closing():
            exchange.writer.write(piece)
            await exchange.writer.drain()


async def _endless(exchange: Exchange) -> None:
    exchange.keep_alive = False
    exchange.send(b"", content_length=str(10**12))
    await _write_without_end(exchange, b" " * 2**20)


async def _endless_head(exchange: Exchange) -> None:
    exchange.keep_alive = False
    exchange.writer.write(b"HTTP/1.1 200 OK\r\n")
    await _write_without_end(exchange, b"x-more: and more\r\n" * 1000)


async def _endless_chunks(exchange: Exchange) -> None:
    exchange.keep_alive = False
    exchange.writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    await _write_without_end(exchange, b"1000\r\n" + b" " * 0x1000 + b"\r\n")


_BOMB = gzip.compress(b" " * (40 << 20))


def _date(seconds: float) -> str:
    return email.utils.formatdate(time.time() + seconds, usegmt=True)


def _usage(prompt: Any) -> dict[str, Any]:
    body = completion("")
    body["usage"] = {"prompt_tokens": prompt, "completion_tokens": -5, "total_tokens": prompt}
    return body


def _with_text(body: dict[str, Any], text: str) -> dict[str, Any]:
    body["choices"][0]["message"]["content"] = text
    return body


FAULTS = {
    # Busy or broken, with a status that tells.
    "429": Fault(lambda x: x.fail(429), "RateLimited"),
    "429 retry-after in seconds": Fault(lambda x: x.fail(429, retry_after="0.05"), "RateLimited"),
    "429 retry-after as a date": Fault(lambda x: x.fail(429, retry_after=_date(1)), "RateLimited"),
    "429 retry-after-ms": Fault(lambda x: x.fail(429, retry_after_ms="30"), "RateLimited"),
    "429 not to be retried": Fault(lambda x: x.fail(429, x_should_retry="false"), "RateLimited"),
    "429 retry-after nonsense": Fault(lambda x: x.fail(429, retry_after="soon"), "RateLimited"),
    "408": Fault(lambda x: x.fail(408), "TimedOut"),
    "409": Fault(lambda x: x.fail(409), "BadRequest"),
    "500": Fault(lambda x: x.fail(500), "ServerFailed"),
    "502 as a web page": Fault(lambda x: x.send(b"<html>bad gateway</html>", 502), "ServerFailed"),
    "503": Fault(lambda x: x.fail(503), "ServerFailed"),
    "504 without a body": Fault(lambda x: x.send(b"", 504), "ServerFailed"),
    "529 overloaded": Fault(lambda x: x.fail(529), "ServerFailed"),
    # The connection breaks or stalls.
    "reset before the reply": Fault(lambda x: x.reset(), "Unreachable"),
    "closed before the reply": Fault(lambda x: x.close(), "Unreachable"),
    "reset in the head": Fault(_half_a_head, "Unreachable"),
    "reset in the body": Fault(lambda x: _half_a_body(x, Exchange.reset), "Unreachable"),
    "closed in the body": Fault(lambda x: _half_a_body(x, Exchange.close), "Unreachable"),
    "endless head": Fault(_endless_head, "Unreachable"),
    "no HTTP": Fault(
        lambda x: (x.writer.write(b"\x16\x03\x01 hello\r\n\r\n"), x.close())[0], "Unreachable"
    ),
    "hangs": Fault(_hang, "TimedOut"),
    "slow drip": Fault(_drip, "TimedOut"),
    # 200 without a usable reply.
    "empty body": Fault(lambda x: x.send(b""), "BadReply"),
    "malformed JSON": Fault(lambda x: x.send(b'{"choices": [{"mess'), "BadReply"),
    "not UTF-8": Fault(lambda x: x.send(b'{"choices": "\xff\xfe\xfa"}'), "BadReply"),
    "a web page": Fault(
        lambda x: x.send(b"<html>log in</html>", content_type="text/html"), "BadReply"
    ),
    "JSON nested without end": Fault(lambda x: x.send(b"[" * 200_000), "BadReply"),
    "JSON of another kind": Fault(lambda x: x.send(b"[1, 2]"), "BadReply"),
    "empty choices": Fault(lambda x: x.send({"choices": []}), "BadReply"),
    "choices of another kind": Fault(lambda x: x.send({"choices": {"0": "text"}}), "BadReply"),
    "content null": Fault(lambda x: x.say(None), "BadReply"),
    "content blank": Fault(lambda x: x.say(" \n\t"), "BadReply"),
    "content of another kind": Fault(
        lambda x: x.say([{"type": "image_url", "image_url": "a"}]), "BadReply"
    ),
    "an error in a 200": Fault(
        lambda x: x.send({"error": {"message": "no upstream", "code": 502}}), "ServerFailed"
    ),
    "an error in the choice": Fault(
        lambda x: x.say("half a sen", finish_reason="error"), "BadReply"
    ),
    "broken compression": Fault(lambda x: x.send(b"{}", content_encoding="gzip"), "BadReply"),
    # Final: a retry cannot help.
    "endless chunks": Fault(_endless_chunks, "BadReply", passes=False),
    "endless body": Fault(_endless, "BadReply", passes=False),
    "compression bomb": Fault(
        lambda x: x.send(_BOMB, content_encoding="gzip"), "BadReply", passes=False
    ),
    "307": Fault(
        lambda x: x.send(b"", 307, location="http://127.0.0.1:1/v1"), "Misconfigured", passes=False
    ),
    "302": Fault(lambda x: x.send(b"", 302, location="/v1/models"), "Misconfigured", passes=False),
    "401 to be retried": Fault(
        lambda x: x.fail(401, x_should_retry="true"), "Misconfigured", passes=False
    ),
    "400": Fault(lambda x: x.fail(400, "too long"), "BadRequest", passes=False),
    "422": Fault(lambda x: x.fail(422, "bad field"), "BadRequest", passes=False),
    "401": Fault(lambda x: x.fail(401, "bad key"), "Misconfigured", passes=False),
    "402": Fault(lambda x: x.fail(402, "pay first"), "Misconfigured", passes=False),
    "403": Fault(lambda x: x.fail(403, "not yours"), "Misconfigured", passes=False),
    "404": Fault(lambda x: x.fail(404, "no such model"), "Misconfigured", passes=False),
    "429 out of credit": Fault(
        lambda x: x.fail(429, code="insufficient_quota"), "Misconfigured", passes=False
    ),
    "refusal": Fault(lambda x: x.say(None, refusal="I will not"), "Refused", passes=False),
    "flagged input": Fault(
        lambda x: x.fail(403, code="content_policy_violation"), "Refused", passes=False
    ),
    "content filter": Fault(
        lambda x: x.say("half", finish_reason="content_filter"), "Refused", passes=False
    ),
    "length without text": Fault(
        lambda x: x.say("", finish_reason="length"), "BadReply", passes=False
    ),
    # Unusual, but a reply.
    "content in parts": Fault(
        lambda x: x.say([{"type": "text", "text": part} for part in x.text]), None
    ),
    "length with text": Fault(lambda x: x.say(x.text, finish_reason="length"), None),
    "long header": Fault(lambda x: x.send(x.good(), x_policy="x" * 50_000), None),
    "wrong content type": Fault(
        lambda x: x.send(x.good(), content_type="text/html; charset=latin-1"), None
    ),
    "10 MB": Fault(
        lambda x: x.send(x.good()[:-1] + b', "padding": "' + b"x" * 10_000_000 + b'"}'), None
    ),
    "absurd usage": Fault(lambda x: x.send(_with_text(_usage(10**400), x.text)), None),
    "stale connection": Fault(_stale, None),
}
"""Every fault by name.

Those of a whole endpoint, refused connections and outages, are [`MisbehavingServer.outage`].
"""

PASSING = [name for name, fault in FAULTS.items() if fault.passes]
ODD_REPLIES = [name for name, fault in FAULTS.items() if fault.error is None]

# --- the server -----------------------------------------------------------------------------------

Plan = Callable[[int, dict[str, Any]], "str | None"]


def at_random(share: float, seed: int = 0, among: list[str] = PASSING) -> Plan:
    """A plan under which each request meets a fault with probability `share`."""
    rng = random.Random(seed)
    return lambda number, request: rng.choice(among) if rng.random() < share else None


def in_turn(*faults: str | None) -> Plan:
    """A plan with the fault of each request written down; those after the last one are answered
    well.
    """
    return lambda number, request: faults[number] if number < len(faults) else None


def echo(request: dict[str, Any]) -> str:
    """The text of a good reply, which identifies its request."""
    return f"reply to {request['messages'][-1]['content']}"


class MisbehavingServer:
    """The endpoint; a context manager.

    Args:
        plan (`Callable[[int, dict], str | None]`, *optional*): The fault that a request meets, by
            its number from 0 and its body; `None`: it is answered well.
        latency (`float`, *optional*, defaults to `0.0`): Seconds before anything is sent.
        say (`Callable[[dict], str]`, *optional*): The text of a good reply.
        hang_seconds (`float`, *optional*, defaults to `30.0`): How long "hangs" and "slow drip"
            take.
        port (`int`, *optional*, defaults to `0`): 0 takes a free one.

    Attributes:
        base_url (`str`): For the client.
        requests (`list[dict]`): Every body, in the order of arrival.
        at (`list[float]`): When each arrived, on `time.monotonic`'s clock.
        authorizations (`set[str]`): The keys that were sent.
        met (`Counter`): How often each fault was met; `None` counts the good replies.
        answered (`Counter`): Good replies sent, by what was asked last.
        connections (`int`): Connections made so far.
    """

    def __init__(
        self,
        plan: Plan = lambda number, request: None,
        latency: float = 0.0,
        say: Callable[[dict[str, Any]], str] = echo,
        hang_seconds: float = 30.0,
        port: int = 0,
    ):
        self.plan = plan
        self.latency = latency
        self.say = say
        self.hang_seconds = hang_seconds
        self.port = port
        self.requests: list[dict[str, Any]] = []
        self.at: list[float] = []
        self.authorizations: set[str] = set()
        self.met: Counter[str | None] = Counter()
        self.answered: Counter[str] = Counter()
        self.connections = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None

    def __enter__(self) -> MisbehavingServer:
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._do(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def go_down(self) -> None:
        """Break every connection and refuse new ones."""
        self._do(self._refuse())

    def come_back(self) -> None:
        """Listen again, at the same address."""
        self._do(self._listen())

    def outage(self, seconds: float) -> threading.Timer:
        """Go down for `seconds` from now on. Returns at once."""
        self.go_down()
        timer = threading.Timer(seconds, self.come_back)
        timer.daemon = True
        timer.start()
        return timer

    def _do(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, backlog=4096, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _refuse(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()

    async def _end(self) -> None:
        await self._refuse()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.add(writer)
        try:
            keep_alive = True
            while keep_alive:
                keep_alive = await self._answer_one(reader, writer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # the client has gone, or we have gone down or ended
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        # It knows chat completions alone, and hangs up on any other request.
        if not head[0].startswith("POST "):
            return False
        headers = {}
        for line in head:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        request = json.loads(body or b"{}")
        number = len(self.requests)
        self.requests.append(request)
        self.at.append(time.monotonic())
        self.authorizations.add(headers.get("authorization", ""))
        fault = self.plan(number, request)
        self.met[fault] += 1
        await asyncio.sleep(self.latency)
        exchange = Exchange(self, writer, request, self.say(request))
        if fault is None or FAULTS[fault].error is None:
            self.answered[request["messages"][-1]["content"]] += 1
        sent = exchange.send(exchange.good()) if fault is None else FAULTS[fault].send(exchange)
        if sent is not None:
            await sent
        if exchange.keep_alive:
            await writer.drain()
        return exchange.keep_alive


def main() -> None:
    """Run a server in the foreground.

    It prints its address, and its counts as JSON when its input ends.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--share", type=float, default=0.0, help="of requests that meet a fault")
    parser.add_argument("--hang", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with MisbehavingServer(
        at_random(args.share, args.seed), args.latency, hang_seconds=args.hang
    ) as server:
        print(server.base_url, flush=True)
        with contextlib.suppress(EOFError):
            input()
        print(
            json.dumps(
                {
                    "requests": len(server.requests),
                    "answered": server.answered,
                    "connections": server.connections,
                }
            )
        )


if __name__ == "__main__":
    main()
