"""The large-LLM side: everything that is asked through text. Imports neither torch nor transformers nor trl."""

from .budget import Budget, charge
from .cache import ReplayCache
from .errors import (
    BadReply,
    BadRequest,
    BudgetExceeded,
    BudgetUnavailable,
    Closed,
    LLMError,
    Misconfigured,
    RateLimited,
    Refused,
    ServerFailed,
    TimedOut,
    Unreachable,
)
from .loop import run, start
from .openai_chat import OpenAIChat
from .routing import RoutedChat
from .scripted import ScriptedChat
from .types import ChatModel, Message, Reply, Usage, as_chat, complete, with_system

__all__ = [
    "BadReply",
    "BadRequest",
    "Budget",
    "BudgetExceeded",
    "BudgetUnavailable",
    "ChatModel",
    "Closed",
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
    "TimedOut",
    "Unreachable",
    "Usage",
    "as_chat",
    "charge",
    "complete",
    "run",
    "start",
    "with_system",
]
