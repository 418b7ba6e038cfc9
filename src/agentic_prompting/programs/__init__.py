"""Agents that keep their own loop: [`Program`], the address that they call, and the token sequences of their calls."""

from .chat import ChatCompletions
from .google import Google
from .messages import Messages
from .program import TRUTH, Program
from .protocol import Asked, Completion, Dialect, Entry, Refusal, ToolCall, error_body
from .responses import Responses
from .session import Call

__all__ = [
    "TRUTH",
    "Asked",
    "Call",
    "ChatCompletions",
    "Completion",
    "Dialect",
    "Entry",
    "Google",
    "Messages",
    "Program",
    "Refusal",
    "Responses",
    "ToolCall",
    "error_body",
]
