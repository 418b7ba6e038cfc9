"""What a client has done and spent so far, and the budget that stops it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from .errors import BudgetExceeded
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
    """Counts calls and money; safe to use from several threads.

    Args:
        budget_usd (`float`, *optional*): See [`OpenAIChat`].
    """

    def __init__(self, budget_usd: float | None = None):
        self.budget_usd = budget_usd
        self._lock = threading.Lock()
        self._stats = ChatStats()

    @property
    def stats(self) -> ChatStats:
        """The counts so far: a copy."""
        with self._lock:
            return replace(self._stats)

    def add(self, reply: Reply) -> None:
        """Count one call that has ended."""
        with self._lock:
            stats = self._stats
            stats.calls += 1
            stats.cached += reply.cached
            stats.failed += reply.error is not None
            stats.retries += max(0, reply.attempts - 1)
            stats.usage += reply.usage

    def stop_when_spent(self) -> None:
        """Raise [`BudgetExceeded`] if the budget is spent."""
        spent = self.stats.usage.cost_usd
        if self.budget_usd is not None and spent >= self.budget_usd:
            raise BudgetExceeded(f"${spent:.4f} of the budget of ${self.budget_usd:.4f} are spent: raise budget_usd=")
