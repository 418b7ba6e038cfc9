"""E-SPL's sandbox: a world with rules that a sentence can state and that are hard to find by trial.

What needs torch or trl is imported from where it lives: `.setup`.
"""

from .reflector import GuardedReflector
from .world import GuardedOracle, draw_rules, load_guarded_world, split_by_country

__all__ = ["GuardedOracle", "GuardedReflector", "draw_rules", "load_guarded_world", "split_by_country"]
