"""From a trained agent to a running service."""

from __future__ import annotations

import logging

import uvicorn

from ..agent import PromptAgent
from ..llm import ChatModel
from .answering import AgentAnswers, Answers, ChatAnswers
from .app import Service, make_app
from .config import ServeConfig
from .metrics import Metrics

logger = logging.getLogger(__name__)


def agent_service(
    agent: PromptAgent, config: ServeConfig = ServeConfig(), name: str = "agent", refined: ChatModel | None = None
) -> Service:
    """A service over an agent.

    Args:
        agent ([`PromptAgent`]): With its environment.
        config ([`ServeConfig`], *optional*): Address and limits.
        name (`str`, *optional*, defaults to `"agent"`): What clients call it.
        refined ([`ChatModel`], *optional*): Served beside it as `prorefine`; a [`RefinedChat`].
    """
    metrics = Metrics()
    agent_answers = AgentAnswers(agent, config.max_cost_usd, config.max_concurrency, metrics.batches.observe)
    models: dict[str, Answers] = {name: agent_answers}
    if refined is not None:
        models["prorefine"] = ChatAnswers(refined)
    return Service(models, config, metrics)


def run_service(service: Service) -> None:
    """Serve until interrupted. Requests that are on their way are given ten seconds.

    Raises:
        `ValueError`: If the address needs a key and there is none.
    """
    app = make_app(service)
    config = service.config
    # No access log: questions are in no log, and /metrics counts.
    uvicorn.run(
        app, host=config.host, port=config.port, log_level="warning", access_log=False, timeout_graceful_shutdown=10
    )
