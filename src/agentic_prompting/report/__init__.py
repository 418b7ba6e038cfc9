"""What people look at."""

from ..evolution import plot_lineage, read_lineage
from .curves import plot_reward
from .history import history_of
from .write import write_report

__all__ = ["history_of", "plot_lineage", "plot_reward", "read_lineage", "write_report"]
