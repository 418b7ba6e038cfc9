"""Shared by [`OpenAIChat`] and its HTTP client: a call, and the settings of a connection."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from .cache import CacheKey
from .types import Message, Usage


class Endpoint(Protocol):
    """The settings of a client that its connections need, as documented in [`OpenAIChat`]."""

    model: str
    base_url: str
    patience: float
    requests_per_minute: float | None

    @property
    def key_source(self) -> str: ...


@dataclass
class ChatCall:
    """One call of an endpoint, over all its attempts.

    Args:
        messages (`list[Message]`): A copy of the conversation.
        sampling (`dict[str, object]`): Further fields of the request.
        key ([`CacheKey`], *optional*): `None` if the cache is not used.
        timeout (`float`): Seconds for each attempt.
        max_retries (`int`): Further attempts after a failed one.
        patience (`float`): Seconds that the call may still wait for an endpoint that is down.
        attempts (`int`, *optional*, defaults to `0`): Requests sent so far.
        usage ([`Usage`], *optional*): Tokens and cost of all attempts, including
            unusable answers.
        started (`float`, *optional*): Time of the call, by `time.perf_counter`.
        sent (`float`, *optional*): When the call had its place among those in flight.
    """

    messages: list[Message]
    sampling: dict[str, object]
    key: CacheKey | None
    timeout: float
    max_retries: int
    patience: float
    attempts: int = 0
    usage: Usage = field(default_factory=Usage)
    started: float = field(default_factory=time.perf_counter)
    sent: float = 0.0
