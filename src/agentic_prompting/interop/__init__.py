"""Adapters to other frameworks, one file each. None imports its package before it is used.

Environments from elsewhere for our agents: [`ToolEnvironment`] (Python functions, MCP servers, a
large LLM as a tool), [`MCPTools`], [`TRLEnvironment`], [`OpenEnv`], [`UserSimulator`]. Our agents
in other frameworks: `interop.dspy`, `interop.gepa`.
"""

from collections.abc import Callable
from typing import Any, Final

from ..environments import as_environment
from ..rollout import Environment
from .mcp import MCPTools
from .openenv import OpenEnv
from .tool_grammar import ToolGrammar
from .tools import Tool, ToolEnvironment, Tools, ask_tool
from .trl import RewardFunction, TRLEnvironment
from .user import Dialogue, UserSimulator

__all__ = [
    "NOT_GIVEN",
    "Dialogue",
    "MCPTools",
    "OpenEnv",
    "TRLEnvironment",
    "Tool",
    "ToolEnvironment",
    "ToolGrammar",
    "UserSimulator",
    "ask_tool",
    "resolve_environment",
]


class NotGiven:
    """The type of [`NOT_GIVEN`]."""

    def __repr__(self) -> str:
        return "NOT_GIVEN"


NOT_GIVEN: Final = NotGiven()
"""The default of an argument for which `None` is a value of its own."""


def resolve_environment(
    environment: Environment | Callable[..., Any] | NotGiven | None,
    tools: Tools | None,
    factory: Callable[[], Any] | None,
) -> tuple[Environment | None, list[RewardFunction]]:
    """Return the environment that a trainer's arguments describe, and its own reward functions.

    Args:
        environment ([`Environment`] or `Callable`): An environment, a function that is one, or
            `None` for an agent without environment; [`NOT_GIVEN`] if the caller passed none.
        tools (`Sequence`, *optional*): Tools, as for [`ToolEnvironment`].
        factory (`Callable`, *optional*): Creates an instance for each episode, as for
            [`TRLEnvironment`].

    Raises:
        `TypeError`: None of them is passed, or more than one; or it is of the wrong type.
    """
    # Exactly one of the three says what the environment is.
    has_environment = environment is not NOT_GIVEN
    has_tools_only = bool(tools) and factory is None
    has_factory = factory is not None
    if [has_environment, has_tools_only, has_factory].count(True) != 1:
        raise TypeError(
            "pass one of environment=, tools= and environment_factory= (tools= may go with "
            "environment_factory=); environment=None trains without one, as trl.GRPOTrainer does"
        )
    # A class in TRL's form, maybe with a reward.
    if factory is not None:
        if not callable(factory):
            raise TypeError(
                "environment_factory must be one class or function without arguments, not several"
            )
        trl_environment = TRLEnvironment(factory, tools or ())
        if trl_environment.reward is None:
            return trl_environment, []
        return trl_environment, [trl_environment.reward]
    if tools:
        return ToolEnvironment(tools), []
    return as_environment(environment), []
