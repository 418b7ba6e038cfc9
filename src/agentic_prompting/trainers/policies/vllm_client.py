"""A vLLM server as an HTTP client sees it: asked on the background loop, with errors that say whether to ask again."""

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
    """A server that samples does not answer, or not with the weights it was given; the message says which, and why."""


class NoAnswer(Exception):
    """A server is not there, broke off, or failed; a retry may help."""


class Refused(Exception):
    """By a server; asking again would not help. The message is its own.

    Args:
        status (`int`): HTTP status code.
        said (`str`): The body of the response.
    """

    def __init__(self, status: int, said: str):
        super().__init__(f"HTTP {status}: {said}")
        self.status = status


@dataclass(eq=False)
class Server:
    """A vLLM server. To be asked on the background loop.

    Args:
        address (`str`): Where, without `/v1`.
        model (`str`): The name of what it serves.
        max_context (`int`, *optional*): Tokens it can read, prompt and response together.
        down_until (`float`): Others are asked until then, by `time.monotonic`.
        answered (`float`): When it last answered; 0.0 when it has just not.
    """

    address: str
    model: str = ""
    max_context: int | None = None
    down_until: float = 0.0
    answered: float = 0.0

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        # aiohttp: a turn costs us half a millisecond of processor time, by the client of `openai` four.
        session = aiohttp.ClientSession(
            # Idle connections go before the server closes them (after 5 s), which would look like an outage.
            connector=aiohttp.TCPConnector(limit=1000, keepalive_timeout=3),
            timeout=aiohttp.ClientTimeout(total=_REQUEST_SECONDS),
        )
        background_loop(self)  # which closes it at the interpreter's end
        # Left to the garbage collector its sockets would be closed first and taken off the event loop later, under
        # numbers that another connection has by then: that one would wait for ever.
        weakref.finalize(self, _close, session).atexit = False
        return session

    def close(self) -> None:
        _close(self._session)

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """What the server answers, JSON or text; with a body by POST.

        Raises:
            [`NoAnswer`]: There is no answer, or one that says that the server has failed.
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
        """Its continuation of a prompt of token ids, as `choices` has it.

        Raises:
            [`PolicyUnreachable`]: Another model has answered. And as `ask`.
        """
        completion = await self.ask("/v1/completions", {**asked, "model": model})
        if completion["model"] != model:
            raise PolicyUnreachable(f"the vLLM server at {self.address} answers as {completion['model']}, not {model}")
        return completion["choices"][0]


@asynccontextmanager
async def paused(server: Server) -> AsyncIterator[None]:
    """A server that has ended the turns under way and begins no others."""
    try:
        await server.ask("/pause?mode=wait", {})
        yield
    finally:
        await server.ask("/resume", {})


def servers_of(args: GRPOConfig) -> list[Server]:
    """The servers that a `GRPOConfig` names, each waited for up to `vllm_server_timeout` seconds.

    Raises:
        [`PolicyUnreachable`]: If one does not answer.
    """
    addresses = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
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
