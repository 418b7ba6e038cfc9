"""The spending of one client: admits its requests by their expected cost, and books their cost."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any

from .budget import Budget, Limit, Price, price_tokens
from .completions import ParsedCompletion
from .types import Usage
from .usage import (
    UNREPORTED_COMPLETION,
    TokenCounts,
    estimate_prompt_tokens,
    estimate_text_tokens,
)

logger = logging.getLogger(__name__)

# Tokens that a reply is expected to have before the first one has arrived.
_INITIAL_COMPLETION_TOKENS = 8192
# A reply is expected to be at most this many times as long as the longest one so far.
_COMPLETION_MARGIN = 2


class SpendingAccount:
    """The limit of one client and what it has spent.

    Args:
        name (`str`): The account in the budget: the model's name, until the client is charged to a
            role.
        limit ([`Limit`]): The client's own limit.
        price (`tuple[float, float]`, *optional*): US dollars per million prompt and completion
            tokens.
    """

    def __init__(self, name: str, limit: Limit, price: Price | None):
        self.budget = Budget()  # in memory, without a limit, until `charge_to`
        self.name = name
        self.limit = limit
        self.price = price
        self._longest_completion = 0
        # Prompt tokens that the endpoint adds, or that the estimate misses.
        self._extra_prompt_tokens = 0
        self._has_warned = False

    @property
    def is_limited(self) -> bool:
        """Whether a limit applies to this client, its own or the budget's."""
        return bool(self.limit or self.budget.limit)

    def admitted(self, request: Mapping[str, Any]) -> AbstractAsyncContextManager[None]:
        """Return the context in which a request may be in flight; see [`Budget.admitted`].

        Args:
            request (`Mapping`): The body of the request.
        """
        if not self.is_limited:
            return nullcontext()
        return self.budget.admitted(self.name, self._estimate_request(request), self.limit)

    def book(self, request: Mapping[str, Any], completion: ParsedCompletion) -> Usage:
        """Book the cost of a completion and return it.

        Under a limit, tokens that the endpoint did not report are estimated: a budget that is never
        reached is worse than one that is reached early.
        """
        counts = completion.counts
        # A server that counts nothing reports zeros.
        if counts.prompt is None and counts.completion == 0:
            counts = TokenCounts()

        if self.is_limited and completion.is_billed and not counts.is_complete:
            usage = self._estimate_completion(request, completion, counts)
        else:
            usage = price_tokens(counts.prompt or 0, counts.completion or 0, self.price)
        self._update_estimates(request, usage)
        self.budget.note(self.name, usage)
        return usage

    def _estimate_request(self, request: Mapping[str, Any]) -> Usage:
        """Estimate the cost of a request from the longest reply so far and the request's own limit."""
        prompt_tokens = estimate_prompt_tokens(request["messages"]) + self._extra_prompt_tokens
        token_limit = _token_limit(request)
        # Replies so far tell more than `max_tokens`, which is often set high.
        if self._longest_completion:
            completion_tokens = _COMPLETION_MARGIN * self._longest_completion
            if token_limit is not None:
                completion_tokens = min(completion_tokens, token_limit)
        elif token_limit is not None:
            completion_tokens = token_limit
        else:
            completion_tokens = _INITIAL_COMPLETION_TOKENS
        return price_tokens(prompt_tokens, completion_tokens, self.price)

    def _estimate_completion(
        self, request: Mapping[str, Any], completion: ParsedCompletion, counts: TokenCounts
    ) -> Usage:
        """Return the usage of a completion, its missing counts estimated."""
        # Estimate the prompt from the messages that were sent.
        estimated_tokens = 0
        prompt_tokens = counts.prompt
        if prompt_tokens is None:
            prompt_tokens = estimate_prompt_tokens(request["messages"])
            estimated_tokens += prompt_tokens

        # Estimate the completion from its text, which may lack thoughts that are billed.
        completion_tokens = counts.completion
        if completion_tokens is None:
            lower_bound = UNREPORTED_COMPLETION
            token_limit = _token_limit(request)
            if token_limit is not None:
                lower_bound = min(lower_bound, token_limit)
            completion_tokens = max(lower_bound, estimate_text_tokens(completion.text))
            estimated_tokens += completion_tokens

        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: the endpoint does not report the tokens of a reply in a known format; under a "
                "budget they are estimated, a reply at no less than %d tokens or its max_tokens",
                self.name,
                UNREPORTED_COMPLETION,
            )
        usage = price_tokens(prompt_tokens, completion_tokens, self.price)
        return replace(usage, estimated_tokens=estimated_tokens)

    def _update_estimates(self, request: Mapping[str, Any], usage: Usage) -> None:
        """Remember the sizes that [`_estimate_request`] uses."""
        if not self.is_limited:
            return
        self._longest_completion = max(self._longest_completion, usage.completion_tokens)
        # The largest difference: tokens that the endpoint added to a prompt.
        extra_tokens = usage.prompt_tokens - estimate_prompt_tokens(request["messages"])
        self._extra_prompt_tokens = max(self._extra_prompt_tokens, extra_tokens)


def _token_limit(request: Mapping[str, Any]) -> int | None:
    """Return how many tokens all replies to a request can have together.

    `None` if the request sets no limit.
    """
    limits = []
    for name in ("max_completion_tokens", "max_tokens"):
        limit = request.get(name)
        if isinstance(limit, int) and limit > 0:
            limits.append(limit)
    if not limits:
        return None

    # `n` samples can have as many tokens each.
    samples = request.get("n")
    if isinstance(samples, int) and samples > 1:
        return min(limits) * samples
    return min(limits)
