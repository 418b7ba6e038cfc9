"""What can go wrong with a large LLM, as one flat vocabulary.

An error here is *data*: it travels inside [`Reply`], it is counted, and it never reaches an agent as if it were an
answer. The classes are exceptions as well, so that code which wants to stop can `raise reply.error`.

Only errors with `fatal = True` stop a run at once: they cannot get better by waiting.
"""

from __future__ import annotations


class LLMError(Exception):
    """A call to a large LLM that gave no usable reply, after all retries.

    Args:
        what (`str`): What went wrong and, where something can be done about it, what to do. One line, no secrets.
        where (`str`, *optional*, defaults to `""`): The model and address that were asked.
        attempts (`int`, *optional*, defaults to `1`): How many times the call was tried.
        status (`int`, *optional*): The last HTTP status, where there was one.
    """

    fatal = False

    def __init__(self, what: str, where: str = "", attempts: int = 1, status: int | None = None):
        super().__init__(what, where, attempts, status)
        self.what, self.where, self.attempts, self.status = what, where, attempts, status

    @property
    def kind(self) -> str:
        """The class name, the short label that logs and metrics use."""
        return type(self).__name__

    def __str__(self) -> str:
        details = [self.where] if self.where else []
        details += [f"HTTP {self.status}"] if self.status else []
        details += [f"{self.attempts} attempts"] if self.attempts > 1 else []
        return f"{self.what} ({', '.join(details)})" if details else self.what


class RateLimited(LLMError):
    """The endpoint kept answering "too many requests"."""


class TimedOut(LLMError):
    """No complete reply arrived before the deadline."""


class Unreachable(LLMError):
    """No connection: wrong address, refused, or broken off."""


class ServerFailed(LLMError):
    """The endpoint answered with a server error (5xx)."""


class BadRequest(LLMError):
    """The endpoint rejected this one request (too long, for example); another request may pass."""


class BadReply(LLMError):
    """The endpoint answered, but with nothing that can be used: no choices, no text, not JSON."""


class Refused(LLMError):
    """The model, or a filter in front of it, declined to answer."""


class Closed(LLMError):
    """The client was closed before the call ended."""


class BudgetExceeded(LLMError):
    """The money or tokens allowed for this model are spent."""

    fatal = True


class BudgetUnavailable(LLMError):
    """There is a limit, and the book of what was spent can be neither read nor written: it could not be kept."""

    fatal = True


class Misconfigured(LLMError):
    """Wrong key, unknown model, wrong address: no retry can help."""

    fatal = True
