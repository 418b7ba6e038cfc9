"""Classifies an endpoint's errors by HTTP status, error code and finish reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .types import (
    BadReply,
    BadRequest,
    LLMError,
    Misconfigured,
    RateLimited,
    Refused,
    ServerFailed,
    TimedOut,
)

MAX_READ_LENGTH = 5000
"""The characters of a response that are read for an error message.

Far more than are shown: keys are masked before a text is cut, otherwise half a key could stay."""

DEFAULT_KEY_SOURCE = "OPENAI_API_KEY or api_key"
"""What to set if a key is wrong, unless another environment variable has it."""

# Error codes that are words, with the HTTP status of the same meaning. Endpoints put them into the
# field `code`, `type` or `status` of an error.
_STATUS_OF_CODE = {
    "invalid_request_error": 400,
    "invalid_argument": 400,
    "context_length_exceeded": 400,
    "string_above_max_length": 400,
    "invalid_api_key": 401,
    "authentication_error": 401,
    "unauthorized": 401,
    "unauthenticated": 401,
    "insufficient_quota": 402,
    "insufficient_balance": 402,
    "billing_hard_limit_reached": 402,
    "billing_error": 402,
    "permission_error": 403,
    "permission_denied": 403,
    "model_not_found": 404,
    "not_found_error": 404,
    "request_timeout": 408,
    "timeout": 408,
    "rate_limit_exceeded": 429,
    "rate_limit_error": 429,
    "rate_limited": 429,
    "too_many_requests": 429,
    "resource_exhausted": 429,
    "server_error": 500,
    "internal_error": 500,
    "internal_server_error": 500,
    "api_error": 500,
    "service_unavailable": 503,
    "unavailable": 503,
    "overloaded": 529,
    "overloaded_error": 529,
}

# Codes of a filter that flagged the text: OpenAI's, Azure's, Alibaba's, Google's.
_FILTER_CODES = {
    "content_filter",
    "content_filtered",
    "content_policy_violation",
    "contentpolicyviolation",
    "responsibleaipolicyviolation",
    "moderation",
    "moderation_blocked",
    "flagged",
    "data_inspection_failed",
    "datainspectionfailed",
    "prohibited_content",
    "safety",
}
_FLAGGED = re.compile(
    r"\b(?:input|prompt|request|message|content|text) (?:was|were|has been|is|got) "
    r"(?:flagged|filtered)\b"
    r"|\bcontent (?:management )?policy\b|\bcontent filter|\bsafety system\b",
    re.IGNORECASE,
)
_FLAGGED_STATUSES = (400, 403, 422, 451)

# Finish reasons of a reply that broke off: OpenRouter's, vLLM's, DeepSeek's, Zhipu's.
_BROKEN_OFF_REASONS = {
    "abort",
    "aborted",
    "cancelled",
    "canceled",
    "error",
    "failed",
    "insufficient_system_resource",
    "network_error",
    "timeout",
}
_FILTERED_REASONS = {
    "content_filter",
    "content-filter",
    "blocklist",
    "prohibited_content",
    "recitation",
    "safety",
    "sensitive",
    "spii",
}


def is_broken_off(finish_reason: str) -> bool:
    """Return whether a finish reason says that the endpoint failed in the middle of the text."""
    return finish_reason.lower() in _BROKEN_OFF_REASONS


def is_filtered(finish_reason: str) -> bool:
    """Return whether a finish reason says that a content filter stopped the reply."""
    return finish_reason.lower() in _FILTERED_REASONS


def error_from_status(
    status: int, body: object, model: str, key_source: str = DEFAULT_KEY_SOURCE
) -> LLMError:
    """Return the error of an HTTP status; its message says what the user can do about it.

    Args:
        status (`int`): The status, or an error code of the same meaning; at least 400.
        body (`object`): The decoded body of the response, or its text.
        model (`str`): The model's name, for the message.
        key_source (`str`, *optional*): Where the key comes from, for the message.
    """
    # A filter's verdict may have any of several statuses.
    message = error_message(body)
    if status in _FLAGGED_STATUSES and is_flagged(body):
        return Refused(f"a filter of the endpoint flagged the request: {message}", status=status)

    # OpenAI also answers 429 for an account without credit, which no retry can fix.
    is_out_of_credit = status == 402
    if status == 429:
        is_out_of_credit = _status_of_words(_error_object(body)) == 402
    if is_out_of_credit:
        return Misconfigured(f"the account is out of credit: {message}", status=status)

    # The server's own message is left out: it may quote the key.
    if status == 401:
        return Misconfigured(f"the key was rejected: set {key_source}", status=status)
    if status == 403:
        return Misconfigured(
            f"the key was rejected or may not use {model!r}: set {key_source} ({message})",
            status=status,
        )
    if status == 404:
        return Misconfigured(
            f"unknown model {model!r} or wrong path: check the model's name and base_url "
            f"({message})",
            status=status,
        )

    # Errors that may pass by waiting.
    if status == 408:
        return TimedOut(f"the endpoint gave up waiting: {message}", status=status)
    if status == 429:
        return RateLimited(
            f"too many requests, lower max_concurrency or requests_per_minute: {message}",
            status=status,
        )
    if status >= 500:
        return ServerFailed(f"the endpoint failed: {message}", status=status)
    return BadRequest(f"the endpoint rejected the request: {message}", status=status)


def error_from_body(body: Mapping[str, Any], model: str) -> LLMError | None:
    """Return the error that the body of a successful response reports; `None` if it reports none.

    Routers report a failure of the server behind them in this way. An error code in the body means
    the same as an HTTP status.
    """
    if not body.get("error") and body.get("object") != "error":
        return None
    if is_flagged(body):
        return Refused(f"a filter of the endpoint flagged the request: {error_message(body)}")

    # A number is more specific than words, wherever it stands.
    error = _error_object(body)
    status = _status_of_number(error) or _status_of_number(body) or _status_of_words(error)
    if status is None:
        return BadReply(f"the endpoint answered with an error: {error_message(body)}")
    return error_from_status(status, body, model)


def error_from_choice(choice: Mapping[str, Any], finish_reason: str, model: str) -> LLMError | None:
    """Return the error of a reply that broke off; `None` if it did not.

    The error comes from the server behind a router. A rejected key or an unknown model is then not
    the caller's, so the error is never fatal.
    """
    error = error_from_body({"error": choice.get("error")}, model)
    if error is None and not is_broken_off(finish_reason):
        return None
    # An error that another attempt may not meet is passed on as it is.
    if error is not None and not error.fatal:
        return error
    # A fatal error is one of the server behind the router: the caller's settings may be right.
    if choice.get("error"):
        return BadReply(f"the reply broke off: {error_message(choice)}")
    return BadReply(f"the reply broke off: finish_reason {finish_reason!r}")


def is_flagged(body: object) -> bool:
    """Return whether an error says that a filter flagged the text of the request."""
    error = _error_object(body)
    metadata = error.get("metadata")
    if isinstance(metadata, Mapping) and (metadata.get("reasons") or metadata.get("flagged_input")):
        return True

    # Then the codes, and as a last resort the wording of the message.
    codes = [error.get("code"), error.get("type")]
    inner_error = error.get("innererror")
    if isinstance(inner_error, Mapping):
        codes.append(inner_error.get("code"))
    if any(isinstance(code, str) and code.lower() in _FILTER_CODES for code in codes):
        return True
    return _FLAGGED.search(error_message(body)) is not None


def error_message(body: object) -> str:
    """Return the error message in a decoded response body, whichever field a server puts it in.

    It may contain secrets.
    """
    # OpenAI has `error.message`; other servers have `message` or `detail`.
    message = body
    if isinstance(body, Mapping):
        message = body.get("error") or body.get("message") or body.get("detail") or body
        if isinstance(message, Mapping):
            message = message.get("message", message)
    return str(message)[:MAX_READ_LENGTH] if message else ""


def _error_object(body: object) -> Mapping[str, Any]:
    """Return the object that describes the error: `error` of the body, or the body itself."""
    if not isinstance(body, Mapping):
        return {}
    error = body.get("error")
    return error if isinstance(error, Mapping) else body


def _status_of_number(error: Mapping[str, Any]) -> int | None:
    """Return the HTTP status that an error has as its code: `502` or `"502"`."""
    for name in ("code", "status", "status_code"):
        code = error.get(name)
        # A status has three digits; other numbers are codes of the endpoint's own.
        if isinstance(code, str) and code.isascii() and code.isdigit() and len(code) == 3:
            code = int(code)
        if isinstance(code, int) and 400 <= code < 600:
            return code
    return None


def _status_of_words(error: Mapping[str, Any]) -> int | None:
    """Return the HTTP status with the meaning of an error's code."""
    for name in ("code", "type", "status"):
        code = error.get(name)
        if isinstance(code, str) and code.lower() in _STATUS_OF_CODE:
            return _STATUS_OF_CODE[code.lower()]
    return None
