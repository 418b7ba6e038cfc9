"""Agents that keep their own loop: [`Program`], the address that they call, and the token sequences of their calls."""

from .call_tree import Call
from .chat import ChatCompletions
from .failures import OverLimit, ProgramFailed
from .google import Google
from .harness import HARNESSES, Harness, harness
from .messages import Messages
from .program import TRUTH, Program, is_agent
from .protocol import (
    ChatMessage,
    Completion,
    CompletionRequest,
    Dialect,
    Refusal,
    ToolCall,
    error_body,
)
from .responses import Responses
from .workspace import Workspace

__all__ = [
    "HARNESSES",
    "TRUTH",
    "Call",
    "ChatCompletions",
    "ChatMessage",
    "Completion",
    "CompletionRequest",
    "Dialect",
    "Google",
    "Harness",
    "Messages",
    "OverLimit",
    "Program",
    "ProgramFailed",
    "Refusal",
    "Responses",
    "ToolCall",
    "Workspace",
    "error_body",
    "harness",
    "is_agent",
]
