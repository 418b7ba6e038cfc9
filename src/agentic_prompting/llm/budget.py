"""What may be spent, the book of what was, and what models cost.

Spending is booked under an account: the role that spent it (`environment`, `reference`, `feedback`, `optimizer`,
`verifier`, `judge`, or whatever name is given). A file as the book is what makes the budget the *job's*: every process
of a launch adds to it and reads it before each call, and a run that was killed and resumed goes on counting where it
was. An all-reduce would know neither the calls of this moment nor those of yesterday.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..records import SharedFile
from .types import BudgetExceeded, BudgetUnavailable, Usage

_BUSY_SECONDS = 1.0  # for another process to let go of the book
_GRACE_SECONDS = 30.0  # that it may be out of reach before a limit counts as not kept

_TABLE = """
CREATE TABLE IF NOT EXISTS spending (
    account TEXT PRIMARY KEY, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, cost_usd REAL NOT NULL
) WITHOUT ROWID
"""
_ADD = """
INSERT INTO spending VALUES (?, ?, ?, ?) ON CONFLICT (account) DO UPDATE SET
    prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    completion_tokens = completion_tokens + excluded.completion_tokens,
    cost_usd = cost_usd + excluded.cost_usd
"""

Price = tuple[float, float]
"""US dollars per million prompt tokens and per million completion tokens."""

# OpenAI's list prices of late 2025, standard tier, written down by hand. Prices change, and discounts are not in it:
# check them against the provider's list before you rely on a budget, or pass `price=` yourself.
PRICES: dict[str, Price] = {
    "gpt-3.5-turbo": (0.50, 1.50),
    "gpt-4-turbo": (10.00, 30.00),
    "gpt-4o": (2.50, 10.00),
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

# A dated snapshot costs what its model costs. Any other suffix ("-audio-preview", "-pro", ".5") is another model with
# another price, and a budget kept with the wrong price is worse than being asked for the right one.
_SNAPSHOT = re.compile(r"-(\d{4}-\d{2}-\d{2}|\d{4}|latest)$")


def find_price(model: str) -> Price | None:
    """The price of `model` or of the model that it is a dated snapshot of; `None` where it is not known.

    Args:
        model (`str`): As sent to the endpoint; a leading `openai/`, as routers want it, is ignored.
    """
    name = model.removeprefix("openai/")
    return PRICES.get(name) or PRICES.get(_SNAPSHOT.sub("", name))


@dataclass(frozen=True)
class Limit:
    """How much may be spent, in US dollars and in tokens read and written; `None` is no limit.

    Raises:
        `ValueError`: If one of them is negative.
    """

    usd: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if min(self.usd or 0, self.tokens or 0) < 0:
            raise ValueError(f"a budget must not be negative: budget_usd={self.usd}, budget_tokens={self.tokens}")

    def __bool__(self) -> bool:
        return self.usd is not None or self.tokens is not None

    def stop_when_reached(self, spent: Usage, whose: str) -> None:
        """Raise [`BudgetExceeded`] if `spent` has reached the limit."""
        if self.usd is not None and spent.cost_usd >= self.usd:
            what = f"${spent.cost_usd:.4f} of the budget of ${self.usd:.4f} are spent{whose}: raise budget_usd="
        elif self.tokens is not None and spent.tokens >= self.tokens:
            what = f"{spent.tokens:,} of the budget of {self.tokens:,} tokens are spent{whose}: raise budget_tokens="
        else:
            return
        raise BudgetExceeded(what, attempts=0)


class Budget(SharedFile):
    """A total, and the book of what every account has spent of it. Safe to use from several threads.

    With a `path` also from several processes, and across restarts: what is in the book stays spent. Delete the file to
    begin anew. Calls on their way when the budget is reached end and are booked, so it can be exceeded by those.

    No method but [`Budget.stop_when_spent`] ever raises for the book's sake: what cannot be written (locked, no space)
    counts all the same and is written with a later call; what cannot be read is as it was read last.

    Args:
        usd (`float`, *optional*): US dollars in all.
        tokens (`int`, *optional*): Tokens in all, read and written.
        path (`str` or `Path`, *optional*): The book, an SQLite file on a local disk. Without one it is in memory. Nodes
            without a disk in common keep a book each: give each its share.

    Example:

    ```python
    charge(Budget(usd=10), feedback=critic, optimizer=rewriter, verifier=judge)
    ```
    """

    def __init__(self, usd: float | None = None, tokens: int | None = None, path: str | Path | None = None):
        super().__init__(None if path is None else Path(path), _TABLE, _BUSY_SECONDS)
        self.limit = Limit(usd, tokens)
        self._lock = threading.Lock()  # for the two below; never held while the disk is waited for
        self._book: dict[str, Usage] = {}  # as last read; without a path all that was spent
        self._unwritten: list[tuple[str, Usage]] = []

    def add(self, account: str, usage: Usage) -> None:
        """Book what `account` has used."""
        self.note(account, usage)
        self.settle()

    def note(self, account: str, usage: Usage) -> None:
        """The same without waiting for a disk: it counts at once, and [`Budget.settle`] writes it down."""
        if usage.tokens or usage.cost_usd:
            with self._lock:
                self._unwritten.append((account, usage))
                if self.path is None:
                    self._book, self._unwritten = _summed(self._book, self._unwritten), []

    def settle(self, at_once: bool = False) -> None:
        """Write down what was spent here, read what was spent elsewhere. Waits for the disk for a second or two.

        Args:
            at_once (`bool`, *optional*, defaults to `False`): Also where it was out of reach a moment ago.
        """
        if self.path is not None:
            super().settle(at_once)

    def spent(self, account: str | None = None) -> Usage:
        """What `account`, or all of them together, have spent so far."""
        by_account = self.by_account()
        return by_account.get(account, Usage()) if account is not None else sum(by_account.values(), Usage())

    def by_account(self) -> dict[str, Usage]:
        """What each account has spent so far, in the order of their names."""
        self.settle()
        with self._lock:
            return dict(sorted(_summed(self._book, self._unwritten).items()))

    def stop_when_spent(self, account: str | None = None, own: Limit = Limit()) -> None:
        """See that another call may be paid for.

        Args:
            account (`str`, *optional*): Of the call.
            own ([`Limit`], *optional*): What `account` may spend, beside the total.

        Raises:
            [`BudgetExceeded`]: The total, or the account's own limit, is reached.
            [`BudgetUnavailable`]: There is a limit, and the book is damaged or was out of reach for half a minute.
        """
        if not self.limit and not own:
            return
        by_account = self.by_account()
        if (error := self._fault) is not None:
            may_pass = any(word in str(error) for word in ("locked", "full"))
            if not may_pass or time.monotonic() - self._failing_since >= _GRACE_SECONDS:
                what = f"the budget cannot be kept, its book {self.path} is out of reach: {error}"
                raise BudgetUnavailable(what, attempts=0)
        if account is not None:
            own.stop_when_reached(by_account.get(account, Usage()), f" by {account!r}")
        where = f" in all (see {self.path})" if self.path else " in all"
        self.limit.stop_when_reached(sum(by_account.values(), Usage()), where)

    def __str__(self) -> str:
        """`environment $1.2000 (34,567 tokens), reference $0.0100 (890 tokens)`; `nothing` where nothing was spent."""
        spent = [f"{name} ${used.cost_usd:.4f} ({used.tokens:,} tokens)" for name, used in self.by_account().items()]
        missing = f" (the book {self.path} is out of reach: {self._fault})" if self._fault is not None else ""
        return (", ".join(spent) or "nothing") + missing

    def __reduce__(self) -> tuple[Any, ...]:  # a copy in another process opens the book for itself
        return type(self), (self.limit.usd, self.limit.tokens, self.path)

    def _write(self) -> None:
        assert self.path is not None
        if self._pid != os.getpid():  # what the parent of a fork owes it writes itself
            self._unwritten = []
        owed = list(self._unwritten)
        if not owed and not self._book and not self.path.exists():
            return  # a run that has spent nothing leaves no book behind
        connection = self._connected()
        if owed:
            connection.execute("BEGIN IMMEDIATE")
            try:
                entries = [(name, used.prompt_tokens, used.completion_tokens, used.cost_usd) for name, used in owed]
                connection.executemany(_ADD, entries)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        rows = connection.execute("SELECT * FROM spending").fetchall()
        book = {str(name): Usage(int(read), int(written), float(usd)) for name, read, written, usd in rows}
        with self._lock:
            del self._unwritten[: len(owed)]
            expected = _summed(self._book, owed)
            missing = any(book.get(name, Usage()).tokens < used.tokens for name, used in expected.items())
            self._book = expected if missing else book
        if missing:  # emptied or replaced while in use: what it now says is not what was spent
            raise ValueError("spending that was in it is gone")


def _summed(book: Mapping[str, Usage], more: Iterable[tuple[str, Usage]]) -> dict[str, Usage]:
    spent = dict(book)
    for account, usage in more:
        spent[account] = spent.get(account, Usage()) + usage
    return spent


def charge(budget: Budget, **roles: Any) -> None:
    """Book what each role spends into `budget`: for models, and whatever is around models.

    Args:
        budget ([`Budget`]): Where to.
        **roles: By name whatever has a `charge_to`, or is around something that has (`chat`, `model`, `models`);
            anything else, `None` included, is passed over. A model in several roles is booked under all their names:
            `feedback+optimizer`.
    """
    accounts: dict[int, tuple[Any, list[str]]] = {}
    for role, spender in roles.items():
        for account, one in _spenders(role, spender, set()):
            accounts.setdefault(id(one), (one, []))[1].append(account)
    for one, names in accounts.values():
        one.charge_to(budget, "+".join(dict.fromkeys(names)))


def _spenders(account: str, around: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """What is inside `around` and can be charged, with the name of its account."""
    if hasattr(around, "charge_to"):
        yield account, around
    elif id(around) not in seen:
        seen.add(id(around))
        for name in ("chat", "model", "models"):
            inside = getattr(around, name, None)
            if isinstance(inside, Mapping):
                for key, one in inside.items():
                    yield from _spenders(f"{account}/{key}", one, seen)
            elif inside is not None and not isinstance(inside, str):
                yield from _spenders(account, inside, seen)
