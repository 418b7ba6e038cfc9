"""What a client has done so far, and where its spending is booked."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace

from .budget import Budget, Limit
from .types import Reply, Usage


@dataclass
class ChatStats:
    """What a client has done so far in this process.

    Args:
        calls (`int`): Calls that have ended, whichever way.
        cached (`int`): Those of them answered from the cache.
        failed (`int`): Those of them that ended without a text.
        retries (`int`): Requests sent beyond the first of each call.
        usage ([`Usage`]): Tokens and dollars, retries and failed calls included.
    """

    calls: int = 0
    cached: int = 0
    failed: int = 0
    retries: int = 0
    usage: Usage = field(default_factory=Usage)


class Ledger:
    """Counts the calls of one client and books what they cost; safe to use from several threads.

    Args:
        account (`str`): Under which name spending is booked.
        limit ([`Limit`], *optional*): The client's own.
    """

    def __init__(self, account: str, limit: Limit = Limit()):
        self.account, self.limit = account, limit
        self.budget = Budget()  # in memory, without a total: until it is told where to book
        self.answered_at: float | None = None  # when the endpoint last gave a text, on the monotonic clock
        self._lock = threading.Lock()
        self._stats = ChatStats()

    @property
    def stats(self) -> ChatStats:
        """The counts so far: a copy."""
        with self._lock:
            return replace(self._stats)

    def charge_to(self, budget: Budget, account: str) -> None:
        """Book into `budget` from now on, and what was booked elsewhere before along with it."""
        with self._lock:
            if budget is self.budget:
                return
            before = self.budget.spent(self.account) if self.budget.path is None else Usage()
            self.budget, self.account = budget, account
        budget.add(account, before)

    def add(self, reply: Reply) -> None:
        """Count one call that has ended."""
        with self._lock:
            stats = self._stats
            stats.calls += 1
            stats.cached += reply.cached
            stats.failed += reply.error is not None
            stats.retries += max(0, reply.attempts - 1)
            stats.usage += reply.usage
            if reply.error is None and not reply.cached:
                self.answered_at = time.monotonic()

    def pay(self, usage: Usage) -> None:
        """Book what one call has used; [`Budget.settle`] writes it down."""
        with self._lock:
            self.budget.note(self.account, usage)

    def stop_when_spent(self) -> None:
        """Raise if the client's own limit or the total of its budget is reached, or could not be kept."""
        self.budget.stop_when_spent(self.account, self.limit)
