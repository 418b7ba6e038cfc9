"""Agents that keep their own loop: [`Program`], the address that they call, and the token sequences of their calls."""

from .chat import ChatCompletions
from .failures import OverLimit, ProgramFailed
from .fields import parse_json
from .google import Google
from .harness import HARNESSES, Harness, harness
from .messages import Messages
from .program import TRUTH, Program, is_agent
from .protocol import MAX_BODY_BYTES, MAX_MESSAGES, Asked, Completion, Dialect, Entry, Refusal, ToolCall, error_body
from .responses import Responses
from .session import Call
from .workspace import Workspace

__all__ = [
    "HARNESSES",
    "MAX_BODY_BYTES",
    "MAX_MESSAGES",
    "TRUTH",
    "Asked",
    "Call",
    "ChatCompletions",
    "Completion",
    "Dialect",
    "Entry",
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
    "parse_json",
]
