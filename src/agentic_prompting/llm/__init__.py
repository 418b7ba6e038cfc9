"""Large LLMs: clients, budgets, replay cache, and the event loop that they run on.

Imports no torch, transformers or trl.
"""

from .budget import Budget, charge
from .cache import ReplayCache
from .chats import FunctionChat, RoutedChat, ScriptedChat, as_chat, complete, fill, with_system
from .loop import gather, run, start
from .openai_chat import OpenAIChat
from .spans import start_traces
from .thoughts import SplitReply, split_thoughts, strip_thoughts, without_thoughts
from .types import (
    BadReply,
    BadRequest,
    BudgetExceeded,
    BudgetUnavailable,
    ChatModel,
    Closed,
    LLMError,
    Message,
    Misconfigured,
    RateLimited,
    Refused,
    Reply,
    ServerFailed,
    TimedOut,
    Unreachable,
    Usage,
)

__all__ = [
    "BadReply",
    "BadRequest",
    "Budget",
    "BudgetExceeded",
    "BudgetUnavailable",
    "ChatModel",
    "Closed",
    "FunctionChat",
    "LLMError",
    "Message",
    "Misconfigured",
    "OpenAIChat",
    "RateLimited",
    "Refused",
    "ReplayCache",
    "Reply",
    "RoutedChat",
    "ScriptedChat",
    "ServerFailed",
    "SplitReply",
    "TimedOut",
    "Unreachable",
    "Usage",
    "as_chat",
    "charge",
    "complete",
    "fill",
    "gather",
    "run",
    "split_thoughts",
    "start",
    "start_traces",
    "strip_thoughts",
    "with_system",
    "without_thoughts",
]
