"""Adapters: any environment in, any framework out. One file each; none is imported before it is used.

In: [`ToolEnvironment`] (Python functions, MCP servers, a large LLM as a tool), [`MCPTools`], [`TRLEnvironment`],
[`UserSimulator`]. Out: `interop.dspy`, `interop.gepa`.
"""

from .mcp import MCPTools
from .tools import Tool, ToolEnvironment, ToolGrammar, ask_tool
from .trl import TRLEnvironment
from .user import Dialogue, UserSimulator

__all__ = [
    "Dialogue",
    "MCPTools",
    "TRLEnvironment",
    "Tool",
    "ToolEnvironment",
    "ToolGrammar",
    "UserSimulator",
    "ask_tool",
]
