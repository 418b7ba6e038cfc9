"""The HTTP half of [`OpenAIChat`]: attempts, what each one means, and when another one is worth making.

The openai package brings addresses, headers and proxies. What is decided here, since a server must not: how long a
whole attempt may take (httpx's own limit is per read, so a server that trickles bytes never meets it), how long an
answer may be, what is retried and after which wait, and that nobody is sent on to another address.

Imports openai, 0.7 s: to be imported inside functions only.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import logging
import random
import time
import zlib
from itertools import cycle
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import openai

from .breaker import Breaker
from .errors import (
    BadReply,
    BadRequest,
    LLMError,
    Misconfigured,
    RateLimited,
    ServerFailed,
    TimedOut,
    Unreachable,
)
from .types import Reply
from .wire import read_completion, said_by, shown_url, worth_retrying

if TYPE_CHECKING:
    from .openai_chat import Call, OpenAIChat

_CONNECT_SECONDS = 10.0
_CONNECTIONS = 32  # in each pool
_OF_THE_TRANSFER = ("content-encoding", "content-length", "transfer-encoding")
_MOST_BYTES = 32 << 20  # of a reply, unpacked
_MOST_ERROR_BYTES = 64 << 10  # of an error, whose beginning is all that is shown
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 8.0  # seconds before a retry, where the server asks for nothing
_LONGEST_ASKED = 120.0  # seconds, whatever the server asks for


class _WithoutSecrets(logging.Filter):
    """For httpx's log, which at level INFO writes down every address as it is, user and password included."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(shown_url(str(arg)) if isinstance(arg, httpx.URL) else arg for arg in record.args)
        return True


logging.getLogger(httpx.__name__).addFilter(_WithoutSecrets())


class _BoundedClient(openai.DefaultAsyncHttpxClient):
    """An HTTP client that reads answers up to a size; of longer ones it has the beginning and says so."""

    async def send(self, request: Any, **kwargs: Any) -> Any:
        response = await super().send(request, **{**kwargs, "stream": True})
        try:
            body, cut = await _read(response, _MOST_BYTES if response.is_success else _MOST_ERROR_BYTES)
        except zlib.error as error:
            raise httpx.DecodingError(str(error), request=request) from None
        finally:
            await response.aclose()
        headers = [pair for pair in response.headers.multi_items() if pair[0] not in _OF_THE_TRANSFER]
        read = httpx.Response(response.status_code, headers=headers, content=body, request=request)
        read.extensions["cut"] = cut
        return read


async def _read(response: Any, most: int) -> tuple[bytes, bool]:
    """The unpacked body, at most so many bytes of it, and whether there was more.

    Not left to httpx, which unpacks whatever has arrived at once: a thousand times its size.
    """
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", "gzip"):
        raise zlib.error(f"content-encoding {encoding!r} was not asked for")
    unpack = zlib.decompressobj(31) if encoding == "gzip" else None
    body = bytearray()
    async for piece in response.aiter_raw():
        body += unpack.decompress(piece, most + 1 - len(body)) if unpack else piece
        if len(body) > most:
            return bytes(body[:most]), True
    if unpack is not None and not unpack.eof:
        raise zlib.error("incomplete data")
    return bytes(body), False


