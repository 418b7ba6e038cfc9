"""Serves the oracle at an OpenAI-compatible address on this machine, so that the default run uses
the real client.

`python -m agentic_prompting.sandbox.server --port 8123` runs it in the foreground. It implements
enough of the protocol for chat clients that do not stream: completions, the list of models, errors
in OpenAI's form. It is not meant for other machines: one thread per connection, no TLS.
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


class _HTTPError(Exception):
    """An error response, in OpenAI's form."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ):
        super().__init__(message)
        # OpenAI names whose fault an error is: the server's or the request's.
        error_type = "server_error" if status >= 500 else "invalid_request_error"
        self.status = status
        self.body = {
            "error": {"message": message, "type": error_type, "param": param, "code": code}
        }


class OracleServer(ThreadingHTTPServer):
    """Serves a [`ChatModel`] on this machine; a context manager.

    Args:
        oracle ([`ChatModel`], *optional*): The model that answers; `Oracle()` by default.
        host (`str`, *optional*, defaults to `"127.0.0.1"`): Address to listen on.
        port (`int`, *optional*, defaults to `0`): Port to listen on; 0 takes a free one.
        api_key (`str`, *optional*): When given, requests without it get a 401. Needed where other
            machines can ask.

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
    daemon_threads = True  # an open connection must not keep the process alive

    def __init__(
        self,
        oracle: ChatModel | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
    ):
        # Without a key, only this machine may ask.
        if not api_key and not is_loopback(host):
            raise ValueError(
                f"other machines can reach {host}: pass api_key (on the command line, set "
                f"{KEY_VARIABLE}), or listen on 127.0.0.1"
            )
        self.oracle = oracle or Oracle()
        self.api_key = api_key
        self._open_connections: set[socket.socket] = set()
        self._thread: threading.Thread | None = None
        # With port 0 the address is known only once the port is taken.
        super().__init__((host, port), _Handler)
        self.base_url = f"http://{host}:{self.server_address[1]}/v1"

    def start(self) -> OracleServer:
        """Serve from a new thread.

        `with` does this; `serve_forever` serves from the caller's thread.
        """
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop serving and close open connections. Safe to call twice."""
        # Only a server that `start` runs has a loop to stop.
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
        self._open_connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open_connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        # Each kept-alive connection has a thread, which would go on answering.
        for connection in list(self._open_connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hung up; handlers answer all other errors themselves."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections alive
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body leave in one piece
    server: OracleServer

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a run makes thousands of requests."""

    def do_GET(self) -> None:
        """Answer a request, whether GET or POST."""
        routes = {
            "GET /v1/models": self._models,
            "GET /health": lambda body: self._send_json(200, {"status": "ok"}),
            "POST /v1/chat/completions": self._chat,
        }
        try:
            # Read the body first, or the next request would start in the middle of it.
            body = self._read_body()
            route = f"{self.command} {self.path.partition('?')[0]}"
            if route not in routes:
                raise _HTTPError(404, f"Unknown request: {route}")
            # A health check needs no key.
            if route != "GET /health":
                self._check_key()
            routes[route](body)
        except _HTTPError as error:
            self._send_json(error.status, error.body)
        except ConnectionError:
            # The client hung up, so there is no reader for an error.
            raise
        except Exception as error:
            # A bug in this server gets an error response: the connection stays usable.
            self._send_json(500, _HTTPError(500, f"{type(error).__name__}: {error}").body)

    do_POST = do_GET

    def _check_key(self) -> None:
        api_key = self.server.api_key
        if not api_key:
            return
        authorization = self.headers.get("Authorization", "")
        # The time of this comparison does not tell how much of a key is right.
        if not hmac.compare_digest(authorization.encode(), f"Bearer {api_key}".encode()):
            raise _HTTPError(401, "Incorrect API key provided.", code="invalid_api_key")

    def _read_body(self) -> bytes:
        length = self.headers.get("Content-Length", "0")

        # Until this body is read, the beginning of the next request is unknown: an error closes the
        # connection.
        close_connection = self.close_connection
        self.close_connection = True
        if not length.isdecimal() or "Transfer-Encoding" in self.headers:
            raise _HTTPError(411, "Send a Content-Length and a body that is not chunked.")
        # Count the digits first: Python refuses to convert a huge number.
        if len(length) > 9 or int(length) > _MAX_BODY_BYTES:
            raise _HTTPError(
                413, f"The request is larger than {_MAX_BODY_BYTES} bytes.", "request_too_large"
            )

        # The length is known, so the connection can be kept.
        self.close_connection = close_connection
        return self.rfile.read(int(length))

    def _models(self, body: bytes) -> None:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "agentic-prompting"}
        self._send_json(200, {"object": "list", "data": [model]})

    def _chat(self, body: bytes) -> None:
        request = _read_chat(body)
        # The seed tells samples of one conversation apart, which is what `repeat` is for.
        reply = complete(self.server.oracle, request["messages"], repeat=request.get("seed"))
        if reply.error is not None:
            raise _HTTPError(500, str(reply.error), code=reply.error.kind)

        # The response, in OpenAI's form.
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": reply.text},
            "logprobs": None,
            "finish_reason": reply.finish_reason,
        }
        usage = {
            "prompt_tokens": reply.usage.prompt_tokens,
            "completion_tokens": reply.usage.completion_tokens,
            "total_tokens": reply.usage.prompt_tokens + reply.usage.completion_tokens,
        }
        nanoseconds = time.time_ns()
        completion = {
            "id": f"chatcmpl-{nanoseconds}",
            "object": "chat.completion",
            "created": nanoseconds // 10**9,
            "model": MODEL,
            "choices": [choice],
            "usage": usage,
        }
        self._send_json(200, completion)

    def _send_json(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _read_chat(body: bytes) -> dict[str, Any]:
    """Parse a chat request and check the fields that the oracle needs."""
    try:
        request = json.loads(body)
    except ValueError:
        raise _HTTPError(400, "We could not parse the JSON body of your request.") from None
    if not isinstance(request, dict):
        raise _HTTPError(400, "The body must be a JSON object.")
    model = request.get("model")
    if model != MODEL:
        raise _HTTPError(404, f"The model `{model}` does not exist.", "model_not_found", "model")
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise _HTTPError(
            400, "`messages` must be a list of objects with a role and a text.", param="messages"
        )
    # Refuse what this server would have to ignore.
    if request.get("n", 1) not in (1, None) or request.get("stream"):
        raise _HTTPError(
            400,
            "This server offers one choice per request, without streaming.",
            code="unsupported_value",
        )
    return request


def _is_message(message: object) -> bool:
    if not isinstance(message, dict):
        return False
    return isinstance(message.get("role"), str) and isinstance(message.get("content"), str)


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

    # The key is not an option: other users of the machine can read command lines.
    api_key = os.environ.get(KEY_VARIABLE, "").strip() or None
    try:
        oracle = Oracle(noise=args.noise, latency=args.latency, seed=args.seed)
        server = OracleServer(oracle, args.host, args.port, api_key)
    except (OSError, ValueError) as error:
        parser.error(f"cannot serve on {args.host}:{args.port}: {error}")

    # With port 0, only this line tells the address.
    print(server.base_url, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    server.close()


if __name__ == "__main__":
    main()
