"""The formats of requests and replies that programs and clients of `serve` can speak."""

from .chat_completions import ChatCompletions
from .google import Google
from .messages import Messages
from .responses import Responses

__all__ = ["ChatCompletions", "Google", "Messages", "Responses"]
