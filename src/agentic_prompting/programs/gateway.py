"""The address that programs call: an HTTP server on the background loop, with a key for each rollout.

The key alone decides which rollout a call belongs to. It is a part of the address that a program gets, and its API key.
It is made for one rollout and ends with it, so an address that others can reach opens nothing else.
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
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ..llm import Misconfigured
from ..llm.spans import under
from .chat import ChatCompletions
from .fields import parse_json
from .google import Google
from .messages import Messages
from .protocol import MAX_BODY_BYTES, Asked, Dialect, Refusal, error_body
from .responses import Responses
from .session import Call, Session, request_threads

logger = logging.getLogger(__name__)

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Responses(), Messages(), Google())

_LARGE_BODY = 2**17  # bytes, from which on a request is read on a thread
_PAST_KEYS = 2**14
_CONNECTIONS = 128  # of a rollout that has a network of its own
_OPEN_FILES = 2**16


class _ClientErrors(logging.Filter):
    """Lets no traceback into the log for what a client did: it hung up, or what it sent is no HTTP."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, ConnectionError | HttpProcessingError | web.RequestPayloadError):
            return True
        logger.debug("a client hung up, or sent no HTTP: %s", error)
        return False


_http_logger = logging.getLogger(f"{__name__}.http")
_http_logger.addFilter(_ClientErrors())


class _Network:
    """The connections to the network of one rollout.

    Args:
        key (`str`): The key of the rollout.
        make (`Callable`): Makes the HTTP protocol of a connection.
        keys (`dict[asyncio.Protocol, str]`): The key of each connection, of all networks.
    """

    def __init__(self, key: str, make: Callable[[], asyncio.Protocol], keys: dict[asyncio.Protocol, str]):
        self.key, self.make, self.keys = key, make, keys
        self.open: dict[asyncio.Protocol, asyncio.Transport] = {}
        self.server: asyncio.Server | None = None
        self._has_warned = False

    def is_full(self) -> bool:
        """Whether no further connection can be had, which is logged once."""
        if len(self.open) < _CONNECTIONS:
            return False
        if not self._has_warned:
            logger.warning("a rollout has %d connections open, and gets no further ones", _CONNECTIONS)
        self._has_warned = True
        return True

    def close(self) -> None:
        """Stop to listen, and end all connections."""
        if self.server is not None:
            self.server.close()
        for transport in [*self.open.values()]:
            transport.abort()


class _Connection(asyncio.Protocol):
    """A connection that counts in its network from when it is made until it is lost. HTTP is spoken by the protocol
    behind it, which a request knows as its own."""

    def __init__(self, network: _Network):
        self._network = network
        self._http: asyncio.Protocol | None = None

    def connection_made(self, transport: Any) -> None:
        if self._network.is_full():
            transport.abort()
            return
        self._http = self._network.make()
        self._network.open[self._http] = transport
        self._network.keys[self._http] = self._network.key
        self._http.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._http is not None:
            del self._network.open[self._http], self._network.keys[self._http]
            self._http.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._http is not None:
            self._http.data_received(data)

    def eof_received(self) -> bool | None:
        return self._http.eof_received() if self._http is not None else None

    def pause_writing(self) -> None:
        if self._http is not None:
            self._http.pause_writing()

    def resume_writing(self) -> None:
        if self._http is not None:
            self._http.resume_writing()


