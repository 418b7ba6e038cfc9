"""E-SPL's sandbox: a world with rules that a sentence can state and that are hard to find by trial.

What needs torch or trl is imported from where it lives: `.setup` and `.visitor`.
"""

from .oracle import HouseOracle
from .reflector import HouseReflector
from .world import House, draw_house, load_house_world, split_by_country

__all__ = ["House", "HouseOracle", "HouseReflector", "draw_house", "load_house_world", "split_by_country"]
