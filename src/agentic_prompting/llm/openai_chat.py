"""[`OpenAIChat`]: any endpoint that speaks OpenAI's chat format - OpenAI, vLLM, SGLang, Ollama, a router.

Settings, counts, and the life of a call: recorded? a place free? money left? ask, book, record, answer. The HTTP is in
`openai_http.py`. A call may come from any thread and any event loop; its life is on the background loop of `loop.py`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from .budget import Budget, Limit, Price, find_price
from .cache import CacheKey, ReplayCache
from .loop import background_loop, on_background_thread, run, start
from .types import BadReply, BadRequest, Closed, LLMError, Message, Misconfigured, Reply, Usage, with_system
from .wire import clean, priced, secrets_in, shown_url

if TYPE_CHECKING:
    from .openai_http import Http

logger = logging.getLogger(__name__)

_OPENAI_URL = "https://api.openai.com/v1"
_CHECK_SECONDS = 30.0
_CHECKED_SECONDS = 600.0  # that a call which succeeded stands for a check
_CLOSE_SECONDS = 5.0


@dataclass
class ChatStats:
    """What a client has done so far in this process."""

    calls: int = 0  # that have ended, whichever way
    cached: int = 0  # those of them answered from the cache
    failed: int = 0  # those of them that ended without a text
    retries: int = 0  # requests sent beyond the first of each call
    usage: Usage = field(default_factory=Usage)  # tokens and dollars, retries and failed calls included


@dataclass
class Call:
    """One call: the conversation as it was when it was made, and its account over all attempts. Times in seconds."""

    messages: list[Message]
    sampling: dict[str, Any]
    key: CacheKey | None  # `None` where the cache has no part in it
    timeout: float  # for each attempt
    max_retries: int
    patience: float  # that it may still wait for an endpoint that is down
    attempts: int = 0
    usage: Usage = field(default_factory=Usage)  # of all attempts: an answer that was no use is paid for too
    started: float = field(default_factory=time.perf_counter)


class OpenAIChat:
    """A [`ChatModel`] behind an OpenAI-compatible endpoint.

    Safe to use from several threads and event loops. A pickled copy has the settings but not the connections, the
    counts or a literal `api_key`: it looks for its key in the environment of its process. `copy.deepcopy` gives the
    same object.

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
            while the endpoint is down.
        budget_usd (`float`, *optional*): When this client has spent this much, no new call is sent; those on their way
            end. A trainer counts all processes of a job and its restarts together ([`OpenAIChat.charge_to`]); without
            one it is counted per process. An endpoint that reports no usage costs nothing here.
        budget_tokens (`int`, *optional*): The same in tokens, read and written.
        price (`tuple[float, float]`, *optional*): US dollars per million prompt and completion tokens. Defaults to the
            table in `budget.py`, which you should check; a model that is not in it costs 0, its tokens are counted.
        cache ([`ReplayCache`], *optional*): Where replies are recorded or replayed. Not closed by `close`.
        system_prompt (`str`, *optional*): Put in front of conversations that have none.
        **sampling: Defaults for `temperature`, `max_tokens`, ...; what a call passes wins. Every parameter is sent as
            it is, also one that only this endpoint knows.

    Raises:
        `ValueError`: A setting makes no sense, or `budget_usd` is the only limit and the price is not known.
    """

    _budget: Budget
    _account: str
    _answered_at: float | None  # when the endpoint last gave a text

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
        self.model, self.base_url, self.needs_key = model, base_url or _OPENAI_URL, base_url is None
        self.key_variable = _variable_with(key) if key else "OPENAI_API_KEY"
        self.max_concurrency, self.requests_per_minute = max_concurrency, requests_per_minute
        self.timeout, self.max_retries, self.patience = timeout, max_retries, patience
        self.limit, self.price = Limit(budget_usd, budget_tokens), price or find_price(model)
        self.cache = None if cache is not None and cache.mode == "off" else cache
        self.system_prompt, self.sampling = system_prompt, sampling
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must begin with http:// or https://, not {shown_url(self.base_url)!r}")
        if max_concurrency < 1 or max_retries < 0 or timeout <= 0 or patience <= 0:
            raise ValueError("max_concurrency must be at least 1, max_retries at least 0, timeout and patience above 0")
        if requests_per_minute is not None and requests_per_minute <= 0:
            raise ValueError("requests_per_minute must be above 0")
        self._check_price(self.limit)
        self._begin(lambda: key)  # not the key itself, which would be in every picture of this object

    async def __call__(
        self, messages: Sequence[Message], *, repeat: int | None = None, session: str | None = None, **sampling: Any
    ) -> Reply:
        """See [`ChatModel`]. Cancelling the call cancels its request. `session` makes no difference here."""
        sampling = {**self.sampling, **sampling}
        try:
            # A copy: the caller may go on with its list while the call waits for a place.
            conversation = with_system(self.system_prompt, [message.copy() for message in messages])
            key = self.cache.key(self.model, conversation, sampling, repeat) if self.cache else None
        except Exception as error:  # whatever is wrong with this conversation, the next one may be fine
            return self._ended(BadRequest(f"not a conversation that can be sent: {error!r}"))
        if self.cache is not None and self.cache.mode == "replay" and key is not None:
            # At once: replies then come in the order of the calls, which no thread can change.
            reply = self.cache.get(key)
            assert reply is not None, "in replay mode what is missing is an error"
            return self._counted(self._priced(reply))
        answer = self._answer(Call(conversation, sampling, key, self.timeout, self.max_retries, self.patience))
        try:  # connections live on one loop, not on the caller's
            return await (answer if on_background_thread() else asyncio.wrap_future(start(answer)))
        except RuntimeError as error:  # the loop has ended, or the interpreter is shutting down
            return self._ended(Closed(str(error)))

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
        self._check_price(budget.limit)
        with self._lock:
            if budget is self._budget:
                return
            before = self._budget.spent(self._account) if self._budget.path is None else Usage()
            self._budget, self._account = budget, account
        budget.add(account, before)

    def check(self) -> None:
        """Ask the endpoint for one word, the way every call does but for the cache.

        Not where a call has succeeded in the last ten minutes, nor in replay mode.

        Raises:
            [`LLMError`]: A call would fail: wrong key, unknown model, no server at this address, ...
        """
        lately = self._answered_at is not None and time.monotonic() - self._answered_at < _CHECKED_SECONDS
        if lately or (self.cache is not None and self.cache.mode == "replay"):
            return
        messages: list[Message] = [{"role": "user", "content": "Reply with the word: ok"}]
        limits = min(self.timeout, _CHECK_SECONDS), min(self.max_retries, 1), self.patience
        reply = run(self._answer(Call(messages, self.sampling, None, *limits)))
        # A model that would have gone on thinking beyond max_tokens is there and works.
        if isinstance(reply.error, BadReply) and reply.finish_reason == "length":
            self._answered_at = time.monotonic()
        elif reply.error is not None:
            raise reply.error

    @property
    def stats(self) -> ChatStats:
        """Calls, failures, retries and usage so far: a copy."""
        with self._lock:
            return replace(self._stats)

    @property
    def usage(self) -> Usage:
        """Tokens and dollars so far."""
        return self.stats.usage

    @property
    def where(self) -> str:
        """The model and its address, fit to be shown."""
        return f"{self.model} at {shown_url(self.base_url)}"

    def find_key(self) -> str | None:
        """The API key, from the environment of this process unless it was passed in."""
        from_environment = os.environ.get(self.key_variable, "").strip() if self.key_variable else ""
        return self._literal_key() or from_environment or None

    def close(self) -> None:
        """End every call in flight with [`Closed`] and let go of the connections. Later calls end the same way.

        May be called any number of times, and is called at interpreter exit.
        """
        self._closed = True
        if self._pid != os.getpid():
            return
        with suppress(RuntimeError):  # the interpreter is shutting down and the loop is gone
            closing = start(self._shut_down())
            if not on_background_thread():
                wait([closing], _CLOSE_SECONDS)
                self._budget.settle(at_once=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"OpenAIChat({self.model!r}, base_url={shown_url(self.base_url)!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> OpenAIChat:
        return self  # one endpoint, one budget

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin(lambda: None)

    def _check_price(self, limit: Limit) -> None:
        if limit.usd is None or self.price is not None:
            return
        unknown = f"the price of {self.model!r} is not known"
        if limit.tokens is None:  # a budget that can never be reached is worse than none
            raise ValueError(
                f"budget_usd needs a price, and {unknown}: pass budget_tokens= instead, or "
                "price=(usd per 1M prompt tokens, usd per 1M completion tokens)"
            )
        logger.warning("%s: of its budget only the tokens are counted", unknown)

    def _begin(self, literal_key: Callable[[], str | None]) -> None:
        """What a copy in another process has of its own."""
        self._literal_key = literal_key
        self._lock = threading.Lock()
        self._stats = ChatStats()
        self._answered_at = None
        self._budget, self._account = Budget(), self.model  # in memory, without a total: until told where to book
        self._closed = False
        self._left_by_fork: list[Any] = []
        self._begin_process()

    def _begin_process(self) -> None:
        """What a fork has of its own. Used on the background loop alone."""
        self._pid = os.getpid()
        self._slots = asyncio.Semaphore(self.max_concurrency)
        self._asking: weakref.WeakValueDictionary[tuple[bytes, int], asyncio.Lock] = weakref.WeakValueDictionary()
        self._tasks: set[asyncio.Task[Reply]] = set()
        self._http: Http | None = None

    async def _answer(self, call: Call) -> Reply:
        """The reply to one call. Raises nothing but the caller's own cancellation."""
        if self._pid != os.getpid():
            self._left_by_fork.append((self._http, self._tasks))  # the parent's: neither used nor closed
            self._begin_process()
        task = asyncio.ensure_future(self._recorded_or_asked(call))  # its own, so that `close` can end it alone
        self._tasks.add(task)
        reply = Reply(error=Closed("cancelled"))
        try:
            reply = await task
        except asyncio.CancelledError:
            asked = asyncio.current_task()  # cancelled itself, or only the task that it waits for
            if not self._closed or (asked is not None and asked.cancelling()):
                raise
            reply = Reply(error=Closed("the client was closed"))
        except LLMError as error:
            reply = Reply(error=error)
        except Exception as error:  # a fault in here fails one call, not the thread all calls share
            logger.debug("a call to %s failed in an unforeseen way", self.where, exc_info=True)
            reply = Reply(error=BadRequest(f"{type(error).__name__}: {error}"))
        finally:
            self._tasks.discard(task)
            reply = self._ended(reply.error, reply, call)
        return reply

    async def _recorded_or_asked(self, call: Call) -> Reply:
        if self.cache is None or call.key is None:
            return await self._ask(call)
        # Who wants the same sample meanwhile waits here, then finds it recorded. A lock, not a shared task: when the
        # first one is cancelled or fails, the next one asks for itself.
        async with self._asking.setdefault(call.key[:2], asyncio.Lock()):
            recorded = await asyncio.to_thread(self.cache.get, call.key)
            return self._priced(recorded) if recorded else await self._ask(call)

    def _priced(self, recorded: Reply) -> Reply:
        saved = priced(recorded.saved.prompt_tokens, recorded.saved.completion_tokens, self.price)
        return replace(recorded, saved=saved)

    async def _ask(self, call: Call) -> Reply:
        async with self._slots:
            if self._closed:
                raise Closed("the client is closed")
            await self._in_thread(self._budget.stop_when_spent, self._account, self.limit)
            http = self._http or self._connect()
            try:
                reply = await http.ask(call)
            finally:
                self._budget.note(self._account, call.usage)
            await self._in_thread(self._keep, call, reply)
            return reply

    def _connect(self) -> Http:
        from .openai_http import Http  # imports httpx, at the first call only

        key = self.find_key()
        if key is None and self.needs_key:
            raise Misconfigured(
                "no key: set OPENAI_API_KEY or pass api_key= (a literal key is not carried into other processes), "
                "or base_url= for a server of your own"
            )
        self._http = Http(self, key or "none")
        background_loop(self)  # which closes what is connected before it ends
        weakref.finalize(self, _let_go, self._http, os.getpid()).atexit = False
        return self._http

    async def _in_thread(self, function: Callable[..., None], *args: Any) -> None:
        """What may wait for a disk, off the loop: there it would hold up every call of every client."""
        if self.cache is None and self._budget.path is None:
            function(*args)  # nothing that waits
        else:
            await asyncio.to_thread(function, *args)

    def _keep(self, call: Call, reply: Reply) -> None:
        """Record the reply, and write down what it cost."""
        if self.cache is not None and call.key is not None:
            try:
                self.cache.put(call.key, replace(reply, usage=call.usage))
            except Exception:  # a reply that is here and paid for is not taken away
                logger.exception("a reply could not be recorded in %r", self.cache)
        self._budget.settle()

    def _ended(self, error: LLMError | None, reply: Reply = Reply(attempts=0), call: Call | None = None) -> Reply:
        """The reply as the caller gets it: with its account, counted, and its error free of secrets and traces."""
        if call is not None:
            seconds = time.perf_counter() - call.started
            reply = replace(reply, usage=call.usage, attempts=call.attempts, seconds=seconds)
        if error is not None:
            what = clean(error.what, self.find_key(), *secrets_in(self.base_url))
            reply = replace(reply, error=type(error)(what, self.where, reply.attempts, error.status))
        return self._counted(reply)

    def _counted(self, reply: Reply) -> Reply:
        with self._lock:
            stats = self._stats
            stats.calls += 1
            stats.cached += reply.cached
            stats.failed += reply.error is not None
            stats.retries += max(0, reply.attempts - 1)
            stats.usage += reply.usage
            if reply.error is None and not reply.cached:
                self._answered_at = time.monotonic()
        return reply

    async def _shut_down(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        http, self._http = self._http, None
        if http is not None:
            await http.close()


def _let_go(http: Http, pid: int) -> None:
    """Close the connections of a client that nobody holds any more; without this they stay open on the loop."""
    if pid == os.getpid():
        with suppress(RuntimeError):  # the interpreter is shutting down
            start(http.close())


def _variable_with(key: str) -> str | None:
    """The environment variable that `key` was read from, so that a pickled copy can carry the name, not the key."""
    names = (name for name, value in os.environ.items() if value.strip() == key and ("KEY" in name or "TOKEN" in name))
    return next(names, None)
