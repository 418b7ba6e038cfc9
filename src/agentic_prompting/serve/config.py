"""[`ServeConfig`]: the address and the limits of the service."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import Any

from ..llm.addresses import is_loopback

KEY_VARIABLE = "AGENTIC_PROMPTING_API_KEY"


def _option(default: Any, text: str) -> Any:
    """A field with its help text for the command line."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ServeConfig:
    """The settings of the service.

    Args:
        host (`str`, *optional*, defaults to `"127.0.0.1"`): Address to listen on. Any other than
            this machine's own loopback needs a key.
        port (`int`, *optional*, defaults to `8080`): Port to listen on; 0 takes a free one.
        key_variable (`str`, *optional*, defaults to `"AGENTIC_PROMPTING_API_KEY"`): Environment
            variable that holds the key. Where it is set, requests without it get a 401, on loopback
            too.
        max_concurrency (`int`, *optional*, defaults to `256`): Requests answered at once; further
            ones get a 429.
        max_body_bytes (`int`, *optional*, defaults to 1 MiB): Larger requests get a 413.
        timeout (`float`, *optional*, defaults to `120.0`): Seconds for a request, its body
            included, after which it is stopped: 504; 408 while the body is still coming, for which
            there are 30 seconds at most.
        max_cost_usd (`float`, *optional*): Dollars that one request may cost: 402. By default any.
        greedy (`bool`, *optional*, defaults to `False`): Take the likeliest token each time instead
            of sampling as in training, for every request; without it for those with
            `temperature=0`.

    Raises:
        `ValueError`: If a limit is not positive, or the port is not valid.
    """

    host: str = _option("127.0.0.1", "Address to listen on; any other than loopback needs a key.")
    port: int = _option(8080, "Port to listen on; 0 takes a free one.")
    key_variable: str = _option(KEY_VARIABLE, "Environment variable that holds the key.")
    max_concurrency: int = _option(256, "Requests answered at once; further ones get a 429.")
    max_body_bytes: int = _option(
        2**20, "Largest size of a request, in bytes; larger ones get a 413."
    )
    timeout: float = _option(120.0, "Seconds for a request, after which it is stopped.")
    max_cost_usd: float | None = _option(
        None, "Dollars that one request may cost; beyond them it gets a 402."
    )
    greedy: bool = _option(False, "Take the likeliest token instead of sampling, always.")

    def __post_init__(self):
        # A limit of 0 would refuse every request.
        limits: tuple[float, ...] = (self.max_concurrency, self.max_body_bytes, self.timeout)
        if self.max_cost_usd is not None:
            limits = (*limits, self.max_cost_usd)
        # In a form that is false for NaN, which is not a limit.
        if not all(limit > 0 for limit in limits):
            raise ValueError(f"every limit of the service must be positive, got {self}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, got {self.port}")

    def find_key(self) -> str | None:
        """The key, read at start and kept nowhere else.

        Raises:
            `ValueError`: If other machines could ask and there is none.
        """
        # On loopback a key is optional. Without one, `check_access` keeps other sites' pages out.
        key = os.environ.get(self.key_variable, "").strip()
        if not key and not is_loopback(self.host):
            raise ValueError(
                f"listening on {self.host}, where other machines can ask, needs a key: set "
                f"{self.key_variable}, or listen on 127.0.0.1"
            )
        return key or None

    def check_address(self) -> None:
        """Find out whether the address can be listened on, before a model is loaded.

        Raises:
            `ValueError`: If it cannot: the port is taken, or the host is not this machine.
        """
        # Close the socket again: the server opens its own once the model is loaded.
        try:
            self.bind().close()
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(
                f"cannot listen on {self.host}, port {self.port} ({reason}): choose another one"
            ) from None

    def bind(self) -> socket.socket:
        """A socket that is bound to the address. Raises `OSError` if there can be none."""
        # The host's first address decides between IPv4 and IPv6.
        addresses = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = addresses[0]
        listener = socket.socket(family)
        try:
            # After a restart the port can be taken again at once.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
        return listener
