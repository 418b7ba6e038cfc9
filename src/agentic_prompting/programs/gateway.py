"""The address that programs call: an HTTP server on the background loop, with a key for each
rollout.

The key alone decides which rollout a call belongs to. It is a part of the address that a program
gets, and also its API key. It is created for one rollout and expires with it, so an address that
others can reach gives access to nothing else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import resource
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ..llm import Misconfigured
from ..llm.spans import under
from ..llm.surrogates import replace_surrogates
from .call_tree import Call
from .connections import RolloutNetwork
from .dialects import ChatCompletions, Google, Messages, Responses
from .dialects.shared_fields import parse_json
from .protocol import MAX_BODY_BYTES, CompletionRequest, Dialect, Refusal, error_body
from .request_threads import run_in_request_thread
from .session import Session
from .session_end import refusal_after_end

logger = logging.getLogger(__name__)

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Responses(), Messages(), Google())

_LARGE_BODY = 2**17  # bytes: requests of this size are parsed in a thread
_EXPIRED_KEYS = 2**14  # that are remembered, with the reason
_OPEN_FILES = 2**16
# The errors of reading or rendering a body whose shape no client sends.
SHAPE_ERRORS = (RecursionError, TypeError, AttributeError, KeyError, ValueError)

_Answer = Callable[[web.Request, Dialect, Session], Awaitable[web.StreamResponse]]


class Gateway:
    """Serves the calls of all rollouts of a process.

    Args:
        host (`str`): The address to listen on.
        port (`int`): The port; 0 for a free one.
        public_url (`str`, *optional*): The URL at which programs reach it, if not by host and port.
        max_body_bytes (`int`, *optional*, defaults to 4 MiB): Larger request bodies are refused.
    """

    def __init__(
        self,
        host: str,
        port: int,
        public_url: str | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ):
        self.host = host
        self.port = port
        self.public_url = public_url
        self.max_body_bytes = max_body_bytes
        self._sessions: dict[str, Session] = {}  # by key
        self._end_reasons: dict[str, str] = {}  # of sessions that have ended, by key
        self._networks: dict[str, RolloutNetwork] = {}  # by key, of rollouts with their own network
        self._connection_keys: dict[Any, str] = {}  # of the connections in these networks
        self._start_task: asyncio.Task[str] | None = None
        self._start_pid = 0
        self._runner: web.AppRunner | None = None
        self._has_logged_malformed = False

    # ---- rollouts ----

    async def open(self, session: Session) -> tuple[str, str]:
        """Open an address for a session.

        Returns:
            `tuple[str, str]`: The base URL and the key.

        Raises:
            [`Misconfigured`]: It cannot listen on this host and port.
        """
        address = await self.listen()
        # 256 random bits: no program can guess the key of another rollout.
        key = secrets.token_urlsafe(32)
        self._sessions[key] = session
        return f"{address}/{key}/v1", key

    async def listen_on(self, listener: socket.socket, key: str) -> RolloutNetwork:
        """Serve one rollout's network: only with its key, on a limited number of connections."""
        assert self._runner is not None and self._runner.server is not None
        network = RolloutNetwork(key, self._runner.server, self._connection_keys)
        # From here on the key is refused on all other connections.
        self._networks[key] = network
        await network.listen(listener)
        return network

    def close_key(self, key: str) -> None:
        """Answer no call with this key any more."""
        self._networks.pop(key, None)
        # A program that still calls learns why its rollout is over.
        self._end_reasons[key] = self._sessions.pop(key).end.reason
        # Forget the oldest keys, which a long run would collect.
        while len(self._end_reasons) > _EXPIRED_KEYS:
            oldest_key = next(iter(self._end_reasons))
            del self._end_reasons[oldest_key]

    # ---- the server ----

    async def listen(self) -> str:
        """Start listening, unless it does already, and return the address.

        Raises:
            [`Misconfigured`]: It cannot listen on this host and port.
        """
        if self._start_task is None or self._start_pid != os.getpid():  # a fork has no server yet
            self._start_task = asyncio.create_task(self._start())
            self._start_pid = os.getpid()
        # All callers wait for one start. `shield` keeps it going if one of them is cancelled.
        try:
            return await asyncio.shield(self._start_task)
        except (OSError, OverflowError) as error:
            # The next caller tries again.
            self._start_task = None
            raise Misconfigured(
                f"the address of programs cannot be opened on host={self.host!r}, "
                f"port={self.port}: {error}"
            ) from error

    async def stop(self) -> None:
        """Stop listening."""
        # Until it listens itself, a fork has only the runner of its parent.
        has_started = self._start_task is not None and self._start_pid == os.getpid()
        self._start_task = None
        if has_started and self._runner is not None:
            await self._runner.cleanup()

    async def _start(self) -> str:
        self._runner = web.AppRunner(
            self._build_app(),
            access_log=None,
            # A handler is cancelled when its client hangs up: the policy then samples no further.
            handler_cancellation=True,
            shutdown_timeout=1,
            # A megabyte can be a gigabyte, which would be unpacked on this event loop.
            auto_decompress=False,
            logger=http_logger,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port, backlog=1024).start()
        # Each connection of a program is an open file.
        _raise_open_files_limit()

        # The address for programs: with the actual port, and an IPv6 host in brackets.
        if self.public_url:
            return self.public_url.rstrip("/")
        port = self._runner.addresses[0][1]
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{port}"

    def _build_app(self) -> web.Application:
        app = web.Application(client_max_size=self.max_body_bytes)
        app.on_response_prepare.append(add_request_id)
        # Google's clients write `v1beta`, all others `v1`.
        version = "/{version:v1(?:beta)?}"
        for prefix in ("/{key}" + version, version):  # the key in the address, or only in a header
            for dialect in DIALECTS:
                app.router.add_post(prefix + dialect.path, self._handler(dialect, self._answer))
                if dialect.count_path:
                    app.router.add_post(
                        prefix + dialect.count_path, self._handler(dialect, self._count_tokens)
                    )
            app.router.add_get(f"{prefix}/models", self._show_models)
            app.router.add_get(f"{prefix}/models/{{model}}", self._show_models)
        # Any other path gets an error that lists the served ones.
        app.router.add_route("*", "/{unknown:.*}", self._refuse_path)
        return app

    # ---- requests ----

    def _handler(
        self, dialect: Dialect, answer: _Answer
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return a handler that sends refusals in the form of a dialect."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                # Check the key before the body is read.
                session = self._find_session(request)
                with under(request.headers, session.rollout.traceparent):
                    return await answer(request, dialect, session)
            except Refusal as refusal:
                return web.json_response(dialect.write_error(refusal), status=refusal.status)

        return handle

    @contextmanager
    def _refuse_malformed(self) -> Iterator[None]:
        """Turn the errors that a body of an unknown shape causes into a refusal.

        The first is logged.
        """
        try:
            yield
        except SHAPE_ERRORS as error:
            # A client that sends such bodies will send more of them.
            log = logger.debug if self._has_logged_malformed else logger.warning
            self._has_logged_malformed = True
            log("a request of a program cannot be read", exc_info=True)
            message = f"The request cannot be read ({type(error).__name__})."
            raise Refusal(400, message, "invalid_value") from None

    def _find_session(self, request: web.Request) -> Session:
        """Find the session of a request, and count the request.

        Raises:
            [`Refusal`]: There is no such session, it has ended, or has sent too many requests.
        """
        key = _find_key(request)
        # A program that goes on after its end is not told that its key is wrong.
        if key in self._end_reasons:
            raise refusal_after_end(self._end_reasons[key])

        # A rollout with its own network uses its key there, and no other rollout's key.
        network_key = self._connection_keys.get(request.protocol)
        is_elsewhere = key != network_key and (network_key is not None or key in self._networks)
        if key not in self._sessions or is_elsewhere:
            message = "No such rollout: use the base_url and api_key that the program got."
            raise Refusal(401, message, "invalid_api_key")
        session = self._sessions[key]
        session.count_request()
        return session

    async def _show_models(self, request: web.Request) -> web.Response:
        """Return all models, or the one that the path names."""
        try:
            session = self._find_session(request)
            names = [session.model, *session.llms]
            name = request.match_info.get("model")
            if name is None:
                return web.json_response(describe_models(names))
            if name not in names:
                message = f"The model {name[:80]!r} does not exist: there are {', '.join(names)}."
                raise Refusal(404, message, "model_not_found", "model")
        except Refusal as refusal:
            return web.json_response(refusal.body, status=refusal.status)
        # One object with the fields that OpenAI, Anthropic and Google have for a model.
        models = describe_models([name])
        return web.json_response({**models["data"][0], **models["models"][0]})

    async def _refuse_path(self, request: web.Request) -> web.Response:
        # Count the request if its path has a key.
        key, _, _ = request.path.lstrip("/").partition("/")
        session = self._sessions.get(key)
        if session is not None:
            try:
                session.count_request()
            except Refusal as refusal:
                return web.json_response(refusal.body, status=refusal.status)

        path = re.sub(r"^/[\w-]{43}(?=/)", "", request.path)  # without the key
        served_paths = ", ".join(
            f"/v1{dialect.path}" for dialect in (ChatCompletions, Responses, Messages)
        )
        message = (
            f"{request.method} {path} is not served here. POST {served_paths} and Google's "
            "models/...:generateContent are; base_url ends with /v1 already."
        )
        return web.json_response(error_body(404, message, "not_found"), status=404)

    async def _count_tokens(
        self, request: web.Request, dialect: Dialect, session: Session
    ) -> web.StreamResponse:
        async with _wait_if_large(request, session):
            with self._refuse_malformed():
                tokens = await session.count_tokens(
                    await self._read_request(request, dialect, session)
                )
        return web.json_response(dialect.write_token_count(tokens))

    async def _answer(
        self, request: web.Request, dialect: Dialect, session: Session
    ) -> web.StreamResponse:
        # Accept the call, or refuse it before anything is sent.
        session.check_calls_left()
        call: Call | None = None
        async with _wait_if_large(request, session):
            with self._refuse_malformed():
                completion_request = await self._read_request(request, dialect, session)
                # Any name but those of the large LLMs stands for the policy.
                if completion_request.model not in session.llms:
                    # OpenAI's and Anthropic's clients count their retries in this header.
                    is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
                    call = await session.accept(completion_request, is_retry)

        # Send the reply. If the client does not get it, take the call back.
        try:
            return await _send_reply(request, dialect, session, completion_request, call)
        except Refusal:
            # The session has taken the call back already.
            raise
        except BaseException as error:
            if call is not None:
                session.mark_undelivered(call)
            if isinstance(error, ConnectionError):
                return web.Response()  # goes nowhere
            raise

    async def _read_request(
        self, request: web.Request, dialect: Dialect, session: Session
    ) -> CompletionRequest:
        """Read a request. One that cannot be read counts as a call.

        Raises:
            [`Refusal`]: It is malformed, too large, or asks for something that is not supported.
        """
        # A client that repeats an unreadable request comes to an end, because it counts as a call.
        try:
            self._check_body(request)
            body = await request.read()
            parse = partial(_parse_request, body, dialect, request.path_qs)
            # Parsing a large body here would hold up all other rollouts.
            if is_large_body(request):
                return await run_in_request_thread(parse)
            return parse()
        except web.HTTPRequestEntityTooLarge:
            session.count_unreadable_request()
            raise self._too_large() from None
        except web.RequestPayloadError:
            session.count_unreadable_request()
            raise Refusal(400, "The body is not valid HTTP.", "invalid_value") from None
        except Exception:
            session.count_unreadable_request()
            raise

    def _check_body(self, request: web.Request) -> None:
        """Refuse a body by its headers."""
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            message = "Compressed bodies are not supported: send the body uncompressed."
            raise Refusal(415, message, "unsupported_encoding")
        if (request.content_length or 0) > self.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> Refusal:
        message = (
            f"The request is too large: its body may have at most {self.max_body_bytes} bytes."
        )
        return Refusal(413, message, "request_too_large")


def describe_models(names: Iterable[str], created: int = 0) -> dict[str, Any]:
    """Return a list of models in the forms of all dialects at once."""
    # Each client reads the fields of its own dialect and ignores the others.
    models = []
    google_models = []
    for name in names:
        model = {"id": name, "object": "model", "created": created, "owned_by": "agentic-prompting"}
        models.append({**model, "type": "model", "display_name": name})
        google_models.append({"name": f"models/{name}", "displayName": name})
    return {"object": "list", "data": models, "has_more": False, "models": google_models}


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Give a response the id of its request, or a new one if the request has none."""
    request_id = request.headers.get("x-request-id", "")
    # Only a short id of harmless characters is repeated.
    if not re.fullmatch(r"[\w.-]{1,128}", request_id, re.ASCII):
        request_id = f"req_{secrets.token_hex(12)}"
    response.headers["x-request-id"] = request_id


def _find_key(request: web.Request) -> str:
    """Return the key of a request: in its path, in one of the vendors' headers, or in its query."""
    if "key" in request.match_info:
        return request.match_info["key"]
    authorization = request.headers.get("Authorization", "")
    candidates = (
        authorization.removeprefix("Bearer "),
        request.headers.get("x-api-key", ""),
        request.headers.get("x-goog-api-key", ""),
        request.query.get("key", ""),
    )
    return next(filter(None, candidates), "")


def is_large_body(request: web.Request) -> bool:
    """Return whether the body of a request should be parsed in a thread."""
    return request.content_length is None or request.content_length > _LARGE_BODY


def _wait_if_large(request: web.Request, session: Session) -> AbstractAsyncContextManager[None]:
    """Return the context of a request: large requests of one rollout wait for each other.

    They would hold memory and threads of all rollouts.
    """
    return session.large_request_slots if is_large_body(request) else nullcontext()


def _parse_request(body: bytes, dialect: Dialect, path: str) -> CompletionRequest:
    """Parse the body of a request.

    Raises [`Refusal`], or whatever a body of an unknown shape causes.
    """
    return dialect.read_request(_without_surrogates(parse_json(body), body), path)


def _without_surrogates(value: Any, body: bytes) -> Any:
    """Replace halves of surrogate pairs, which JSON can contain and no tokenizer takes."""
    # Few bodies have any escape, and fewer have half a pair: the others need no second pass.
    if b"\\u" not in body or (b"\\ud" not in body and b"\\uD" not in body):
        return value
    return json.loads(replace_surrogates(json.dumps(value, ensure_ascii=False)))


async def _send_reply(
    request: web.Request,
    dialect: Dialect,
    session: Session,
    completion_request: CompletionRequest,
    call: Call | None,
) -> web.StreamResponse:
    """Get the reply to a call, or a large LLM's reply if `call` is None, and send it.

    Raises:
        [`Refusal`]: There is no reply, and nothing has been sent.
        `ConnectionError`: The client has hung up.
    """
    # Send the headers of a stream at once. Some clients hang up if they wait for these, others if
    # they get a comment.
    stream: web.StreamResponse | None = None
    if completion_request.stream:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        stream = web.StreamResponse(headers=headers)
        await stream.prepare(request)

    # Get the reply. In a stream that has begun, a refusal becomes an event.
    try:
        if call is None:
            completion = await session.call_llm(completion_request)
        else:
            completion = await session.sample_reply(call)
    except Refusal as refusal:
        if stream is None:
            raise
        await stream.write(b"".join(dialect.write_failure(refusal, completion_request)))
        await stream.write_eof()
        return stream

    # Send it, as one body or as the events of the stream.
    response: web.StreamResponse
    if stream is None:
        body = json.dumps(dialect.write_body(completion)).encode()
        response = web.Response(body=body, content_type="application/json")
        await response.prepare(request)
    else:
        response = stream
        await response.write(b"".join(dialect.write_events(completion, completion_request)))
    await response.write_eof()
    # Writing does not always fail if the client has gone.
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError("the client has hung up")
    return response


def _raise_open_files_limit() -> None:
    """Allow as many open files as 64 rollouts with many connections each need."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    # As far as the system allows, and never below the present limit.
    limit = max(soft_limit, min(hard_limit, _OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard_limit))


class _ClientErrorFilter(logging.Filter):
    """Keeps tracebacks out of the log if a client hangs up, or sends something that is not HTTP."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, ConnectionError | HttpProcessingError | web.RequestPayloadError):
            return True
        logger.debug("a client hung up, or sent something that is not HTTP: %s", error)
        return False


http_logger = logging.getLogger(f"{__name__}.http")
http_logger.addFilter(_ClientErrorFilter())
