"""[`Service`]: the models that are served, and the state that all requests share."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..llm import (
    Budget,
    BudgetExceeded,
    ChatModel,
    Closed,
    LLMError,
    Misconfigured,
    RateLimited,
    Unreachable,
    charge,
)
from ..llm.guard import traceback_of, without_places
from ..llm.loop import LoopEnded, start
from ..llm.spans import under
from ..programs import Refusal
from ..refine import RefinedChat
from .answering import (
    AgentAnswers,
    Answers,
    ChatAnswers,
    CostLimit,
    OnProgress,
    PromptTooLong,
    ServedAnswer,
)
from .config import ServeConfig
from .metrics import Metrics
from .requests import AnswerRequest

if TYPE_CHECKING:
    from ..agent import PromptAgent

logger = logging.getLogger(__name__)

CLOSED_REQUEST = 499  # nginx's number; the client has gone and does not read it
# After these errors the large LLM cannot be asked at present: 503 instead of 502.
_UNAVAILABLE = (RateLimited, Unreachable, BudgetExceeded, Misconfigured, Closed)


class Service:
    """The models, and the state that all requests share.

    Args:
        models (`dict[str, Answers]`): By the name that clients use.
        config ([`ServeConfig`]): The limits.
        metrics ([`Metrics`], *optional*): Where to count.

    Attributes:
        in_flight (`int`): Requests that are being answered.
        shutdown (`asyncio.Event`): Set when requests that are still in flight get an error.
    """

    def __init__(
        self, models: Mapping[str, Answers], config: ServeConfig, metrics: Metrics | None = None
    ):
        self.models = models
        self.config = config
        self.metrics = metrics or Metrics()
        self.started = int(time.time())
        self.in_flight = 0
        self.shutdown = asyncio.Event()

    async def answer(
        self,
        request: AnswerRequest,
        deadline: float,
        headers: Mapping[str, str],
        on_progress: OnProgress | None = None,
    ) -> ServedAnswer:
        """The answer to one request.

        Args:
            request ([`AnswerRequest`]): The request, of a model that is served.
            deadline (`float`): The time of the loop at which it is stopped.
            headers (`Mapping`): Headers that may name the client's span.
            on_progress (`Callable`, *optional*): Called with each event, on the loop of this call.

        Raises:
            [`Refusal`]: There is none. It has the status and the error for the client.
        """
        model = request.model
        outcome = "error"
        try:
            # At the limit, refuse at once rather than queue.
            if self.in_flight >= self.config.max_concurrency:
                message = "Too many requests at once; try again soon."
                raise Refusal(429, message, "rate_limit_exceeded")
            # Answer it. From here on it counts as one of those in flight.
            self._count(+1)
            try:
                with self.metrics.seconds.labels(model).time():
                    answer = await self._play(request, deadline, headers, on_progress)
            except LoopEnded as error:
                message = "The service has failed and must be started again."
                raise Refusal(503, message, "service_failed") from error
            finally:
                self._count(-1)

            # Count what it cost, even if it has failed.
            self.metrics.answered(model, answer)
            if answer.error is not None:
                raise _to_refusal(answer.error)
            outcome = "answered" if answer.text is not None else "no_answer"
            return answer
        except Refusal as refusal:
            outcome = str(refusal.status)
            raise
        except asyncio.CancelledError:  # the client has hung up
            outcome = str(CLOSED_REQUEST)
            raise
        finally:
            self.metrics.requests.labels(model, outcome).inc()

    async def _play(
        self,
        request: AnswerRequest,
        deadline: float,
        headers: Mapping[str, str],
        on_progress: OnProgress | None,
    ) -> ServedAnswer:
        """Play the episode of a request, but no longer than its client waits and than a request may
        take.
        """
        # Start the episode on the background loop. Without a seed each answer is another sample.
        seed = secrets.randbits(63) if request.seed is None else request.seed
        # The episode is played on another loop, so its events are handed over to this one.
        options: dict[str, Any] = {}
        if on_progress is not None:
            loop = asyncio.get_running_loop()
            report = on_progress

            def hand_over(event: Mapping[str, Any]) -> None:
                loop.call_soon_threadsafe(report, event)

            options["on_progress"] = hand_over
        if request.row_fields:
            options["fields"] = request.row_fields
        answering = self.models[request.model](
            request.messages,
            seed,
            request.completion_request.max_tokens,
            self.config.greedy or request.is_greedy,
            **options,
        )
        with under(headers):
            episode = asyncio.wrap_future(start(answering))  # it is cancelled with this one

        # Wait until it ends, the service stops, or its time is over.
        shutdown = asyncio.create_task(self.shutdown.wait())
        try:
            remaining = max(deadline - asyncio.get_running_loop().time(), 0)
            pending: set[asyncio.Future[Any]] = {episode, shutdown}
            await asyncio.wait(pending, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
            if episode.done():
                return episode.result()
            if shutdown.done():
                raise Refusal(503, "The service is shutting down.", "shutting_down")
            raise Refusal(504, f"No answer within {self.config.timeout:g} seconds.", "timeout")
        except Refusal:
            raise
        except Exception as error:
            # Whatever else is raised fails only this request.
            logger.exception("a request failed")
            if isinstance(error, LLMError):
                return ServedAnswer(error=error)
            return ServedAnswer(error=Closed(f"the request ended with {type(error).__name__}"))
        finally:
            shutdown.cancel()
            episode.cancel()

    def _count(self, change: int) -> None:
        self.in_flight += change
        self.metrics.in_flight.set(self.in_flight)


def _to_refusal(error: LLMError) -> Refusal:
    """A failed call as the client reads it: what happened, but not where."""
    # Limits of the request itself, which its client can do something about.
    if isinstance(error, CostLimit):
        return Refusal(402, error.message, "cost_limit")
    if isinstance(error, PromptTooLong):
        return Refusal(400, error.message, "context_length_exceeded", "messages")
    # Anything else is a failure of a model or tool that the agent calls. Only the log says where.
    logger.warning("%s: %s", error.kind, error)
    status = 503 if isinstance(error, _UNAVAILABLE) else 502
    return Refusal(status, _message_for_client(error), error.kind)


def _message_for_client(error: LLMError) -> str:
    """A failure in general words: without the text of an exception of the operator's code, and
    without its place.
    """
    message = error.message
    # Such a failure has a note with the traceback; the class of the exception is in its first
    # words.
    if traceback_of(error):
        message = message.partition(": ")[0]
    return without_places(message)


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
        budget ([`Budget`], *optional*): What all of them may spend, each in its role:
            `environment`, and those of the refiner (`task`, `feedback`, `optimizer`, `verifier`).
            Models that are one object have one account.
    """
    # The policy itself knows how many turns are being written.
    metrics = Metrics()
    metrics.sampling.set_function(lambda: agent.policy.active_count)

    # The agent, and ProRefine as a second model beside it.
    models: dict[str, Answers] = {name: AgentAnswers(agent, config.max_cost_usd)}
    if refined is not None:
        models["prorefine"] = ChatAnswers(refined, config.max_cost_usd)

    # One budget for all models that they call, by their roles.
    if budget is not None:
        roles = (
            refined.refiner.models if isinstance(refined, RefinedChat) else {"prorefine": refined}
        )
        charge(budget, environment=agent.environment, **roles)
        metrics.show(budget)
    return Service(models, config, metrics)
