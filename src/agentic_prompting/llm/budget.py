"""Budgets: limits on spending, the record of what was spent (the *book*), and the prices of models.

Spending is booked under an account: the role that spent it (`environment`, `reference`, `feedback`, `optimizer`,
`verifier`, `judge`, or any other name). With a file as its book a budget holds for the whole *job*: every process of a
launch adds to the file and reads it before each call, and a resumed run continues to count where it was. An all-reduce
could not do this: it knows neither the calls in flight nor those of an earlier process.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..records import SharedFile
from .types import BudgetExceeded, BudgetUnavailable, Usage

_BUSY_SECONDS = 1.0  # to wait while another process has locked the book
_GRACE_SECONDS = 30.0  # without access to the book before calls are refused
_ROUNDING = 1e-9  # share of a limit in dollars by which a sum of floats may miss it

_TABLE = """
CREATE TABLE IF NOT EXISTS spending (
    account TEXT PRIMARY KEY, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    cost_usd REAL NOT NULL, estimated_tokens INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID
"""
_ADD_COLUMN = "ALTER TABLE spending ADD COLUMN estimated_tokens INTEGER NOT NULL DEFAULT 0"  # to an older book
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

# OpenAI's list prices of late 2025, standard tier, entered by hand, without discounts. Prices change: check them
# against the provider's list before you rely on a budget, or pass `price=` yourself.
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

# A dated snapshot that is not in the table costs the same as its model. Any other suffix ("-audio-preview", "-pro",
# ".5") is another model with another price; a budget with the wrong price is worse than an error that asks for the
# right one.
_SNAPSHOT = re.compile(r"-(\d{4}-\d{2}-\d{2}|\d{4}|latest)$")


def find_price(model: str) -> Price | None:
    """The price of `model`, else that of the model of which it is a dated snapshot; `None` if the price is not known.

    Args:
        model (`str`): As sent to the endpoint; a leading `openai/`, which routers use, is ignored.
    """
    name = model.removeprefix("openai/")
    return PRICES.get(name) or PRICES.get(_SNAPSHOT.sub("", name))


@dataclass(frozen=True)
class Limit:
    """A limit on spending, in US dollars and in tokens (prompt and completion); `None` is no limit.

    Raises:
        `ValueError`: If one of them is negative.
    """

    usd: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if min(self.usd or 0, self.tokens or 0) < 0:
            raise ValueError(
                f"a budget must not be negative: budget_usd={self.usd}, budget_tokens={self.tokens}"
            )

    def __bool__(self) -> bool:
        return self.usd is not None or self.tokens is not None

    def stop_when_reached(self, spent: Usage, whose: str) -> None:
        """Raise [`BudgetExceeded`] if `spent` has reached the limit."""
        if self.usd is not None and spent.cost_usd >= self.usd - _ROUNDING * self.usd:
            what = f"${spent.cost_usd:.4f} of the budget of ${self.usd:.4f} are spent{whose}: raise budget_usd="
        elif self.tokens is not None and spent.tokens >= self.tokens:
            what = f"{spent.tokens:,} of the budget of {self.tokens:,} tokens are spent{whose}: raise budget_tokens="
        else:
            return
        raise BudgetExceeded(what, attempts=0)

    def has_room_for(self, tokens: int, cost_usd: float) -> bool:
        """Whether so many tokens and dollars in total stay within the limit."""
        within_usd = self.usd is None or cost_usd <= self.usd + _ROUNDING * self.usd
        within_tokens = self.tokens is None or tokens <= self.tokens
        return within_usd and within_tokens


class _Gate:
    """Admits requests under one limit, first come, first served. For coroutines of the background loop."""

    def __init__(self) -> None:
        self._turn = (
            asyncio.Lock()
        )  # held by the request that is next, also while it waits for others to end
        self._request_ended = asyncio.Event()
        # The requests on their way, and what they are expected to cost together.
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
        """Wait until the limit has room for a request, or no other one is on its way."""
        async with self._turn:
            while True:
                await stop_when_spent()
                total = spent() + expected
                has_room = limit.has_room_for(
                    total.tokens + self._tokens, total.cost_usd + self._cost_usd
                )
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


class Budget(SharedFile):
    """A total limit, and the book of what each account has spent. Safe to use from several threads.

    With a `path` it is also shared by several processes and survives restarts. Delete the file to start at zero.

    A request is admitted ([`Budget.admitted`]) when the limit has room for what it may cost besides the requests in
    flight; otherwise it waits for them. While none is in flight, a request is admitted as long as the limit is not
    reached. So the total exceeds the limit by no more than what was in flight: in one process by one request and the
    error of the estimates, in several by the requests of the other processes too.

    Only [`Budget.stop_when_spent`] and [`Budget.admitted`] raise an error of the file. An amount that cannot be written
    (file locked, no space) counts at once and is written with a later call; if the file cannot be read, the last values
    read are used.

    Args:
        usd (`float`, *optional*): US dollars in total.
        tokens (`int`, *optional*): Prompt and completion tokens in total.
        path (`str` or `Path`, *optional*): The book, an SQLite file on a local disk. Without one it is in memory. Nodes
            without a common disk have one book each: give each node its share.

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
        self._lock = threading.Lock()  # for the two below; never held during disk access
        self._book: dict[
            str, Usage
        ] = {}  # as last read from the file; without a path everything that was spent
        self._unwritten: list[tuple[str, Usage]] = []
        self._reset_gates()

    def add(self, account: str, usage: Usage) -> None:
        """Book `usage` under `account`."""
        self.note(account, usage)
        self.settle()

    def note(self, account: str, usage: Usage) -> None:
        """As [`Budget.add`], without disk access: it counts at once, and [`Budget.settle`] writes it."""
        if usage.tokens or usage.cost_usd:
            with self._lock:
                self._unwritten.append((account, usage))
                if self.path is None:
                    self._book, self._unwritten = _summed(self._book, self._unwritten), []

    def settle(self, at_once: bool = False) -> None:
        """Write what this process spent and read what others spent. Waits for the disk, up to about two seconds.

        Args:
            at_once (`bool`, *optional*, defaults to `False`): Try also if the last attempt failed a moment ago.
        """
        if self.path is not None:
            super().settle(at_once)

    def spent(self, account: str | None = None) -> Usage:
        """The spending of `account` so far, or of all accounts together."""
        by_account = self.by_account()
        return (
            by_account.get(account, Usage())
            if account is not None
            else sum(by_account.values(), Usage())
        )

    def by_account(self) -> dict[str, Usage]:
        """The spending of each account so far, sorted by name."""
        self.settle()
        return dict(sorted(self._last_known().items()))

    def stop_when_spent(self, account: str | None = None, own: Limit = Limit()) -> None:
        """Raise an error if no further call may be made.

        Args:
            account (`str`, *optional*): The account of the call.
            own ([`Limit`], *optional*): The limit of `account`, besides the total.

        Raises:
            [`BudgetExceeded`]: The total, or the account's own limit, is reached.
            [`BudgetUnavailable`]: There is a limit, and the book is damaged or was inaccessible for half a minute.
        """
        if not self.limit and not own:
            return
        by_account = self.by_account()
        if (error := self._fault) is not None:
            may_pass = any(word in str(error) for word in ("locked", "full"))
            if not may_pass or time.monotonic() - self._failing_since >= _GRACE_SECONDS:
                what = (
                    f"the budget cannot be checked, its book {self.path} is out of reach: {error}"
                )
                raise BudgetUnavailable(what, attempts=0)
        if account is not None:
            own.stop_when_reached(by_account.get(account, Usage()), f" by {account!r}")
        where = f" in all (see {self.path})" if self.path else " in all"
        self.limit.stop_when_reached(sum(by_account.values(), Usage()), where)

    @asynccontextmanager
    async def admitted(
        self, account: str, expected: Usage, own: Limit = Limit()
    ) -> AsyncIterator[None]:
        """The context in which a request may be on its way. For coroutines of the background loop.

        Waits, first come, first served, until the limits have room for what the request may cost, or no other request
        is on its way. Book what it has cost inside of the context, so that the next one sees it.

        Args:
            account (`str`): The account of the request.
            expected ([`Usage`]): What it may cost.
            own ([`Limit`], *optional*): The limit of `account`, besides the total.

        Raises:
            [`BudgetExceeded`], [`BudgetUnavailable`]: As [`Budget.stop_when_spent`].
        """

        async def stop_when_spent() -> None:
            if self.path is None:
                self.stop_when_spent(account, own)
            else:
                await asyncio.to_thread(self.stop_when_spent, account, own)  # waits for the disk

        async with AsyncExitStack() as gates:
            if own:
                gate = self._gates.setdefault(account, _Gate())
                await gate.enter(
                    expected, own, stop_when_spent, lambda: self._last_known().get(account, Usage())
                )
                gates.callback(gate.leave, expected)
            if self.limit:
                await self._gate_of_all.enter(
                    expected, self.limit, stop_when_spent, self._last_known_total
                )
                gates.callback(self._gate_of_all.leave, expected)
            yield

    def _last_known(self) -> dict[str, Usage]:
        """The spending of each account, without looking into the file."""
        with self._lock:
            return _summed(self._book, self._unwritten)

    def _last_known_total(self) -> Usage:
        return sum(self._last_known().values(), Usage())

    def _reset_gates(self) -> None:
        """Begin with no request on its way. The gates are used on the background loop only."""
        self._gate_of_all = _Gate()
        self._gates: dict[str, _Gate] = {}  # by account

    def __str__(self) -> str:
        """`environment $1.2000 (34,567 tokens), reference $0.0100 (890 tokens)`; `nothing` where nothing was spent."""
        spent = [
            f"{name} ${used.cost_usd:.4f} ({_tokens_of(used)})"
            for name, used in self.by_account().items()
        ]
        missing = (
            f" (the book {self.path} is out of reach: {self._fault})"
            if self._fault is not None
            else ""
        )
        return (", ".join(spent) or "nothing") + missing

    def __reduce__(self) -> tuple[Any, ...]:  # a copy in another process opens the file itself
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
            columns = {row[1] for row in connection.execute("PRAGMA table_info(spending)")}
            if "estimated_tokens" not in columns:
                connection.execute(_ADD_COLUMN)
        except sqlite3.OperationalError as error:
            if "duplicate column" not in str(error):  # another process has added it
                connection.close()
                raise
        except BaseException:
            connection.close()
            raise
        return connection

    def _write(self) -> None:
        assert self.path is not None
        owed = list(self._unwritten)
        if not owed and not self._book and not self.path.exists():
            return  # a run that has spent nothing leaves no file
        connection = self._connected()
        if owed:
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.executemany(_ADD, [_entry(account, usage) for account, usage in owed])
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        rows = connection.execute(_SELECT).fetchall()
        book = {
            str(account): Usage(int(prompt), int(completion), float(cost_usd), int(estimated))
            for account, prompt, completion, cost_usd, estimated in rows
        }
        with self._lock:
            del self._unwritten[: len(owed)]
            expected = _summed(self._book, owed)
            missing = any(
                book.get(name, Usage()).tokens < used.tokens for name, used in expected.items()
            )
            self._book = expected if missing else book
        if missing:  # the file was emptied or replaced while in use
            raise ValueError("spending that was in it is gone")


def _entry(account: str, usage: Usage) -> tuple[str, int, int, float, int]:
    """A row of the book."""
    return (
        account,
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cost_usd,
        usage.estimated_tokens,
    )


def _tokens_of(usage: Usage) -> str:
    estimated = f", {usage.estimated_tokens:,} of them estimated" if usage.estimated_tokens else ""
    return f"{usage.tokens:,} tokens{estimated}"


def _summed(book: Mapping[str, Usage], more: Iterable[tuple[str, Usage]]) -> dict[str, Usage]:
    spent = dict(book)
    for account, usage in more:
        spent[account] = spent.get(account, Usage()) + usage
    return spent


def charge(budget: Budget, **roles: Any) -> None:
    """Book what each role spends into `budget`.

    Args:
        budget ([`Budget`]): The budget.
        **roles: By name an object with a `charge_to`, or one with such objects in its attributes `chat`, `model` and
            `models`. Others, `None` included, are ignored. A model in several roles is booked under all their names:
            `feedback+optimizer`.
    """
    accounts: dict[int, tuple[Any, list[str]]] = {}
    for role, spender in roles.items():
        for account, one in _spenders(role, spender, set()):
            accounts.setdefault(id(one), (one, []))[1].append(account)
    for one, names in accounts.values():
        one.charge_to(budget, "+".join(dict.fromkeys(names)))


def charge_models_of(owner: Any, budget: Budget, account: str) -> None:
    """Book what the models in the attributes `chat`, `model` and `models` of `owner` spend into `budget`."""
    for name, model in _models_of(account, owner, set()):
        model.charge_to(budget, name)


def _spenders(account: str, owner: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """`owner`, or the models inside it, as far as they can be charged, each with the name of its account."""
    if hasattr(owner, "charge_to"):
        yield account, owner
    elif id(owner) not in seen:
        yield from _models_of(account, owner, seen)


def _models_of(account: str, owner: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    seen.add(id(owner))
    for name in ("chat", "model", "models"):
        inside = getattr(owner, name, None)
        models = (
            {f"{account}/{key}": one for key, one in inside.items()}
            if isinstance(inside, Mapping)
            else None
        )
        for name_of_account, model in ({account: inside} if models is None else models).items():
            if model is not None and not isinstance(model, str):
                yield from _spenders(name_of_account, model, seen)
