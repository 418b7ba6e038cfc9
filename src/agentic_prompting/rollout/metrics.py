"""What is logged of a batch of rollouts: plain numbers from plain facts, the same on one process and on many.

Each process reduces its rollouts to small [`RolloutFacts`]; the facts of all processes are put together and averaged
once. Averages of averages would weigh a process with few rollouts like one with many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .types import Rollout

STATUSES = ("answered", "out_of_turns", "truncated", "malformed", "failed")


@dataclass(frozen=True)
class RolloutFacts:
    """The numbers of one rollout that metrics are made of. Picklable, a few hundred bytes."""

    status: str
    error_kind: str | None
    error: str | None
    fatal: bool
    turns: int
    interactions: int
    agent_tokens: int
    observation_tokens: int
    latencies: tuple[float, ...]
    calls: int
    cached: int
    retries: int
    tokens: int
    cost_usd: float

    @classmethod
    def of(cls, rollout: Rollout) -> RolloutFacts:
        replies = rollout.replies
        return cls(
            status=rollout.status,
            error_kind=None if rollout.error is None else rollout.error.kind,
            error=None if rollout.error is None else str(rollout.error),
            fatal=rollout.error is not None and rollout.error.fatal,
            turns=len(rollout.turns),
            interactions=sum(observation.error is None for observation in rollout.observations),
            agent_tokens=sum(rollout.mask),
            observation_tokens=len(rollout.mask) - sum(rollout.mask),
            latencies=tuple(observation.seconds for observation in rollout.observations),
            calls=len(replies),
            cached=sum(reply.cached for reply in replies),
            retries=sum(max(reply.attempts - 1, 0) for reply in replies),
            tokens=sum(reply.usage.tokens for reply in replies),
            cost_usd=sum(reply.usage.cost_usd for reply in replies),
        )


def rollout_metrics(facts: Sequence[RolloutFacts]) -> dict[str, float]:
    """Metrics of a batch.

    `rollout/turns`, `rollout/interactions`: means; `rollout/<status>`: shares, which add up to 1;
    `rollout/agent_tokens`, `rollout/observation_tokens`: means; `environment/calls`, `retries`, `cached`, `tokens`,
    `cost_usd`: sums over the batch; `environment/latency_mean`, `latency_p95`: seconds per interaction.
    """
    latencies = [seconds for fact in facts for seconds in fact.latencies] or [0.0]
    return {
        "rollout/turns": float(np.mean([fact.turns for fact in facts])),
        "rollout/interactions": float(np.mean([fact.interactions for fact in facts])),
        **{f"rollout/{status}": float(np.mean([fact.status == status for fact in facts])) for status in STATUSES},
        "rollout/agent_tokens": float(np.mean([fact.agent_tokens for fact in facts])),
        "rollout/observation_tokens": float(np.mean([fact.observation_tokens for fact in facts])),
        "environment/calls": float(sum(fact.calls for fact in facts)),
        "environment/retries": float(sum(fact.retries for fact in facts)),
        "environment/cached": float(sum(fact.cached for fact in facts)),
        "environment/tokens": float(sum(fact.tokens for fact in facts)),
        "environment/cost_usd": float(sum(fact.cost_usd for fact in facts)),
        "environment/latency_mean": float(np.mean(latencies)),
        "environment/latency_p95": float(np.percentile(latencies, 95)),
    }
