"""Adapters, one file each; none imports its package before it is used.

Environments from elsewhere for our agents: [`ToolEnvironment`] (Python functions, MCP servers, a large LLM as a tool),
[`MCPTools`], [`TRLEnvironment`], [`OpenEnv`], [`UserSimulator`]. Our agents in other frameworks: `interop.dspy`,
`interop.gepa`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ..environments import as_environment
from ..rollout import Environment
from .mcp import MCPTools
from .openenv import OpenEnv
from .tool_grammar import ToolGrammar
from .tools import Tool, ToolEnvironment, ask_tool
from .trl import TRLEnvironment
from .user import Dialogue, UserSimulator

__all__ = [
    "Dialogue",
    "MCPTools",
    "OpenEnv",
    "TRLEnvironment",
    "Tool",
    "ToolEnvironment",
    "ToolGrammar",
    "UserSimulator",
    "ask_tool",
    "environment_of",
]


def environment_of(
    environment: Any, tools: Sequence[Any] | None, factory: Callable[[], Any] | None
) -> tuple[Environment | None, list[Any]]:
    """The environment that a trainer's arguments describe, and the reward functions that come with it.

    Args:
        environment (`Any`): An environment, a function that is one, or `None` for an agent without environment; `...`
            if the caller passed none.
        tools (`Sequence`, *optional*): Tools, as for [`ToolEnvironment`].
        factory (`Callable`, *optional*): Makes an instance for each episode, as for [`TRLEnvironment`].

    Raises:
        `TypeError`: None of them is given, or more than one; or it is of the wrong kind.
    """
    if [environment is not ..., bool(tools) and factory is None, factory is not None].count(
        True
    ) != 1:
        raise TypeError(
            "pass one of environment=, tools= and environment_factory= (tools= may go with environment_factory=); "
            "environment=None is for an agent without environment"
        )
    if factory is None:
        return as_environment(ToolEnvironment(tools) if tools else environment), []
    if not callable(factory):
        raise TypeError(
            "environment_factory must be one class or function without arguments, not several"
        )
    built = TRLEnvironment(factory, tools or ())
    return built, [] if built.reward is None else [built.reward]
