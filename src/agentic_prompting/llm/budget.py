"""What may be spent, and the book of what was: of one client, of all the roles of a run, of all processes of a job.

Spending is booked under an account: the role that spent it (`environment`, `reference`, `feedback`, `optimizer`,
`verifier`, `judge`, or whatever name is given). A file as the book is what makes the budget the *job's*: every process
of a launch adds to it and reads it before each call, and a run that was killed and resumed goes on counting where it
was. An all-reduce would know neither the calls of this moment nor those of yesterday.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .database import Connection, open_for_writing
from .errors import BudgetExceeded
from .types import Usage

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


@dataclass(frozen=True)
class Limit:
    """How much may be spent.

    Args:
        usd (`float`, *optional*): US dollars.
        tokens (`int`, *optional*): Prompt and completion tokens together.

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
            raise BudgetExceeded(what, attempts=0)
        if self.tokens is not None and spent.tokens >= self.tokens:
            what = f"{spent.tokens:,} of the budget of {self.tokens:,} tokens are spent{whose}: raise budget_tokens="
            raise BudgetExceeded(what, attempts=0)


class Budget:
    """A total, and the book of what every account has spent of it. Safe to use from several threads.

    With a `path` also from several processes, and across restarts: what is in the book stays spent. Delete the file to
    begin anew. Calls on their way when the budget is reached end and are booked, so it can be exceeded by those.

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
        self.limit, self.path = Limit(usd, tokens), None if path is None else Path(path)
        self._book = Connection(lambda: open_for_writing(self.path or ":memory:", _TABLE))

    def add(self, account: str, usage: Usage) -> None:
        """Book what one call of `account` has used."""
        if usage.tokens or usage.cost_usd:
            with self._book.lock:
                row = (account, usage.prompt_tokens, usage.completion_tokens, usage.cost_usd)
                self._book().execute(_ADD, row)

    def spent(self, account: str | None = None) -> Usage:
        """What `account`, or all of them together, have spent so far."""
        by_account = self.by_account()
        return by_account.get(account, Usage()) if account is not None else sum(by_account.values(), Usage())

    def by_account(self) -> dict[str, Usage]:
        """What each account has spent so far, in the order of their names."""
        with self._book.lock:
            rows = self._book().execute("SELECT * FROM spending ORDER BY account").fetchall()
        return {account: Usage(*amounts) for account, *amounts in rows}

    def stop_when_spent(self) -> None:
        """Raise [`BudgetExceeded`] if the total is reached."""
        if self.limit:
            self.limit.stop_when_reached(self.spent(), f" in all (see {self.path})" if self.path else " in all")

    def __str__(self) -> str:
        """`environment $1.2000 (34,567 tokens), reference $0.0100 (890 tokens)`; `nothing` where nothing was spent."""
        spent = [f"{name} ${used.cost_usd:.4f} ({used.tokens:,} tokens)" for name, used in self.by_account().items()]
        return ", ".join(spent) or "nothing"

    def __getstate__(self) -> dict[str, Any]:
        return {"usd": self.limit.usd, "tokens": self.limit.tokens, "path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # a copy in another process opens the book for itself


def charge(budget: Budget, **roles: Any) -> None:
    """Book what each role spends into `budget`: for models, and environments around models, that can be told to.

    Args:
        budget ([`Budget`]): Where to.
        **roles: By name whatever has a `charge_to`; anything else, `None` included, is passed over.
    """
    for role, spender in roles.items():
        charge_to = getattr(spender, "charge_to", None)
        if charge_to is not None:
            charge_to(budget, role)
