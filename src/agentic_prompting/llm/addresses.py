"""Shows the address of an endpoint without the secrets that it may contain."""

from __future__ import annotations

import ipaddress
from urllib.parse import unquote, urlsplit

# Parts of a path that are the same for every user of an endpoint. Any other part may be a key.
_COMMON_PATH_PARTS = {
    "v1",
    "v1beta",
    "api",
    "openai",
    "compatible-mode",
    "inference",
    "chat",
    "completions",
    "models",
}


def redact_url(url: str) -> str:
    """Return the parts of a URL that may be shown.

    These are its scheme, host and port, and the end of its path if it consists of common parts.
    Every other part may contain a key: user and password, the query, with some gateways the path.
    """
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
    except ValueError:
        return "an address that cannot be read"
    # The host without user and password.
    host = parts.netloc.rpartition("@")[2]
    scheme = f"{parts.scheme}://" if parts.scheme else ""

    # Hide everything up to the last part of the path that is not common.
    path_parts = [part for part in parts.path.split("/") if part]
    common_end: list[str] = []
    for part in reversed(path_parts):
        if part not in _COMMON_PATH_PARTS:
            break
        common_end.insert(0, part)
    if len(common_end) < len(path_parts):
        common_end.insert(0, "...")
    return "/".join([scheme + host, *common_end])


def find_url_secrets(url: str) -> list[str]:
    """Return the parts of a URL that [`redact_url`] hides.

    Each part is listed unchanged and decoded: a server may quote either form.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return []
    # A server may quote a whole query field or its value alone.
    query_fields = parts.query.split("&")
    query_values = [field.partition("=")[2] for field in query_fields]
    hidden_parts = [
        *parts.path.split("/"),
        parts.username,
        parts.password,
        *query_fields,
        *query_values,
    ]
    # Common parts are no secrets: masking them would garble every message.
    secrets = []
    for part in hidden_parts:
        if part and part not in _COMMON_PATH_PARTS:
            secrets.append(part)
            secrets.append(unquote(part))
    return secrets


def is_loopback(host: str) -> bool:
    """Return whether a name or address is this machine's loopback. Makes no DNS lookup."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
