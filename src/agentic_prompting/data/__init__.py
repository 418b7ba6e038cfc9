"""Data sets of the papers in one schema. `datasets` is imported when something is loaded, not before."""

from .catalogue import SourceCheck, check_sources, check_table, describe_task, list_tasks
from .contamination import Contamination, contamination_report
from .espl import PAIRS
from .loading import find_task, load_task
from .records import Cut, Reader, Source, Task
from .rows import validate_dataset
from .tasks import TASKS

__all__ = [
    "PAIRS",
    "TASKS",
    "Contamination",
    "Cut",
    "Reader",
    "Source",
    "SourceCheck",
    "Task",
    "check_sources",
    "check_table",
    "contamination_report",
    "describe_task",
    "find_task",
    "list_tasks",
    "load_task",
    "validate_dataset",
]