class _Pools(httpx.AsyncBaseTransport):
    """Many small connection pools behind one transport; requests are dealt out in turn.

    httpx's pool goes through all of its connections whenever a request begins or ends. With a thousand calls in flight
    that is two thirds of the processor time of a call.

    Args:
        connections (`int`): Requests on their way at once at most.
    """

    def __init__(self, connections: int):
        verify = httpx.create_ssl_context()  # one for all: making one takes longer than a pool
        # A pool may get more than its share for a moment, when the others' requests end early.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=_CONNECTIONS)
        number = -(-connections // _CONNECTIONS)
        self._pools = [httpx.AsyncHTTPTransport(verify=verify, limits=limits) for _ in range(number)]
        self._next = cycle(self._pools)

    async def handle_async_request(self, request: Any) -> Any:
        return await next(self._next).handle_async_request(request)

    async def aclose(self) -> None:
        await asyncio.gather(*(pool.aclose() for pool in self._pools))


class Http:
    """The connections of one client in one process. To be made and used on the background loop.

    Args:
        chat ([`OpenAIChat`]): Its settings, which are read here and not kept: it must not be held.
        key (`str`): The API key.
    """

    def __init__(self, chat: OpenAIChat, key: str):
        self.model, self.price, self.breaker = chat.model, chat.price, Breaker()
        # Connecting gets less: a host that is there answers fast.
        timeouts = httpx.Timeout(chat.timeout, connect=min(chat.timeout, _CONNECT_SECONDS))
        # Mounted, not passed as the transport, which would turn off the proxies that the environment names.
        client = _BoundedClient(
            mounts={"all://": _Pools(chat.max_concurrency)},
            timeout=timeouts,
            follow_redirects=False,
            headers={"accept-encoding": "gzip"},
        )
        self.client = openai.AsyncOpenAI(
            api_key=key, base_url=chat.base_url, timeout=timeouts, max_retries=0, http_client=client
        )
        self._interval = 60 / chat.requests_per_minute if chat.requests_per_minute else 0.0
        self._next_start = 0.0

    async def ask(self, call: Call) -> Reply:
        """Ask, retries included. What went wrong is in the reply, not yet cleaned of secrets."""
        # As a part of the body every parameter reaches the endpoint, also one that only vLLM knows (`top_k`, `min_p`).
        extra = call.sampling.get("extra_body") or {}
        body = {"model": self.model, "messages": call.messages, **call.sampling, **extra}
        body.pop("extra_body", None)
        while True:
            reply, wait = await self._attempt(body, call)
            if wait is None or call.attempts > call.max_retries:
                return reply
            await asyncio.sleep(wait)

    async def close(self) -> None:
        await self.client.close()

    async def _attempt(self, body: dict[str, Any], call: Call) -> tuple[Reply, float | None]:
        """One attempt: what came of it, and the seconds after which another one is worth making, if any."""
        began = time.monotonic()
        try:
            async with self.breaker.attempt(call.patience) as probing:
                call.patience = max(0.0, call.patience - (time.monotonic() - began))
                await self._wait_for_turn()
                call.attempts += 1
                answer = await self._answer(body, call.timeout)
                dead = isinstance(answer, TimedOut | Unreachable) or getattr(answer, "status_code", 0) >= 500
                self.breaker.dead(probing) if dead else self.breaker.alive()
        except LLMError as error:  # down for as long as a call waits, or nothing that can be sent
            return Reply(error=error), None
        if isinstance(answer, LLMError):
            return Reply(error=answer), _backoff(call.attempts)
        if not answer.is_success:
            failed = Reply(error=_from_status(answer, self.model))
            passes = answer.status_code in (408, 409, 429) or answer.status_code >= 500
            final = not passes or b"insufficient_quota" in answer.content  # waiting does not fill an account
            return failed, None if final else _wait_before_retry(call.attempts, answer)
        if answer.extensions["cut"]:
            return Reply(error=BadReply(f"the endpoint's answer has more than {_MOST_BYTES >> 20} MiB")), None
        reply = read_completion(answer.content, self.price)
        call.usage += reply.usage
        return reply, _backoff(call.attempts) if worth_retrying(reply) else None

    async def _answer(self, body: dict[str, Any], timeout: float) -> Any:
        """The response, whatever its status, or the [`LLMError`] that there is instead of one.

        Raises:
            [`BadRequest`]: It cannot be sent.
        """
        try:
            async with asyncio.timeout(timeout):
                # Not `chat.completions.create`, which walks through the types of every message and builds a typed
                # completion: a third of the processor time of a call, for what `read_completion` does anyway.
                return await self.client.post("/chat/completions", body=body, cast_to=httpx.Response)
        except openai.APIStatusError as error:
            return error.response
        except openai.APIConnectionError as error:  # a timeout is one
            cause = error.__cause__
            if isinstance(cause, httpx.DecodingError):
                return BadReply(f"the endpoint's answer cannot be decoded: {cause}")
            if isinstance(cause, httpx.TimeoutException) and not isinstance(cause, httpx.ConnectTimeout):
                return TimedOut(str(cause) or "no reply in time")
            reason = str(cause) or type(cause).__name__
            return Unreachable(f"no connection ({reason}): is the server running, and is base_url right?")
        except TimeoutError:
            return TimedOut(f"no complete reply within {timeout:g} s")
        except Exception as error:  # whatever happened, it happened to this call alone
            raise BadRequest(f"the request could not be sent: {type(error).__name__}: {error}") from None

    async def _wait_for_turn(self) -> None:
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + self._interval
        if start > now:
            await asyncio.sleep(start - now)


def _backoff(attempts: int) -> float:
    """Seconds before the next attempt: twice as long each time, and not the same for all who failed together."""
    return min(_FIRST_WAIT * 2 ** (attempts - 1), _LONGEST_WAIT) * random.uniform(0.75, 1.0)


def _wait_before_retry(attempts: int, response: Any) -> float:
    """What the server asks for, two minutes at most. `x-should-retry` is not asked: the retries were promised."""
    asked = _asked_wait(response.headers)
    return min(asked, _LONGEST_ASKED) if asked > 0 else _backoff(attempts)


def _asked_wait(headers: Any) -> float:
    """The seconds in `Retry-After`; 0 where there are none that can be read."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            return unit * float(headers[name])
        except (KeyError, ValueError):
            pass
    date = email.utils.parsedate_tz(headers.get("retry-after", ""))
    return email.utils.mktime_tz(date) - time.time() if date else 0.0


def _from_status(response: Any, model: str) -> LLMError:
    """The error of ours that says what a status means for the user."""
    status, said = response.status_code, said_by(_decoded(response))
    if status == 429 and b"insufficient_quota" in response.content:
        return Misconfigured("the account is out of credit: add credit or use another key", status=status)
    if status == 401:  # what the server says here may quote the key
        return Misconfigured("the key was rejected: set OPENAI_API_KEY or pass api_key=", status=status)
    if status == 402:
        return Misconfigured(f"the account is out of credit: {said}", status=status)
    if status == 403:
        what = f"the key was rejected or may not use {model!r}: set OPENAI_API_KEY or pass api_key= ({said})"
        return Misconfigured(what, status=status)
    if status == 404:
        what = f"unknown model {model!r} or wrong path: check model= and that base_url= ends as it should ({said})"
        return Misconfigured(what, status=status)
    if status == 408:
        return TimedOut(f"the endpoint gave up waiting: {said}", status=status)
    if status == 429:
        return RateLimited(f"too many requests, lower max_concurrency or requests_per_minute: {said}", status=status)
    if status >= 500:
        return ServerFailed(f"the endpoint failed: {said}", status=status)
    if status >= 400:
        return BadRequest(f"the endpoint rejected the request: {said}", status=status)
    to = shown_url(response.headers.get("location", "")) or "another address"
    what = f"the endpoint sends on to {to}, which is not followed: if that is the server you want, set base_url= to it"
    return Misconfigured(what, status=status)


def _decoded(response: Any) -> Any:
    try:
        return json.loads(response.content)
    except (ValueError, RecursionError):
        return response.text
