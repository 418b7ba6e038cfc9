"""A trained agent, and ProRefine, behind OpenAI's chat completions. Needs the extra `serve`."""

from .answering import AgentAnswers, Answer, Answers, ChatAnswers
from .app import Metrics, Service, agent_service, make_app, run_service
from .protocol import KEY_VARIABLE, ServeConfig

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
