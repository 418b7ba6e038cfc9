"""Reports: a run's folder, read once (`summary.py`), as a page (`page.py`) and as pictures (`plots.py`)."""

from ..evolution import plot_lineage, read_lineage
from .page import watch_report, write_report
from .plots import plot_reward
from .summary import RunSummary, history_of

__all__ = [
    "RunSummary",
    "history_of",
    "plot_lineage",
    "plot_reward",
    "read_lineage",
    "watch_report",
    "write_report",
]
