"""Secrets out of texts: one function for errors, logs and records.

It works on texts whose secrets are not known in advance, so it goes by form: keys with well-known beginnings, bearer
tokens, headers, users and passwords in addresses, and query parameters with telling names. Known secrets can be passed.
"""

from __future__ import annotations

import re

_MASK = "[key]"
# Each pattern scans a text in linear time: the texts come from servers that may be hostile. Group 1 stays.
_PATTERNS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"()\bsk-[\w*.\-]{4,}",
        r"()\b(?:hf_|gsk_|gh[opsu]_|github_pat_|xox[abprs]-|AIza|AKIA)[\w\-]{12,}",
        r"(\bBearer )[^\s'\"]+",
        r"(://)[^\s/'\"]+(?=@)",  # user and password
        r"([?&;](?:[\w.\-]*(?:key|token|secret|password|passwd|signature|sig|auth|credentials?))=)[^\s&;#'\"]+",
        # In a header or a dictionary that is printed: the scheme stays, the rest goes.
        r"((?:authorization|api[_-]?key)['\"]?(?:=|:\s?)['\"]?(?:(?:Basic|Bearer|Token) )?)[^\s&#'\",;]+",
        r"((?:access_token|client_secret|password|passwd)['\"]?=['\"]?)[^\s&'\",;]+",
    )
]
_SHORTEST = 6  # a shorter known secret ("none", "EMPTY") is a placeholder or an ordinary word


def mask_secrets(text: str, *known: str | None) -> str:
    """`text` with `[key]` in the place of each secret.

    Args:
        text (`str`): Any text, of any length.
        *known (`str`, *optional*): Secrets to look for as they are, such as the key of the endpoint.

    Returns:
        `str`: Masking it again changes nothing. Mask before you cut a text, or half a secret can stay.
    """
    for secret in sorted(
        {one for one in known if one and len(one) >= _SHORTEST}, key=len, reverse=True
    ):
        text = text.replace(secret, _MASK)
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\1{_MASK}", text)
    return text
