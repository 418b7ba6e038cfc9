"""Makes texts safe for errors, logs and records: masks secrets, escapes control characters.

Most secrets are not known in advance, so they are recognised by their form: keys with well-known
prefixes, bearer tokens, headers, users and passwords in addresses, and query parameters with
telling names. Known secrets can be passed too.
"""

from __future__ import annotations

import re

_MASK = "[key]"
# Each pattern scans a text in linear time: the texts come from servers that may be hostile. Group 1
# is kept.
_PATTERNS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"()\bsk-[\w*.\-]{4,}",
        r"()\b(?:hf_|gsk_|gh[opsu]_|github_pat_|xox[abprs]-|AIza|AKIA)[\w\-]{12,}",
        r"(\bBearer )[^\s'\"]+",
        r"(://)[^\s/'\"]+(?=@)",  # user and password
        # Query parameters.
        r"([?&;](?:[\w.\-]*(?:key|token|secret|password|passwd|signature|sig|auth|credentials?))=)"
        r"[^\s&;#'\"]+",
        # A header, or the printed form of a dictionary: the scheme is kept.
        r"((?:authorization|api[_-]?key)['\"]?(?:=|:\s?)['\"]?(?:(?:Basic|Bearer|Token) )?)"
        r"[^\s&#'\",;]+",
        r"((?:access_token|client_secret|password|passwd)['\"]?=['\"]?)[^\s&'\",;]+",
    )
]
# Control characters except tab and line feed, direction marks, invisible tags, and halves of
# surrogate pairs.
_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
_MAX_MESSAGE_LENGTH = 300
# A shorter known secret ("none", "EMPTY") is a placeholder or an ordinary word.
_MIN_SECRET_LENGTH = 6


def mask_secrets(text: str, *secrets: str | None) -> str:
    """Replace each secret in a text by `[key]`.

    Args:
        text (`str`): Any text, of any length.
        *secrets (`str`, *optional*): Known secrets to look for literally, such as the endpoint's
            key.

    Returns:
        `str`: Masking it again changes nothing. Mask before you cut a text: otherwise half a secret
            can stay.
    """
    # The longest first: a secret may be part of a longer one.
    long_secrets = {secret for secret in secrets if secret and len(secret) >= _MIN_SECRET_LENGTH}
    for secret in sorted(long_secrets, key=len, reverse=True):
        text = text.replace(secret, _MASK)
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\1{_MASK}", text)
    return text


def sanitize_message(text: str, *secrets: str | None) -> str:
    """Make a text from outside safe to quote in a message.

    It is put on one line and shortened; `secrets`, other keys and control characters are removed.
    """
    one_line = " ".join(mask_secrets(text, *secrets).split())
    message = escape_controls(one_line)
    if len(message) <= _MAX_MESSAGE_LENGTH:
        return message
    return message[: _MAX_MESSAGE_LENGTH - 3] + "..."


def escape_controls(text: str) -> str:
    """Escape the terminal control characters in a text: `\\u001b` for ESC, and so on.

    Escape sequences can set the clipboard or clear the screen, and direction marks reverse a text.
    Line feeds and tabs stay. The escapes are those of JSON, so a line of JSON stays the same JSON.
    """
    return _CONTROL_CHARACTERS.sub(_to_json_escape, text.replace("\r\n", "\n"))


def _to_json_escape(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))
