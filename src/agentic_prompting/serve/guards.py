"""What stands before every request: the key and the size of its body. Plain ASGI, so that nothing is read before."""

from __future__ import annotations

import hmac
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from .protocol import error_body

_OPEN = ("/health",)  # for load balancers, which have no key; says nothing about the service


class Guards:
    """ASGI middleware: 401 without the key, 413 above the size.

    Args:
        app (ASGI application): What is guarded.
        key (`str`, *optional*): `None` lets everybody in.
        max_body_bytes (`int`): Counted while they arrive, so that a length that is missing or wrong helps nobody.
    """

    def __init__(self, app: Any, key: str | None, max_body_bytes: int):
        self.app, self._expected, self.max_body_bytes = app, None if key is None else f"Bearer {key}", max_body_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        refused = None
        if not self._may_enter(scope["path"], headers.get(b"authorization", b"")):
            refused = error_body(401, "Incorrect API key provided.", "invalid_api_key"), 401
        elif _length(headers) > self.max_body_bytes:
            refused = error_body(413, self._too_large, "request_too_large"), 413
        if refused is not None:
            await JSONResponse(*refused)(scope, receive, send)
        else:
            await self.app(scope, self._counted(receive), send)

    def _may_enter(self, path: str, sent: bytes) -> bool:
        return self._expected is None or path in _OPEN or hmac.compare_digest(sent, self._expected.encode())

    @property
    def _too_large(self) -> str:
        return f"The request is larger than {self.max_body_bytes} bytes."

    def _counted(self, receive: Any) -> Any:
        received = 0

        async def counting() -> Any:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_body_bytes:
                raise HTTPException(413, self._too_large)
            return message

        return counting


def _length(headers: dict[bytes, bytes]) -> int:
    length = headers.get(b"content-length", b"0")
    return int(length) if length.isdigit() else 0
