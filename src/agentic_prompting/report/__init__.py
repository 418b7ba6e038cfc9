"""Reports: a run's folder, read once (`run_summary.py`), as a page (`page.py`) and as pictures
(`plots.py`).
"""

from ..evolution import plot_lineage, read_lineage
from .headroom_plot import plot_headroom
from .page import write_report
from .plots import plot_reward
from .rescoring import Rescoring, RewardChange, rescore
from .rollout_records import history_of
from .run_summary import RunSummary
from .watching import watch_report

__all__ = [
    "Rescoring",
    "RewardChange",
    "RunSummary",
    "history_of",
    "plot_headroom",
    "plot_lineage",
    "plot_reward",
    "read_lineage",
    "rescore",
    "watch_report",
    "write_report",
]
