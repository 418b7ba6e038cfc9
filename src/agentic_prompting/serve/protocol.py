"""Requests and responses: access, limits of a request and of a connection, OpenAI's chat format.

The guards are plain ASGI and a bounded HTTP protocol: nothing of a request is read before.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import socket
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..llm import Message
from ..llm.addresses import is_loopback
from ..programs import Completion, Refusal, error_body
from ..programs.fields import parse_json
from ..programs.protocol import MAX_MESSAGES
from .answering import ServedAnswer

KEY_VARIABLE = "AGENTIC_PROMPTING_API_KEY"
_OPEN = (
    "/health",
)  # for load balancers, which have no key and use any host name; reveals nothing about the service
_BODY_SECONDS = 30.0
_CLOSE = {"Connection": "close"}  # an unread rest of a body would keep the connection open
CLOSED_REQUEST = 499  # nginx's number; the client has gone and does not read it
_LARGE_BODY = 2**16  # bytes, from which on a request is read on a thread
_HEAD_SECONDS = 10.0  # for the head of a request to arrive
# JSON can say half of a surrogate pair, which is no character: no tokenizer takes it.
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")


def _option(default: Any, text: str) -> Any:
    """A field with its help text for the command line."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ServeConfig:
    """The settings of the service.

    Args:
        host (`str`, *optional*, defaults to `"127.0.0.1"`): Address to listen on. Any other than this machine's own
            loopback needs a key.
        port (`int`, *optional*, defaults to `8080`): Port to listen on; 0 takes a free one.
        key_variable (`str`, *optional*, defaults to `"AGENTIC_PROMPTING_API_KEY"`): Environment variable that holds the
            key. Where it is set, requests without it get a 401, on loopback too.
        max_concurrency (`int`, *optional*, defaults to `256`): Requests answered at once; further ones get a 429.
        max_body_bytes (`int`, *optional*, defaults to 1 MiB): Larger requests get a 413.
        timeout (`float`, *optional*, defaults to `120.0`): Seconds for a request, its body included, after which it is
            stopped: 504; 408 while the body is still coming, for which there are 30 seconds at most.
        max_cost_usd (`float`, *optional*): Dollars that one request may cost: 402. By default any.
        greedy (`bool`, *optional*, defaults to `False`): Take the likeliest token each time instead of sampling as in
            training, for every request; without it for those with `temperature=0`.

    Raises:
        `ValueError`: If a limit is not positive, or the port is none.
    """

    host: str = _option("127.0.0.1", "Address to listen on; any other than loopback needs a key.")
    port: int = _option(8080, "Port to listen on; 0 takes a free one.")
    key_variable: str = _option(KEY_VARIABLE, "Environment variable that holds the key.")
    max_concurrency: int = _option(256, "Requests answered at once; further ones get a 429.")
    max_body_bytes: int = _option(2**20, "Larger requests get a 413.")
    timeout: float = _option(120.0, "Seconds for a request, after which it is stopped.")
    max_cost_usd: float | None = _option(None, "Dollars that one request may cost: 402.")
    greedy: bool = _option(False, "Take the likeliest token instead of sampling, always.")

    def __post_init__(self):
        limits = (self.max_concurrency, self.max_body_bytes, self.timeout)
        if min(limits) <= 0 or (self.max_cost_usd is not None and self.max_cost_usd <= 0):
            raise ValueError(f"every limit of the service must be positive, got {self}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, got {self.port}")

    def find_key(self) -> str | None:
        """The key, read at start and kept nowhere else.

        Raises:
            `ValueError`: If other machines could ask and there is none.
        """
        key = os.environ.get(self.key_variable, "").strip()
        if not key and not is_loopback(self.host):
            raise ValueError(
                f"listening on {self.host}, where other machines can ask, needs a key: set {self.key_variable}, or "
                "listen on 127.0.0.1"
            )
        return key or None

    def check_address(self) -> None:
        """Find out whether the address can be listened on, before a model is loaded.

        Raises:
            `ValueError`: If it cannot: the port is taken, or the host is not this machine.
        """
        try:
            family, *_, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[
                0
            ]
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(
                f"cannot listen on {self.host}, port {self.port} ({reason}): choose another one"
            ) from None


