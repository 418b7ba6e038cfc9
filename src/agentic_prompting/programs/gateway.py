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
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from ..llm import Misconfigured
from ..llm.spans import under
from .chat import ChatCompletions
from .google import Google
from .messages import Messages
from .protocol import Asked, Completion, Dialect, Refusal, error_body
from .responses import Responses
from .session import Session

logger = logging.getLogger(__name__)

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Responses(), Messages(), Google())

_LARGEST_BODY = 2**26
_PAST_KEYS = 2**14
_CONNECTIONS = 128  # of a rollout that has a network of its own
_OPEN_FILES = 2**16


class _Closed(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: Any) -> None:
        transport.abort()


class Gateway:
    """Serves the calls of all rollouts of a process.

    Args:
        host (`str`): The address to listen on.
        port (`int`): The port; 0 takes a free one.
        public_url (`str`, *optional*): How programs reach it, if not by `host` and port.
    """

    def __init__(self, host: str, port: int, public_url: str | None = None):
        self.host, self.port, self.public_url = host, port, public_url
        self._sessions: dict[str, Session] = {}
        self._past: dict[str, str] = {}
        self._own: dict[str, set[Any]] = {}  # by key: the connections of a rollout that has a network of its own
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

    async def listen_on(self, listener: socket.socket, key: str) -> asyncio.Server:
        """Serve the network of one rollout: with its own key alone, and so many connections at once."""
        assert self._runner is not None and self._runner.server is not None
        make, own = self._runner.server, self._own.setdefault(key, set())

        def connect() -> asyncio.BaseProtocol:
            own.difference_update([one for one in own if one.transport is None and one not in fresh])
            if len(own) >= _CONNECTIONS:
                return _Closed()
            own.add(made := make())
            fresh.append(made)
            return made

        fresh: deque[Any] = deque(maxlen=1)  # not connected yet
        return await asyncio.get_running_loop().create_server(connect, sock=listener)

    def close_key(self, key: str) -> None:
        """Answer no call with this key any more."""
        self._own.pop(key, None)
        self._past[key] = self._sessions.pop(key).over
        while len(self._past) > _PAST_KEYS:
            del self._past[next(iter(self._past))]

    async def stop(self) -> None:
        """Stop to listen."""
        started, self._started = self._started, None
        if started is not None and started[0] == os.getpid() and self._runner is not None:
            await self._runner.cleanup()

    async def _start(self) -> str:
        app = web.Application(client_max_size=_LARGEST_BODY)
        version = "/{version:v1(?:beta)?}"
        for prefix in ("/{key}" + version, version):  # the key in the address, or in a header alone
            for dialect in DIALECTS:
                app.router.add_post(prefix + dialect.path, self._handler(dialect, self._answer))
                if dialect.count_path:
                    app.router.add_post(prefix + dialect.count_path, self._handler(dialect, self._count))
            app.router.add_get(f"{prefix}/models", self._models)
        app.router.add_route("*", "/{unknown:.*}", self._refuse_path)
        # A handler is cancelled when its client hangs up: the policy then samples no further.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
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
        if key not in self._sessions or request.protocol not in self._own.get(key, (request.protocol,)):
            raise Refusal(401, "No such rollout: use the base_url and api_key that the program got.", "invalid_api_key")
        return self._sessions[key]

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
        at = re.sub(r"^/[\w-]{43}(?=/)", "", request.path)  # without the key
        known = ", ".join(f"/v1{path}" for path in (ChatCompletions.path, Responses.path, Messages.path))
        what = f"{request.method} {at} is not served here. POST {known} and Google's models/...:generateContent are; "
        return web.json_response(error_body(404, f"{what}base_url ends with /v1 already.", "not_found"), status=404)

    def _handler(self, dialect: Dialect, answer: Callable[..., Awaitable[web.StreamResponse]]) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                with under(request.headers, self._session(request).rollout.traceparent):
                    return await answer(request, dialect)
            except Refusal as error:
                refusal = error
            except (RecursionError, TypeError, AttributeError, KeyError) as error:
                # A body of another shape than any client sends: its own fault, and no reason to ask again.
                log, self._log_unreadable = self._log_unreadable, logger.debug  # an agent may send it for ever
                log("a request of a program cannot be read", exc_info=True)
                refusal = Refusal(400, f"The request cannot be read ({type(error).__name__}).", "invalid_value")
            return web.json_response(dialect.error(refusal), status=refusal.status)

        return handle

    async def _count(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        session = self._session(request)
        tokens = await session.count(await self._read(request, dialect))
        return web.json_response(dialect.counted(tokens))

    async def _read(self, request: web.Request, dialect: Dialect) -> Asked:
        try:
            raw = await request.read()
            body = json.loads(raw)
            if b"\\ud" in raw or b"\\uD" in raw:  # JSON can say half of a surrogate pair: no tokenizer takes it
                text = json.dumps(body, ensure_ascii=False)
                body = json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        except (ValueError, RecursionError):
            raise Refusal(400, "The body is no JSON.", "invalid_json") from None
        except web.HTTPRequestEntityTooLarge:
            what = f"The request is too large: its body may have {_LARGEST_BODY} bytes."
            raise Refusal(413, what, "request_too_large") from None
        return dialect.read(body, request.path_qs)

    async def _answer(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        session = self._session(request)
        asked = await self._read(request, dialect)
        call = await session.ask(asked, is_retry=request.headers.get("x-stainless-retry-count", "0") != "0")
        response: web.StreamResponse | None = None
        if asked.stream:  # the headers at once, then silence: some clients hang up without, others at a comment
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
        said = call if isinstance(call, Completion) else None
        try:
            if not isinstance(call, Completion):
                said = await session.reply(call)
        except Refusal as refusal:
            if response is None:
                raise
            await response.write(b"".join(dialect.failed(refusal, asked)))
            await response.write_eof()
            return response
        assert said is not None
        try:
            if response is None:
                response = web.Response(body=json.dumps(dialect.body(said)).encode(), content_type="application/json")
                await response.prepare(request)
            else:
                await response.write(b"".join(dialect.events(said, asked)))
            await response.write_eof()
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError
        except BaseException as error:
            if not isinstance(call, Completion):
                session.lost(call)
            if isinstance(error, ConnectionError):
                return response if response is not None else web.Response()
            raise
        return response
