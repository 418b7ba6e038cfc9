"""What people look at."""

from .curves import plot_reward
from .history import history_of
from .lineage import read_lineage
from .tree_picture import plot_lineage
from .write import write_report

__all__ = ["history_of", "plot_lineage", "plot_reward", "read_lineage", "write_report"]
