"""The HTTP half of [`OpenAIChat`], on aiohttp: attempts, their errors, and retries.

This client decides four things that must not be left to a server: how long a whole attempt may
take, how long an answer may be, which errors are retried and after which wait, and that redirects
are not followed. The openai package decides them differently, and it validates the types of every
message and completion, which takes a third of the processor time of a call.

Importing aiohttp takes a tenth of a second, so this file is imported inside functions only.
"""

from __future__ import annotations

import asyncio
import email.utils
import io
import json
import logging
import math
import os
import random
import re
import ssl
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from .account import SpendingAccount
from .addresses import redact_url
from .circuit_breaker import CircuitBreaker
from .completions import ParsedCompletion, read_completion
from .endpoint_errors import error_from_status
from .guard import describe
from .openai_call import ChatCall, Endpoint
from .spans import carrier
from .types import BadReply, BadRequest, LLMError, Misconfigured, Reply, TimedOut, Unreachable
from .usage import estimate_prompt_tokens

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0
# An endpoint that has never answered: how long a connection and an answer may take, and how long
# it is waited for in silence.
_FIRST_CONNECT_SECONDS = 5.0
_FIRST_ANSWER_SECONDS = 30.0
_SILENT_SECONDS = 5.0
_MODEL_LIST_SECONDS = 5.0  # how long the list of models of an endpoint that answers may take
# How long an idle connection is kept. Shorter than servers keep it: a request is lost if the server
# closes the connection at the same moment.
_IDLE_SECONDS = 3.0
_MAX_REPLY_BYTES = 32 << 20  # decompressed
_MAX_ERROR_BYTES = 64 << 10  # only the beginning of an error is shown
_MAX_BYTES_AT_ONCE = 1 << 20  # of a request; aiohttp warns about longer ones
# Seconds before a retry if the server sends no `Retry-After`.
_FIRST_WAIT = 0.5
_MAX_WAIT = 8.0
# How much longer the wait is after a 429: limits are by the minute, and five retries then last
# about one.
_RATE_LIMITED_FACTOR = 5
_MAX_RETRY_AFTER = 120.0  # seconds of a server's `Retry-After`
# Text that aiohttp and asyncio put around the reason of a connection error.
_CONNECTION_ERROR_FRAME = re.compile(r"^Cannot connect to host .*? \[|\]$| \('[^()]*\)")


class _Connections(aiohttp.TCPConnector):
    """Connections that are dropped silently where they cannot be closed.

    This is the case in a forked child, which would remove its parent's connections from the
    parent's event loop, and after the end of the loop.
    """

    def __init__(self, certificates: ssl.SSLContext):
        self._pid = os.getpid()
        super().__init__(limit=0, keepalive_timeout=_IDLE_SECONDS, ssl=certificates)

    @property
    def closed(self) -> bool:
        return super().closed or self._pid != os.getpid() or not self._loop.is_running()

    def __del__(self, *modules: object) -> None:
        if not self.closed:
            super().__del__(*modules)


@dataclass(frozen=True)
class ModelListAnswer:
    """The answer of an endpoint that was asked for its list of models.

    Args:
        status (`int`, *optional*): The HTTP status; `None` if there is no HTTP answer.
        model_names (`tuple[str, ...]`, *optional*): The listed names; none if the answer is not a
            list in OpenAI's format.
        silence (`str`, *optional*): Why there is no answer at all; `None` for any answer.
    """

    status: int | None = None
    model_names: tuple[str, ...] = ()
    silence: str | None = None


