"""The HTTP half of [`OpenAIChat`], on aiohttp: attempts, their errors, and retries.

This client decides four things that it must not leave to a server: how long a whole attempt may take, how long an
answer may be, which errors are retried and after which wait, and that redirects are not followed. The openai package
decides them otherwise, and it checks the types of every message and completion, which takes a third of the processor
time of a call.

Importing aiohttp takes a tenth of a second, so this file is imported inside functions only.
"""

from __future__ import annotations

import asyncio
import email.utils
import io
import json
import math
import os
import random
import re
import ssl
import time
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from .account import SpendingAccount
from .endpoint_errors import error_from_status
from .guard import describe
from .spans import carrier
from .types import BadReply, BadRequest, LLMError, Misconfigured, Reply, TimedOut, Unreachable
from .usage import estimate_prompt_tokens
from .wire import Call, Completion, Endpoint, read_completion, shown_url

_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = (
    3.0  # of a connection: shorter than servers', because a request on one that they close is lost
)
_MOST_BYTES = 32 << 20  # of a reply, unpacked
_MOST_ERROR_BYTES = 64 << 10  # of an error, of which only the beginning is shown
_MOST_BYTES_AT_ONCE = 1 << 20  # of a request; aiohttp warns of more
_FIRST_WAIT, _LONGEST_WAIT = (
    0.5,
    8.0,
)  # seconds before a retry, if the server sends no `Retry-After`
_RATE_LIMITED = (
    5  # times as long after a 429: limits are by the minute, and five retries then last about one
)
_LONGEST_ASKED = 120.0  # seconds at most of a server's `Retry-After`
_FAILURES = 5  # in a row, after which an endpoint is down
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0  # seconds before an attempt at an endpoint that is down
_CONNECTED_TO = re.compile(
    r"^Cannot connect to host .*? \[|\]$| \('[^()]*\)"
)  # what aiohttp and asyncio say of it


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
        self._turns = (
            asyncio.Lock()
        )  # served in order of arrival, so that each attempt is another call's

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
                raise Unreachable(
                    "the endpoint was down for as long as a call waits for it: is it running?"
                ) from None
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


