"""A client for vLLM servers, on the background loop, whose errors show if a retry may help."""

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

REQUEST_SECONDS = 1800.0  # so long, because a full server queues requests


class PolicyUnreachable(RuntimeError):
    """A server of the policy does not answer, or does not have the weights that were pushed.

    The message names the server.
    """


class VLLMUnavailable(Exception):
    """A connection error, or a server error; a retry may help."""


class VLLMRequestRejected(Exception):
    """A server has rejected a request; a retry would not help. The message is the server's.

    Args:
        status (`int`): HTTP status code.
        body (`str`): The body of the response.
    """

    def __init__(self, status: int, body: str):
        super().__init__(f"HTTP {status}: {body}")
        self.status = status


@dataclass(eq=False)
class VLLMServer:
    """A vLLM server. The coroutines run on the background loop.

    Args:
        address (`str`): Its address, without `/v1`.
        model (`str`): The name of the model that it serves.
        max_context (`int`, *optional*): Tokens that it can read, prompt and response together.
        down_until (`float`): The time, by `time.monotonic`, until which other servers are
            preferred.
        answered_at (`float`): The time of its last response; 0.0 if the last request got none.
    """

    address: str
    model: str = ""
    max_context: int | None = None
    down_until: float = 0.0
    answered_at: float = 0.0

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        # aiohttp needs half a millisecond of processor time for a turn, the client of `openai`
        # needs four.
        session = aiohttp.ClientSession(
            # Close idle connections before the server does (after 5 s), which would look like an
            # outage.
            connector=aiohttp.TCPConnector(limit=1000, keepalive_timeout=3),
            timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS),
        )
        background_loop(self)  # closes it when the interpreter ends
        # The garbage collector would close its sockets first and remove them from the event loop
        # later, under numbers that another connection may have by then, which would wait forever.
        weakref.finalize(self, _close_session, session).atexit = False
        return session

    def close(self) -> None:
        _close_session(self._session)

    async def request(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the response, JSON or text, to a GET, or to a POST of `body`.

        Raises:
            [`VLLMUnavailable`]: If there is no response, or a server error (5xx).
            [`VLLMRequestRejected`]: If the server responds with another error.
        """
        method = "GET" if body is None else "POST"
        try:
            async with self._session.request(method, self.address + path, json=body) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            # Without a response, the server may be restarting and lose its weights.
            self.answered_at = 0.0
            raise VLLMUnavailable(f"{type(error).__name__}: {error}") from None

        # A retry may help after a server error, but not after other errors.
        if response.status >= 500:
            raise VLLMUnavailable(f"HTTP {response.status}: {text}")
        self.answered_at = time.monotonic()
        if response.status >= 400:
            raise VLLMRequestRejected(response.status, text)
        if response.content_type == "application/json":
            return json.loads(text)
        return text

    async def complete(self, model: str, **options: Any) -> dict[str, Any]:
        """Return the continuation of a prompt of token ids: an element of `choices`.

        Raises:
            [`PolicyUnreachable`]: If another model has answered. Also raises as
                [`VLLMServer.request`].
        """
        completion = await self.request("/v1/completions", {**options, "model": model})
        if completion["model"] != model:
            raise PolicyUnreachable(
                f"the vLLM server at {self.address} answers as {completion['model']}, not {model}"
            )
        return completion["choices"][0]


@asynccontextmanager
async def pause_server(server: VLLMServer) -> AsyncIterator[None]:
    """Within this context, a server has finished the turns in flight and begins no others."""
    try:
        await server.request("/pause?mode=wait", {})
        yield
    finally:
        # Also after an error: a server that stays paused would answer no turn.
        await server.request("/resume", {})


def connect_servers(args: GRPOConfig) -> list[VLLMServer]:
    """Return the servers that a `GRPOConfig` names.

    Waits for each up to `vllm_server_timeout` seconds.

    Raises:
        [`PolicyUnreachable`]: If one does not answer.
    """
    # Several addresses are separated by commas.
    addresses = args.vllm_server_base_url
    if not addresses:
        addresses = f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    servers = [VLLMServer(address.strip().rstrip("/")) for address in addresses.split(",")]
    run(gather(_wait_for_server(server, args.vllm_server_timeout) for server in servers))
    return servers


async def _wait_for_server(server: VLLMServer, timeout: float) -> None:
    """Wait until a server names its model."""
    started_at = time.monotonic()
    while True:
        try:
            models = (await server.request("/v1/models"))["data"]
            server.model = models[0]["id"]
            server.max_context = models[0].get("max_model_len")
            return
        except (VLLMUnavailable, VLLMRequestRejected) as error:
            # A server that rejects the request is up, and waiting would not help.
            waited = time.monotonic() - started_at
            if isinstance(error, VLLMRequestRejected) or waited >= timeout:
                raise PolicyUnreachable(
                    f"no vLLM server at {server.address} (vllm_server_base_url) after "
                    f"{waited:.0f} s: {error}"
                ) from None
        await asyncio.sleep(1.0)


def _close_session(session: aiohttp.ClientSession) -> None:
    start(session.close())
