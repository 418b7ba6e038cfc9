"""The oracle behind an OpenAI-compatible address on this machine, so that the default run takes the real client's path.

`python -m agentic_prompting.sandbox.server --port 8123` runs it in the foreground. Enough of the protocol for chat
clients that do not stream: completions, the list of models, errors in OpenAI's form. Not a server for other machines:
one thread a connection, no TLS.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ..llm import ChatModel, complete
from ..llm.addresses import is_loopback
from .world import Oracle

MODEL = "sandbox-oracle"
"""The only model there is."""

KEY_VARIABLE = "AGENTIC_PROMPTING_API_KEY"  # as for `agentic-prompting serve`

_MAX_BODY_BYTES = 2**20


class _Refusal(Exception):
    """A request that gets an error body instead of a reply."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ):
        super().__init__(message)
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class OracleServer(ThreadingHTTPServer):
    """Serves a [`ChatModel`] on this machine; a context manager.

    Args:
        oracle ([`ChatModel`], *optional*): The model that answers; `Oracle()` by default.
        host (`str`, *optional*, defaults to `"127.0.0.1"`): Address to listen on.
        port (`int`, *optional*, defaults to `0`): Port to listen on; 0 takes a free one.
        api_key (`str`, *optional*): When given, requests without it get a 401. Needed where other machines can ask.

    Attributes:
        base_url (`str`): The address for clients, `/v1` included.

    Raises:
        `OSError`: If the port is taken.
        `ValueError`: If other machines could ask and there is no key.

    Example:

    ```python
    with OracleServer() as server:
        client = OpenAI(base_url=server.base_url, api_key="any")
    ```
    """

    request_queue_size = 1024  # a whole batch of rollouts connects at the same moment
    daemon_threads = True

    def __init__(
        self,
        oracle: ChatModel | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
    ):
        if not api_key and not is_loopback(host):
            raise ValueError(
                f"{host} can be asked by other machines, so it needs a key; listen on 127.0.0.1 without"
            )
        self.oracle, self.api_key = oracle or Oracle(), api_key
        self._open: set[socket.socket] = set()
        self._thread: threading.Thread | None = None
        super().__init__((host, port), _Handler)
        self.base_url = f"http://{host}:{self.server_address[1]}/v1"

    def start(self) -> OracleServer:
        """Serve from a thread of its own. `with` does this; `serve_forever` serves from the caller's."""
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop, and break off the connections that are open. Safe to call twice."""
        if self._thread is not None:
            self.shutdown()
            self._thread.join()
            self._thread = None
        self.server_close()

    def __enter__(self) -> OracleServer:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        # Kept-alive connections have threads of their own, which would go on answering.
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no news here; handlers answer everything else themselves."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections alive
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body leave in one piece
    server: OracleServer

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: thousands of requests a run."""

    def do_GET(self) -> None:
        """Answer a request; also those that are posted."""
        routes = {
            "GET /v1/models": self._models,
            "GET /health": lambda body: self._send_json(200, {"status": "ok"}),
            "POST /v1/chat/completions": self._chat,
        }
        try:
            body = (
                self._read_body()
            )  # before anything else, or the next request would start in the middle of it
            route = f"{self.command} {self.path.partition('?')[0]}"
            if route not in routes:
                raise _Refusal(404, f"Unknown request: {route}")
            key, sent = self.server.api_key, self.headers.get("Authorization", "")
            if (
                key
                and route != "GET /health"
                and not hmac.compare_digest(sent.encode(), f"Bearer {key}".encode())
            ):
                raise _Refusal(401, "Incorrect API key provided.", code="invalid_api_key")
            routes[route](body)
        except _Refusal as refusal:
            self._send_json(refusal.status, refusal.body)
        except ConnectionError:
            raise
        except (
            Exception
        ) as error:  # a defect here is a server error there, not a connection that breaks
            self._send_json(500, _Refusal(500, f"{type(error).__name__}: {error}").body)

    do_POST = do_GET

    def _read_body(self) -> bytes:
        length = self.headers.get("Content-Length", "0")
        # If this body is not read, the beginning of the next request is unknown.
        closes, self.close_connection = self.close_connection, True
        if not length.isdecimal() or "Transfer-Encoding" in self.headers:
            raise _Refusal(411, "Send a Content-Length and a body that is not chunked.")
        if len(length) > 9 or int(length) > _MAX_BODY_BYTES:
            raise _Refusal(
                413, f"The request is larger than {_MAX_BODY_BYTES} bytes.", "request_too_large"
            )
        self.close_connection = closes
        return self.rfile.read(int(length))

    def _models(self, body: bytes) -> None:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "agentic-prompting"}
        self._send_json(200, {"object": "list", "data": [model]})

    def _chat(self, body: bytes) -> None:
        request = _read_chat(body)
        # The seed tells samples of one conversation apart, which is what `repeat` is for.
        reply = complete(self.server.oracle, request["messages"], repeat=request.get("seed"))
        if reply.error is not None:
            raise _Refusal(500, str(reply.error), code=reply.error.kind)
        message = {"role": "assistant", "content": reply.text}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": reply.finish_reason,
        }
        now, read, written = (
            time.time_ns(),
            reply.usage.prompt_tokens,
            reply.usage.completion_tokens,
        )
        head = {
            "id": f"chatcmpl-{now}",
            "object": "chat.completion",
            "created": now // 10**9,
            "model": MODEL,
        }
        usage = {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
        }
        self._send_json(200, {**head, "choices": [choice], "usage": usage})

    def _send_json(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _read_chat(body: bytes) -> dict[str, Any]:
    """The request, checked as far as the oracle needs it."""
    try:
        request = json.loads(body)
    except ValueError:
        raise _Refusal(400, "We could not parse the JSON body of your request.") from None
    if not isinstance(request, dict):
        raise _Refusal(400, "The body must be a JSON object.")
    if request.get("model") != MODEL:
        raise _Refusal(
            404, f"The model `{request.get('model')}` does not exist.", "model_not_found", "model"
        )
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise _Refusal(
            400, "`messages` must be a list of objects with a role and a text.", param="messages"
        )
    if request.get("n", 1) not in (1, None) or request.get("stream"):
        raise _Refusal(
            400, "One choice a request, not streamed, is all that is offered.", "unsupported_value"
        )
    return request


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and {
        type(message.get("role")),
        type(message.get("content")),
    } == {str}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the oracle's server in the foreground until Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m agentic_prompting.sandbox.server", description=main.__doc__
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help=f"any other than loopback needs a key in {KEY_VARIABLE}"
    )
    parser.add_argument("--port", type=int, default=8123, help="0 takes a free one")
    parser.add_argument("--noise", type=float, default=0.0, help="probability of a wrong fact")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds until a reply")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        oracle = Oracle(noise=args.noise, latency=args.latency, seed=args.seed)
        server = OracleServer(
            oracle, args.host, args.port, os.environ.get(KEY_VARIABLE, "").strip() or None
        )
    except (OSError, ValueError) as error:
        parser.error(f"cannot serve on {args.host}:{args.port}: {error}")
    print(server.base_url, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    server.close()


if __name__ == "__main__":
    main()
