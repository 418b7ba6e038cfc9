"""A trained agent, and ProRefine, behind OpenAI's chat completions. Needs the extra `serve`."""

from .answering import AgentAnswers, Answer, Answers, ChatAnswers
from .app import Service, make_app
from .config import KEY_VARIABLE, ServeConfig
from .metrics import Metrics
from .run import agent_service, run_service

__all__ = [
    "KEY_VARIABLE",
    "AgentAnswers",
    "Answer",
    "Answers",
    "ChatAnswers",
    "Metrics",
    "ServeConfig",
    "Service",
    "agent_service",
    "make_app",
    "run_service",
]
