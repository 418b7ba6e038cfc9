"""A real HTTP server on the loopback interface that speaks OpenAI's chat format and misbehaves on
purpose.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal


@dataclass
class Answer:
    """The server's response to one request.

    Args:
        text (`str`): The message of a well-formed completion.
        status (`int`): The HTTP status; from 400 on the body is an error of OpenAI's shape.
        headers (`dict`): Added to the response.
        delay (`float`): Seconds before anything is sent.
        body (`bytes` or `dict`): A body in place of the completion, sent unchanged.
        drop (`str`): `"before"` cuts the connection without a byte, `"mid"` in the middle of the
            body.
        trickle (`float`): Seconds between single bytes of the body.
        finish_reason (`str`): The completion's reason.
        usage (`tuple[int, int]`): Prompt and completion tokens.
    """

    text: str = "ok"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    body: bytes | dict[str, Any] | None = None
    drop: Literal["before", "mid"] | None = None
    trickle: float = 0.0
    finish_reason: str = "stop"
    usage: tuple[int, int] = (10, 5)

    def encoded(self) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        if self.body is not None:
            return json.dumps(self.body).encode()
        if self.status >= 400:
            return json.dumps(
                {"error": {"message": self.text, "type": "error", "code": None}}
            ).encode()
        return json.dumps(completion(self.text, self.finish_reason, self.usage)).encode()


def completion(
    text: Any, finish_reason: str = "stop", usage: tuple[int, int] = (10, 5), **message: Any
) -> dict:
    """The body of a chat completion whose message holds `text` and the entries of `message`."""
    prompt, written = usage
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "test",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, **message},
                "finish_reason": finish_reason,
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
        },
    }


Script = Callable[[dict[str, Any], int], "Answer | str"]


class LoopbackServer:
    """A scripted endpoint; a context manager.

    Args:
        script (`Callable[[dict, int], Answer | str]`): Called with the decoded request and its
            number, from 0, on a thread of its own; a string is the text of a good reply.
        answer_get (`Callable[[dict], Answer]`, *optional*): Called with the headers of a GET, such
            as that of the list of models. By default the status is 501.

    Attributes:
        base_url (`str`): For the client.
        requests (`list[dict]`): The decoded bodies, in the order of arrival.
        headers (`list[dict]`): Their headers, names in lower case.
        most_at_once (`int`): The largest number of requests being answered at one time.
        hung_up (`int`): Requests whose client was gone before the answer.
    """

    def __init__(
        self,
        script: Script = lambda request, n: "ok",
        answer_get: Callable[[dict[str, str]], Answer] | None = None,
    ):
        self.script = script
        self.answer_get = answer_get
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = self.hung_up = self._at_once = 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _handler_of(self))
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> LoopbackServer:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request as the script says."""
        request = json.loads(
            handler.rfile.read(int(handler.headers.get("content-length", 0))) or b"{}"
        )
        with self._lock:
            number = len(self.requests)
            self.requests.append(request)
            self.headers.append({name.lower(): value for name, value in handler.headers.items()})
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            answer = self.script(request, number)
            answer = Answer(answer) if isinstance(answer, str) else answer
            self._stopping.wait(answer.delay)
            # Before the reply is sent, because the client's next request may arrive while this
            # thread is still ending.
            with self._lock:
                self._at_once -= 1
            self._send(handler, answer)
        except (BrokenPipeError, ConnectionResetError):
            self.hung_up += 1

    def _send(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        body = answer.encoded()
        if answer.drop == "before":
            return _reset(handler)
        handler.send_response(answer.status)
        for name, value in {"content-type": "application/json", **answer.headers}.items():
            handler.send_header(name, value)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        if answer.drop == "mid":
            handler.wfile.write(body[: len(body) // 2])
            return _reset(handler)
        if answer.trickle:
            for byte in body:
                handler.wfile.write(bytes([byte]))
                if self._stopping.wait(answer.trickle):
                    return None
            return None
        handler.wfile.write(body)


def unused_url() -> str:
    """An address on this machine without a server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/v1"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients of these tests hang up on purpose: no traceback for it."""


def _handler_of(server: LoopbackServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            server.answer(self)

        def do_GET(self) -> None:
            answer = Answer(status=501)
            if server.answer_get is not None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                answer = server.answer_get(headers)
            server._send(self, answer)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _reset(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.wfile.flush()
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
