"""Where a client asks and how: the settings of [`OpenAIChat`] that a call needs, checked once."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import Any

from .budget import Limit
from .pricing import Price
from .wire import shown_url

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Endpoint:
    """Where and how to ask: the settings of [`OpenAIChat`] that a call needs.

    Args:
        literal_key (`str`, *optional*): The key passed in, never shown and never pickled.
        key_variable (`str`, *optional*): The environment variable that holds the key.
        needs_key (`bool`): Whether there is no use in asking without a key.
        The others are those of [`OpenAIChat`].
    """

    model: str
    base_url: str
    literal_key: str | None = field(repr=False)
    key_variable: str | None
    needs_key: bool
    max_concurrency: int
    requests_per_minute: float | None
    timeout: float
    max_retries: int
    patience: float
    price: Price | None

    def check(self, limit: Limit) -> None:
        """Raise `ValueError` if a setting makes no sense, alone or with what may be spent."""
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must begin with http:// or https://, not {shown_url(self.base_url)!r}")
        if self.max_concurrency < 1 or self.max_retries < 0 or self.timeout <= 0 or self.patience <= 0:
            raise ValueError("max_concurrency must be at least 1, max_retries at least 0, timeout and patience above 0")
        if self.requests_per_minute is not None and self.requests_per_minute <= 0:
            raise ValueError("requests_per_minute must be above 0")
        self.check_price(limit)

    def check_price(self, limit: Limit) -> None:
        """Raise `ValueError` if dollars are all that `limit` counts and what they buy here is not known."""
        if limit.usd is None or self.price is not None:
            return
        unknown = f"the price of {self.model!r} is not known"
        if limit.tokens is None:  # a budget that can never be reached is worse than none
            raise ValueError(
                f"budget_usd needs a price, and {unknown}: pass budget_tokens= instead, or "
                "price=(usd per 1M prompt tokens, usd per 1M completion tokens)"
            )
        logger.warning("%s: of its budget only the tokens are counted", unknown)

    @property
    def where(self) -> str:
        return f"{self.model} at {shown_url(self.base_url)}"

    def find_key(self) -> str | None:
        from_environment = os.environ.get(self.key_variable, "").strip() if self.key_variable else ""
        return self.literal_key or from_environment or None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "literal_key": None}


def variable_with(key: str) -> str | None:
    """The environment variable that `key` was read from, so that a pickled copy can carry the name, not the key."""
    names = (name for name, value in os.environ.items() if value.strip() == key and ("KEY" in name or "TOKEN" in name))
    return next(names, None)
