"""The check of a command's endpoints before its first request, and the words of its errors.

A program in Python waits patiently for an endpoint that is down. A command whose address is wrong
should say so within seconds, and name the role's options.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from .types import LLMError


class CheckedClient(Protocol):
    """What the check needs of an [`OpenAIChat`]."""

    base_url: str

    async def find_first_error(self) -> LLMError | None:
        """Return why the endpoint cannot be asked at all; `None` if it answers, in whatever way."""
        ...


@dataclass(frozen=True)
class CommandRole:
    """The role that a client plays in a command.

    Args:
        name (`str`): As messages call it: `the policy`.
        advice (`str`): Follows an error that no retry can help. Names the options of the role:
            `the policy's options are --policy-model, --policy-base-url and --policy-client`.
    """

    name: str
    advice: str


class EndpointCheck:
    """Finds endpoints of a command that cannot be reached, before the first request to any of them.

    The first call that no recorded reply answers runs the check: a command that is answered from
    its record needs no endpoint. All endpoints are checked at once, so that nothing is paid for one
    if another cannot be reached. After the check, an outage is waited for as usual.
    """

    def __init__(self) -> None:
        self._clients: dict[str, CheckedClient] = {}  # one for each address
        self._lock = asyncio.Lock()
        self._is_done = False
        self._error: LLMError | None = None

    def add(self, client: CheckedClient) -> None:
        """Check this client's endpoint, too."""
        self._clients.setdefault(client.base_url, client)

    async def run(self) -> None:
        """Check all endpoints, once. Runs on the background loop.

        Raises:
            [`Misconfigured`]: One of them does not answer; the first one if several do not.
        """
        async with self._lock:
            if not self._is_done:
                clients = self._clients.values()
                errors = await asyncio.gather(*(client.find_first_error() for client in clients))
                self._error = next((error for error in errors if error is not None), None)
                self._is_done = True
        if self._error is not None:
            raise self._error
