"""What people look at."""

from .curves import plot_reward

__all__ = ["plot_reward"]
