"""Reports: a run's folder, read once (`run_summary.py`), as a page (`page.py`) and as pictures
(`plots.py`).
"""

from ..evolution import plot_lineage, read_lineage
from .headroom_plot import plot_headroom
from .page import write_report
from .plots import plot_reward
from .rescoring import (
    AnswerRescoring,
    Rescoring,
    RewardChange,
    SystemReward,
    is_evaluation,
    rescore,
    rescore_answers,
)
from .rollout_records import history_of
from .run_summary import RunSummary
from .watching import watch_report

__all__ = [
    "AnswerRescoring",
    "Rescoring",
    "RewardChange",
    "RunSummary",
    "SystemReward",
    "history_of",
    "is_evaluation",
    "plot_headroom",
    "plot_lineage",
    "plot_reward",
    "read_lineage",
    "rescore",
    "rescore_answers",
    "watch_report",
    "write_report",
]
