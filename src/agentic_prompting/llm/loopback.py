"""Which addresses only this machine can reach: what listens elsewhere needs a key."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own loopback. Asks no name server."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
