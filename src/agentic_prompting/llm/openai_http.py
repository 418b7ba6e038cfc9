"""The HTTP half of [`OpenAIChat`], on httpx: attempts, their errors, and retries.

This client decides four things that it must not leave to a server: how long a whole attempt may take (httpx's own limit
is per read, so a server that trickles bytes never reaches it), how long an answer may be, which errors are retried and
after which wait, and that redirects are not followed. The openai package decides them otherwise, and it checks the
types of every message and completion, which takes a third of the processor time of a call.

Importing httpx takes a tenth of a second, so this file is imported inside functions only.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import logging
import os
import random
import time
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx2 as httpx

from .guard import describe
from .types import (
    BadReply,
    BadRequest,
    LLMError,
    Misconfigured,
    RateLimited,
    Reply,
    ServerFailed,
    TimedOut,
    Unreachable,
)
from .wire import Call, Endpoint, read_completion, said_by, shown_url

_CONNECT_SECONDS = 10.0
_CONNECTIONS = 4  # in each pool
_MOST_BYTES = 32 << 20  # of a reply, unpacked
_MOST_ERROR_BYTES = 64 << 10  # of an error, of which only the beginning is shown
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 8.0  # seconds before a retry, if the server sends no `Retry-After`
_LONGEST_ASKED = 120.0  # seconds at most of a server's `Retry-After`
_FAILURES = 5  # in a row, after which an endpoint is down
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0  # seconds before an attempt at an endpoint that is down


class _WithoutSecrets(logging.Filter):
    """A filter for httpx's log, which at level INFO shows every address with user and password."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(shown_url(str(arg)) if isinstance(arg, httpx.URL) else arg for arg in record.args)
        return True


logging.getLogger(httpx.__name__).addFilter(_WithoutSecrets())


class Breaker:
    """The circuit breaker: while an endpoint is down, one call at a time tries it, at growing intervals.

    Without it, every call of a batch would use up its retries against an endpoint that is down, and the batch would
    fail; with it, the calls wait and keep their retries. An endpoint counts as down after five attempts in a row that
    ended in a connection error, a timeout or a server error. Then one attempt at a time is made, after a pause of 0.5 s
    at first, twice as long after each failure, 10 s at most. The first answer of any kind ends the outage. For one
    event loop.

    Attributes:
        answered (`float`): Time of the endpoint's last answer, by `time.perf_counter`.
        pause (`float`): Seconds before the next attempt; 0 while the endpoint is up.
        pauses (`int`): How many outages there were.
    """

    def __init__(self) -> None:
        self.pause, self.pauses, self._failures, self.answered = 0.0, 0, 0, 0.0
        self._turns = asyncio.Lock()  # served in order of arrival, so that each attempt is another call's

    @asynccontextmanager
    async def attempt(self, patience: float) -> AsyncIterator[bool]:
        """Wait until an attempt may be made, at most `patience` seconds (without the last pause). The caller makes it
        inside the context and then calls `alive` or `dead`. Yields whether it probes an endpoint that is down.

        Raises:
            [`Unreachable`]: The endpoint was down for all that time.
        """
        if self.pause:
            try:
                async with asyncio.timeout(patience):
                    await self._turns.acquire()
                if not patience:  # acquiring a free lock never times out
                    self._turns.release()
                    raise TimeoutError
            except TimeoutError:
                raise Unreachable("the endpoint was down for as long as a call waits for it: is it running?") from None
            try:
                await asyncio.sleep(self.pause)
                if self.pause:
                    yield True  # with the lock, so that no other call tries meanwhile
                    return
            finally:
                self._turns.release()
        yield False

    def alive(self) -> None:
        """Note that the endpoint has answered, if only with an error status."""
        self._failures, self.pause, self.answered = 0, 0.0, time.perf_counter()

    def dead(self, probing: bool, certainly: bool = False) -> None:
        """Note an attempt that ended in a connection error, a timeout or a server error."""
        self._failures += 1
        if probing:
            self.pause = min(2 * self.pause, _LONGEST_PAUSE)
        elif not self.pause and (certainly or self._failures >= _FAILURES):
            self.pause, self.pauses = _FIRST_PAUSE, self.pauses + 1