class Gateway:
    """Serves the calls of all rollouts of a process.

    Args:
        host (`str`): The address to listen on.
        port (`int`): The port; 0 takes a free one.
        public_url (`str`, *optional*): How programs reach it, if not by `host` and port.
        max_body_bytes (`int`, *optional*, defaults to 4 MiB): Requests with a larger body are refused.
    """

    def __init__(self, host: str, port: int, public_url: str | None = None, max_body_bytes: int = MAX_BODY_BYTES):
        self.host, self.port, self.public_url = host, port, public_url
        self.max_body_bytes = max_body_bytes
        self._sessions: dict[str, Session] = {}
        self._past: dict[str, str] = {}
        self._networks: dict[str, _Network] = {}  # by key, of the rollouts that have one of their own
        self._keys: dict[Any, str] = {}  # of the connections to those networks
        self._started: tuple[int, asyncio.Task[str]] | None = None
        self._runner: web.AppRunner | None = None
        self._log_unreadable: Callable[..., None] = logger.warning

    async def open(self, session: Session) -> tuple[str, str]:
        """An address and a key for a session. Raises as `listen`."""
        base, key = await self.listen(), secrets.token_urlsafe(32)
        self._sessions[key] = session
        return f"{base}/{key}/v1", key

    async def listen(self) -> str:
        """Start to listen, if it does not yet; the address.

        Raises:
            [`Misconfigured`]: It cannot listen on this host and port.
        """
        if self._started is None or self._started[0] != os.getpid():  # a fork has no server of its own yet
            self._started = os.getpid(), asyncio.create_task(self._start())
        try:
            return await asyncio.shield(self._started[1])
        except (OSError, OverflowError) as error:
            self._started = None
            what = f"the address of programs cannot be opened on host={self.host!r}, port={self.port}: {error}"
            raise Misconfigured(what) from error

    async def listen_on(self, listener: socket.socket, key: str) -> _Network:
        """Serve the network of one rollout: with its own key alone, and so many connections at once."""
        assert self._runner is not None and self._runner.server is not None
        network = self._networks[key] = _Network(key, self._runner.server, self._keys)
        loop = asyncio.get_running_loop()
        network.server = await loop.create_server(partial(_Connection, network), sock=listener)
        return network

    def close_key(self, key: str) -> None:
        """Answer no call with this key any more."""
        self._networks.pop(key, None)
        self._past[key] = self._sessions.pop(key).over
        while len(self._past) > _PAST_KEYS:
            del self._past[next(iter(self._past))]

    async def stop(self) -> None:
        """Stop to listen."""
        started, self._started = self._started, None
        if started is not None and started[0] == os.getpid() and self._runner is not None:
            await self._runner.cleanup()

    async def _start(self) -> str:
        app = web.Application(client_max_size=self.max_body_bytes)
        version = "/{version:v1(?:beta)?}"
        for prefix in ("/{key}" + version, version):  # the key in the address, or in a header alone
            for dialect in DIALECTS:
                app.router.add_post(prefix + dialect.path, self._handler(dialect, self._answer))
                if dialect.count_path:
                    app.router.add_post(prefix + dialect.count_path, self._handler(dialect, self._count))
            app.router.add_get(f"{prefix}/models", self._models)
        app.router.add_route("*", "/{unknown:.*}", self._refuse_path)
        # A handler is cancelled when its client hangs up: the policy then samples no further.
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=1,
            auto_decompress=False,  # a megabyte can be a gigabyte, unpacked on this loop
            logger=_http_logger,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port, backlog=1024).start()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # 64 rollouts with many connections each
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _OPEN_FILES)), hard))
        port = self._runner.addresses[0][1]
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (self.public_url or f"http://{host}:{port}").rstrip("/")

    def _session(self, request: web.Request) -> Session:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        named = (request.headers.get(name) for name in ("x-api-key", "x-goog-api-key"))
        key = request.match_info.get("key") or bearer or next(filter(None, named), request.query.get("key", ""))
        if key in self._past:
            what = f"This rollout is over ({self._past[key]}): no call is answered any more."
            raise Refusal(400, what, "rollout_ended")
        key_of_network = self._keys.get(request.protocol)  # through which the request came
        is_elsewhere = key != key_of_network and (key_of_network is not None or key in self._networks)
        if key not in self._sessions or is_elsewhere:
            raise Refusal(401, "No such rollout: use the base_url and api_key that the program got.", "invalid_api_key")
        session = self._sessions[key]
        session.count_request()
        return session

    async def _models(self, request: web.Request) -> web.Response:
        try:
            session = self._session(request)
        except Refusal as refusal:
            return web.json_response(refusal.body, status=refusal.status)
        names = (session.model, *session.llms)
        own = {"object": "model", "type": "model", "created": 0, "owned_by": "agentic-prompting"}
        data = [{"id": name, "display_name": name, **own} for name in names]
        google = [{"name": f"models/{name}", "displayName": name} for name in names]
        return web.json_response({"object": "list", "data": data, "has_more": False, "models": google})

    async def _refuse_path(self, request: web.Request) -> web.Response:
        if (session := self._sessions.get(request.path[1:].partition("/")[0])) is not None:
            try:
                session.count_request()
            except Refusal as refusal:
                return web.json_response(refusal.body, status=refusal.status)
        at = re.sub(r"^/[\w-]{43}(?=/)", "", request.path)  # without the key
        known = ", ".join(f"/v1{path}" for path in (ChatCompletions.path, Responses.path, Messages.path))
        what = f"{request.method} {at} is not served here. POST {known} and Google's models/...:generateContent are; "
        return web.json_response(error_body(404, f"{what}base_url ends with /v1 already.", "not_found"), status=404)

    def _handler(self, dialect: Dialect, answer: Callable[..., Awaitable[web.StreamResponse]]) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                session = self._session(request)
                with under(request.headers, session.rollout.traceparent):
                    return await answer(request, dialect, session)
            except Refusal as error:
                refusal = error
            except (RecursionError, TypeError, AttributeError, KeyError, ValueError) as error:
                # A body of another shape than any client sends: its own fault, and no reason to ask again.
                log, self._log_unreadable = self._log_unreadable, logger.debug  # an agent may send it for ever
                log("a request of a program cannot be read", exc_info=True)
                refusal = Refusal(400, f"The request cannot be read ({type(error).__name__}).", "invalid_value")
            return web.json_response(dialect.error(refusal), status=refusal.status)

        return handle

    async def _count(self, request: web.Request, dialect: Dialect, session: Session) -> web.StreamResponse:
        async with self._turn_of(request, session):
            tokens = await session.count(await self._read(request, dialect, session))
        return web.json_response(dialect.counted(tokens))

    @staticmethod
    def _is_large(request: web.Request) -> bool:
        return request.content_length is None or request.content_length > _LARGE_BODY

    def _turn_of(self, request: web.Request, session: Session) -> Any:
        """A rollout's large requests wait for each other: so they hold neither the memory nor the threads of all."""
        return session.large_requests if self._is_large(request) else nullcontext()

    async def _read(self, request: web.Request, dialect: Dialect, session: Session) -> Asked:
        """The request in the inner form. One that cannot be read counts as a call."""
        try:
            return await self._parsed(request, dialect)
        except web.RequestPayloadError:
            session.count_unreadable()
            raise Refusal(400, "The body is no HTTP.", "invalid_value") from None
        except Exception:
            session.count_unreadable()
            raise

    async def _parsed(self, request: web.Request, dialect: Dialect) -> Asked:
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise Refusal(415, "A compressed body is not supported: send it as it is.", "unsupported_encoding")
        too_large = Refusal(
            413, f"The request is too large: its body may have {self.max_body_bytes} bytes.", "request_too_large"
        )
        if (request.content_length or 0) > self.max_body_bytes:
            raise too_large
        try:
            raw = await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise too_large from None
        read = partial(_read_body, raw, dialect, request.path_qs)
        if not self._is_large(request):
            return read()
        return await asyncio.get_running_loop().run_in_executor(request_threads(os.getpid()), read)

    async def _answer(self, request: web.Request, dialect: Dialect, session: Session) -> web.StreamResponse:
        session.check_calls_left()
        async with self._turn_of(request, session):
            asked = await self._read(request, dialect, session)
            is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
            is_large_llm = asked.model in session.llms
            call = None if is_large_llm else await session.ask(asked, is_retry)
        try:
            return await self._send_reply(request, dialect, session, asked, call)
        except Refusal:
            raise
        except BaseException as error:
            if call is not None:
                session.lost(call)
            if isinstance(error, ConnectionError):
                return web.Response()  # to nobody
            raise

    async def _send_reply(
        self, request: web.Request, dialect: Dialect, session: Session, asked: Asked, call: Call | None
    ) -> web.StreamResponse:
        """The reply on its way. Raises `ConnectionError` if the client has gone."""
        response: web.StreamResponse | None = None
        if asked.stream:  # the headers at once, then silence: some clients hang up without, others at a comment
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
        try:
            said = await (session.ask_large(asked) if call is None else session.reply(call))
        except Refusal as refusal:
            if response is None:
                raise
            await response.write(b"".join(dialect.failed(refusal, asked)))
            await response.write_eof()
            return response
        if response is None:
            response = web.Response(body=json.dumps(dialect.body(said)).encode(), content_type="application/json")
            await response.prepare(request)
        else:
            await response.write(b"".join(dialect.events(said, asked)))
        await response.write_eof()
        if request.transport is None or request.transport.is_closing():
            raise ConnectionResetError
        return response


def _read_body(raw: bytes, dialect: Dialect, path: str) -> Asked:
    """The request in a body. Raises as [`Dialect.read`]."""
    body = parse_json(raw)
    if b"\\ud" in raw or b"\\uD" in raw:  # JSON can say half of a surrogate pair: no tokenizer takes it
        try:
            text = json.dumps(body, ensure_ascii=False)
        except RecursionError:
            raise Refusal(400, "The body is no JSON.", "invalid_json") from None
        body = json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    return dialect.read(body, path)
