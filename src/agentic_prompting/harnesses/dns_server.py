"""A fake DNS server for sandboxed commands: refuses every lookup and reports it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

_HEADER_BYTES = 12  # header of a query, before its question
_QUESTION_END_BYTES = 5  # end of a question, after its labels: a zero, its type, its class

# The rest of the header of a reply to one question: the name does not exist.
_NO_SUCH_NAME = bytes.fromhex("8183 0001 0000 0000 0000")


class DNSServer(asyncio.DatagramProtocol):
    """Answers DNS queries.

    Args:
        on_dns_lookup (`Callable[[str], None]`): Called with each name, as often as it is
            looked up.
    """

    def __init__(self, on_dns_lookup: Callable[[str], None]):
        self.on_dns_lookup = on_dns_lookup

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        # Read the labels of the name: each has its length in front, and a zero ends them.
        labels = []
        position = _HEADER_BYTES
        while position < len(data) and data[position] > 0:
            end = position + 1 + data[position]
            labels.append(data[position + 1 : end].decode("ascii", "backslashreplace"))
            position = end
        question_end = position + _QUESTION_END_BYTES
        if question_end > len(data):  # no query, or cut off
            return

        # Report the name, and reply with the query's id and question that it does not exist.
        self.on_dns_lookup(".".join(labels))
        reply = data[:2] + _NO_SUCH_NAME + data[_HEADER_BYTES:question_end]
        self.transport.sendto(reply, addr)
