"""Names that a command looks up in a network of its own, where none resolves: each is listed, and refused at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

_HEADER = 12  # bytes of a query before its question
_NO_SUCH_NAME = bytes.fromhex(
    "8183 0001 0000 0000 0000"
)  # a reply to one question, without an answer


class Lookups(asyncio.DatagramProtocol):
    """Reads queries of DNS.

    Args:
        report (`Callable[[str], None]`): Gets each name, as often as it is asked for.
    """

    def __init__(self, report: Callable[[str], None]):
        self.report = report

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        labels, at = [], _HEADER
        while at < len(data) and (size := data[at]):
            labels.append(data[at + 1 : at + 1 + size].decode("ascii", "backslashreplace"))
            at += 1 + size
        if at + 5 > len(data):  # no query, or cut
            return
        self.report(".".join(labels))
        self.transport.sendto(data[:2] + _NO_SUCH_NAME + data[_HEADER : at + 5], addr)