class _Pools(httpx.AsyncBaseTransport):
    """Many small connection pools behind one transport.

    httpx's pool scans all of its connections whenever a request begins or ends. With pools of 32 this takes a third of
    the processor time of a call. A request goes to the pool that was released last, whose connections are open.
    """

    def __init__(self, max_concurrency: int):
        verify = httpx.create_ssl_context()  # shared: creating one takes longer than creating a pool
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=_CONNECTIONS)
        number = -(-max_concurrency // _CONNECTIONS)
        self._pools = [httpx.AsyncHTTPTransport(verify=verify, limits=limits) for _ in range(number)]
        self._free = self._pools * _CONNECTIONS  # each as often as it may have a request in flight

    async def handle_async_request(self, request: Any) -> Any:
        pool = self._free.pop()
        try:
            response = await pool.handle_async_request(request)
        except BaseException:
            self._free.append(pool)
            raise
        response.stream = _Releasing(response.stream, lambda: self._free.append(pool))
        return response

    async def aclose(self) -> None:
        await asyncio.gather(*(pool.aclose() for pool in self._pools))


class _Releasing(httpx.AsyncByteStream):
    """A body that calls a function when it is closed for the first time."""

    def __init__(self, body: Any, release: Callable[[], None]):
        self._body, self._release = body, [release]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._body:
            yield part

    async def aclose(self) -> None:
        try:
            await self._body.aclose()
        finally:
            while self._release:
                self._release.pop()()


class _Answer(NamedTuple):
    status: int
    headers: Any
    body: bytes
    cut: bool


class Http:
    """The connections of one client in one process. Created and used on the background loop.

    Args:
        chat ([`Endpoint`]): The client. Its settings are copied, because a reference to it would keep it alive.
        key (`str`): The API key.
    """

    def __init__(self, chat: Endpoint, key: str):
        self.model, self.price, self.breaker = chat.model, chat.price, Breaker()
        url = httpx.URL(chat.base_url)
        self._url = url.copy_with(path=url.path.rstrip("/") + "/chat/completions")
        names = {"openai-organization": "OPENAI_ORG_ID", "openai-project": "OPENAI_PROJECT_ID"}
        headers = {header: os.environ[name] for header, name in names.items() if os.environ.get(name)}
        headers |= {"authorization": f"Bearer {key}", "accept-encoding": "gzip", "user-agent": "agentic-prompting"}
        self.client = httpx.AsyncClient(
            # Mounted, not passed as the transport, which would disable the proxies of the environment variables.
            mounts={"all://": _Pools(chat.max_concurrency)},
            # Connecting has a shorter limit: a host that is up answers fast.
            timeout=httpx.Timeout(chat.timeout, connect=min(chat.timeout, _CONNECT_SECONDS)),
            follow_redirects=False,
            headers=headers,
        )
        self._interval = 60 / chat.requests_per_minute if chat.requests_per_minute else 0.0
        self._next_start = 0.0

    async def ask(self, call: Call) -> Reply:
        """Send a call, with retries. An error is in the reply, its secrets not yet removed."""
        # In the body every parameter reaches the endpoint, also one that only vLLM knows (`top_k`, `min_p`).
        body = {"model": self.model, "messages": call.messages, **call.sampling}
        body |= body.pop("extra_body", None) or {}
        while True:
            reply, wait = await self._attempt(body, call)
            if wait is None or call.attempts > call.max_retries:
                return reply
            await asyncio.sleep(wait)

    async def close(self) -> None:
        await self.client.aclose()

    async def _attempt(self, body: dict[str, Any], call: Call) -> tuple[Reply, float | None]:
        """One attempt: its reply, and the seconds to wait before a retry; `None` if a retry cannot help."""
        began = time.monotonic()
        try:
            async with self.breaker.attempt(call.patience) as probing:
                call.patience = max(0.0, call.patience - (time.monotonic() - began))
                await self._wait_for_turn()
                call.attempts += 1
                answer = await self._post(body, call.timeout)
                dead = isinstance(answer, TimedOut | Unreachable)
                dead = dead or (isinstance(answer, _Answer) and answer.status >= 500)
                # With few calls in flight, too few fail to open the breaker: before a call's last retry, a refused
                # connection opens it, if the endpoint has not answered any call meanwhile.
                refused = isinstance(getattr(answer, "__cause__", None), httpx.ConnectError)
                last = call.attempts == call.max_retries > 1 and self.breaker.answered < call.started
                self.breaker.dead(probing, certainly=refused and last) if dead else self.breaker.alive()
                call.max_retries += refused and probing  # a probe serves all calls, so it costs no retry
        except LLMError as error:  # down for longer than the call's patience, or a request that cannot be sent
            return Reply(error=error), None
        if isinstance(answer, LLMError):
            return Reply(error=answer), _backoff(call.attempts)
        if not 200 <= answer.status < 300:
            passes = answer.status in (408, 409, 429) or answer.status >= 500
            final = not passes or b"insufficient_quota" in answer.body  # waiting does not fill an account
            return Reply(error=_from_status(answer, self.model)), None if final else _wait(call.attempts, answer)
        if answer.cut:
            return Reply(error=BadReply(f"the endpoint's answer has more than {_MOST_BYTES >> 20} MiB")), None
        reply = read_completion(answer.body, self.price)
        call.usage += reply.usage
        # A retry may get a usable body. It does not help after a refusal, which is an answer, nor if the reply used up
        # its tokens before the first word of text (a reasoning model with a small `max_tokens`).
        passes = isinstance(reply.error, BadReply) and reply.finish_reason != "length"
        return reply, _backoff(call.attempts) if passes else None

    async def _post(self, body: dict[str, Any], timeout: float) -> _Answer | LLMError:
        """The answer, whatever its status, or the error; raises [`BadRequest`] for a request that cannot be sent."""
        try:
            async with asyncio.timeout(timeout), self.client.stream("POST", self._url, json=body) as response:
                return _Answer(response.status_code, response.headers, *await _read(response))
        except TimeoutError:
            return TimedOut(f"no complete reply within {timeout:g} s")
        except zlib.error as error:
            return BadReply(f"the endpoint's answer cannot be decoded: {error}")
        except httpx.TransportError as error:
            if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
                return TimedOut(str(error) or "no reply in time")
            reason = str(error) or type(error).__name__
            found = Unreachable(f"no connection ({reason}): is the server running, and is base_url right?")
            found.__cause__ = error
            return found
        except Exception as error:  # it concerns this call alone
            raise BadRequest(f"the request could not be sent: {describe(error)}") from None

    async def _wait_for_turn(self) -> None:
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + self._interval
        if start > now:
            await asyncio.sleep(start - now)


async def _read(response: Any) -> tuple[bytes, bool]:
    """The decompressed body up to the largest size, and whether it was cut.

    Not left to httpx, which decompresses everything that has arrived at once: up to a thousand times its size.
    """
    most = _MOST_BYTES if response.is_success else _MOST_ERROR_BYTES
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


def _backoff(attempts: int) -> float:
    """Seconds before the next attempt: doubled each time, with jitter for calls that failed together."""
    return min(_FIRST_WAIT * 2 ** (attempts - 1), _LONGEST_WAIT) * random.uniform(0.75, 1.0)


def _wait(attempts: int, answer: _Answer) -> float:
    """Seconds before the next attempt: the server's `Retry-After`, two minutes at most, or else the backoff.

    `x-should-retry` is ignored, because `max_retries` is a promise to the user.
    """
    asked, headers = 0.0, answer.headers
    try:
        asked = (
            float(headers["retry-after-ms"]) / 1000 if "retry-after-ms" in headers else float(headers["retry-after"])
        )
    except (KeyError, ValueError):
        if date := email.utils.parsedate_tz(headers.get("retry-after", "")):
            asked = email.utils.mktime_tz(date) - time.time()
    return min(asked, _LONGEST_ASKED) if asked > 0 else _backoff(attempts)


def _from_status(answer: _Answer, model: str) -> LLMError:
    """The [`LLMError`] of an HTTP status, with what the user can do about it."""
    status = answer.status
    try:
        said = said_by(json.loads(answer.body))
    except (ValueError, RecursionError):
        said = said_by(answer.body.decode("utf-8", "replace"))
    if status < 400:
        to = shown_url(answer.headers.get("location", "")) or "another address"
        what = f"the endpoint redirects to {to}, which is not followed: if you want that server, set base_url= to it"
        return Misconfigured(what, status=status)
    meanings: dict[int, tuple[type[LLMError], str]] = {
        # Without the server's own message, which may quote the key.
        401: (Misconfigured, "the key was rejected: set OPENAI_API_KEY or pass api_key="),
        402: (Misconfigured, f"the account is out of credit: {said}"),
        403: (
            Misconfigured,
            f"the key was rejected or may not use {model!r}: set OPENAI_API_KEY or pass api_key= ({said})",
        ),
        404: (
            Misconfigured,
            f"unknown model {model!r} or wrong path: check model= and that base_url= is right ({said})",
        ),
        408: (TimedOut, f"the endpoint gave up waiting: {said}"),
        429: (RateLimited, f"too many requests, lower max_concurrency or requests_per_minute: {said}"),
    }
    failed = ServerFailed, f"the endpoint failed: {said}"
    rejected = BadRequest, f"the endpoint rejected the request: {said}"
    unpaid = status == 429 and b"insufficient_quota" in answer.body
    kind, what = meanings.get(402 if unpaid else status) or (failed if status >= 500 else rejected)
    return kind(what, status=status)
