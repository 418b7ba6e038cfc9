"""The service: OpenAI's chat completions over a trained agent, so that any OpenAI client can use it as one model."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Request
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse

from ..llm import (
    Budget,
    BudgetExceeded,
    ChatModel,
    Closed,
    LLMError,
    Message,
    Misconfigured,
    RateLimited,
    Unreachable,
    charge,
)
from ..llm.loop import LoopEnded, loop_error, start
from ..llm.masking import escape_controls
from ..llm.spans import under
from ..programs import ChatCompletions, CompletionRequest, Refusal, error_body
from ..refine import RefinedChat
from .answering import AgentAnswers, Answers, ChatAnswers, CostLimit, PromptTooLong, ServedAnswer
from .protocol import (
    CLOSED_REQUEST,
    ChatRequest,
    ErrorBody,
    Guards,
    ServeConfig,
    bounded_protocol,
    completion,
    read_request,
)

if TYPE_CHECKING:
    from ..agent import PromptAgent

logger = logging.getLogger(__name__)
requests_log = logging.getLogger(f"{__package__}.requests")

_CHAT = ChatCompletions()
_SCHEMAS = "#/components/schemas/"
_BODY = {
    "content": {"application/json": {"schema": {"$ref": f"{_SCHEMAS}ChatRequest"}}},
    "required": True,
}
_GRACE_SECONDS = 10  # for the requests that are open when the service stops
_BACKLOG = 128  # asyncio takes as many connections at a time, before any can be turned away
_SPARE_CONNECTIONS = (
    256  # beside those of the requests answered at once: to be refused, idle, asked for metrics
)
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_UNAVAILABLE = (RateLimited, Unreachable, BudgetExceeded, Misconfigured, Closed)
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in {
        400: "The request cannot be read",
        401: "The key is missing or wrong",
        402: "The request came to cost more than one may",
        403: "Not for this service's host, which has no key",
        404: "No such model",
        408: "The request's body did not arrive in time",
        413: "The request is too large",
        429: "Too many requests at once",
        502: "A model behind this one failed",
        503: "A model behind this one cannot be asked at present",
        504: "The request took longer than one may",
    }.items()
}


class Service:
    """The models, and the state that all requests share.

    Args:
        models (`dict[str, Answers]`): By the name that clients use.
        config ([`ServeConfig`]): The limits.
        metrics ([`Metrics`], *optional*): Where to count.
    """

    def __init__(
        self, models: Mapping[str, Answers], config: ServeConfig, metrics: Metrics | None = None
    ):
        self.models = models
        self.config = config
        self.metrics = metrics or Metrics()
        self.started = int(time.time())
        self._in_flight = 0

    async def answer(self, request: Request, chat_request: ChatRequest) -> ServedAnswer:
        """The answer to one request.

        Raises:
            [`Refusal`]: There is none. It has the status and the error for the client.
        """
        model = chat_request.model
        if model not in self.models:
            raise Refusal(
                404, f"The model {model[:80]!r} does not exist.", "model_not_found", "model"
            )
        outcome = "error"
        details = ""
        try:
            messages = chat_request.conversation()
            if self._in_flight >= self.config.max_concurrency:
                raise Refusal(
                    429, "Too many requests at once; try again soon.", "rate_limit_exceeded"
                )
            self._count(+1)
            try:
                with self.metrics.seconds.labels(model).time():
                    answer = await self._play(request, chat_request, messages)
            except LoopEnded as error:
                raise Refusal(
                    503, "The service has failed and must be started again.", "service_failed"
                ) from error
            finally:
                self._count(-1)
            self.metrics.answered(model, answer)
            if answer.error is not None:
                raise _refusal(answer.error)
            outcome = "answered" if answer.text is not None else "no_answer"
            if answer.trajectory:
                details = f", {len(answer.trajectory['turns'])} turns"
            details += f", ${answer.usage.cost_usd:.4f}"
            return answer
        except Refusal as refusal:
            outcome = str(refusal.status)
            raise
        finally:
            self.metrics.requests.labels(model, outcome).inc()
            request.state.about = f"{model[:80]} {outcome}{details}"

    async def _play(
        self, request: Request, chat_request: ChatRequest, messages: Sequence[Message]
    ) -> ServedAnswer:
        """Play the episode of a request, but no longer than its client waits and than a request may take."""
        seed = chat_request.seed
        if seed is None:
            seed = secrets.randbits(63)
        greedy = self.config.greedy or chat_request.temperature == 0
        answering = self.models[chat_request.model](
            messages, seed, chat_request.token_limit, greedy
        )
        with under(request.headers):
            episode = start(answering)

        done = asyncio.wrap_future(episode)  # cancels the episode if it is cancelled
        disconnected = asyncio.create_task(_disconnected(request))
        pending: set[asyncio.Future[Any]] = {done, disconnected}
        try:
            remaining = max(request.state.deadline - asyncio.get_running_loop().time(), 0)
            await asyncio.wait(pending, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
            if done.done():
                return done.result()
            if disconnected.done():
                raise Refusal(CLOSED_REQUEST, "The client closed the connection.")
            raise Refusal(504, f"No answer within {self.config.timeout:g} seconds.", "timeout")
        except Refusal:
            raise
        except Exception as error:
            logger.exception("a request failed")
            failed = Closed(f"the request ended with {type(error).__name__}")
            return ServedAnswer(error=error if isinstance(error, LLMError) else failed)
        finally:
            disconnected.cancel()
            done.cancel()

    def _count(self, change: int) -> None:
        self._in_flight += change
        self.metrics.in_flight.set(self._in_flight)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refusal(error: LLMError) -> Refusal:
    """A failure behind the model as the client reads it: what happened, but not where."""
    if isinstance(error, CostLimit):
        return Refusal(402, error.message, "cost_limit")
    if isinstance(error, PromptTooLong):
        return Refusal(400, error.message, "context_length_exceeded", "messages")
    logger.warning("%s: %s", error.kind, error)
    return Refusal(503 if isinstance(error, _UNAVAILABLE) else 502, error.message, error.kind)


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
        roles = (
            refined.refiner.models if isinstance(refined, RefinedChat) else {"prorefine": refined}
        )
        charge(budget, environment=agent.environment, **roles)
        metrics.show(budget)
    return Service(models, config, metrics)


def run_service(service: Service) -> None:
    """Serve until interrupted, with a line per request on standard error; prints the address once it listens. Open
    requests have ten seconds to end, and then get a 503.

    Raises:
        `ValueError`: If the address needs a key and there is none.
        `SystemExit`: If the address cannot be listened on, with the reason on standard error.
    """
    if not requests_log.handlers:
        lines = logging.StreamHandler()
        lines.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        requests_log.addHandler(lines)
        requests_log.setLevel(logging.INFO)
    server = server_of(service)
    listener = server.config.bind_socket()
    listener.listen(_BACKLOG)
    address = f"{service.config.host}:{listener.getsockname()[1]}"
    print(f"http://{address}/v1  models: {', '.join(service.models)}  (Ctrl-C stops)", flush=True)
    server.run([listener])


def server_of(service: Service) -> uvicorn.Server:
    """The server, not yet running."""
    # Not uvicorn's access log: ours has no address of a client, and what an answer took.
    return uvicorn.Server(
        uvicorn.Config(
            make_app(service),
            host=service.config.host,
            port=service.config.port,
            http=bounded_protocol(service.config.max_concurrency + _SPARE_CONNECTIONS),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            backlog=_BACKLOG,
        )
    )


class RequestLog:
    """ASGI middleware: a line per request in the log, without questions, keys and checks of health. Counts requests
    for an answer that were refused before their model was known."""

    def __init__(self, app: Any, metrics: Metrics):
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started = time.perf_counter()
        status = 0
        state = scope.setdefault("state", {})

        async def sending(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, sending)
        finally:
            if scope["path"] == "/v1/chat/completions" and "about" not in state:
                self.metrics.requests.labels("", str(status or CLOSED_REQUEST)).inc()
            if status != 200 or scope["path"] not in ("/health", "/metrics"):
                about = f", {state['about']}" if "about" in state else ""
                line = f"{scope['method']} {scope['path'][:80]} {status} {time.perf_counter() - started:.2f} s{about}"
                requests_log.info("%s", " ".join(escape_controls(line).split()))


# The application ------------------------------------------------------------------------------------------------------


def make_app(service: Service) -> FastAPI:
    """The ASGI application.

    Args:
        service ([`Service`]): The models and their limits.

    Raises:
        `ValueError`: If its address needs a key and there is none.
    """

    app = FastAPI(title="agentic-prompting", docs_url=None, redoc_url=None)
    app.add_middleware(Guards, config=service.config, key=service.config.find_key())
    app.add_middleware(RequestLog, metrics=service.metrics)
    app.add_exception_handler(Refusal, _send_refusal)
    app.add_exception_handler(HTTPException, _send_http_error)

    @app.post("/v1/chat/completions", responses=_ERRORS, openapi_extra={"requestBody": _BODY})
    async def chat_completions(request: Request) -> Any:
        """An answer to a conversation, in OpenAI's format."""
        chat_request = await read_request(request)
        answer = await service.answer(request, chat_request)
        reply = completion(answer, chat_request.model, chat_request.trajectory)
        headers = {}
        ignored_fields = chat_request.ignored()
        if ignored_fields:
            headers["X-Ignored-Parameters"] = ", ".join(ignored_fields)
        if not chat_request.stream:
            return JSONResponse(_CHAT.write_body(reply), headers=headers)
        options = chat_request.stream_options
        stream_usage = options is not None and bool(options.include_usage)
        completion_request = CompletionRequest(chat_request.model, (), stream_usage=stream_usage)
        stream = _CHAT.write_events(reply, completion_request, by_word=True)
        headers["Cache-Control"] = "no-cache"
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    @app.get("/v1/models", responses={status: _ERRORS[status] for status in (401, 403)})
    async def models() -> dict[str, Any]:
        """The models that can be asked."""
        shared = {"object": "model", "created": service.started, "owned_by": "agentic-prompting"}
        return {"object": "list", "data": [{"id": name, **shared} for name in service.models]}

    @app.get("/health", responses={503: {"description": "The service has failed: start it again"}})
    async def health() -> JSONResponse:
        """Whether the service can answer. Asks nothing of the models behind it."""
        if loop_error() is not None:  # the reason is in the log: this page needs no key
            return JSONResponse({"status": "failed"}, 503)
        return JSONResponse({"status": "ok"})

    @app.get(
        "/metrics",
        responses={status: _ERRORS[status] for status in (401, 403)},
        response_class=Response,
    )
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    _describe(app, list(service.models))
    return app


