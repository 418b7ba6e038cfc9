"""What [`OpenAIChat`] and its HTTP half share: a call, and the settings of a connection."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from .budget import Price
from .cache import CacheKey
from .types import Message, Usage


class Endpoint(Protocol):
    """The settings of a client that its connections need, as documented in [`OpenAIChat`]."""

    model: str
    base_url: str
    price: Price | None
    max_concurrency: int
    requests_per_minute: float | None
    timeout: float


@dataclass
class Call:
    """One call: a copy of its conversation, its limits, and its counts over all attempts. Times in seconds."""

    messages: list[Message]
    sampling: dict[str, Any]
    key: CacheKey | None  # `None` if the cache is not used
    timeout: float  # for each attempt
    max_retries: int
    patience: float  # time left to wait for an endpoint that is down
    attempts: int = 0
    usage: Usage = field(default_factory=Usage)  # of all attempts: an unusable answer is paid for too
    started: float = field(default_factory=time.perf_counter)
