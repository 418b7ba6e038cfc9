"""What well-known models cost, so that a budget in dollars can be kept without looking prices up.

A small table, written down by hand, not fetched: prices change and discounts (cached prompts, batches) are not in it.
**Check the numbers against the provider's price list before you rely on a budget**, or pass `price=` yourself.
"""

from __future__ import annotations

import re

from .types import Usage

Price = tuple[float, float]
"""US dollars per million prompt tokens and per million completion tokens."""

# OpenAI's published list prices of late 2025, standard tier.
PRICES: dict[str, Price] = {
    "gpt-3.5-turbo": (0.50, 1.50),
    "gpt-4-turbo": (10.00, 30.00),
    "gpt-4o": (2.50, 10.00),
    "gpt-4o-mini": (0.15, 0.60),
    "gpt-4.1": (2.00, 8.00),
    "gpt-4.1-mini": (0.40, 1.60),
    "gpt-4.1-nano": (0.10, 0.40),
    "gpt-5": (1.25, 10.00),
    "gpt-5-mini": (0.25, 2.00),
    "gpt-5-nano": (0.05, 0.40),
    "gpt-5-pro": (15.00, 120.00),
    "gpt-5.1": (1.25, 10.00),
    "o3": (2.00, 8.00),
    "o3-mini": (1.10, 4.40),
    "o4-mini": (1.10, 4.40),
}

# A dated snapshot costs what its model costs. Any other suffix ("-audio-preview", "-pro", ".5") is another model with
# another price, and a budget kept with the wrong price is worse than being asked for the right one.
_SNAPSHOT = re.compile(r"-(\d{4}-\d{2}-\d{2}|\d{4}|latest)")


def find_price(model: str) -> Price | None:
    """The price of `model` or of the model that it is a dated snapshot of; `None` where it is not known.

    Args:
        model (`str`): As sent to the endpoint; a leading `openai/`, as routers want it, is ignored.
    """
    name = model.removeprefix("openai/")
    for known in sorted(PRICES, key=len, reverse=True):
        if name == known or (name.startswith(known) and _SNAPSHOT.fullmatch(name[len(known) :])):
            return PRICES[known]
    return None


def priced(prompt_tokens: int, completion_tokens: int, price: Price | None) -> Usage:
    """The tokens with what they cost: nothing where the price is not known."""
    per_prompt, per_completion = price or (0.0, 0.0)
    cost = (prompt_tokens * per_prompt + completion_tokens * per_completion) / 1e6
    return Usage(prompt_tokens, completion_tokens, cost)
