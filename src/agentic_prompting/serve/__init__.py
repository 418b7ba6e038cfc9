"""A trained agent, and ProRefine, behind the APIs of OpenAI, Anthropic and Google.

Needs the extra `serve`.
"""

from .answering import AgentAnswers, Answers, ChatAnswers, ServedAnswer
from .app import make_app
from .config import KEY_VARIABLE, ServeConfig
from .metrics import Metrics
from .server import Server, run_service
from .service import Service, agent_service

__all__ = [
    "KEY_VARIABLE",
    "AgentAnswers",
    "Answers",
    "ChatAnswers",
    "Metrics",
    "ServeConfig",
    "ServedAnswer",
    "Server",
    "Service",
    "agent_service",
    "make_app",
    "run_service",
]
