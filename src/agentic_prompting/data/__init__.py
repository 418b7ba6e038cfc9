"""Data sets of the papers and your own, in one schema.

`datasets` is imported when something is loaded, not before.
"""

from .catalogue import (
    SourceCheck,
    check_sources,
    check_table,
    describe_task,
    list_tasks,
)
from .contamination import Contamination, contamination_report
from .files import read_rows
from .hold_out import hold_out
from .loading import load_task
from .records import as_dataset
from .task import Reader, ReadRow, Source, Subset, Task
from .tasks import PAIRS, TASKS, TaskSplit, find_task
from .user_data import is_user_data
from .validation import validate_dataset

__all__ = [
    "PAIRS",
    "TASKS",
    "Contamination",
    "ReadRow",
    "Reader",
    "Source",
    "SourceCheck",
    "Subset",
    "Task",
    "TaskSplit",
    "as_dataset",
    "check_sources",
    "check_table",
    "contamination_report",
    "describe_task",
    "find_task",
    "hold_out",
    "is_user_data",
    "list_tasks",
    "load_task",
    "read_rows",
    "validate_dataset",
]
