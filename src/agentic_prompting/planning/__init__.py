"""The needs of a run, before it starts."""

from .layout import Layout
from .plan import Plan, plan
from .shapes import Unplannable
from .spending import Assumptions, Spending, spending

__all__ = ["Assumptions", "Layout", "Plan", "Spending", "Unplannable", "plan", "spending"]