def _describe(app: FastAPI, models: list[str]) -> None:
    """Complete the OpenAPI description: the form of a request, and the names of the models."""
    schema = ChatRequest.model_json_schema(ref_template=f"{_SCHEMAS}{{model}}")
    schema["properties"]["model"]["enum"] = models
    app.openapi()["components"]["schemas"].update(schema.pop("$defs"), ChatRequest=schema)


async def _send_refusal(request: Request, refusal: Any) -> Response:
    headers = {"Retry-After": "1"} if refusal.status == 429 else None
    return JSONResponse(refusal.body, refusal.status, headers)


async def _send_http_error(request: Request, error: Any) -> Response:
    return JSONResponse(
        error_body(error.status_code, str(error.detail)), error.status_code, error.headers
    )


# Counters for Prometheus. They hold no text, no key and no question ---------------------------------------------------


class Metrics:
    """The counters of one service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        common: Any = {"namespace": "agentic_prompting", "registry": self.registry}
        self.requests = Counter(
            "requests", "Requests by model and outcome.", ["model", "outcome"], **common
        )
        self.seconds = Histogram(
            "request_seconds", "Time to an answer.", ["model"], buckets=_SECONDS, **common
        )
        self.in_flight = Gauge("requests_in_flight", "Requests being answered.", **common)
        self.turns = Histogram(
            "agent_turns", "Turns per answer.", ["model"], buckets=range(1, 11), **common
        )
        self.sampling = Gauge(
            "turns_being_sampled", "Turns of the agent that are being written.", **common
        )
        self.cost = Counter("cost_usd", "Dollars spent on the models behind.", ["model"], **common)
        self.errors = Counter(
            "environment_errors", "Failures behind the model, by kind.", ["model", "kind"], **common
        )

    def answered(self, model: str, answer: ServedAnswer) -> None:
        """Count what an answer came to."""
        self.cost.labels(model).inc(answer.usage.cost_usd)
        if answer.error is not None:
            self.errors.labels(model, answer.error.kind).inc()
        elif answer.trajectory is not None:
            self.turns.labels(model).observe(len(answer.trajectory["turns"]))

    def show(self, budget: Budget) -> None:
        """Add what each role has spent of a budget, from its book."""
        self.registry.register(_Spending(budget))

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)


class _Spending:
    def __init__(self, budget: Budget):
        self.budget = budget

    def collect(self) -> Iterator[GaugeMetricFamily]:
        spent = GaugeMetricFamily(
            "agentic_prompting_spent_usd", "Dollars spent, by role.", labels=["role"]
        )
        for role, usage in self.budget.by_account().items():
            spent.add_metric([role], usage.cost_usd)
        yield spent
