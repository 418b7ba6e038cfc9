"""A client for a vLLM server, on the background loop, with errors that show whether a retry may help."""

from __future__ import annotations

import asyncio
import json
import time
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import aiohttp
from trl import GRPOConfig

from ...llm.loop import background_loop, gather, run, start

_REQUEST_SECONDS = 1800.0  # so long, because a full server queues requests


class PolicyUnreachable(RuntimeError):
    """A server of the policy does not answer, or does not have the weights that were pushed; the message names it."""


class NoAnswer(Exception):
    """A connection error, or a server error; a retry may help."""


class Refused(Exception):
    """A server has rejected a request, and a retry would not help. The message is the server's.

    Args:
        status (`int`): HTTP status code.
        said (`str`): The body of the response.
    """

    def __init__(self, status: int, said: str):
        super().__init__(f"HTTP {status}: {said}")
        self.status = status


@dataclass(eq=False)
class Server:
    """A vLLM server. Its coroutines run on the background loop.

    Args:
        address (`str`): Its address, without `/v1`.
        model (`str`): The name of the model that it serves.
        max_context (`int`, *optional*): Tokens it can read, prompt and response together.
        down_until (`float`): The time, by `time.monotonic`, until which other servers are preferred.
        answered (`float`): The time of its last answer; 0.0 if the last request got none.
    """

    address: str
    model: str = ""
    max_context: int | None = None
    down_until: float = 0.0
    answered: float = 0.0

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        # aiohttp needs half a millisecond of processor time for a turn, the client of `openai` four.
        session = aiohttp.ClientSession(
            # Close idle connections before the server does (after 5 s), which would look like an outage.
            connector=aiohttp.TCPConnector(limit=1000, keepalive_timeout=3),
            timeout=aiohttp.ClientTimeout(total=_REQUEST_SECONDS),
        )
        background_loop(self)  # closes it when the interpreter ends
        # The garbage collector would close its sockets first and remove them from the event loop later, under numbers
        # that another connection may have by then, which would wait for ever.
        weakref.finalize(self, _close, session).atexit = False
        return session

    def close(self) -> None:
        _close(self._session)

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The server's answer, JSON or text, to a GET, or to a POST of `body`.

        Raises:
            [`NoAnswer`]: There is no answer, or a server error (5xx).
            [`Refused`]: The server answered with another error.
        """
        try:
            async with self._session.request(
                "GET" if body is None else "POST", self.address + path, json=body
            ) as answer:
                said = await answer.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.answered = 0.0
            raise NoAnswer(f"{type(error).__name__}: {error}") from None
        if answer.status >= 500:
            raise NoAnswer(f"HTTP {answer.status}: {said}")
        self.answered = time.monotonic()
        if answer.status >= 400:
            raise Refused(answer.status, said)
        return json.loads(said) if answer.content_type == "application/json" else said

    async def complete(self, model: str, **asked: Any) -> dict[str, Any]:
        """The server's continuation of a prompt of token ids, an element of `choices`. Raises as `ask` does, and:

        Raises:
            [`PolicyUnreachable`]: Another model has answered.
        """
        completion = await self.ask("/v1/completions", {**asked, "model": model})
        if completion["model"] != model:
            raise PolicyUnreachable(
                f"the vLLM server at {self.address} answers as {completion['model']}, not {model}"
            )
        return completion["choices"][0]


@asynccontextmanager
async def paused(server: Server) -> AsyncIterator[None]:
    """Within it a server has finished the turns in flight and begins no others."""
    try:
        await server.ask("/pause?mode=wait", {})
        yield
    finally:
        await server.ask("/resume", {})


def servers_of(args: GRPOConfig) -> list[Server]:
    """The servers that a `GRPOConfig` names; waits for each up to `vllm_server_timeout` seconds.

    Raises:
        [`PolicyUnreachable`]: If one does not answer.
    """
    addresses = (
        args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    )
    servers = [Server(address.strip().rstrip("/")) for address in addresses.split(",")]
    run(gather(_found(server, args.vllm_server_timeout) for server in servers))
    return servers


async def _found(server: Server, patience: float) -> None:
    began = time.monotonic()
    while True:
        try:
            (model, *_) = (await server.ask("/v1/models"))["data"]
            server.model, server.max_context = model["id"], model.get("max_model_len")
            return
        except (NoAnswer, Refused) as error:
            waited = time.monotonic() - began
            if isinstance(error, Refused) or waited >= patience:
                raise PolicyUnreachable(
                    f"no vLLM server at {server.address} (vllm_server_base_url) after {waited:.0f} s: {error}"
                ) from None
        await asyncio.sleep(1.0)


def _close(session: aiohttp.ClientSession) -> None:
    start(session.close())