@dataclass(frozen=True)
class _HttpResponse:
    status: int
    headers: Mapping[str, str]
    body: bytes
    is_cut: bool  # whether the body is longer than the limit

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class Http:
    """The connections of one client in one process. Created and used on the background loop.

    Args:
        chat ([`Endpoint`]): The client. Its settings are copied, because a reference to it would
            keep it alive.
        key (`str`): The API key.
        account ([`SpendingAccount`]): Admits requests and books their cost.
    """

    def __init__(self, chat: Endpoint, key: str, account: SpendingAccount):
        self.model = chat.model
        self._key_source = chat.key_source
        self.account = account
        self.breaker = CircuitBreaker(chat.base_url, chat.patience)
        self._where = f"{chat.model} at {redact_url(chat.base_url)}"
        self._has_warned = False
        url = urlsplit(chat.base_url)
        self._url = url._replace(path=url.path.rstrip("/") + "/chat/completions").geturl()
        self._models_url = url._replace(path=url.path.rstrip("/") + "/models").geturl()

        # Headers and proxy are passed with each request: headers of the session are sent to a proxy
        # too.
        self._headers = {
            "accept-encoding": "gzip",
            "content-type": "application/json",
            "user-agent": "agentic-prompting",
        }
        if url.username is None:  # the address's own user and password take precedence
            self._headers["authorization"] = f"Bearer {key}"
        if os.environ.get("OPENAI_ORG_ID"):
            self._headers["openai-organization"] = os.environ["OPENAI_ORG_ID"]
        if os.environ.get("OPENAI_PROJECT_ID"):
            self._headers["openai-project"] = os.environ["OPENAI_PROJECT_ID"]
        self._proxy = _find_proxy(url)

        self.client = aiohttp.ClientSession(
            connector=_Connections(_certificates()),
            # A host that is up accepts a connection fast.
            timeout=aiohttp.ClientTimeout(total=None, connect=_CONNECT_SECONDS),
            # A header of a gateway may be longer than aiohttp's 8 kB.
            max_field_size=_MAX_ERROR_BYTES,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        # Requests are started at least this many seconds apart.
        self._interval = 60 / chat.requests_per_minute if chat.requests_per_minute else 0.0
        self._next_start = 0.0
        # Whether the model takes `max_completion_tokens` in the place of `max_tokens`.
        self._renames_limit = False

    async def ask(self, call: ChatCall) -> Reply:
        """Send a call, with retries.

        An error is in the reply; its secrets are not masked yet.
        """
        # Every parameter reaches the endpoint, even one that only vLLM knows (`top_k`, `min_p`).
        request: dict[str, Any] = {
            "model": self.model,
            "messages": call.messages,
            **call.sampling,
        }
        # As in the openai package, `extra_body` holds further fields of the request.
        request |= request.pop("extra_body", None) or {}
        call.sent = time.perf_counter()
        while True:
            reply, wait = await self._attempt(request, call)
            # `call.attempts` was increased by the attempt.
            if wait is None or call.attempts > call.max_retries:
                return reply
            await asyncio.sleep(wait)

    async def ask_for_models(self) -> ModelListAnswer:
        """Ask for the list of models, twice if there is no answer.

        An error status is an answer, too: not every endpoint has such a list.
        """
        try:
            return await self._ask_for_models()
        except (aiohttp.ClientConnectorError, aiohttp.ClientResponseError):
            # A refused connection, or an answer that is not HTTP, may be the accident of a moment.
            await asyncio.sleep(_FIRST_WAIT)
        try:
            return await self._ask_for_models()
        except (aiohttp.ClientConnectorError, aiohttp.ClientResponseError) as error:
            return ModelListAnswer(silence=_connection_error_reason(error))

    async def _ask_for_models(self) -> ModelListAnswer:
        """Ask for the list of models once.

        Raises:
            `aiohttp.ClientConnectorError`: There is no connection.
            `aiohttp.ClientResponseError`: The answer is not HTTP.
        """
        warning = asyncio.get_running_loop().call_later(
            _SILENT_SECONDS,
            logger.warning,
            "%s has not answered yet; it is waited for %g s",
            self._where,
            _FIRST_ANSWER_SECONDS,
        )
        try:
            async with (
                asyncio.timeout(_FIRST_ANSWER_SECONDS) as deadline,
                self.client.get(
                    self._models_url,
                    headers=self._headers,
                    proxy=self._proxy,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(connect=_FIRST_CONNECT_SECONDS),
                ) as response,
            ):
                # There is an answer: reading its body has a limit of its own.
                warning.cancel()
                deadline.reschedule(None)
                names: tuple[str, ...] = ()
                if response.status == 200:
                    names = await _read_model_names(response)
                return ModelListAnswer(status=response.status, model_names=names)
        except aiohttp.ServerTimeoutError:
            return ModelListAnswer(silence=f"no connection within {_FIRST_CONNECT_SECONDS:g} s")
        except TimeoutError:
            return ModelListAnswer(silence=f"no answer within {_FIRST_ANSWER_SECONDS:g} s")
        except aiohttp.InvalidURL:
            return ModelListAnswer(
                silence="base_url, or the proxy that the environment names, is not an address"
            )
        except (aiohttp.ClientConnectorError, aiohttp.ClientResponseError):
            raise
        except (aiohttp.ClientError, OSError):
            return ModelListAnswer()  # a server that hangs up may know chat completions alone
        finally:
            warning.cancel()

    async def close(self) -> None:
        await self.client.close()

    async def _attempt(self, request: dict[str, Any], call: ChatCall) -> tuple[Reply, float | None]:
        """Send the request once.

        Returns the reply, and the seconds to wait before a retry; `None` if a retry cannot help.
        """
        start = time.monotonic()
        is_given_up = self.breaker.was_given_up_before(call.sent)
        if self._renames_limit and "max_tokens" in request:
            request["max_completion_tokens"] = request.pop("max_tokens")
        try:
            async with self.breaker.attempt(call.patience, is_given_up) as is_probe:
                # The wait for the breaker uses up the call's patience.
                call.patience = max(0.0, call.patience - (time.monotonic() - start))
                async with self.account.admitted(request):
                    # The budget admits first: a request that waits for it must not hold a turn.
                    await self._wait_for_turn()
                    call.attempts += 1
                    response = await self._post(request, call.timeout)
                    reply = self._read_reply(response, request, call)
                is_dead = self._report_to_breaker(response, reply, call, is_probe, is_given_up)
        except LLMError as error:
            # The budget is spent, the endpoint was down for too long, or the request cannot be
            # sent.
            return Reply(error=error), None
        # One quick try is enough at an endpoint that earlier calls have waited for in vain.
        if is_given_up and is_dead:
            return reply, None
        # The breaker paces the attempts at an endpoint that is down.
        if is_probe and isinstance(response, LLMError):
            return reply, 0.0
        return reply, self._wait_before_retry(response, reply, request, call)

    def _read_reply(
        self, response: _HttpResponse | LLMError, request: dict[str, Any], call: ChatCall
    ) -> Reply:
        """Return the reply in a response, and book its cost."""
        if isinstance(response, LLMError):
            return Reply(error=response)
        if not response.is_success:
            return Reply(error=_error_of(response, self.model, self._key_source))
        # An answer that is too long is paid for, but not read.
        if response.is_cut:
            error = BadReply(f"the endpoint's answer has more than {_MAX_REPLY_BYTES >> 20} MiB")
            completion = ParsedCompletion(Reply(error=error, finish_reason="length"))
        else:
            messages = request["messages"]
            completion = read_completion(
                response.body, self.model, lambda: estimate_prompt_tokens(messages)
            )
        call.usage += self.account.book(request, completion)
        return completion.reply

    def _report_to_breaker(
        self,
        response: _HttpResponse | LLMError,
        reply: Reply,
        call: ChatCall,
        is_probe: bool,
        is_given_up: bool,
    ) -> bool:
        """Tell the breaker whether the endpoint is alive. Return whether it seems dead."""
        is_dead = isinstance(response, TimedOut | Unreachable)
        if reply.error is not None and reply.error.status is not None:
            is_dead = is_dead or reply.error.status >= 500
        if not is_dead:
            self.breaker.alive()
            return False

        # With few calls in flight, too few fail to open the breaker. So a refused connection opens
        # it before a call's last retry, if the endpoint has not answered any call meanwhile.
        cause = response.__cause__ if isinstance(response, LLMError) else None
        is_refused = isinstance(cause, aiohttp.ClientConnectorError)
        is_before_last_retry = call.attempts == call.max_retries > 1
        has_not_answered = self.breaker.answered < call.started
        was_up = not self.breaker.pause
        self.breaker.dead(
            is_probe,
            is_certain=is_given_up or (is_refused and is_before_last_retry and has_not_answered),
            has_connection=not isinstance(
                cause, aiohttp.ClientConnectorError | aiohttp.ServerTimeoutError
            ),
        )
        if was_up and self.breaker.pause and not is_given_up:
            self._warn_of_outage(reply.error)
        # A probe serves all calls, so it costs no retry.
        if is_refused and is_probe:
            call.max_retries += 1
        return True

    def _warn_of_outage(self, error: LLMError | None) -> None:
        """Log one warning for a client whose endpoint is down, so that a long wait is not silent."""
        if self._has_warned or error is None:
            return
        self._has_warned = True
        # The text of a server is not shown: it may quote the key.
        reason = error.message if error.status is None else f"HTTP {error.status}"
        logger.warning(
            "%s is down (%s); a call waits %g s for it. Ctrl-C stops; the same command goes on",
            self._where,
            reason,
            self.breaker.patience,
        )

    def _wait_before_retry(
        self,
        response: _HttpResponse | LLMError,
        reply: Reply,
        request: dict[str, Any],
        call: ChatCall,
    ) -> float | None:
        """Return the seconds to wait before a retry; `None` if a retry cannot help."""
        error = reply.error
        if error is None:
            return None
        if isinstance(response, LLMError):  # no answer arrived
            return _backoff(call.attempts)

        # OpenAI's reasoning models have another name for the same limit.
        is_misnamed_limit = error.status == 400 and b"max_completion_tokens" in response.body
        if is_misnamed_limit and "max_tokens" in request:
            self._renames_limit = True
            call.max_retries += 1
            return 0.0

        # The body is unusable, and a retry may get a usable one. It does not help after a refusal,
        # which is an answer, nor if the reply used up its tokens before the first word of text (a
        # reasoning model with a small `max_tokens`).
        if error.status is None:
            if isinstance(error, BadReply) and reply.finish_reason != "length":
                return _backoff(call.attempts)
            return None

        # An error that does not pass by waiting, such as an empty account.
        is_temporary = error.status in (408, 409, 429) or error.status >= 500
        if error.fatal or not is_temporary:
            return None
        return _wait_after_status(call.attempts, response.headers, error.status)

    async def _post(self, body: dict[str, Any], timeout: float) -> _HttpResponse | LLMError:
        """Return the response, whatever its status, or the error of the connection.

        Raises:
            [`BadRequest`]: The request cannot be sent.
        """
        try:
            # NaN is not JSON: such a request is refused here, not by the server.
            encoded = json.dumps(
                body, ensure_ascii=False, separators=(",", ":"), allow_nan=False
            ).encode()
            data = encoded if len(encoded) <= _MAX_BYTES_AT_ONCE else io.BytesIO(encoded)
            async with (
                asyncio.timeout(timeout),
                self.client.post(
                    self._url,
                    data=data,
                    headers={**self._headers, **carrier()},
                    proxy=self._proxy,
                    allow_redirects=False,
                ) as response,
            ):
                return await _read_response(response)
        except zlib.error as error:
            return BadReply(f"the endpoint's answer cannot be decoded: {error}")
        except (aiohttp.ClientError, OSError) as error:
            # The timeout of the whole attempt; aiohttp's timeouts have classes of their own.
            if type(error) is TimeoutError:
                return TimedOut(f"no complete reply within {timeout:g} s")
            if isinstance(error, aiohttp.InvalidURL):
                raise BadRequest(
                    "the request could not be sent: base_url, or the proxy that the environment "
                    "names, is not an address"
                ) from None
            reason = _connection_error_reason(error)
            unreachable = Unreachable(
                f"no connection ({reason}): is the server running, and is base_url right?"
            )
            unreachable.__cause__ = error
            return unreachable
        except Exception as error:  # it concerns this call alone
            raise BadRequest(f"the request could not be sent: {describe(error)}") from None

    async def _wait_for_turn(self) -> None:
        """Keep requests apart, so that there are no more than `requests_per_minute`."""
        # Take the next free start at once, so that requests line up while they wait.
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + self._interval
        if start > now:
            await asyncio.sleep(start - now)


def _find_proxy(url: SplitResult) -> str | None:
    """Return the proxy that the environment names for an address.

    aiohttp's `trust_env` would read the variables again at each request, in a thread, and a netrc
    file.
    """
    # NO_PROXY, without the address's user and password.
    if proxy_bypass(url.netloc.rpartition("@")[2]):
        return None
    proxy = getproxies().get(url.scheme)
    if not proxy:
        return None
    # `HTTP_PROXY=host:port` is common, too.
    if "://" not in proxy:
        proxy = f"http://{proxy}"
    if not proxy.startswith(("http://", "https://")):
        raise Misconfigured(
            f"the proxy for {url.scheme} in the environment is not an HTTP proxy: set NO_PROXY"
        )
    return proxy


def _certificates() -> ssl.SSLContext:
    """Trust the certificates that the environment names, or else those of the system."""
    file = os.environ.get("SSL_CERT_FILE")
    folder = os.environ.get("SSL_CERT_DIR")
    if file or folder:
        return ssl.create_default_context(cafile=file or None, capath=folder or None)
    if ssl.get_default_verify_paths().cafile:
        return ssl.create_default_context()
    # macOS, Windows, or a Python that was built for another Linux.
    import truststore

    return truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


async def _read_response(response: aiohttp.ClientResponse) -> _HttpResponse:
    """Read a response and decompress its body, up to the largest size.

    Not left to aiohttp, which has no such limit.
    """
    # A completion is read as a whole, of an error only the beginning.
    max_bytes = _MAX_REPLY_BYTES if 200 <= response.status < 300 else _MAX_ERROR_BYTES
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", "gzip"):
        raise zlib.error(f"content-encoding {encoding!r} was not asked for")
    decompressor = zlib.decompressobj(31) if encoding == "gzip" else None

    # Stop as soon as the body is too long.
    body = bytearray()
    is_cut = False
    async for chunk in response.content.iter_any():
        if decompressor is not None:
            # One byte more than allowed shows that there is more.
            chunk = decompressor.decompress(chunk, max_bytes + 1 - len(body))
        body += chunk
        if len(body) > max_bytes:
            is_cut = True
            break
    if decompressor is not None and not decompressor.eof and not is_cut:
        raise zlib.error("incomplete data")
    return _HttpResponse(response.status, response.headers, bytes(body[:max_bytes]), is_cut)


async def _read_model_names(response: aiohttp.ClientResponse) -> tuple[str, ...]:
    """Return the names in a list of models; none if it is not one in OpenAI's format."""
    try:
        async with asyncio.timeout(_MODEL_LIST_SECONDS):
            body = (await _read_response(response)).body
        entries = json.loads(body)["data"]
        names = tuple(entry["id"] for entry in entries)
    except (aiohttp.ClientError, OSError, zlib.error):  # the body did not arrive
        return ()
    except (ValueError, LookupError, TypeError, RecursionError):  # it is something else
        return ()
    return names if all(isinstance(name, str) for name in names) else ()


def _connection_error_reason(error: Exception) -> str:
    """Return the reason of a connection error, without the address, which the caller adds."""
    # The text of aiohttp's timeout is the address; a `message` is a text without it.
    if isinstance(error, aiohttp.ServerTimeoutError):
        return type(error).__name__
    message = str(getattr(error, "message", error))
    return _CONNECTION_ERROR_FRAME.sub("", message) or type(error).__name__


def _backoff(attempts: int) -> float:
    """Return the seconds before the next attempt.

    They double each time, with jitter for calls that failed together.
    """
    return min(_FIRST_WAIT * 2 ** (attempts - 1), _MAX_WAIT) * random.uniform(0.75, 1.0)


def _wait_after_status(attempts: int, headers: Mapping[str, str], status: int) -> float:
    """Return the seconds before the next attempt after an error status.

    The server may ask for a wait, at most two minutes. Otherwise it is the backoff, which is longer
    after a 429. `x-should-retry` is ignored, because `max_retries` is a promise to the user.
    """
    retry_after = _read_retry_after(headers)
    if retry_after > 0:
        return min(retry_after, _MAX_RETRY_AFTER)
    if status == 429:
        return _backoff(attempts) * _RATE_LIMITED_FACTOR
    return _backoff(attempts)


def _read_retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that a server asks to wait; 0 if it asks for none in a known format."""
    # A number, of milliseconds or of seconds.
    for name, per_second in (("retry-after-ms", 1000), ("retry-after", 1)):
        try:
            seconds = float(headers.get(name, "")) / per_second
        except ValueError:
            continue
        if seconds > 0 and math.isfinite(seconds):
            return seconds

    # A date.
    try:
        date = email.utils.parsedate_tz(headers.get("retry-after", ""))
        return email.utils.mktime_tz(date) - time.time() if date else 0.0
    except (ValueError, OverflowError):  # a date outside of the calendar
        return 0.0


def _error_of(response: _HttpResponse, model: str, key_source: str) -> LLMError:
    """Return the error of a response whose status is not a success."""
    # A redirect could send the key to another server.
    if response.status < 400:
        target = redact_url(response.headers.get("location", "")) or "another address"
        return Misconfigured(
            f"the endpoint redirects to {target}, which is not followed: if you want that server, "
            "set base_url to it",
            status=response.status,
        )
    # A gateway may answer with a page instead of JSON.
    try:
        body = json.loads(response.body)
    except (ValueError, RecursionError):
        body = response.body.decode("utf-8", "replace")
    return error_from_status(response.status, body, model, key_source)
