"""All data sets by name, and how a name is looked up.

To add a data set, add a [`Task`] to `TASKS`. The repository ids, splits, sizes and licences are
facts about other people's repositories, collected in August 2026. `agentic-prompting data check
--online` compares them with what is there now.
"""

from __future__ import annotations

import difflib
from typing import NamedTuple

from .espl_tasks import ESPL_TASKS, PAIRS
from .prompt_r1_tasks import PROMPT_R1_TASKS
from .prorefine_tasks import PROREFINE_TASKS
from .task import Task

TASKS: dict[str, Task] = {**PROMPT_R1_TASKS, **PROREFINE_TASKS, **ESPL_TASKS}


class TaskSplit(NamedTuple):
    """A split of a data set.

    Attributes:
        name (`str`): The name of the data set, a key of `TASKS`.
        split (`str`): The split. Whether it exists is not checked.
        task (`Task`): The data set.
    """

    name: str
    split: str
    task: Task


def find_task(name: str, split: str = "test") -> TaskSplit:
    """Look up a data set by its name. The name of a pair leads to the set behind its split.

    Args:
        name (`str`): A key of `TASKS` or `PAIRS`.
        split (`str`, *optional*, defaults to `"test"`): The split.

    Raises:
        `ValueError`: There is no such data set (the nearest names are offered), or a pair has no
            such split.
    """
    # The splits of a pair are splits of other data sets.
    if name in PAIRS:
        if split not in PAIRS[name]:
            raise ValueError(f"{name} has no split {split!r}; it has: {', '.join(PAIRS[name])}")
        name, split = PAIRS[name][split]
    if name in TASKS:
        return TaskSplit(name, split, TASKS[name])
    # Unknown: offer names that are spelled like it.
    all_names = [*TASKS, *PAIRS]
    similar_names = difflib.get_close_matches(name.lower(), all_names, n=3, cutoff=0.5)
    if similar_names:
        guess = " or ".join(map(repr, similar_names))
        raise ValueError(
            f"unknown task {name!r}; did you mean {guess}? `agentic-prompting data list` shows all"
        )
    raise ValueError(f"unknown task {name!r}; known: {', '.join(all_names)}")


def check_split(name: str, task: Task, split: str) -> None:
    """Raise `ValueError` if a data set has no such split."""
    if split not in task.expected_rows:
        raise ValueError(f"{name} has no split {split!r}; it has: {', '.join(task.expected_rows)}")
