"""The least budget with which [`evolve`] can be useful, estimated before the first call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ..llm import Budget
from ..llm.budget import Price, price_tokens
from ..llm.usage import estimate_prompt_tokens, estimate_text_tokens
from ..rollout import AgentSpec
from . import templates
from .one_call import MAX_FAILURES
from .population import Population
from .results import question_of
from .scoring import read_problems
from .settings import EvolveConfig
from .system_prompt import SystemPrompt

REPLY_TOKENS = 250
"""Tokens of a reply, for the estimate, unless `max_tokens` of the sampling options is lower."""

_SAMPLE_SIZE = 100  # rows that the mean length of a question is computed from


@dataclass(frozen=True)
class LeastBudget:
    """The spending of the first two steps of a run.

    In the first step a child is made, in the second one it is compared with its parent. A run that
    ends before has nothing to show.

    Args:
        policy_calls (`int`): Calls of the policy.
        reference_calls (`int`): Calls of the reference LLM, at most.
        tokens (`int`): Tokens that these calls read and write, estimated.
        usd (`float`, *optional*): Their price; `None` if a price is not known.
        reply_tokens (`int`): Tokens of a reply that the estimate assumes.
    """

    policy_calls: int
    reference_calls: int
    tokens: int
    usd: float | None
    reply_tokens: int

    def __str__(self) -> str:
        price = "" if self.usd is None else f", ${self.usd:.2g}"
        return (
            f"two steps, one to make a child and one to compare it: {self.policy_calls} calls of "
            f"the policy, up to {self.reference_calls} of the reference LLM, about "
            f"{self.tokens:,} tokens{price}, with {self.reply_tokens} tokens a reply"
        )

    def exceeds(self, budget: Budget) -> bool:
        """Return whether a budget is too small for it."""
        limit = budget.limit
        has_too_few_tokens = limit.tokens is not None and limit.tokens < self.tokens
        has_too_few_dollars = (
            limit.usd is not None and self.usd is not None and limit.usd < self.usd
        )
        return has_too_few_tokens or has_too_few_dollars


def estimate_least_budget(
    policy: object,
    reference: object,
    rows: Sequence[Any],
    prompt: SystemPrompt | Population | str,
    config: EvolveConfig,
) -> LeastBudget:
    """Estimate the spending of the first two steps of [`evolve`], whose arguments these are.

    The price of a model is its attribute `price`, as [`OpenAIChat`] has it.
    """
    root = prompt.best() if isinstance(prompt, Population) else SystemPrompt.of(prompt)
    prompt_place: Any = config.prompt_place
    spec = AgentSpec(prompt_template=config.prompt_template)
    some_rows = read_problems(
        [rows[index] for index in range(min(_SAMPLE_SIZE, len(rows)))], "rows"
    )
    messages = [root.messages(spec.messages(row), prompt_place) for row in some_rows]
    policy_input = fmean(estimate_prompt_tokens(conversation) for conversation in messages)
    question_tokens = fmean(estimate_text_tokens(question_of(row)) for row in some_rows)
    prompt_tokens = estimate_text_tokens(root.text)

    # The first step plays the root alone. The second one plays its child too, if there is room.
    attempts = config.problems_per_step * config.num_generations
    plays_both = config.mode == "evolution" and config.prompts_per_step > 1
    policy_calls = attempts * (3 if plays_both else 2)
    sampling: Any = config.policy_sampling or {}
    reply_tokens = min(REPLY_TOKENS, sampling.get("max_tokens") or REPLY_TOKENS)

    # Both steps end with a mutation.
    if config.reflection != "paper":
        calls = 1
        input_tokens: float = estimate_text_tokens(templates.REVISE) + prompt_tokens
        input_tokens += min(attempts, MAX_FAILURES) * (question_tokens + reply_tokens)
    else:
        calls = attempts + config.problems_per_step + 1
        summaries = estimate_text_tokens(templates.SUMMARISE) + prompt_tokens + question_tokens
        critiques = estimate_text_tokens(templates.CRITIQUE) + prompt_tokens + question_tokens
        critiques += config.num_generations * REPLY_TOKENS
        input_tokens = attempts * (summaries + reply_tokens) + config.problems_per_step * critiques
        # The consolidation reads the edits of each problem.
        input_tokens += estimate_text_tokens(templates.CONSOLIDATE) + prompt_tokens
        input_tokens += config.problems_per_step * config.max_ops * config.max_words * 2

    # Tokens read and written, and their price where it is known.
    policy_usage = price_tokens(
        round(policy_calls * policy_input), policy_calls * reply_tokens, _price_of(policy)
    )
    reference_usage = price_tokens(
        round(2 * input_tokens), 2 * calls * REPLY_TOKENS, _price_of(reference)
    )
    usage = policy_usage + reference_usage
    has_prices = _price_of(policy) is not None and _price_of(reference) is not None
    return LeastBudget(
        policy_calls=policy_calls,
        reference_calls=2 * calls,
        tokens=usage.tokens,
        usd=usage.cost_usd if has_prices else None,
        reply_tokens=reply_tokens,
    )


def _price_of(model: object) -> Price | None:
    price: Price | None = getattr(model, "price", None)
    return price
