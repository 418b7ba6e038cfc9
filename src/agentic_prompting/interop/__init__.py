"""Adapters: any environment in, any framework out. One file each; none is imported before it is used.

In: [`ToolEnvironment`] (Python functions, MCP servers, a large LLM as a tool), [`MCPTools`], [`TRLEnvironment`],
[`OpenEnv`], [`VerifiersTasks`], [`UserSimulator`]. Out: `interop.dspy`, `interop.dspy_provider`, `interop.gepa`,
`interop.anything`.
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
from .verifiers import VerifiersTasks

__all__ = [
    "Dialogue",
    "MCPTools",
    "OpenEnv",
    "TRLEnvironment",
    "Tool",
    "ToolEnvironment",
    "ToolGrammar",
    "UserSimulator",
    "VerifiersTasks",
    "ask_tool",
    "environment_of",
]


def environment_of(
    environment: Any, tools: Sequence[Any] | None, factory: Callable[[], Any] | None
) -> tuple[Environment | None, list[Any]]:
    """The environment of whichever of the three a trainer was given, and the reward functions that it brings along.

    Raises:
        `TypeError`: None of them was given (`environment=None` says that nobody answers), or more than one; or it is
            none.
    """
    given = [environment is not ..., bool(tools) and factory is None, factory is not None]
    if sum(given) != 1:
        raise TypeError(
            "pass one of environment=, tools= and environment_factory= (the last with tools= if you like); "
            "environment=None for an agent that nobody answers"
        )
    if factory is None:
        return as_environment(ToolEnvironment(tools) if tools else environment), []
    if not callable(factory):
        raise TypeError("environment_factory must be a class or a function without arguments; several are not taken")
    brought = TRLEnvironment(factory, tools or ())
    return brought, [] if brought.reward is None else [brought.reward]
