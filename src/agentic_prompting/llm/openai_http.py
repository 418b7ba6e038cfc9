"""The HTTP half of [`OpenAIChat`]: the openai package's client, with every attempt passing through one method.

Retries, backoff and `Retry-After` are the openai package's. What it lacks sits in [`AttemptClient.send`], which each
request goes through, retries included: attempts wait while the endpoint is down, are counted and spaced there, a time
limit holds for the *whole* attempt (httpx's own is per read, so a server that trickles bytes never meets it), and a 2xx
body without a usable reply is raised as a broken transfer, so that it is retried like one, within the same number of
attempts.

Imports openai, 0.7 s: to be imported inside functions only.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextvars import ContextVar
from typing import Any

import openai

from .breaker import Breaker
from .endpoint import Endpoint
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
from .http_pools import Pools, httpx
from .types import Reply
from .wire import Call, read_completion, said_by, shown_url, worth_retrying

_CONNECT_SECONDS = 10.0


class _WithoutSecrets(logging.Filter):
    """For httpx's log, which at level INFO writes down every address as it is, user and password included."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(shown_url(str(arg)) if isinstance(arg, httpx.URL) else arg for arg in record.args)
        return True


logging.getLogger(httpx.__name__).addFilter(_WithoutSecrets())


# The openai package hands nothing of ours on to the transport; the context of the call's own task reaches it.
CURRENT_CALL: ContextVar[Call] = ContextVar("CURRENT_CALL")


class UnusableBody(httpx.RequestError):  # type: ignore[misc, name-defined]  # a class only known when running
    """A 2xx response without a usable reply, in the shape of the errors that the openai package retries."""

    def __init__(self, error: LLMError, request: Any):
        super().__init__(error.what, request=request)
        self.error = error


class AttemptClient(openai.DefaultAsyncHttpxClient):
    """An HTTP client that holds back, counts, spaces, times and judges every attempt.

    Args:
        breaker ([`Breaker`]): Lets attempts through.
        requests_per_minute (`float`, *optional*): At most this many attempts a minute, evenly spaced.
        **kwargs: Of `httpx.AsyncClient`.
    """

    def __init__(self, breaker: Breaker, requests_per_minute: float | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.breaker = breaker
        self._interval = 60 / requests_per_minute if requests_per_minute else 0.0
        self._next_start = 0.0

    async def send(self, request: Any, **kwargs: Any) -> Any:
        call = CURRENT_CALL.get()
        clock = asyncio.get_running_loop().time
        began = clock()
        async with self.breaker.attempt(call.patience) as probing:
            call.patience = max(0.0, call.patience - (clock() - began))
            await self._wait_for_turn()
            call.attempts += 1
            try:
                response = await asyncio.wait_for(super().send(request, **kwargs), call.timeout)
            except TimeoutError:
                self.breaker.dead(probing)
                raise httpx.ReadTimeout(f"no complete reply within {call.timeout:g} s", request=request) from None
            except httpx.DecodingError:
                self.breaker.alive()
                raise
            except httpx.TransportError:
                self.breaker.dead(probing)
                raise
            self.breaker.dead(probing) if response.status_code >= 500 else self.breaker.alive()
        return _judged(response, call, request)

    async def _wait_for_turn(self) -> None:
        now = asyncio.get_running_loop().time()
        start = max(now, self._next_start)
        self._next_start = start + self._interval
        if start > now:
            await asyncio.sleep(start - now)


def _judged(response: Any, call: Call, request: Any) -> Any:
    """`response`, with what it holds written into `call`. Raises where another attempt is, or is not, worth making."""
    if response.status_code == 429 and b"insufficient_quota" in response.content:
        # Raised as our own error it is not retried: waiting does not fill an account.
        raise Misconfigured("the account is out of credit: add credit or use another key", status=429)
    if response.is_success:
        call.reply = read_completion(response.content, call.price)
        call.usage += call.reply.usage
        if call.reply.error is not None and worth_retrying(call.reply):
            raise UnusableBody(call.reply.error, request)
    return response


def connect(endpoint: Endpoint, key: str) -> openai.AsyncOpenAI:
    """An openai client over an [`AttemptClient`]. To be made and used on one event loop."""
    seconds = endpoint.timeout
    # Connecting gets less: a host that is there answers fast.
    timeouts = httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS))
    # Mounted, not passed as the transport, which would turn off the proxies that the environment names.
    pools = {"all://": Pools(endpoint.max_concurrency)}
    client = AttemptClient(Breaker(), endpoint.requests_per_minute, mounts=pools, timeout=timeouts)
    return openai.AsyncOpenAI(
        api_key=key,
        base_url=endpoint.base_url,
        timeout=timeouts,
        max_retries=endpoint.max_retries,
        http_client=client,
    )


async def request_completion(
    client: openai.AsyncOpenAI, call: Call, model: str, messages: Any, sampling: dict[str, Any]
) -> Reply:
    """Ask once, retries included, as a part of `call`.

    Raises:
        [`LLMError`]: There is no reply. Without `where` and `attempts`, and not yet cleaned of secrets.
    """
    CURRENT_CALL.set(call)
    # As a part of the body every parameter reaches the endpoint, also one that only vLLM knows (`top_k`, `min_p`).
    body = {**sampling, **(sampling.get("extra_body") or {})}
    body.pop("extra_body", None)
    try:
        # Not `chat.completions.create`, which walks through the types of every message and builds a typed completion:
        # a third of the processor time of a call, for what `read_completion` does anyway.
        request = {"model": model, "messages": messages, **body}
        await client.post("/chat/completions", body=request, cast_to=httpx.Response)
    except Exception as error:  # whatever happened, it happened to this call alone
        raise as_llm_error(error, model, str(client.base_url)) from None
    assert call.reply is not None, "a 2xx response leaves a reply"
    return call.reply


def as_llm_error(error: Exception, model: str, base_url: str) -> LLMError:
    """The error of ours that says what `error` of the openai package (or any other) means for the user."""
    cause = error.__cause__
    if isinstance(error, LLMError):
        return error
    if isinstance(cause, UnusableBody):
        return cause.error
    if isinstance(cause, httpx.DecodingError):
        return BadReply(f"the endpoint's answer cannot be decoded: {cause}")
    if isinstance(error, openai.APITimeoutError) and not isinstance(cause, httpx.ConnectTimeout):
        return TimedOut(str(cause) or "no reply in time")
    if isinstance(error, openai.APIConnectionError):
        reason = str(cause) or type(cause).__name__
        return Unreachable(f"no connection ({reason}): is the server running, and is base_url right?")
    if isinstance(error, openai.APIStatusError):
        return _from_status(error, model, base_url)
    return BadRequest(f"the request could not be sent: {type(error).__name__}: {error}")


def _from_status(error: openai.APIStatusError, model: str, base_url: str) -> LLMError:
    status, said = error.status_code, said_by(_body(error))
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
    return Misconfigured(f"the endpoint answers with a redirect: is base_url {base_url} right?", status=status)


def _body(error: openai.APIStatusError) -> Any:
    try:
        return json.loads(error.response.content)
    except ValueError:
        return error.response.text
