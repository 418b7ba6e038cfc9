"""Memory, time and cost of a run before it starts."""

from .cost import Assumptions, CostEstimate, estimate_cost
from .layout import Layout
from .model_shape import Unplannable
from .plan import Plan, plan

__all__ = [
    "Assumptions",
    "CostEstimate",
    "Layout",
    "Plan",
    "Unplannable",
    "estimate_cost",
    "plan",
]
