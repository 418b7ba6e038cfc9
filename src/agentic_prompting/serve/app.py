"""The web application of the service: a trained agent in the formats of OpenAI, Anthropic and
Google.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from ..llm.loop import loop_error
from ..llm.masking import escape_controls
from ..llm.numbers import count_in_words, format_usd
from ..programs import (
    ChatCompletions,
    Completion,
    CompletionRequest,
    Dialect,
    Refusal,
    error_body,
)
from ..programs.gateway import DIALECTS, add_request_id, describe_models, is_large_body
from ..programs.request_threads import run_in_request_thread
from .access import check_access
from .answering import WITHHELD_FIELDS, ServedAnswer
from .description import describe
from .requests import AnswerRequest, read_answer_request
from .service import CLOSED_REQUEST, Service

requests_log = logging.getLogger(f"{__package__}.requests")

_BODY_SECONDS = 30.0
_QUIET_PATHS = ("/health", "/metrics")  # not in the log while they succeed
_CHAT = ChatCompletions()
_STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
# The log line of the request that the current task answers.
_summary: ContextVar[str] = ContextVar("summary", default="")

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(service: Service) -> web.Application:
    """The web application.

    Args:
        service ([`Service`]): The models and their limits.

    Raises:
        `ValueError`: If its address needs a key and there is none.
    """
    return _App(service).build()


class _App:
    """The handlers of one service.

    Args:
        service ([`Service`]): The models and their limits.
    """

    def __init__(self, service: Service):
        self.service = service
        self.config = service.config
        self.key = service.config.find_key()
        self._dialects: dict[Any, Dialect] = {}  # by the resource of the router

    def build(self) -> web.Application:
        app = web.Application(
            client_max_size=self.config.max_body_bytes, middlewares=[self._middleware()]
        )
        app.on_response_prepare.append(add_request_id)

        # One path for each format. The matched path later tells how to write an error.
        for dialect in DIALECTS:
            path = "/{version:v1(?:beta)?}" + dialect.path
            route = app.router.add_post(path, partial(self._complete, dialect))
            self._dialects[route.resource] = dialect

        # The models, for the clients of all vendors, and the pages for the operator of the service.
        app.router.add_get("/{version:v1(?:beta)?}/models", self._list_models, allow_head=False)
        app.router.add_get(
            "/{version:v1(?:beta)?}/models/{model}", self._show_model, allow_head=False
        )
        # Without a version, because they belong to no vendor's format.
        app.router.add_get("/health", self._show_health, allow_head=False)
        app.router.add_get("/metrics", self._show_metrics, allow_head=False)
        app.router.add_get("/openapi.json", self._show_description, allow_head=False)
        return app

    # ---- every request ----

    def _middleware(self) -> Any:
        @web.middleware
        async def respond(request: web.Request, handler: _Handler) -> web.StreamResponse:
            """Check access, send refusals in the format of the request, and write a line into the
            log.
            """
            start = time.perf_counter()
            # A request whose client hangs up gets no response, and keeps this status in the log.
            status = CLOSED_REQUEST
            dialect = self._dialects.get(request.match_info.route.resource)
            try:
                try:
                    check_access(request, self.key, self.config.host)
                    response = await handler(request)
                except Refusal as refusal:
                    # On a page without a format of its own, errors look like OpenAI's.
                    response = _write_refusal(dialect or _CHAT, refusal)
                except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
                    response = self._refuse_path(request, error)
                status = response.status
                return response
            finally:
                self._log(request, dialect, status, time.perf_counter() - start)

        return respond

    def _log(
        self, request: web.Request, dialect: Dialect | None, status: int, seconds: float
    ) -> None:
        """Write a line without questions, keys and checks of health, and count a request that was
        refused early.
        """
        summary = _summary.get()
        # The service counts the requests that reach a model.
        if dialect is not None and not summary:
            self.service.metrics.requests.labels("", str(status)).inc()
        if status == 200 and request.path in _QUIET_PATHS:
            return
        # A path cannot forge lines of the log: it is shortened, and its control characters escaped.
        line = f"{request.method} {request.path[:80]} {status} {seconds:.2f} s{summary}"
        requests_log.info("%s", " ".join(escape_controls(line).split()))

    def _refuse_path(self, request: web.Request, error: web.HTTPError) -> web.Response:
        served_paths = ", ".join(f"/v1{dialect.path}" for dialect in DIALECTS[:-1])
        message = (
            f"{request.method} {request.path[:80]} is not served here. POST {served_paths} and "
            "Google's models/...:generateContent are, and GET /v1/models, /health, /metrics and "
            "/openapi.json."
        )
        # HTTP demands that a 405 names the allowed methods.
        headers = {}
        if isinstance(error, web.HTTPMethodNotAllowed):
            headers["Allow"] = error.headers["Allow"]
        body = error_body(error.status, message, "not_found")
        return web.json_response(body, status=error.status, headers=headers)

    # ---- answers ----

    async def _complete(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        """Answer a conversation, in the format of a dialect."""
        # Read the request. A long one is read in a thread: the loop is that of all requests.
        deadline = asyncio.get_running_loop().time() + self.config.timeout
        body = await self._read_body(request)
        read = partial(read_answer_request, body, dialect, request.path_qs)
        answer_request = await run_in_request_thread(read) if is_large_body(request) else read()
        self._check_model(answer_request.model)
        self._check_row(answer_request)

        headers = {}
        if answer_request.ignored:
            headers["X-Ignored-Parameters"] = ", ".join(answer_request.ignored)
        if answer_request.wants_progress:
            return await self._stream_progress(request, answer_request, deadline, headers)

        # Get the answer.
        outcome = f", {answer_request.model[:80]}"
        _summary.set(outcome)
        try:
            answer = await self.service.answer(answer_request, deadline, request.headers)
            _summary.set(outcome + _summarize(answer))
        except Refusal as refusal:
            _summary.set(f"{outcome} {refusal.status}")
            raise

        # Send it. An answer is known only when the last turn is done: a stream starts then.
        completion = _to_completion(answer, answer_request)
        if not answer_request.completion_request.stream:
            text = json.dumps(dialect.write_body(completion))
            return web.Response(text=text, content_type="application/json", headers=headers)
        stream = web.StreamResponse(headers=headers | _STREAM_HEADERS)
        await stream.prepare(request)
        for event in _write_events(dialect, completion, answer_request.completion_request):
            await stream.write(event)
        await stream.write_eof()
        return stream

    async def _stream_progress(
        self,
        request: web.Request,
        answer_request: AnswerRequest,
        deadline: float,
        headers: Mapping[str, str],
    ) -> web.StreamResponse:
        """Stream the events of an episode while it is played, then its answer.

        The stream starts with the first event. A failure before it keeps its HTTP status; a later
        one is an event.
        """
        outcome = f", {answer_request.model[:80]}"
        _summary.set(outcome)
        events: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue()
        answering = asyncio.ensure_future(
            self.service.answer(answer_request, deadline, request.headers, events.put_nowait)
        )

        def end_events(task: asyncio.Future[ServedAnswer]) -> None:
            # The end of the episode, whatever it is, comes after the last event. Nobody may be left
            # to read an error.
            events.put_nowait(None)
            if not task.cancelled():
                task.exception()

        answering.add_done_callback(end_events)
        # All chunks of a stream have the same id.
        completion_id = secrets.token_hex(12)
        stream = web.StreamResponse(headers={**headers, **_STREAM_HEADERS})
        try:
            while (event := await events.get()) is not None:
                if not stream.prepared:
                    await stream.prepare(request)
                progress = Completion(
                    answer_request.model, id=completion_id, extra_fields={"progress": event}
                )
                await stream.write(_CHAT.write_extra_fields(progress))
            try:
                answer = await answering
                _summary.set(outcome + _summarize(answer))
            except Refusal as refusal:
                _summary.set(f"{outcome} {refusal.status}")
                if not stream.prepared:
                    raise
                for failure in _CHAT.write_failure(refusal, answer_request.completion_request):
                    await stream.write(failure)
            else:
                if not stream.prepared:
                    await stream.prepare(request)
                completion = replace(_to_completion(answer, answer_request), id=completion_id)
                for chunk in _write_events(_CHAT, completion, answer_request.completion_request):
                    await stream.write(chunk)
        finally:
            # A client that hangs up stops its episode.
            answering.cancel()
        await stream.write_eof()
        return stream

    async def _read_body(self, request: web.Request) -> bytes:
        """The body of a request, up to the size and the time that it may take.

        Raises:
            [`Refusal`]: It is too large, too slow, compressed, or not called JSON.
        """
        too_large = Refusal(
            413,
            f"The request is larger than {self.config.max_body_bytes} bytes.",
            "request_too_large",
        )

        # Refuse by the headers, before anything is read.
        if (request.content_length or 0) > self.config.max_body_bytes:
            raise too_large
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            message = "Compressed bodies are not supported: send the body uncompressed."
            raise Refusal(415, message, "unsupported_encoding")

        # Read the body. Its size may not have been announced, and it may never end.
        try:
            async with asyncio.timeout(min(self.config.timeout, _BODY_SECONDS)):
                body = await request.read()
        except TimeoutError:
            raise Refusal(408, "The request's body did not arrive in time.") from None
        except web.HTTPRequestEntityTooLarge:
            raise too_large from None
        except web.RequestPayloadError:
            raise Refusal(400, "The body is not valid HTTP.", "invalid_value") from None
        if "json" not in request.headers.get("Content-Type", ""):
            message = "Send the body as JSON, with the header `Content-Type: application/json`."
            raise Refusal(400, message, "invalid_content_type")
        return body

    def _check_model(self, name: str) -> None:
        if name not in self.service.models:
            message = (
                f"The model {name[:80]!r} does not exist: there are "
                f"{', '.join(self.service.models)}."
            )
            raise Refusal(404, message, "model_not_found", "model")

    def _check_row(self, request: AnswerRequest) -> None:
        """Refuse fields of a row that the model does not take: without them the answer would be
        another one.
        """
        taken = getattr(self.service.models[request.model], "row_fields", ())
        for name in request.row_fields:
            if name not in taken:
                message = (
                    f"`row` has the field {name[:80]!r}, which {request.model[:80]} does not take"
                )
                message += f": it takes {', '.join(taken)}" if taken else ": it takes none"
                # The question, the truth and files are never a client's.
                if name not in WITHHELD_FIELDS:
                    option = f"--columns {name[:80]}={name[:80]}"
                    message += f". The operator of the service adds it with serve {option}"
                message += "."
                raise Refusal(400, message, "unsupported_value", "row")

    # ---- pages ----

    async def _list_models(self, request: web.Request) -> web.Response:
        return web.json_response(describe_models(self.service.models, self.service.started))

    async def _show_model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        self._check_model(name)
        # One object with the fields that OpenAI, Anthropic and Google have for a model.
        models = describe_models([name], self.service.started)
        return web.json_response({**models["data"][0], **models["models"][0]})

    async def _show_health(self, request: web.Request) -> web.Response:
        """Whether the service can answer. Asks nothing of the models behind it."""
        if loop_error() is not None:  # the reason is in the log: this page needs no key
            return web.json_response({"status": "failed"}, status=503)
        return web.json_response({"status": "ok"})

    async def _show_metrics(self, request: web.Request) -> web.Response:
        exposition = self.service.metrics.exposition()
        return web.Response(body=exposition, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _show_description(self, request: web.Request) -> web.Response:
        return web.json_response(describe(list(self.service.models)))


def _write_refusal(dialect: Dialect, refusal: Refusal) -> web.Response:
    response = web.json_response(dialect.write_error(refusal), status=refusal.status)
    if refusal.status == 429:
        response.headers["Retry-After"] = "1"
    if refusal.status in (401, 403, 408, 413):
        # An unread rest of a body would keep the connection open.
        response.force_close()
    return response


def _write_events(
    dialect: Dialect, completion: Completion, request: CompletionRequest
) -> Iterator[bytes]:
    # Clients of chat completions show a text while it arrives.
    if isinstance(dialect, ChatCompletions):
        return dialect.write_events(completion, request, by_word=True)
    return dialect.write_events(completion, request)


def _to_completion(answer: ServedAnswer, request: AnswerRequest) -> Completion:
    """An answer as the reply to a request. An agent without an answer has a `refusal` and no text."""
    # Fields that OpenAI's format does not have.
    extra_fields: dict[str, Any] = {}
    if answer.workers:
        extra_fields["workers"] = answer.workers
    if request.wants_trajectory:
        extra_fields["trajectory"] = answer.trajectory
    return Completion(
        model=request.model,
        text=answer.text,
        finish_reason=answer.finish_reason,
        prompt_tokens=answer.usage.prompt_tokens,
        completion_tokens=answer.usage.completion_tokens,
        refusal=answer.why_none,
        extra_fields=extra_fields,
    )


def _summarize(answer: ServedAnswer) -> str:
    """An answer in the log: how it ended and what it took."""
    outcome = "answered" if answer.text is not None else "no_answer"
    turns = (
        f", {count_in_words(len(answer.trajectory['turns']), 'turn')}" if answer.trajectory else ""
    )
    return f" {outcome}{turns}, ${format_usd(answer.usage.cost_usd)}"