class _Connections(aiohttp.TCPConnector):
    """Connections that end without a word where they cannot be closed: in a forked child, which would take those of
    its parent off the parent's event loop, and after the end of the loop."""

    def __init__(self, **settings: Any):
        self._pid = os.getpid()
        super().__init__(**settings)

    @property
    def closed(self) -> bool:
        return super().closed or self._pid != os.getpid() or not self._loop.is_running()

    def __del__(self, *modules: Any) -> None:
        if not self.closed:
            super().__del__(*modules)


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
        account ([`SpendingAccount`]): Admits requests and books what they cost.
    """

    def __init__(self, chat: Endpoint, key: str, account: SpendingAccount):
        self.model = chat.model
        self.account = account
        self.breaker = Breaker()
        url = urlsplit(chat.base_url)
        self._url = url._replace(path=url.path.rstrip("/") + "/chat/completions").geturl()
        names = {"openai-organization": "OPENAI_ORG_ID", "openai-project": "OPENAI_PROJECT_ID"}
        headers = {
            header: os.environ[name] for header, name in names.items() if os.environ.get(name)
        }
        headers |= {
            "accept-encoding": "gzip",
            "content-type": "application/json",
            "user-agent": "agentic-prompting",
        }
        if url.username is None:  # the address's own user and password take precedence
            headers["authorization"] = f"Bearer {key}"
        # Not `trust_env`, which reads the variables again at each request, in a thread, and a netrc file.
        proxy = (
            None if proxy_bypass(url.netloc.rpartition("@")[2]) else getproxies().get(url.scheme)
        )
        proxy = f"http://{proxy}" if proxy and "://" not in proxy else proxy
        if proxy and not proxy.startswith(("http://", "https://")):
            raise Misconfigured(
                f"the proxy for {url.scheme} in the environment is not an HTTP proxy: set NO_PROXY"
            )
        # Passed with each request: headers of the session are sent to a proxy too.
        self._settings: Any = {"headers": headers, "proxy": proxy, "allow_redirects": False}
        self.client = aiohttp.ClientSession(
            connector=_Connections(limit=0, keepalive_timeout=_IDLE_SECONDS, ssl=_certificates()),
            timeout=aiohttp.ClientTimeout(
                total=None, connect=_CONNECT_SECONDS
            ),  # a host that is up answers fast
            max_field_size=_MOST_ERROR_BYTES,  # a header of a gateway may be longer than aiohttp's 8 kB
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._interval = 60 / chat.requests_per_minute if chat.requests_per_minute else 0.0
        self._next_start = 0.0
        self._renames_limit = (
            False  # whether the model takes `max_completion_tokens` in the place of `max_tokens`
        )

    async def ask(self, call: Call) -> Reply:
        """Send a call, with retries. An error is in the reply, its secrets not yet removed."""
        # In the body every parameter reaches the endpoint, also one that only vLLM knows (`top_k`, `min_p`).
        request = {"model": self.model, "messages": call.messages, **call.sampling}
        request |= request.pop("extra_body", None) or {}
        while True:
            reply, wait = await self._attempt(request, call)
            if wait is None or call.attempts > call.max_retries:
                return reply
            await asyncio.sleep(wait)

    async def close(self) -> None:
        await self.client.close()

    async def _attempt(self, request: dict[str, Any], call: Call) -> tuple[Reply, float | None]:
        """One attempt: its reply, and the seconds to wait before a retry; `None` if a retry cannot help."""
        began = time.monotonic()
        if self._renames_limit and "max_tokens" in request:
            request["max_completion_tokens"] = request.pop("max_tokens")
        try:
            async with self.breaker.attempt(call.patience) as probing:
                call.patience = max(0.0, call.patience - (time.monotonic() - began))
                async with self.account.admitted(request):
                    await self._wait_for_turn()
                    call.attempts += 1
                    answer = await self._post(request, call.timeout)
                    reply = self._read(answer, request, call)
                self._report_to_breaker(answer, reply, call, probing)
        except LLMError as error:  # the budget is spent, the endpoint is down for too long, or nothing could be sent
            return Reply(error=error), None
        return reply, self._wait_before_retry(answer, reply, request, call)

    def _read(self, answer: _Answer | LLMError, request: dict[str, Any], call: Call) -> Reply:
        """The reply in an answer, whose cost is booked."""
        if isinstance(answer, LLMError):
            return Reply(error=answer)
        if not 200 <= answer.status < 300:
            return Reply(error=_error_of(answer, self.model))
        if answer.cut:
            problem = BadReply(f"the endpoint's answer has more than {_MOST_BYTES >> 20} MiB")
            completion = Completion(Reply(error=problem, finish_reason="length"))
        else:
            messages = request["messages"]
            completion = read_completion(
                answer.body, self.model, lambda: estimate_prompt_tokens(messages)
            )
        call.usage += self.account.book(request, completion)
        return completion.reply

    def _report_to_breaker(
        self, answer: _Answer | LLMError, reply: Reply, call: Call, probing: bool
    ) -> None:
        """Tell the breaker whether the endpoint is alive."""
        status = reply.error.status if reply.error is not None else None
        is_dead = isinstance(answer, TimedOut | Unreachable) or (
            status is not None and status >= 500
        )
        if not is_dead:
            self.breaker.alive()
            return
        # With few calls in flight, too few fail to open the breaker: before a call's last retry, a refused connection
        # opens it, if the endpoint has not answered any call meanwhile.
        is_refused = isinstance(getattr(answer, "__cause__", None), aiohttp.ClientConnectorError)
        is_last = call.attempts == call.max_retries > 1 and self.breaker.answered < call.started
        self.breaker.dead(probing, certainly=is_refused and is_last)
        call.max_retries += is_refused and probing  # a probe serves all calls, so it costs no retry

    def _wait_before_retry(
        self, answer: _Answer | LLMError, reply: Reply, request: dict[str, Any], call: Call
    ) -> float | None:
        """Seconds to wait before a retry; `None` if a retry cannot help."""
        error = reply.error
        if error is None:
            return None
        if isinstance(answer, LLMError):  # no answer arrived
            return _backoff(call.attempts)
        if (
            error.status == 400
            and "max_tokens" in request
            and b"max_completion_tokens" in answer.body
        ):
            self._renames_limit = True  # OpenAI's reasoning models: the same limit by another name
            call.max_retries += 1
            return 0.0
        if error.status is None:
            # A retry may get a usable body. It does not help after a refusal, which is an answer, nor if the reply used
            # up its tokens before the first word of text (a reasoning model with a small `max_tokens`).
            may_pass = isinstance(error, BadReply) and reply.finish_reason != "length"
            return _backoff(call.attempts) if may_pass else None
        may_pass = error.status in (408, 409, 429) or error.status >= 500
        if error.fatal or not may_pass:  # waiting does not fill an account
            return None
        return _wait(call.attempts, answer.headers, error.status)

    async def _post(self, body: dict[str, Any], timeout: float) -> _Answer | LLMError:
        """The answer, whatever its status, or the error; raises [`BadRequest`] for a request that cannot be sent."""
        try:
            sent = json.dumps(
                body, ensure_ascii=False, separators=(",", ":"), allow_nan=False
            ).encode()
            data = sent if len(sent) <= _MOST_BYTES_AT_ONCE else io.BytesIO(sent)
            settings = {**self._settings, "headers": {**self._settings["headers"], **carrier()}}
            async with (
                asyncio.timeout(timeout),
                self.client.post(self._url, data=data, **settings) as response,
            ):
                return _Answer(response.status, response.headers, *await _read(response))
        except zlib.error as error:
            return BadReply(f"the endpoint's answer cannot be decoded: {error}")
        except (aiohttp.ClientError, OSError) as error:
            if (
                type(error) is TimeoutError
            ):  # that of the whole attempt: those of aiohttp have types of their own
                return TimedOut(f"no complete reply within {timeout:g} s")
            if isinstance(error, aiohttp.InvalidURL):
                what = "base_url, or the proxy that the environment names, is not an address"
                raise BadRequest(f"the request could not be sent: {what}") from None
            # The text of a timeout is the address; a `message` is a text without it. Whose server it is, is in `where`.
            shown = (
                ""
                if isinstance(error, aiohttp.ServerTimeoutError)
                else getattr(error, "message", error)
            )
            reason = _CONNECTED_TO.sub("", str(shown)) or type(error).__name__
            found = Unreachable(
                f"no connection ({reason}): is the server running, and is base_url right?"
            )
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


def _certificates() -> ssl.SSLContext:
    """Trust in the certificates that the environment names, or else in those of the system."""
    file, folder = os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")
    if file or folder:
        return ssl.create_default_context(cafile=file or None, capath=folder or None)
    if ssl.get_default_verify_paths().cafile:
        return ssl.create_default_context()
    import truststore  # for macOS, Windows, and a Python that was built for another Linux

    return truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


async def _read(response: aiohttp.ClientResponse) -> tuple[bytes, bool]:
    """The decompressed body up to the largest size, and whether it was cut.

    Not left to aiohttp, which has no such limit.
    """
    most = _MOST_BYTES if 200 <= response.status < 300 else _MOST_ERROR_BYTES
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", "gzip"):
        raise zlib.error(f"content-encoding {encoding!r} was not asked for")
    unpack = zlib.decompressobj(31) if encoding == "gzip" else None
    body = bytearray()
    async for piece in response.content.iter_any():
        body += unpack.decompress(piece, most + 1 - len(body)) if unpack else piece
        if len(body) > most:
            return bytes(body[:most]), True
    if unpack is not None and not unpack.eof:
        raise zlib.error("incomplete data")
    return bytes(body), False


def _backoff(attempts: int) -> float:
    """Seconds before the next attempt: doubled each time, with jitter for calls that failed together."""
    return min(_FIRST_WAIT * 2 ** (attempts - 1), _LONGEST_WAIT) * random.uniform(0.75, 1.0)


def _wait(attempts: int, headers: Mapping[str, str], status: int) -> float:
    """Seconds before the next attempt: what the server asks for, two minutes at most, or else the backoff, which is
    longer after a 429.

    `x-should-retry` is ignored, because `max_retries` is a promise to the user.
    """
    requested = _retry_after(headers)
    if requested > 0:
        return min(requested, _LONGEST_ASKED)
    return _backoff(attempts) * (_RATE_LIMITED if status == 429 else 1)


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that a server asks to wait; 0 if it asks for none in a form that can be read."""
    for name, per_second in (("retry-after-ms", 1000), ("retry-after", 1)):
        try:
            seconds = float(headers.get(name, "")) / per_second
        except ValueError:
            continue
        if seconds > 0 and math.isfinite(seconds):
            return seconds
    try:
        date = email.utils.parsedate_tz(headers.get("retry-after", ""))
        return email.utils.mktime_tz(date) - time.time() if date else 0.0
    except (ValueError, OverflowError):  # a date outside of the calendar
        return 0.0


def _error_of(answer: _Answer, model: str) -> LLMError:
    """The error of an answer whose status is no success."""
    if answer.status < 400:
        target = shown_url(answer.headers.get("location", "")) or "another address"
        hint = "which is not followed: if you want that server, set base_url= to it"
        return Misconfigured(f"the endpoint redirects to {target}, {hint}", status=answer.status)
    try:
        body = json.loads(answer.body)
    except (ValueError, RecursionError):
        body = answer.body.decode("utf-8", "replace")
    return error_from_status(answer.status, body, model)
