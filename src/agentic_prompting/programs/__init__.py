"""Agents that keep their own loop: [`Program`], the address that they call, and the token sequences of their calls."""

from .program import TRUTH, Program
from .protocol import Asked, ChatCompletions, Completion, Entry, Refusal, Responses, ToolCall, error_body
from .session import Call

__all__ = [
    "TRUTH",
    "Asked",
    "Call",
    "ChatCompletions",
    "Completion",
    "Entry",
    "Program",
    "Refusal",
    "Responses",
    "ToolCall",
    "error_body",
]