class Guards:
    """ASGI middleware: 401 without the key, 403 for a web page's requests, 408 and 413 for a body too slow or large.

    Without a key, every client that reaches the service may spend. A web page in a browser on this machine can reach
    it: its own name may lead to 127.0.0.1 (DNS rebinding), or it sends a request whose answer it may not read. Such
    requests carry the page's name in `Host` or `Origin`.

    A request that is cut off when the service stops gets a 503.

    Args:
        app (ASGI application): The guarded application.
        config ([`ServeConfig`]): Limits, and the host whose name is allowed besides loopback's.
        key (`str`, *optional*): `None` lets every request to this host in.
    """

    def __init__(self, app: Any, config: ServeConfig, key: str | None):
        self.app = app
        self.config = config
        self._expected = None if key is None else f"Bearer {key}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def sending(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        now = asyncio.get_running_loop().time()
        scope.setdefault("state", {})["deadline"] = now + self.config.timeout
        refused = self._refused(scope["path"], dict(scope["headers"]))
        try:
            if refused is not None:
                await JSONResponse(*refused, headers=_CLOSE)(scope, receive, send)
            else:
                body = self._counted(receive, now + min(self.config.timeout, _BODY_SECONDS))
                await self.app(scope, body, sending)
        except asyncio.CancelledError:
            # The server stops and sends nothing more to open requests.
            if not started:
                body = error_body(503, "The service is shutting down.", "shutting_down")
                await JSONResponse(body, 503, _CLOSE)(scope, receive, send)

    def _refused(self, path: str, headers: dict[bytes, bytes]) -> tuple[Any, int] | None:
        """The body and the status for a request that may not enter."""
        if path not in _OPEN:
            sent = headers.get(b"authorization", b"")
            if self._expected is not None and not hmac.compare_digest(
                sent, self._expected.encode()
            ):
                return error_body(401, "Incorrect API key provided.", "invalid_api_key"), 401
            if self._expected is None and not self._is_for_us(headers):
                message = "Without a key the service answers to loopback names only, and to no other site's pages."
                return error_body(403, message, "host_not_allowed"), 403
        if _length(headers) > self.config.max_body_bytes:
            return error_body(413, self._too_large, "request_too_large"), 413
        return None

    def _is_for_us(self, headers: dict[bytes, bytes]) -> bool:
        host = b"//" + headers.get(b"host", b"")
        hosts = [_host(url) for url in (host, headers.get(b"origin", host))]
        return all(is_loopback(host) or host == self.config.host.lower() for host in hosts)

    @property
    def _too_large(self) -> str:
        return f"The request is larger than {self.config.max_body_bytes} bytes."

    def _counted(self, receive: Any, deadline: float) -> Any:
        """`receive`, up to the size and, while the body is coming, up to the deadline."""
        body_size = 0
        is_complete = False

        async def receive_within_limits() -> Any:
            nonlocal body_size, is_complete
            try:
                async with asyncio.timeout_at(None if is_complete else deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408, "The request's body did not arrive in time.", _CLOSE
                ) from None
            is_complete = is_complete or not message.get("more_body", False)
            body_size += len(message.get("body", b""))
            if body_size > self.config.max_body_bytes:
                raise HTTPException(413, self._too_large, _CLOSE)
            return message

        return receive_within_limits


def _host(url: bytes) -> str:
    """The host in an address, without its port; empty if it has none."""
    try:
        return urlsplit(url.decode("latin-1")).hostname or ""
    except ValueError:
        return ""


def _length(headers: dict[bytes, bytes]) -> int:
    length = headers.get(b"content-length", b"0")
    return int(length) if length.isdigit() else 0


# Connections ----------------------------------------------------------------------------------------------------------


def bounded_protocol(max_connections: int) -> type[H11Protocol]:
    """HTTP over a limited number of connections."""
    return type("Bounded", (_Bounded,), {"max_connections": max_connections})


class _Bounded(H11Protocol):
    """uvicorn's HTTP protocol with two limits that it lacks: the time for a request's head, the number of connections.

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


# --- OpenAI's format -------------------------------------------------------------------------------------------------


class TextPart(BaseModel):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class MessageBody(BaseModel):
    """One message of a conversation. Text only; of a reply without an answer it is the refusal."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)] | None = None
    refusal: str | None = None

    def as_message(self) -> Message:
        content = self.content or self.refusal or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool | None = Field(False, description="Send the token counts in a last chunk.")


