"""Memory, time and cost of a run before it starts."""

from .cost import Assumptions, CostEstimate, WorkerCost, estimate_cost
from .layout import Layout
from .model_shape import Unplannable
from .plan import Plan, plan

__all__ = [
    "Assumptions",
    "CostEstimate",
    "Layout",
    "Plan",
    "Unplannable",
    "WorkerCost",
    "estimate_cost",
    "plan",
]
