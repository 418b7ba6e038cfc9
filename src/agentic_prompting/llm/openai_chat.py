"""[`OpenAIChat`]: any endpoint that speaks OpenAI's chat format - OpenAI, vLLM, SGLang, Ollama, a router.

What callers see, on their own threads: settings, futures, counts, the end. What happens to a call is in `calls.py`, the
HTTP in `openai_http.py`, both on the event loop of `loop.py`. Everything that can happen to a call ends up in its
[`Reply`].
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, wait
from typing import Any, Self, TypeVar

from .budget import Budget, Limit
from .cache import ReplayCache
from .calls import Calls, Request
from .endpoint import Endpoint, variable_with
from .errors import BadReply, BadRequest, Closed, LLMError
from .ledger import ChatStats, Ledger
from .loop import background_loop, on_background_thread
from .pricing import Price, find_price
from .types import Message, Reply, Usage, with_system
from .wire import clean, shown_url

T = TypeVar("T")

_OPENAI_URL = "https://api.openai.com/v1"
_CHECK_SECONDS = 30.0
_CHECKED_SECONDS = 600.0  # that a call which succeeded stands for a check
_CLOSE_SECONDS = 5.0


class OpenAIChat:
    """A [`ChatModel`] behind an OpenAI-compatible endpoint.

    Safe to use from several threads. A pickled copy has the settings but not the connections, the counts or a literal
    `api_key`: it looks for its key in the environment of its process. `copy.deepcopy` gives the same object.

    Callbacks added to the futures run on the event loop's thread: they may `submit`, but must not wait.

    Args:
        model (`str`): As the endpoint calls it.
        base_url (`str`, *optional*): The endpoint, `/v1` included. Defaults to `OPENAI_BASE_URL`, then OpenAI.
        api_key (`str`, *optional*): Defaults to `OPENAI_API_KEY`, read at the first call. An endpoint given by its
            address may do without one.
        max_concurrency (`int`, *optional*, defaults to `64`): Calls on their way at once; the others wait. A call that
            waits for its retry keeps its place, so that an overloaded endpoint is asked less.
        requests_per_minute (`float`, *optional*): Requests are spaced to stay below this, retries included.
        timeout (`float`, *optional*, defaults to `60`): Seconds for each attempt. A call ends at the latest
            `timeout · (max_retries + 1)` seconds after it got its place, plus the waits between attempts: 0.5 to 8
            seconds each, or what the endpoint asks for (`Retry-After`) up to two minutes; and `patience`.
        max_retries (`int`, *optional*, defaults to `5`): Further attempts after a failed one.
        patience (`float`, *optional*, defaults to `120`): Seconds that a call waits in all, its retries unspent,
            while the endpoint is down; see `breaker.py`.
        budget_usd (`float`, *optional*): When this client has spent this much, no new call is sent; those on their way
            end. A trainer counts all processes of a job and its restarts together ([`OpenAIChat.charge_to`]); without
            one it is counted per process. An endpoint that reports no usage costs nothing here.
        budget_tokens (`int`, *optional*): The same in tokens, read and written.
        price (`tuple[float, float]`, *optional*): US dollars per million prompt and completion tokens. Defaults to the
            table in `pricing.py`, which you should check; a model that is not in it costs 0, its tokens are counted.
        cache ([`ReplayCache`], *optional*): Where replies are recorded or replayed. Not closed by `close`.
        system_prompt (`str`, *optional*): Put in front of conversations that have none.
        **sampling: Defaults for `temperature`, `max_tokens`, ...; what a call passes wins. Every parameter is sent as
            it is, also one that only this endpoint knows.

    Raises:
        `ValueError`: A setting makes no sense, or `budget_usd` is the only limit and the price is not known.
    """

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        api_key: str | None = None,
        max_concurrency: int = 64,
        requests_per_minute: float | None = None,
        timeout: float = 60,
        max_retries: int = 5,
        patience: float = 120,
        budget_usd: float | None = None,
        budget_tokens: int | None = None,
        price: Price | None = None,
        cache: ReplayCache | None = None,
        system_prompt: str | None = None,
        **sampling: Any,
    ):
        base_url = base_url or os.environ.get("OPENAI_BASE_URL")
        key = api_key.strip() if api_key else None
        self.endpoint = Endpoint(
            model=model,
            base_url=base_url or _OPENAI_URL,
            literal_key=key,
            key_variable=variable_with(key) if key else "OPENAI_API_KEY",
            needs_key=base_url is None,
            max_concurrency=max_concurrency,
            requests_per_minute=requests_per_minute,
            timeout=timeout,
            max_retries=max_retries,
            patience=patience,
            price=price or find_price(model),
        )
        self.limit = Limit(budget_usd, budget_tokens)
        self.endpoint.check(self.limit)
        self.cache, self.system_prompt, self.sampling = cache, system_prompt, sampling
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._ledger = Ledger(self.model, self.limit)
        self._closed = False
        self._calls: Calls | None = None
        self._left_by_fork: list[Calls] = []

    @property
    def model(self) -> str:
        return self.endpoint.model

    def submit(
        self, messages: Sequence[Message], *, repeat: int | None = None, session: str | None = None, **sampling: Any
    ) -> Future[Reply]:
        """See [`ChatModel`]. Cancelling the future cancels its request. `session` makes no difference here."""
        started = time.perf_counter()
        sampling = {**self.sampling, **sampling}
        try:
            # A copy: the caller may go on with its list while the call waits for a place.
            conversation = with_system(self.system_prompt, [message.copy() for message in messages])
            key = None
            if self.cache is not None and self.cache.mode != "off":
                key = self.cache.key(self.model, conversation, sampling, repeat)
        except Exception as error:  # whatever is wrong with this conversation, the next one may be fine
            return self._ended(BadRequest, f"not a conversation that can be sent: {error!r}")
        endpoint = self.endpoint
        request = Request(conversation, sampling, key, endpoint.max_retries, endpoint.timeout, started)
        return (
            self._replayed(request) if self.cache is not None and self.cache.mode == "replay" else self._start(request)
        )

    def charge_to(self, budget: Budget, account: str) -> None:
        """Book what this client spends into `budget`, under the name of its role.

        Its own `budget_usd` and `budget_tokens` then hold for all that is booked under this name, by whichever process
        and whenever; the total of `budget` holds as well.

        Args:
            budget ([`Budget`]): Of the whole job, or of several roles.
            account (`str`): The role: `environment`, `reference`, `feedback`, `optimizer`, `verifier`, `judge`, ...

        Raises:
            `ValueError`: `budget` is in dollars alone, and the price is not known.
        """
        self.endpoint.check_price(budget.limit)
        self._ledger.charge_to(budget, account)

    def check(self) -> None:
        """Ask the endpoint for one word, the way every call does but for the cache.

        Not where a call has succeeded in the last ten minutes, nor in replay mode.

        Raises:
            [`LLMError`]: A call would fail: wrong key, unknown model, no server at this address, ...
        """
        answered = self._ledger.answered_at
        if answered is not None and time.monotonic() - answered < _CHECKED_SECONDS:
            return
        if self.cache is not None and self.cache.mode == "replay":
            return
        messages: list[Message] = [{"role": "user", "content": "Reply with the word: ok"}]
        retries, timeout = min(self.endpoint.max_retries, 1), min(self.endpoint.timeout, _CHECK_SECONDS)
        reply = self._start(Request(messages, self.sampling, None, retries, timeout)).result()
        # A model that would have gone on thinking beyond max_tokens is there and works.
        if isinstance(reply.error, BadReply) and reply.finish_reason == "length":
            self._ledger.answered_at = time.monotonic()
        elif reply.error is not None:
            raise reply.error

    @property
    def stats(self) -> ChatStats:
        """Calls, failures, retries and usage so far: a copy."""
        return self._ledger.stats

    @property
    def usage(self) -> Usage:
        """Tokens and dollars so far."""
        return self._ledger.stats.usage

    def close(self) -> None:
        """End every call in flight with [`Closed`] and let go of the connections. Later calls end the same way.

        May be called any number of times, and is called at interpreter exit.
        """
        with self._lock:
            self._closed = True
            calls, self._calls = self._calls, None
        if calls is None or calls.pid != os.getpid():
            return
        closing = _run(calls.shut_down())
        if closing is not None and not on_background_thread():
            wait([closing], _CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"OpenAIChat({self.model!r}, base_url={shown_url(self.endpoint.base_url)!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> OpenAIChat:
        return self  # one endpoint, one budget

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def _start(self, request: Request) -> Future[Reply]:
        with self._lock:
            if self._closed:
                return self._ended(Closed, "the client is closed")
            if self._calls is None or self._calls.pid != os.getpid():
                if self._calls is not None:
                    self._left_by_fork.append(self._calls)  # with the parent's connections: neither used nor closed
                self._calls = Calls(self.endpoint, self._ledger, self.cache)
                weakref.finalize(self, _let_go, self._calls).atexit = False
            # Within the lock, so that `close` on another thread finds this call among those to end.
            future = _run(self._calls.answer(request), self)
        return future or self._ended(Closed, "the interpreter is shutting down")

    def _replayed(self, request: Request) -> Future[Reply]:
        """The recorded reply, at once: replies then come in the order of the requests, which no thread can change."""
        assert self.cache is not None and request.key is not None
        reply = self.cache.get(request.key)
        assert reply is not None, "in replay mode what is missing is an error"
        self._ledger.add(reply)
        future: Future[Reply] = Future()
        future.set_result(reply)
        return future

    def _ended(self, kind: type[LLMError], what: str) -> Future[Reply]:
        """The reply to a call that never left."""
        reply = Reply(error=kind(clean(what), self.endpoint.where, attempts=0), attempts=0)
        self._ledger.add(reply)
        future: Future[Reply] = Future()
        future.set_result(reply)
        return future


def _run(coroutine: Coroutine[Any, Any, T], user: OpenAIChat | None = None) -> Future[T] | None:
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, background_loop(user))
    except RuntimeError:  # the interpreter is shutting down and the loop is gone
        coroutine.close()
        return None


def _let_go(calls: Calls) -> None:
    """Close the connections of a client that nobody holds any more; without this they stay open on the loop."""
    if calls.pid == os.getpid():
        _run(calls.shut_down())
