"""[`OpenAIChat`]: a client for endpoints with OpenAI's chat format: OpenAI, vLLM, Ollama, a router.

This file has the settings, the counts and the steps of a call: check the cache, acquire a slot,
send the request, record and return the reply. HTTP and retries are in `openai_http.py`, the budget
of each attempt in `account.py`. A call may come from any thread and any event loop; it runs on the
background loop of `loop.py`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from .account import SpendingAccount
from .addresses import find_url_secrets, redact_url
from .budget import Budget, Limit, Price, find_price, price_tokens
from .cache import CacheKey, ReplayCache
from .chats import with_system
from .endpoint_check import CommandRole, EndpointCheck, find_similar_names
from .endpoint_errors import DEFAULT_KEY_SOURCE, error_from_status
from .guard import describe
from .loop import background_loop, on_background_thread, run, start
from .masking import sanitize_message
from .openai_call import ChatCall
from .spans import traced_chat
from .types import BadReply, BadRequest, Closed, LLMError, Message, Misconfigured, Reply, Usage

if TYPE_CHECKING:
    from .openai_http import Http

logger = logging.getLogger(__name__)

_OPENAI_URL = "https://api.openai.com/v1"
_CHECK_SECONDS = 30.0
# After a successful call the endpoint is not checked for this long.
_SECONDS_WITHOUT_CHECK = 600.0
_CLOSE_SECONDS = 5.0


@dataclass
class ChatStats:
    """The counts of a client in this process.

    Args:
        calls (`int`): Finished calls, with or without a text.
        cached (`int`): Calls that were answered from the cache.
        failed (`int`): Calls that ended without a text.
        retries (`int`): Requests sent beyond the first of each call.
        usage ([`Usage`]): Tokens and dollars, including retries and failed calls.
    """

    calls: int = 0
    cached: int = 0
    failed: int = 0
    retries: int = 0
    usage: Usage = field(default_factory=Usage)


class OpenAIChat:
    """A [`ChatModel`] behind an OpenAI-compatible endpoint.

    Safe to use from several threads and event loops. A pickled copy has the settings, but not the
    connections, the counts or a literal `api_key`: it reads its key from the environment of its
    process. `copy.deepcopy` returns the same object.

    Args:
        model (`str`): The model's name at the endpoint.
        base_url (`str`, *optional*): The endpoint, including `/v1`. Defaults to `OPENAI_BASE_URL`,
            then OpenAI.
        api_key (`str`, *optional*): Defaults to `OPENAI_API_KEY`, read at the first call. Not
            required if `base_url` is set.
        max_concurrency (`int`, *optional*, defaults to `64`): At most this many calls in flight;
            others wait for a slot. A call keeps its slot while it waits for a retry, so that an
            overloaded endpoint gets fewer requests.
        requests_per_minute (`float`, *optional*): Requests are spaced to stay below this rate,
            retries included. It applies to each process, as `max_concurrency` does: divide a
            provider's limit by the number of processes.
        timeout (`float`, *optional*, defaults to `60`): Seconds for each attempt. A call ends at
            the latest `timeout · (max_retries + 1)` seconds after it got its slot, plus the waits
            between attempts (0.5 to 8 seconds each, 2.5 to 40 after a 429, or the endpoint's
            `Retry-After` up to two minutes), plus `patience`.
        max_retries (`int`, *optional*, defaults to `5`): Further attempts after a failed one.
        patience (`float`, *optional*, defaults to `120`): Total seconds that a call waits while the
            endpoint is down. This wait uses up no retries.
        budget_usd (`float`, *optional*): Once this client has spent this much, no new request is
            sent, retries included; requests in flight finish. A request is sent if the budget has
            room for it besides those in flight, so that the budget is exceeded by no more than
            these. A trainer counts all processes of a job and its restarts together
            ([`OpenAIChat.charge_to`]); otherwise each process counts for itself. If the endpoint
            does not report the tokens of a reply, they are estimated, with one warning.
        budget_tokens (`int`, *optional*): The same limit in prompt and completion tokens.
        price (`tuple[float, float]`, *optional*): US dollars per million prompt and completion
            tokens. Defaults to the table in `budget.py`, which you should check. A model that is
            not in it costs 0; its tokens are counted.
        cache ([`ReplayCache`], *optional*): Records or replays replies. Not closed by `close`.
        system_prompt (`str`, *optional*): The first message of conversations without a system
            prompt.
        **sampling: Defaults for `temperature`, `max_tokens`, ...; a call's own values take
            precedence. Every parameter is sent as it is, even one that only this endpoint knows.

    Raises:
        `ValueError`: A setting is invalid, or `budget_usd` is the only limit and the price is not
            known.
    """

    command_role: CommandRole | None = None
    _account: SpendingAccount
    _endpoint_check: EndpointCheck | None = None  # in the process that has started the command
    _answered_at: float | None  # time of the endpoint's last text

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
        self.model = model
        self.base_url = base_url or _OPENAI_URL
        self.needs_key = base_url is None
        self.key_variable = _find_variable_with(key) if key else "OPENAI_API_KEY"
        self.max_concurrency = max_concurrency
        self.requests_per_minute = requests_per_minute
        self.timeout = timeout
        self.max_retries = max_retries
        self.patience = patience
        self.limit = Limit(budget_usd, budget_tokens)
        self.price = price or find_price(model)
        self.cache = cache if cache is not None and cache.mode != "off" else None
        self.system_prompt = system_prompt
        self.sampling = sampling

        # Refuse settings that would fail at every call, before the run begins.
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(
                f"base_url must begin with http:// or https://, not {redact_url(self.base_url)!r}"
            )
        # In a form that is false for NaN, which is no limit.
        if not (max_concurrency >= 1 and max_retries >= 0 and timeout > 0 and patience > 0):
            raise ValueError(
                "max_concurrency must be at least 1, max_retries at least 0, timeout and patience "
                "above 0"
            )
        if requests_per_minute is not None and not requests_per_minute > 0:
            raise ValueError("requests_per_minute must be above 0")
        if price is not None and not _is_price(price):
            raise ValueError(
                "price must be two numbers from 0, US dollars per 1M prompt tokens and per 1M "
                f"completion tokens, not {price!r}"
            )
        self._check_price(self.limit)
        # A function, because the key itself would show in dumps of this object.
        self._begin(lambda: key)

    @traced_chat
    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        repeat: int | None = None,
        session: str | None = None,
        **sampling: Any,
    ) -> Reply:
        """See [`ChatModel`]. Cancelling the call cancels its request. `session` is ignored."""
        sampling = {**self.sampling, **sampling}
        key: CacheKey | None = None
        try:
            # A copy: the caller may change its list while the call waits for a slot.
            conversation = with_system(self.system_prompt, [message.copy() for message in messages])
            if self.cache is not None:
                key = self.cache.key(self.model, conversation, sampling, repeat)
        except Exception as error:  # this conversation cannot be sent; the next one may be fine
            return self._finish(
                Reply(
                    error=BadRequest(f"not a conversation that can be sent: {describe(error)}"),
                    attempts=0,
                )
            )

        # Replay at once, so that replies come in the order of the calls whatever the threads do.
        if self.cache is not None and self.cache.mode == "replay" and key is not None:
            reply = self.cache.get(key)
            assert reply is not None, "in replay mode a missing reply is an error"
            return self._count(self._priced(reply))

        # Connections belong to the background loop, not to the caller's.
        answer = self._answer(
            ChatCall(
                messages=conversation,
                sampling=sampling,
                key=key,
                timeout=self.timeout,
                max_retries=self.max_retries,
                patience=self.patience,
            )
        )
        try:
            if on_background_thread():
                return await answer
            return await asyncio.wrap_future(start(answer))
        except RuntimeError as error:  # the loop has ended, or the interpreter is shutting down
            return self._finish(Reply(error=Closed(str(error)), attempts=0))

    def charge_to(self, budget: Budget, account: str) -> None:
        """Book the spending of this client into `budget`, under the name of its role.

        Its own `budget_usd` and `budget_tokens` then limit everything that is booked under this
        name, in all processes and across restarts. The total of `budget` applies as well.

        Args:
            budget ([`Budget`]): The budget of the whole job, or of several roles.
            account (`str`): The role: `environment`, `reference`, `feedback`, `optimizer`,
                `verifier`, `judge`, ...

        Raises:
            `ValueError`: `budget` is in dollars alone, and the price is not known.
        """
        self._check_price(budget.limit)
        with self._lock:
            previous_budget = self._account.budget
            if budget is previous_budget:
                return
            # Move the spending that is booked in memory so far.
            spent = Usage()
            if previous_budget.path is None:
                spent = previous_budget.spent(self._account.name)
            self._account.budget = budget
            self._account.name = account
        budget.add(account, spent)

    def serve_command(self, role: CommandRole, endpoint_check: EndpointCheck) -> None:
        """Name a role's options in errors, and fail at once if an endpoint never answers or rejects
        the key.

        Args:
            role ([`CommandRole`]): The role that this client plays.
            endpoint_check ([`EndpointCheck`]): Shared by the clients of the command; runs before
                the first request of any of them.
        """
        self.command_role = role
        self._endpoint_check = endpoint_check
        endpoint_check.add(self)

    async def find_first_error(self) -> LLMError | None:
        """Return why no call can succeed: no answer, or a rejected key; else `None`.

        A model that the endpoint does not list leads to a warning. Runs on the background loop.
        """
        name = self.command_role.name if self.command_role else "the endpoint"
        try:
            http = self._http or self._connect()
            answer = await http.ask_for_models()
            # A wrong key would be found only after the calls of other roles are paid for. Other
            # statuses prove nothing: not every endpoint has a list, or shows it with this key.
            if answer.status == 401:
                raise error_from_status(401, None, self.model, self.key_source)
        except LLMError as error:
            # The call of another role may be the one that runs the check: say whose error it is.
            named_error = type(error)(f"{name}: {error.message}", status=error.status)
            return self._public_error(named_error, attempts=0)
        if answer.silence is None:
            self._warn_of_unlisted_model(name, answer.model_names)
            return None
        question = "is its server running, and is its base_url right?"
        if self.needs_key:
            question = "is there a network, or is its base_url missing?"
        silence = Misconfigured(f"{name} does not answer ({answer.silence}): {question}")
        return self._public_error(silence, attempts=0)

    def _warn_of_unlisted_model(self, role_name: str, listed_names: Sequence[str]) -> None:
        """Log one warning if the endpoint lists models, and not this one. It may serve it yet."""
        similar_names = find_similar_names(self.model, listed_names)
        if not similar_names:
            return
        message = (
            f"{role_name}: {self.where} does not list this model: the call may fail, or the list "
            f"may be incomplete. It lists {', '.join(similar_names)}"
        )
        if len(listed_names) > len(similar_names):
            message += f" and {len(listed_names) - len(similar_names)} more"
        # The names come from the server.
        logger.warning(
            "%s", sanitize_message(message, self.find_key(), *find_url_secrets(self.base_url))
        )

    def check(self) -> None:
        """Ask the endpoint for one word, as any call does but without the cache.

        Skipped if a call succeeded in the last ten minutes, and in replay mode.

        Raises:
            [`LLMError`]: A call would fail: wrong key, unknown model, no server at this address,
                ...
        """
        if self.cache is not None and self.cache.mode == "replay":
            return

        # A call that succeeded lately is proof enough.
        seconds_since_answer = math.inf
        if self._answered_at is not None:
            seconds_since_answer = time.monotonic() - self._answered_at
        if seconds_since_answer < _SECONDS_WITHOUT_CHECK:
            return

        # A short call: one word, at most half a minute for each attempt, and one retry.
        call = ChatCall(
            messages=[{"role": "user", "content": "Reply with the word: ok"}],
            sampling=self.sampling,
            key=None,
            timeout=min(self.timeout, _CHECK_SECONDS),
            max_retries=min(self.max_retries, 1),
            patience=self.patience,
        )
        reply = run(self._answer(call))
        # A reasoning model that was cut off by max_tokens exists and works.
        if isinstance(reply.error, BadReply) and reply.finish_reason == "length":
            self._answered_at = time.monotonic()
        elif reply.error is not None:
            raise reply.error

    @property
    def stats(self) -> ChatStats:
        """A copy of the counts so far: calls, failures, retries, usage."""
        with self._lock:
            return replace(self._stats)

    @property
    def usage(self) -> Usage:
        """Tokens and dollars so far."""
        return self.stats.usage

    @property
    def where(self) -> str:
        """The model and its address, without secrets."""
        return f"{self.model} at {redact_url(self.base_url)}"

    @property
    def key_source(self) -> str:
        """What to set if the key is wrong: the environment variable that has it, or `api_key`."""
        if self.key_variable in (None, "OPENAI_API_KEY"):
            return DEFAULT_KEY_SOURCE
        return self.key_variable

    def find_key(self) -> str | None:
        """Return the API key, from the environment of this process unless it was passed in."""
        literal_key = self._literal_key()
        if literal_key or not self.key_variable:
            return literal_key or None
        return os.environ.get(self.key_variable, "").strip() or None

    def close(self) -> None:
        """End every call in flight with [`Closed`] and close the connections.

        Later calls end the same way. May be called several times; called at interpreter exit.
        """
        self._closed = True
        # In a fork, the connections are the parent's.
        if self._pid != os.getpid():
            return
        with suppress(RuntimeError):  # the interpreter is shutting down and the loop is gone
            closing = start(self._shut_down())
            # On the loop's own thread, waiting would block what is waited for.
            if not on_background_thread():
                wait([closing], _CLOSE_SECONDS)
                self._account.budget.settle(at_once=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"OpenAIChat({self.model!r}, base_url={redact_url(self.base_url)!r})"

    def __deepcopy__(self, memo: dict[int, object]) -> OpenAIChat:
        return self  # one endpoint, one budget

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._begin(lambda: None)

    def _check_price(self, limit: Limit) -> None:
        if limit.usd is None or self.price is not None:
            return
        problem = f"the price of {self.model!r} is not known"
        # A budget that is never reached is worse than none.
        if limit.tokens is None:
            raise ValueError(
                self._add_advice(
                    f"budget_usd needs a price, and {problem}: set budget_tokens instead, or the "
                    "price, US dollars per 1M prompt tokens and per 1M completion tokens"
                )
            )
        logger.warning("%s: of its budget only the tokens are counted", problem)

    def _begin(self, literal_key: Callable[[], str | None]) -> None:
        """Create the state that a copy in another process does not share."""
        self._literal_key = literal_key
        self._lock = threading.Lock()
        self._stats = ChatStats()
        self._answered_at = None
        self._account = SpendingAccount(self.model, self.limit, self.price)
        self._closed = False
        # The parent's connections and tasks, which are never used or closed in a fork.
        self._left_by_fork: list[tuple[Http | None, set[asyncio.Task[Reply]]]] = []
        self._begin_process()

    def _begin_process(self) -> None:
        """Create the state that a fork does not share. It is used on the background loop only."""
        self._pid = os.getpid()
        self._slots = asyncio.Semaphore(self.max_concurrency)
        # One lock for each sample that is being requested.
        self._sample_locks: weakref.WeakValueDictionary[tuple[bytes, int], asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )
        self._tasks: set[asyncio.Task[Reply]] = set()
        self._http: Http | None = None

    async def _answer(self, call: ChatCall) -> Reply:
        """Return the reply to one call. Raises nothing but the caller's own cancellation."""
        # The first call in a fork: begin without the parent's connections and tasks.
        if self._pid != os.getpid():
            self._left_by_fork.append((self._http, self._tasks))
            self._begin_process()
            self._endpoint_check = None  # the parent's; its lock may be held

        # A task of its own, so that `close` can cancel it alone.
        task = asyncio.ensure_future(self._replay_or_send(call))
        self._tasks.add(task)
        reply = Reply(error=Closed("cancelled"))
        try:
            reply = await task
        except asyncio.CancelledError:
            # Was this task cancelled, or only the one that it awaits?
            current_task = asyncio.current_task()
            if not self._closed or (current_task is not None and current_task.cancelling()):
                raise
            reply = Reply(error=Closed("the client was closed"))
        except LLMError as error:
            reply = Reply(error=error)
        except Exception as error:  # a bug here fails one call, not the thread that all calls share
            logger.debug("a call to %s failed unexpectedly", self.where, exc_info=True)
            reply = Reply(error=BadRequest(describe(error)))
        finally:
            self._tasks.discard(task)
            # Also for a failed call: what it cost, and how long it took.
            reply = replace(
                reply,
                usage=call.usage,
                attempts=call.attempts,
                seconds=time.perf_counter() - call.started,
            )
            reply = self._finish(reply)
        return reply

    async def _replay_or_send(self, call: ChatCall) -> Reply:
        """Return the recorded reply, or else send the call."""
        if self.cache is None or call.key is None:
            return await self._send(call)
        # A second call for the same sample waits here and then finds it recorded. A lock, not a
        # shared task: if the first call is cancelled or fails, the next one sends its own request.
        async with self._sample_locks.setdefault(call.key[:2], asyncio.Lock()):
            recorded = await asyncio.to_thread(self.cache.get, call.key)
            if recorded is not None:
                return self._priced(recorded)
            return await self._send(call)

    def _priced(self, recorded: Reply) -> Reply:
        """Return a recorded reply with the cost that its tokens have today."""
        saved = price_tokens(
            recorded.saved.prompt_tokens, recorded.saved.completion_tokens, self.price
        )
        return replace(recorded, saved=saved)

    async def _send(self, call: ChatCall) -> Reply:
        """Send the call when a slot is free, and record its reply and cost."""
        async with self._slots:
            if self._closed:
                raise Closed("the client is closed")
            # Connect at the first call.
            http = self._http or self._connect()
            if self._endpoint_check is not None:
                await self._endpoint_check.run()
            reply = await http.ask(call)
            # On the loop, access to the disk would block every call of every client.
            if self.cache is not None or self._account.budget.path is not None:
                await asyncio.to_thread(self._record, call, reply)
            return reply

    def _connect(self) -> Http:
        from .openai_http import Http  # imports aiohttp, at the first call only

        key = self.find_key()
        if key is None and self.needs_key:
            raise Misconfigured(
                f"no key: set {self.key_source} (a literal key is not carried into other "
                "processes), or base_url for a server of your own"
            )
        self._http = Http(self, key or "none", self._account)
        background_loop(self)  # which closes the connections before it ends
        # An open client is closed when it is garbage-collected or, at exit, by the loop.
        weakref.finalize(self, _close_collected, self._http, os.getpid()).atexit = False
        return self._http

    def _record(self, call: ChatCall, reply: Reply) -> None:
        """Record the reply and write its cost."""
        if self.cache is not None and call.key is not None:
            try:
                self.cache.put(call.key, replace(reply, usage=call.usage))
            except Exception:  # the reply has arrived and is paid for: return it all the same
                logger.exception("a reply could not be recorded in %r", self.cache)
        self._account.budget.settle()

    def _finish(self, reply: Reply) -> Reply:
        """Return the reply for the caller: its error without secrets and traceback, and counted."""
        error = reply.error
        if error is not None:
            reply = replace(reply, error=self._public_error(error, reply.attempts))
        return self._count(reply)

    def _public_error(self, error: LLMError, attempts: int) -> LLMError:
        """Return an error for the caller: without secrets, with what a command's user can do."""
        # The check of another endpoint of the command has failed: its client has described it.
        if error.where:
            return type(error)(error.message, error.where, attempts, error.status)
        # Neither the key nor the address's password may reach a log or an agent.
        message = sanitize_message(error.message, self.find_key(), *find_url_secrets(self.base_url))
        if isinstance(error, Misconfigured):
            message = self._add_advice(message)
        return type(error)(message, self.where, attempts, error.status)

    def _add_advice(self, message: str) -> str:
        """Return a message with the options of the role that this client plays in a command."""
        if self.command_role is None:
            return message
        joint = " " if message.endswith("?") else "; "
        return f"{message}{joint}{self.command_role.advice}"

    def _count(self, reply: Reply) -> Reply:
        """Add a reply to the counts and return it."""
        with self._lock:
            stats = self._stats
            stats.calls += 1
            stats.cached += reply.cached
            stats.failed += reply.error is not None
            stats.retries += max(0, reply.attempts - 1)
            stats.usage += reply.usage
            # A recorded reply says nothing about the endpoint.
            if reply.error is None and not reply.cached:
                self._answered_at = time.monotonic()
        return reply

    async def _shut_down(self) -> None:
        # End the calls before their connections.
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        http = self._http
        self._http = None
        if http is not None:
            await http.close()


def _close_collected(http: Http, pid: int) -> None:
    """Close the connections of a garbage-collected client; otherwise they stay open on the loop."""
    if pid == os.getpid():
        with suppress(RuntimeError):  # the interpreter is shutting down
            start(http.close())


def _is_price(price: object) -> bool:
    if not isinstance(price, tuple | list) or len(price) != 2:
        return False
    # An infinite price would make the cost of no tokens NaN, which reaches no limit.
    return all(isinstance(dollars, int | float) and 0 <= dollars < math.inf for dollars in price)


def _find_variable_with(key: str) -> str | None:
    """Return the environment variable with the value `key`.

    A pickled copy carries its name instead of the key.
    """
    for name, value in os.environ.items():
        if value.strip() == key and ("KEY" in name or "TOKEN" in name):
            return name
    return None
