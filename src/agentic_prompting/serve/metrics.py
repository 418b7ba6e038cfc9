"""[`Metrics`]: the counters of a service, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from ..llm import Budget
from .answering import ServedAnswer

# Buckets in seconds, up to more than the default limit of 120 for a request.
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)


class Metrics:
    """The counters of one service. They hold no text, no key and no question."""

    def __init__(self) -> None:
        # A registry of its own, so that two services in one process do not collide.
        self.registry = CollectorRegistry()
        common: Any = {"namespace": "agentic_prompting", "registry": self.registry}
        self.requests = Counter(
            "requests", "Requests by model and outcome.", ["model", "outcome"], **common
        )
        self.seconds = Histogram(
            "request_seconds", "Time to an answer.", ["model"], buckets=_SECONDS, **common
        )
        self.in_flight = Gauge("requests_in_flight", "Requests being answered.", **common)
        self.turns = Histogram(
            "agent_turns", "Turns per answer.", ["model"], buckets=range(1, 11), **common
        )
        self.sampling = Gauge(
            "turns_being_sampled", "Turns of the agent that are being written.", **common
        )
        self.cost = Counter("cost_usd", "Dollars spent on the models behind.", ["model"], **common)
        self.errors = Counter(
            "environment_errors", "Failures behind the model, by kind.", ["model", "kind"], **common
        )

    def answered(self, model: str, answer: ServedAnswer) -> None:
        """Count what an answer came to."""
        self.cost.labels(model).inc(answer.usage.cost_usd)
        # Turns are counted for complete episodes of an agent.
        if answer.error is not None:
            self.errors.labels(model, answer.error.kind).inc()
        elif answer.trajectory is not None:
            self.turns.labels(model).observe(len(answer.trajectory["turns"]))

    def show(self, budget: Budget) -> None:
        """Add what each role has spent of a budget, from its book."""
        self.registry.register(_Spending(budget))

    def exposition(self) -> bytes:
        """Return the text that Prometheus reads."""
        return generate_latest(self.registry)


class _Spending:
    def __init__(self, budget: Budget):
        self.budget = budget

    def collect(self) -> Iterator[GaugeMetricFamily]:
        # Read from the budget each time that Prometheus asks, so it is never out of date.
        spent = GaugeMetricFamily(
            "agentic_prompting_spent_usd", "Dollars spent, by role.", labels=["role"]
        )
        for role, usage in self.budget.by_account().items():
            spent.add_metric([role], usage.cost_usd)
        yield spent
