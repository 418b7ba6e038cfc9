"""Data sets of the papers in one schema. `datasets` is imported when something is loaded, not before."""

from .catalogue import (
    Contamination,
    SourceCheck,
    check_sources,
    check_table,
    contamination_report,
    describe_task,
    list_tasks,
)
from .loading import find_task, is_own, load_task
from .task import Cut, Reader, Source, Task, as_dataset, validate_dataset
from .tasks import PAIRS, TASKS

__all__ = [
    "PAIRS",
    "TASKS",
    "Contamination",
    "Cut",
    "Reader",
    "Source",
    "SourceCheck",
    "Task",
    "as_dataset",
    "check_sources",
    "check_table",
    "contamination_report",
    "describe_task",
    "find_task",
    "is_own",
    "list_tasks",
    "load_task",
    "validate_dataset",
]