class ChatRequest(BaseModel):
    """A request for a completion. The agent samples as it was trained to: other fields are ignored, and named in the
    reply's header `X-Ignored-Parameters`."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(description="A name from /v1/models.")
    messages: list[MessageBody] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        description="Must end with a user's message: the question.",
    )
    stream: bool | None = Field(False, description="Send the answer in pieces, once it is there.")
    stream_options: StreamOptions | None = None
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="The same seed gives the same answer."
    )
    max_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="Of all turns of the agent and replies together."
    )
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="The same.")
    n: Literal[1] | None = Field(1, description="Only one choice a request is offered.")
    temperature: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="0 takes the likeliest token each time. Others are ignored.",
    )
    tools: list[Any] | None = Field(None, description="None is offered: a 400 unless empty.")
    functions: list[Any] | None = Field(None, description="As `tools`.")
    response_format: dict[str, Any] | None = Field(
        None, description="A 400 unless its type is `text`."
    )
    logprobs: bool | None = Field(None, description="A 400 if true.")
    trajectory: bool | None = Field(
        False, description="Send `trajectory`, how the answer came about, as well."
    )

    @property
    def token_limit(self) -> int | None:
        limits = [
            limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None
        ]
        return min(limits, default=None)

    def conversation(self) -> list[Message]:
        """The messages, checked to end with a question.

        Raises:
            `Refusal`: If they do not, or the request wants what no answer here has.
        """
        unsupported = {
            "tools": self.tools,
            "functions": self.functions,
            "logprobs": self.logprobs,
            "response_format": self.response_format
            and self.response_format.get("type") not in (None, "text"),
        }
        for name, is_requested in unsupported.items():
            if is_requested:
                raise Refusal(
                    400, f"`{name}` is not supported: leave it out.", "unsupported_parameter", name
                )
        messages = [message.as_message() for message in self.messages]
        if messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
            raise Refusal(
                400, "`messages` must end with a user message that is not empty.", param="messages"
            )
        if any(_HALF_A_PAIR.search(message["content"]) for message in messages):
            raise Refusal(
                400,
                "`messages` must be Unicode: there is half of a surrogate pair in it.",
                param="messages",
            )
        return messages

    def ignored(self) -> list[str]:
        """Fields that make no difference, those with a name that a header can hold."""
        names = [name for name, value in (self.model_extra or {}).items() if value is not None]
        names += ["temperature"] if self.temperature else []
        return sorted(name for name in names if re.fullmatch(r"\w{1,40}", name, re.ASCII))[:20]


async def read_request(request: Request) -> ChatRequest:
    """The request in a body. A long one is read on a thread: the loop is that of all requests.

    Raises:
        [`Refusal`]: It is no request for a completion.
    """
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise Refusal(CLOSED_REQUEST, "The client closed the connection.") from None
    if "json" not in request.headers.get("content-type", ""):
        raise Refusal(
            400, "body: it must be JSON, and the request's Content-Type application/json."
        )
    return await asyncio.to_thread(_read_body, raw) if len(raw) > _LARGE_BODY else _read_body(raw)


def _read_body(raw: bytes) -> ChatRequest:
    try:
        return ChatRequest.model_validate(parse_json(raw))
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[
            0
        ]  # what was sent is not repeated
        where = ".".join(part for part in first["loc"] if isinstance(part, str))
        raise Refusal(400, f"{where or 'body'}: {first['msg']}", param=where or None) from None


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """OpenAI's form of an error."""

    error: ErrorDetail


def completion(answer: ServedAnswer, model: str, with_trajectory: bool | None) -> Completion:
    """An answer as the reply to a request. An agent without an answer has a `refusal` and no text."""
    extra_fields: dict[str, Any] = {}
    if answer.workers:
        extra_fields["workers"] = answer.workers
    if with_trajectory:
        extra_fields["trajectory"] = answer.trajectory
    return Completion(
        model=model,
        text=answer.text,
        finish_reason=answer.finish_reason,
        prompt_tokens=answer.usage.prompt_tokens,
        completion_tokens=answer.usage.completion_tokens,
        refusal=answer.why_none,
        extra_fields=extra_fields,
    )
