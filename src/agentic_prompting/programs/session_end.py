"""[`SessionEnd`]: whether a session still answers calls, and why not; [`ReachedLimit`]: a limit
that a rollout has exceeded, which is no end yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from ..rollout import Status
from .protocol import Refusal


@dataclass(frozen=True)
class ReachedLimit:
    """The first limit that a rollout has exceeded.

    It is no end: the program may continue, for example with a shorter conversation.

    Args:
        status (`str`): The status of the rollout if its program returns no answer. `truncated`: the
            context left no room for a reply. `out_of_turns`: the calls, sequences or requests are
            used up. `malformed`: the run has used more resources than it may.
        name (`str`, *optional*): The limit that is used up: `calls`, `requests`, ...
        size (`int`, *optional*): How many of them a rollout may have.
    """

    status: Status
    name: str = ""
    size: int = 0


class SessionEnd:
    """The end of a session: pending, then a reason or an error. The first one counts.

    Attributes:
        future (`asyncio.Future[str]`): Pending while calls are answered. Its result is the reason
            of the end; its exception is the error of the policy or a large LLM that fails the
            rollout.
    """

    def __init__(self) -> None:
        self.future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_over(self) -> bool:
        return self.future.done()

    @property
    def reason(self) -> str:
        """Why no call is answered any more; empty while calls are answered."""
        if not self.future.done():
            return ""
        return "failed" if self.future.exception() is not None else self.future.result()

    def finish(self, reason: str) -> None:
        """End the session without an error."""
        if not self.future.done():
            self.future.set_result(reason)
        self.future.exception()  # mark it as retrieved; asyncio would report it otherwise
        if self._timer is not None:
            self._timer.cancel()

    def fail(self, error: Exception) -> None:
        """End the session with an error, which fails the rollout."""
        if not self.future.done():
            self.future.set_exception(error)

    def start_timer(self, seconds: float, close: Callable[[], None]) -> None:
        """Call `close` after a while, unless the session is over by then. Started once."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, close)

    def refuse_if_over(self) -> None:
        """Refuse a call after the end of the session."""
        if self.is_over:
            raise refusal_after_end(self.reason)

    def fail_and_refuse(self, error: Exception) -> NoReturn:
        """Fail the rollout, and refuse the call in which it failed."""
        self.fail(error)
        raise refusal_after_end(self.reason)


def refusal_after_end(reason: str) -> Refusal:
    """Return the refusal of a call after the end of its rollout."""
    # Status 400, because clients retry after others. The text must not suggest that a shorter
    # conversation would help.
    message = f"This rollout is over ({reason}): no call is answered any more."
    return Refusal(400, message, "rollout_ended")
