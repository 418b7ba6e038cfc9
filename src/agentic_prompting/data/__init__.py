"""Data sets of the papers in one schema. `datasets` is imported when something is loaded, not before."""

from .loading import load_task, validate_dataset
from .records import Cut, Reader, Source, Task
from .tasks import TASKS

__all__ = ["TASKS", "Cut", "Reader", "Source", "Task", "load_task", "validate_dataset"]
