"""Budgets: limits on spending, the record of what was spent (the *book*), and the prices of models.

Spending is booked under an account: the role that spent it (`environment`, `reference`, `feedback`,
`optimizer`, `verifier`, `judge`, or any other name). With a file as its book a budget holds for the
whole *job*: every process of a launch adds to the file and reads it before each call, and a resumed
run continues the count. An all-reduce could not do this: it knows neither the calls in flight nor
those of an earlier process.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from ..records import SharedFile
from .numbers import format_usd
from .types import BudgetExceeded, BudgetUnavailable, Usage, cost_in_words

logger = logging.getLogger(__name__)

_BUSY_SECONDS = 1.0  # wait while another process has locked the book
_GRACE_SECONDS = 30.0  # without access to the book, before calls are refused
_ROUNDING = 1e-9  # relative error of a sum of floats that is ignored at a limit in dollars

_TABLE = """
CREATE TABLE IF NOT EXISTS spending (
    account TEXT PRIMARY KEY, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    cost_usd REAL NOT NULL, estimated_tokens INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID
"""
# A book of an older version lacks this column.
_ADD_COLUMN = "ALTER TABLE spending ADD COLUMN estimated_tokens INTEGER NOT NULL DEFAULT 0"
_COLUMNS = "account, prompt_tokens, completion_tokens, cost_usd, estimated_tokens"
_ADD = f"""
INSERT INTO spending ({_COLUMNS}) VALUES (?, ?, ?, ?, ?) ON CONFLICT (account) DO UPDATE SET
    prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    completion_tokens = completion_tokens + excluded.completion_tokens,
    cost_usd = cost_usd + excluded.cost_usd,
    estimated_tokens = estimated_tokens + excluded.estimated_tokens
"""
_SELECT = f"SELECT {_COLUMNS} FROM spending"

Price = tuple[float, float]
"""US dollars per million prompt tokens and per million completion tokens."""

# OpenAI's list prices of late 2025, standard tier, entered by hand, without discounts. Prices
# change: check them against the provider's list before you rely on a budget, or pass `price=`
# yourself.
PRICES: dict[str, Price] = {
    "gpt-3.5-turbo": (0.50, 1.50),
    "gpt-3.5-turbo-0301": (1.50, 2.00),
    "gpt-3.5-turbo-0613": (1.50, 2.00),
    "gpt-3.5-turbo-1106": (1.00, 2.00),
    "gpt-4-turbo": (10.00, 30.00),
    "gpt-4o": (2.50, 10.00),
    "gpt-4o-2024-05-13": (5.00, 15.00),
    "gpt-4o-mini": (0.15, 0.60),
    "gpt-4.1": (2.00, 8.00),
    "gpt-4.1-mini": (0.40, 1.60),
    "gpt-4.1-nano": (0.10, 0.40),
    "gpt-5": (1.25, 10.00),
    "gpt-5-mini": (0.25, 2.00),
    "gpt-5-nano": (0.05, 0.40),
    "gpt-5-pro": (15.00, 120.00),
    "gpt-5.1": (1.25, 10.00),
    "o3": (2.00, 8.00),
    "o3-mini": (1.10, 4.40),
    "o4-mini": (1.10, 4.40),
}

# A dated snapshot that is not in the table costs the same as its model. Any other suffix
# ("-audio-preview", "-pro", ".5") is another model with another price; a budget with the wrong
# price is worse than an error that asks for the right one.
_SNAPSHOT = re.compile(r"-(\d{4}-\d{2}-\d{2}|\d{4}|latest)$")


def find_price(model: str) -> Price | None:
    """Return the price of a model, or of the model that it is a dated snapshot of.

    `None` if the price is not known.

    Args:
        model (`str`): As sent to the endpoint; a leading `openai/`, which routers use, is ignored.
    """
    name = model.removeprefix("openai/")
    return PRICES.get(name) or PRICES.get(_SNAPSHOT.sub("", name))


def price_tokens(prompt_tokens: int, completion_tokens: int, price: Price | None) -> Usage:
    """Return the usage of a call with the cost of its tokens; the cost is 0 without a price."""
    if price is None:
        return Usage(prompt_tokens, completion_tokens)
    # Prices are in dollars per million tokens.
    prompt_price, completion_price = price
    cost = prompt_tokens * prompt_price + completion_tokens * completion_price
    return Usage(prompt_tokens, completion_tokens, cost / 1e6)


@dataclass(frozen=True)
class Limit:
    """A limit on spending, in US dollars and in tokens (prompt and completion); `None` is no limit.

    Raises:
        `ValueError`: One of them is negative or not a number (NaN): no spending would reach it.
    """

    usd: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("budget_usd", self.usd), ("budget_tokens", self.tokens)):
            # Not a comparison with "below 0", which is false for NaN.
            if value is not None and not value >= 0:
                raise ValueError(f"{name} must not be negative or NaN, got {value}")

    def __bool__(self) -> bool:
        return self.usd is not None or self.tokens is not None

    def stop_when_reached(self, spent: Usage, spender: str) -> None:
        """Raise [`BudgetExceeded`] if `spent` has reached the limit."""
        if self.usd is not None and spent.cost_usd >= self.usd - _ROUNDING * self.usd:
            raise BudgetExceeded(
                f"${format_usd(spent.cost_usd)} of the budget of ${format_usd(self.usd)} are "
                f"spent{spender}: raise budget_usd",
                attempts=0,
            )
        if self.tokens is not None and spent.tokens >= self.tokens:
            raise BudgetExceeded(
                f"{spent.tokens:,} of the budget of {self.tokens:,} tokens are spent{spender}: "
                "raise budget_tokens",
                attempts=0,
            )

    def has_room_for(self, tokens: int, cost_usd: float) -> bool:
        """Whether these totals stay within the limit."""
        is_within_usd = self.usd is None or cost_usd <= self.usd + _ROUNDING * self.usd
        is_within_tokens = self.tokens is None or tokens <= self.tokens
        return is_within_usd and is_within_tokens


class _Gate:
    """Admits requests under one limit, first come, first served.

    For coroutines of the background loop.
    """

    def __init__(self) -> None:
        # Held by the request that is next, also while it waits for others to end.
        self._turn = asyncio.Lock()
        self._request_ended = asyncio.Event()
        # The number of requests in flight, and their expected total.
        self._requests = 0
        self._tokens = 0
        self._cost_usd = 0.0

    async def enter(
        self,
        expected: Usage,
        limit: Limit,
        stop_when_spent: Callable[[], Awaitable[None]],
        spent: Callable[[], Usage],
    ) -> None:
        """Wait until the limit has room for a request, or no other request is in flight."""
        async with self._turn:
            while True:
                # Count the requests in flight at their expected cost.
                await stop_when_spent()
                total = spent() + expected
                has_room = limit.has_room_for(
                    total.tokens + self._tokens, total.cost_usd + self._cost_usd
                )
                # A request that fits nowhere is sent alone, rather than never.
                if has_room or not self._requests:
                    break
                self._request_ended.clear()
                await self._request_ended.wait()
            self._requests += 1
            self._tokens += expected.tokens
            self._cost_usd += expected.cost_usd

    def leave(self, expected: Usage) -> None:
        """Note that a request has ended."""
        self._requests -= 1
        self._tokens -= expected.tokens
        self._cost_usd -= expected.cost_usd
        if not self._requests:
            self._cost_usd = 0.0  # without the rounding errors of the sums
        self._request_ended.set()


def describe_accounts(by_account: Mapping[str, Usage]) -> str:
    """List accounts with their dollars and tokens on one line."""
    accounts = []
    for name, usage in by_account.items():
        tokens = f"{usage.tokens:,} tokens"
        if usage.estimated_tokens:
            tokens += f", {usage.estimated_tokens:,} of them estimated"
        cost = cost_in_words(usage.cost_usd, was_used=usage.tokens > 0)
        accounts.append(f"{name} {cost} ({tokens})")
    return ", ".join(accounts) or "nothing"


class Budget(SharedFile):
    """A total limit, and the book of what each account has spent. Safe to use from several threads.

    With a `path` it is also shared by several processes and survives restarts. Delete the file to
    start at zero.

    A request is admitted ([`Budget.admitted`]) if the limit has room for its expected cost besides
    the requests in flight; otherwise it waits for them. While none is in flight, a request is
    admitted as long as the limit is not reached. So the total exceeds the limit by no more than
    what was in flight: in one process by one request and the error of the estimates, in several
    processes by the requests of the others too.

    Only [`Budget.stop_when_spent`] and [`Budget.admitted`] raise an error of the file. An amount
    that cannot be written (file locked, disk full) counts at once and is written with a later call;
    if the file cannot be read, the last values read are used.

    Args:
        usd (`float`, *optional*): US dollars in total.
        tokens (`int`, *optional*): Prompt and completion tokens in total.
        path (`str` or `Path`, *optional*): The book, an SQLite file on a local disk. By default the
            book is in memory. Nodes without a common disk have one book each: give each node its
            share.

    Example:

    ```python
    charge(Budget(usd=10), feedback=critic, optimizer=rewriter, verifier=judge)
    ```
    """

    def __init__(
        self, usd: float | None = None, tokens: int | None = None, path: str | Path | None = None
    ):
        super().__init__(None if path is None else Path(path), _TABLE, _BUSY_SECONDS)
        self.limit = Limit(usd, tokens)
        # Guards the two attributes below; never held during disk access.
        self._lock = threading.Lock()
        # As last read from the file; without a path everything that was spent.
        self._book: dict[str, Usage] = {}
        self._unwritten: list[tuple[str, Usage]] = []
        # The accounts that this process books under, also those that have spent nothing yet.
        self._accounts: set[str] = set()
        self._reset_gates()

    def add(self, account: str, usage: Usage) -> None:
        """Book `usage` under `account`."""
        self._accounts.add(account)
        self.note(account, usage)
        self.settle()

    def note(self, account: str, usage: Usage) -> None:
        """Book `usage` under `account` without disk access.

        It counts at once; [`Budget.settle`] writes it.
        """
        if not usage.tokens and not usage.cost_usd:
            return

        # In memory the book is final at once; for a file the entry waits to be written.
        with self._lock:
            if self.path is None:
                self._book = _add_entries(self._book, [(account, usage)])
            else:
                self._unwritten.append((account, usage))

    def settle(self, at_once: bool = False) -> None:
        """Write what this process spent and read what others spent.

        Waits for the disk, up to about two seconds.

        Args:
            at_once (`bool`, *optional*, defaults to `False`): Try again even if the last attempt
                failed a moment ago.
        """
        if self.path is not None:
            super().settle(at_once)

    def spent(self, account: str | None = None) -> Usage:
        """Return the spending of `account` so far, or of all accounts together."""
        by_account = self.by_account()
        if account is None:
            return sum(by_account.values(), Usage())
        return by_account.get(account, Usage())

    def warn_if_it_limits_nothing(self) -> None:
        """Log a warning if there is a limit, and nothing has been charged to this budget."""
        if self.limit and not self._accounts:
            logger.warning(
                "the budget limits nothing: what this run calls books no spending. An OpenAIChat "
                "in the attribute `chat`, `model` or `models` of an environment is charged; for "
                "what you call in another way, set a limit at its provider"
            )

    def by_account(self) -> dict[str, Usage]:
        """Return the spending of each account so far, sorted by name."""
        self.settle()
        return dict(sorted(self._last_known().items()))

    def stop_when_spent(self, account: str | None = None, account_limit: Limit = Limit()) -> None:
        """Raise an error if no further call may be made.

        Args:
            account (`str`, *optional*): The account of the call.
            account_limit ([`Limit`], *optional*): The limit of `account`, besides the total.

        Raises:
            [`BudgetExceeded`]: The total or the account's limit is reached.
            [`BudgetUnavailable`]: There is a limit, and the book is damaged or was inaccessible for
                half a minute.
        """
        if not self.limit and not account_limit:
            return
        by_account = self.by_account()

        # A locked file or a full disk may pass; until then the last values that were read count.
        if self._fault is not None:
            is_temporary = "locked" in str(self._fault) or "full" in str(self._fault)
            if not is_temporary or time.monotonic() - self._failing_since >= _GRACE_SECONDS:
                raise BudgetUnavailable(
                    f"the budget cannot be checked, its book {self.path} is out of reach: "
                    f"{self._fault}",
                    attempts=0,
                )

        # The account's own limit first: its message names the role.
        if account is not None:
            account_limit.stop_when_reached(by_account.get(account, Usage()), f" by {account!r}")
        spender = f" in all (see {self.path})" if self.path else " in all"
        self.limit.stop_when_reached(sum(by_account.values(), Usage()), spender)

    @asynccontextmanager
    async def admitted(
        self, account: str, expected: Usage, account_limit: Limit = Limit()
    ) -> AsyncIterator[None]:
        """The context in which a request may be in flight. For coroutines of the background loop.

        Waits, first come, first served, until the limits have room for the expected cost of the
        request, or no other request is in flight. Book its cost inside the context, so that the
        next request sees it.

        Args:
            account (`str`): The account of the request.
            expected ([`Usage`]): The expected cost.
            account_limit ([`Limit`], *optional*): The limit of `account`, besides the total.

        Raises:
            [`BudgetExceeded`], [`BudgetUnavailable`]: As [`Budget.stop_when_spent`].
        """

        async def stop_when_spent() -> None:
            if self.path is None:
                self.stop_when_spent(account, account_limit)
            else:
                # It waits for the disk.
                await asyncio.to_thread(self.stop_when_spent, account, account_limit)

        def account_spent() -> Usage:
            return self._last_known().get(account, Usage())

        # Enter both gates, always in this order, and leave them in reverse.
        async with AsyncExitStack() as gates:
            if account_limit:
                gate = self._gates.setdefault(account, _Gate())
                await gate.enter(expected, account_limit, stop_when_spent, account_spent)
                gates.callback(gate.leave, expected)
            if self.limit:
                await self._gate_of_all.enter(
                    expected, self.limit, stop_when_spent, self._last_known_total
                )
                gates.callback(self._gate_of_all.leave, expected)
            yield

    def _last_known(self) -> dict[str, Usage]:
        """Return the spending of each account, without reading the file."""
        with self._lock:
            return _add_entries(self._book, self._unwritten)

    def _last_known_total(self) -> Usage:
        return sum(self._last_known().values(), Usage())

    def _reset_gates(self) -> None:
        """Start with no request in flight. The gates are used on the background loop only."""
        self._gate_of_all = _Gate()
        self._gates: dict[str, _Gate] = {}  # by account

    def __str__(self) -> str:
        """List the accounts: `environment $1.2000 (34,567 tokens), judge $0.0100 (890 tokens)`."""
        text = describe_accounts(self.by_account())
        if self._fault is not None:
            text += f" (the book {self.path} is out of reach: {self._fault})"
        return text

    def __reduce__(
        self,
    ) -> tuple[type[Budget], tuple[float | None, int | None, Path | None]]:
        # A copy in another process opens the file itself.
        return type(self), (self.limit.usd, self.limit.tokens, self.path)

    def _begin_fork(self) -> None:
        super()._begin_fork()
        self._lock = threading.Lock()
        if self.path is not None:
            self._unwritten = []  # the parent writes its own entries
        self._reset_gates()

    def _open(self) -> sqlite3.Connection:
        connection = super()._open()
        try:
            # Bring the book of an older version up to date.
            columns = {row[1] for row in connection.execute("PRAGMA table_info(spending)")}
            if "estimated_tokens" not in columns:
                connection.execute(_ADD_COLUMN)
        except sqlite3.OperationalError as error:
            # Unless another process has just added it.
            if "duplicate column" not in str(error):
                connection.close()
                raise
        except BaseException:
            connection.close()
            raise
        return connection

    def _write(self) -> None:
        assert self.path is not None
        entries = list(self._unwritten)
        if not entries and not self._book and not self.path.exists():
            return  # a run that has spent nothing leaves no file

        # Add this process's entries, all of them or none.
        connection = self._connected()
        if entries:
            new_rows = [
                (
                    account,
                    usage.prompt_tokens,
                    usage.completion_tokens,
                    usage.cost_usd,
                    usage.estimated_tokens,
                )
                for account, usage in entries
            ]
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.executemany(_ADD, new_rows)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

        # Read the spending of all processes.
        rows = connection.execute(_SELECT).fetchall()
        book = {
            str(account): Usage(int(prompt), int(completion), float(cost_usd), int(estimated))
            for account, prompt, completion, cost_usd, estimated in rows
        }

        # The file may have been emptied or replaced while in use: then keep what is known.
        with self._lock:
            del self._unwritten[: len(entries)]
            expected_book = _add_entries(self._book, entries)
            is_incomplete = any(
                book.get(account, Usage()).tokens < usage.tokens
                for account, usage in expected_book.items()
            )
            self._book = expected_book if is_incomplete else book
        if is_incomplete:
            raise ValueError("spending that was in it is gone")


def _add_entries(
    book: Mapping[str, Usage], entries: Iterable[tuple[str, Usage]]
) -> dict[str, Usage]:
    """Return a copy of a book with further entries."""
    new_book = dict(book)
    for account, usage in entries:
        new_book[account] = new_book.get(account, Usage()) + usage
    return new_book


class Chargeable(Protocol):
    """An object whose spending can be booked, such as [`OpenAIChat`]."""

    def charge_to(self, budget: Budget, account: str, /) -> None: ...


@dataclass
class _Spender:
    """An object that can be charged, and its accounts."""

    model: Chargeable
    accounts: list[str] = field(default_factory=list)


def charge(budget: Budget, **roles: object) -> None:
    """Book what each role spends into `budget`.

    Args:
        budget ([`Budget`]): The budget.
        **roles: By name an object with a `charge_to`, or one with such objects in its attributes
            `chat`, `model` and `models`. Others, `None` included, are ignored. A model in several
            roles is booked under all their names: `feedback+optimizer`.
    """
    # A model in several roles is charged once, under all their names.
    spenders: dict[int, _Spender] = {}
    for role, owner in roles.items():
        for account, model in _find_spenders(role, owner, set()):
            spenders.setdefault(id(model), _Spender(model)).accounts.append(account)
    for spender in spenders.values():
        unique_accounts = dict.fromkeys(spender.accounts)
        spender.model.charge_to(budget, "+".join(unique_accounts))


def charge_models_of(owner: object, budget: Budget, account: str) -> None:
    """Book what the models in the attributes `chat`, `model` and `models` of `owner` spend."""
    for model_account, model in _find_models_of(account, owner, set()):
        model.charge_to(budget, model_account)


def _find_spenders(
    account: str, owner: object, visited: set[int]
) -> Iterator[tuple[str, Chargeable]]:
    """Yield `owner` if it can be charged, else the models inside it, each with its account."""
    if hasattr(owner, "charge_to"):
        yield account, cast(Chargeable, owner)
    # An object that cannot be charged may hold models, or itself: visit it once.
    elif id(owner) not in visited:
        yield from _find_models_of(account, owner, visited)


def _find_models_of(
    account: str, owner: object, visited: set[int]
) -> Iterator[tuple[str, Chargeable]]:
    """Yield the models in the attributes of `owner`, each with its account."""
    visited.add(id(owner))
    for attribute in ("chat", "model", "models"):
        value = getattr(owner, attribute, None)
        # Models by name have an account each, below that of their owner.
        if isinstance(value, Mapping):
            models = {f"{account}/{key}": model for key, model in value.items()}
        else:
            models = {account: value}
        for model_account, model in models.items():
            if model is not None and not isinstance(model, str):
                yield from _find_spenders(model_account, model, visited)
