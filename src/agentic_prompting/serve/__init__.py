"""A trained agent, and ProRefine, behind OpenAI's chat completions. Needs the extra `serve`."""

from .answering import AgentAnswers, Answers, ChatAnswers, ServedAnswer
from .app import Metrics, Service, agent_service, make_app, run_service
from .protocol import KEY_VARIABLE, ServeConfig

__all__ = [
    "KEY_VARIABLE",
    "AgentAnswers",
    "Answers",
    "ChatAnswers",
    "Metrics",
    "ServeConfig",
    "ServedAnswer",
    "Service",
    "agent_service",
    "make_app",
    "run_service",
]
