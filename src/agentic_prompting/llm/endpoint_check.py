"""The check of a command's endpoints before its first request, and the words of its errors.

A program in Python waits patiently for an endpoint that is down. A command whose address is wrong
should say so within seconds, and name the role's options.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Protocol

from .types import LLMError

_SHOWN_NAMES = 5  # of a list of models


class CheckedClient(Protocol):
    """What the check needs of an [`OpenAIChat`]."""

    model: str
    base_url: str

    def find_key(self) -> str | None:
        """Return the API key."""
        ...

    async def find_first_error(self) -> LLMError | None:
        """Return why no call can succeed: no answer, or a rejected key; else `None`."""
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
    """Finds endpoints of a command that cannot be reached, or reject the key, before the first
    request to any of them.

    The first call that no recorded reply answers runs the check: a command that is answered from
    its record needs no endpoint. All endpoints are checked at once, so that nothing is paid for one
    if another cannot be reached. After the check, an outage is waited for as usual.
    """

    def __init__(self) -> None:
        self._clients: list[CheckedClient] = []
        self._lock = asyncio.Lock()
        self._is_done = False
        self._error: LLMError | None = None

    def add(self, client: CheckedClient) -> None:
        """Check this client's endpoint, too, unless another client would be answered the same."""
        for other in self._clients:
            is_same_model = (other.base_url, other.model) == (client.base_url, client.model)
            if is_same_model and other.find_key() == client.find_key():
                return
        self._clients.append(client)

    async def run(self) -> None:
        """Check all endpoints, once. Runs on the background loop.

        Raises:
            [`Misconfigured`]: One of them does not answer, or rejects the key; the first one if
                several do.
        """
        async with self._lock:
            if not self._is_done:
                checks = [client.find_first_error() for client in self._clients]
                errors = await asyncio.gather(*checks)
                self._error = next((error for error in errors if error is not None), None)
                self._is_done = True
        if self._error is not None:
            raise self._error


def find_similar_names(model: str, listed_names: Sequence[str]) -> list[str]:
    """Return a few names of a list of models that lacks `model`, the most similar ones first.

    Empty if the list has it, or is empty. Ollama leaves out the tag `latest` of a name, and Google
    the prefix `models/`.
    """
    if {model, f"{model}:latest", f"models/{model}"} & set(listed_names):
        return []
    similar_names = get_close_matches(model, listed_names, n=_SHOWN_NAMES)
    return list(dict.fromkeys([*similar_names, *listed_names]))[:_SHOWN_NAMES]
