"""Clients that close their connection before they have a reply."""

from __future__ import annotations

import socket
import struct
import time


def hang_up(host: str, port: int, request: bytes, seconds: float, with_reset: bool) -> None:
    """Send the bytes of a request, wait, and close the connection without reading a reply.

    With `with_reset` the connection is aborted (RST), as by a client that was killed; otherwise it
    is closed in an orderly way (FIN).
    """
    with socket.create_connection((host, port), timeout=10) as connection:
        connection.sendall(request)
        time.sleep(seconds)
        if with_reset:
            # Lingering for 0 seconds makes `close` abort.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
