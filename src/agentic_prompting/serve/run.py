"""From a trained agent to a running service."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..agent import PromptAgent
from ..llm import Budget, ChatModel, charge
from ..refine import RefinedChat
from .answering import AgentAnswers, Answers, ChatAnswers
from .app import Service, make_app
from .config import ServeConfig
from .metrics import Metrics

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 10  # for the requests that are on their way when the service is told to stop
_HEAD_SECONDS = 10.0  # for a connection to say what it wants
_BACKLOG = 128  # asyncio takes as many connections at a time, before any can be turned away
_SPARE_CONNECTIONS = 256  # beside those of the requests answered at once: to be refused, idle, asked for metrics


def agent_service(
    agent: PromptAgent,
    config: ServeConfig = ServeConfig(),
    name: str = "agent",
    refined: ChatModel | None = None,
    budget: Budget | None = None,
) -> Service:
    """A service over an agent.

    Args:
        agent ([`PromptAgent`]): With its environment.
        config ([`ServeConfig`], *optional*): Address and limits.
        name (`str`, *optional*, defaults to `"agent"`): What clients call it.
        refined ([`ChatModel`], *optional*): Served beside it as `prorefine`; a [`RefinedChat`].
        budget ([`Budget`], *optional*): What all of them may spend, each in its role: `environment`, and those of the
            refiner (`task`, `feedback`, `optimizer`, `verifier`). Models that are one object have one account.
    """
    metrics = Metrics()
    metrics.sampling.set_function(lambda: agent.policy.at_work)
    models: dict[str, Answers] = {name: AgentAnswers(agent, config.max_cost_usd)}
    if refined is not None:
        models["prorefine"] = ChatAnswers(refined, config.max_cost_usd)
    if budget is not None:
        roles = refined.refiner.models if isinstance(refined, RefinedChat) else {"prorefine": refined}
        charge(budget, environment=agent.environment, **roles)
        metrics.show(budget)
    return Service(models, config, metrics)


def run_service(service: Service) -> None:
    """Serve until interrupted. Requests that are on their way are given ten seconds, and then a 503.

    Raises:
        `ValueError`: If the address needs a key and there is none.
    """
    server_of(service).run()


def server_of(service: Service) -> uvicorn.Server:
    """The server, not yet running."""
    # No access log: questions are in no log, and /metrics counts.
    return uvicorn.Server(
        uvicorn.Config(
            make_app(service),
            host=service.config.host,
            port=service.config.port,
            http=_protocol(service.config.max_concurrency + _SPARE_CONNECTIONS),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            backlog=_BACKLOG,
        )
    )


def _protocol(most: int) -> type[H11Protocol]:
    class Bounded(_Bounded):
        max_connections = most

    return Bounded


class _Bounded(H11Protocol):
    """uvicorn's HTTP, which waits for ever for a request to be said and takes any number of connections, without both.

    A connection without a request is looked at every few seconds, and closed when it has been one since the last look.
    """

    max_connections: int

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= self.max_connections:
            transport.abort()
            return
        super().connection_made(transport)
        self._quiet_since: Any = self.cycle
        self._look_again()

    def _look_again(self) -> None:
        self._look = self.loop.call_later(_HEAD_SECONDS, self._close_if_quiet)

    def _close_if_quiet(self) -> None:
        is_quiet = self.cycle is None or self.cycle.response_complete
        if is_quiet and self._quiet_since is self.cycle:
            self.transport.close()
            return
        self._quiet_since = self.cycle if is_quiet else asyncio  # anything that is no cycle
        self._look_again()

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self.connections:
            self._look.cancel()
            super().connection_lost(exc)
