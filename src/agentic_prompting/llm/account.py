"""The account of one client: estimates what its requests may cost, admits them, and books what they cost."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from .budget import Budget, Limit, Price
from .types import Usage
from .usage import (
    UNREPORTED_COMPLETION,
    TokenCounts,
    estimate_prompt_tokens,
    estimate_text_tokens,
)
from .wire import Completion, priced

logger = logging.getLogger(__name__)

_UNKNOWN_COMPLETION = (
    8192  # tokens that a reply is expected to have before the first one has arrived
)
_MARGIN = 2  # a reply is expected to be at most so many times as long as the longest one so far


class SpendingAccount:
    """What one client may spend and has spent.

    Args:
        name (`str`): The account in the budget: the model's name, until the client is charged to a role.
        limit ([`Limit`]): The client's own limit.
        price (`tuple[float, float]`, *optional*): US dollars per million prompt and completion tokens.
    """

    def __init__(self, name: str, limit: Limit, price: Price | None):
        self.budget = Budget()  # in memory, without a limit, until `charge_to`
        self.name = name
        self.limit = limit
        self.price = price
        self._longest_completion = 0
        self._unseen_prompt_tokens = (
            0  # that the endpoint adds to a prompt, or that the estimate lacks
        )
        self._has_warned = False

    @property
    def is_limited(self) -> bool:
        """Whether a limit holds for this client, its own or the budget's."""
        return bool(self.limit or self.budget.limit)

    def admitted(self, request: Mapping[str, Any]) -> AbstractAsyncContextManager[None]:
        """The context in which a request may be on its way; see [`Budget.admitted`].

        Args:
            request (`Mapping`): The body of the request.
        """
        if not self.is_limited:
            return nullcontext()
        return self.budget.admitted(self.name, self._expect(request), self.limit)

    def book(self, request: Mapping[str, Any], completion: Completion) -> Usage:
        """Book the cost of a completion and return it.

        Under a limit, tokens that the endpoint did not report are estimated: a budget that is never reached is worse
        than one that is reached early.
        """
        counts = completion.counts
        if (
            counts.prompt is None and counts.completion == 0
        ):  # zeros are the placeholders of a server that counts nothing
            counts = TokenCounts()
        usage = priced(counts.prompt or 0, counts.completion or 0, self.price)
        if self.is_limited and completion.is_billed and not counts.is_complete:
            usage = self._estimate(request, completion, counts)
        self._learn(request, usage)
        self.budget.note(self.name, usage)
        return usage

    def _expect(self, request: Mapping[str, Any]) -> Usage:
        """What a request may cost, by the longest reply so far and by its own limit."""
        prompt = estimate_prompt_tokens(request["messages"]) + self._unseen_prompt_tokens
        limit = _token_limit(request)
        if not self._longest_completion:
            completion = _UNKNOWN_COMPLETION if limit is None else limit
        else:
            completion = _MARGIN * self._longest_completion
            completion = completion if limit is None else min(completion, limit)
        return priced(prompt, completion, self.price)

    def _estimate(
        self, request: Mapping[str, Any], completion: Completion, counts: TokenCounts
    ) -> Usage:
        """The usage of a completion, its missing counts estimated."""
        estimated = 0
        prompt = counts.prompt
        if prompt is None:
            prompt = estimate_prompt_tokens(request["messages"])
            estimated += prompt
        completion_tokens = counts.completion
        if completion_tokens is None:
            limit = _token_limit(request)
            floor = UNREPORTED_COMPLETION if limit is None else min(UNREPORTED_COMPLETION, limit)
            completion_tokens = max(floor, estimate_text_tokens(completion.text))
            estimated += completion_tokens

        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: the endpoint does not report the tokens of a reply in a form that is known; under a budget they "
                "are estimated, a reply at no less than %d tokens or its max_tokens",
                self.name,
                UNREPORTED_COMPLETION,
            )
        usage = priced(prompt, completion_tokens, self.price)
        return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cost_usd, estimated)

    def _learn(self, request: Mapping[str, Any], usage: Usage) -> None:
        """Remember the sizes that [`_expect`] uses."""
        if not self.is_limited:
            return
        self._longest_completion = max(self._longest_completion, usage.completion_tokens)
        unseen = usage.prompt_tokens - estimate_prompt_tokens(request["messages"])
        self._unseen_prompt_tokens = max(self._unseen_prompt_tokens, unseen)


def _token_limit(request: Mapping[str, Any]) -> int | None:
    """The most tokens that the replies to a request can have together; `None` if it sets no limit."""
    limits = []
    for name in ("max_completion_tokens", "max_tokens"):
        limit = request.get(name)
        if isinstance(limit, int) and limit > 0:
            limits.append(limit)
    if not limits:
        return None
    samples = request.get("n")
    return min(limits) * (samples if isinstance(samples, int) and samples > 1 else 1)
