"""How the run of a program fails."""

from __future__ import annotations

from ..llm import LLMError, ServerFailed
from ..llm.guard import failure_of


class ProgramFailed(ServerFailed):
    """The program raised, or its command failed.

    Args:
        message (`str`): What happened, and where.
        is_mistake (`bool`, *optional*, defaults to `False`): Whether the policy is to blame.
    """

    def __init__(self, message: str, is_mistake: bool = False):
        super().__init__(message)
        self.is_mistake = is_mistake


class LimitExceeded(LLMError):
    """A run used more resources than it may. The policy is to blame, and nothing outside."""


def raised_by(error: Exception, mistakes: tuple[type[BaseException], ...]) -> ProgramFailed:
    """Return the failure for an exception that a program raised.

    Args:
        error (`Exception`): The exception.
        mistakes (`tuple`): Exceptions for which the policy is to blame.
    """
    failure = failure_of(ProgramFailed, "the program", error)
    failure.is_mistake = isinstance(error, mistakes)
    return failure
