"""Agents that keep their own loop: [`Program`], the address that they call, and the token sequences
of their calls.
"""

from .agent_program import AgentProgram, AgentRun, RunRequest
from .call_tree import Call
from .dialects import ChatCompletions, Google, Messages, Responses
from .failures import LimitExceeded, ProgramFailed
from .program import Program, is_agent
from .protocol import (
    ChatMessage,
    Completion,
    CompletionRequest,
    Dialect,
    Refusal,
    ToolCall,
    error_body,
)

__all__ = [
    "AgentProgram",
    "AgentRun",
    "Call",
    "ChatCompletions",
    "ChatMessage",
    "Completion",
    "CompletionRequest",
    "Dialect",
    "Google",
    "LimitExceeded",
    "Messages",
    "Program",
    "ProgramFailed",
    "Refusal",
    "Responses",
    "RunRequest",
    "ToolCall",
    "error_body",
    "is_agent",
]
