"""Where the service listens, who may ask, and how much a request may take."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..llm.wire import is_loopback

KEY_VARIABLE = "AGENTIC_PROMPTING_API_KEY"


@dataclass(frozen=True)
class ServeConfig:
    """The settings of the service.

    Args:
        host (`str`, *optional*, defaults to `"127.0.0.1"`): Address to listen on. Any other than this machine's own
            loopback needs a key.
        port (`int`, *optional*, defaults to `8080`): Port to listen on; 0 takes a free one.
        key_variable (`str`, *optional*, defaults to `"AGENTIC_PROMPTING_API_KEY"`): Environment variable that holds the
            key. Where it is set, requests without it get a 401, on loopback too.
        max_concurrency (`int`, *optional*, defaults to `256`): Requests answered at once; further ones get a 429.
        max_body_bytes (`int`, *optional*, defaults to 1 MiB): Larger requests get a 413.
        timeout (`float`, *optional*, defaults to `120.0`): Seconds for a request, its body included, after which it is
            stopped: 504; 408 while the body is still coming, for which there are 30 seconds at most.
        max_cost_usd (`float`, *optional*): Dollars that one request may cost: 402. By default any.
        greedy (`bool`, *optional*, defaults to `False`): Take the likeliest token each time instead of sampling as in
            training, for every request; without it for those with `temperature=0`.

    Raises:
        `ValueError`: If a limit is not positive.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    key_variable: str = KEY_VARIABLE
    max_concurrency: int = 256
    max_body_bytes: int = 2**20
    timeout: float = 120.0
    max_cost_usd: float | None = None
    greedy: bool = False

    def __post_init__(self):
        limits = (self.max_concurrency, self.max_body_bytes, self.timeout)
        if min(limits) <= 0 or (self.max_cost_usd is not None and self.max_cost_usd <= 0):
            raise ValueError(f"every limit of the service must be positive, got {self}")

    def find_key(self) -> str | None:
        """The key, read at start and kept nowhere else.

        Raises:
            `ValueError`: If other machines could ask and there is none.
        """
        key = os.environ.get(self.key_variable, "").strip()
        if not key and not is_loopback(self.host):
            raise ValueError(
                f"listening on {self.host}, where other machines can ask, needs a key: set {self.key_variable}, or "
                "listen on 127.0.0.1"
            )
        return key or None
