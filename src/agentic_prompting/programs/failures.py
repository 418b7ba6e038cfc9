"""How the run of a program fails."""

from __future__ import annotations

from ..llm import LLMError, ServerFailed
from ..llm.guard import failure_of


class ProgramFailed(ServerFailed):
    """The program raised, or its command ended with an exit code other than 0.

    Args:
        what (`str`): What happened, and where.
        code (`int`, *optional*): The exit code of a command.
        is_mistake (`bool`, *optional*, defaults to `False`): Whether the policy is to blame.
    """

    def __init__(self, what: str, code: int | None = None, is_mistake: bool = False):
        super().__init__(what)
        self.code, self.is_mistake = code, is_mistake


class OverLimit(LLMError):
    """A command used more than its workspace allows: the policy is to blame, and nothing outside."""


def raised_by(error: Exception, mistakes: tuple[type[BaseException], ...]) -> ProgramFailed:
    """The failure for an exception of the program's; `mistakes` are those for which the policy is to blame."""
    failure = failure_of(ProgramFailed, "the program", error)
    failure.is_mistake = isinstance(error, mistakes)
    return failure
