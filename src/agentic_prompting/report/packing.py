"""Data inside of an HTML page, so that nothing in it can be taken for the page.

JSON, gzip, base64: there is no `<`, no quote and no ampersand in what comes out, whatever a model wrote, so there is
nothing to escape and nothing to forget. It is also a tenth of the size, and the browser unpacks a piece only when
somebody looks at it.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from typing import Any


def pack(data: Any) -> str:
    """`data` as base64 of compressed JSON. Lone surrogates survive, as JSON's escapes."""
    # The same data gives the same page: no time stamp.
    return base64.b64encode(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), 6, mtime=0)).decode()


def data_block(name: str, data: Any) -> str:
    """An element that holds `data` and does nothing; the page's `unpack(name)` reads it."""
    return f'<script type="text/plain" id="data-{name}">{pack(data)}</script>\n'


def chunk_blocks(name: str, items: Sequence[Any], size: int) -> str:
    """`items` as [`data_block`]s of `size` each, `<name>-0`, `<name>-1`, ..."""
    return "".join(
        data_block(f"{name}-{start // size}", items[start : start + size]) for start in range(0, len(items), size)
    )
