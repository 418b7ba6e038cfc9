"""The tasks of an evaluation: [`EvaluationTask`], and how names, files and rows become one."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data import TASKS, find_task, is_user_data, load_task, validate_dataset
from .systems import Row


@dataclass(frozen=True)
class EvaluationTask:
    """Questions to ask, and the metrics that score the answers.

    Args:
        name (`str`): Name of the task in tables and files.
        rows (`list`): Rows with `question` and `answers`.
        metrics (`tuple[str, ...]`): Metrics to report, the main one first.
    """

    name: str
    rows: list[Row]
    metrics: tuple[str, ...] = ("exact_match", "token_f1")


def prepare_tasks(tasks: object, n: int | None, seed: int) -> list[EvaluationTask]:
    """Load, sample and check the tasks of [`evaluate_agent`].

    Raises:
        `ValueError`: If an entry is no task, a row has no question or no answers, or two tasks have
            one name.
    """
    prepared_tasks = [_prepare_task(task, n, seed) for task in _list_tasks(tasks)]
    names = [task.name for task in prepared_tasks]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"two tasks are called {name!r}: give each task a different name (a file's "
                "name is the name of its task)"
            )
    return prepared_tasks


def load_evaluation_task(
    name: str, n: int | None = None, seed: int = 0, **options: Any
) -> EvaluationTask:
    """Load a task by name (`name` or `name/split`) or from a file.

    Args:
        name (`str`): Name of the task, or path of a file.
        n (`int`, *optional*): Number of rows to sample. Defaults to all.
        seed (`int`, *optional*, defaults to `0`): Seed of the sample.
        **options: Passed to [`load_task`].

    Raises:
        `ValueError`: If the task does not exist.
    """
    # A file of the user has no splits.
    if is_user_data(name):
        rows = list(load_task(name, **options))
        return EvaluationTask(Path(name).stem, _sample_rows(rows, n, seed))

    # Without a split: test, else validation, else the task's first split.
    task_name, _, split = name.partition("/")
    if not split:
        splits = list(TASKS[task_name].expected_rows) if task_name in TASKS else ["test"]
        preferred_splits = [split for split in ("test", "validation") if split in splits]
        split = preferred_splits[0] if preferred_splits else splits[0]
    task_name, split, task = find_task(task_name, split)

    # A split with at most n rows is loaded as it is, in its order.
    expected_rows = task.expected_rows.get(split)
    if n is not None and expected_rows is not None and expected_rows <= n:
        n = None
    task_rows = load_task(task_name, split, n, seed, **options)
    return EvaluationTask(name, list(task_rows), task.metrics)


def _list_tasks(tasks: object) -> list[str | EvaluationTask]:
    """Return the tasks of [`evaluate_agent`] as a list of names and [`EvaluationTask`]s.

    Raises:
        `ValueError`: If an entry is neither a name nor rows. The message explains how to pass it.
    """
    advice = 'pass a list of names, {"my task": rows}, or the rows of one task (a data set or a list of dicts)'

    # A single task, or rows by name.
    if isinstance(tasks, EvaluationTask):
        return [tasks]
    if isinstance(tasks, str):
        raise ValueError(f"tasks must be a list, got the text {tasks!r}")
    if isinstance(tasks, Mapping):
        for name, rows in tasks.items():
            if not _holds_rows(rows):
                raise ValueError(
                    f"the task {name!r} has no rows but {type(rows).__name__}: {advice}"
                )
        return [EvaluationTask(name, list(rows)) for name, rows in tasks.items()]
    if not isinstance(tasks, Iterable):
        raise ValueError(f"tasks must be a list, got {type(tasks).__name__}: {advice}")

    # A data set, or a list of rows, is one task. A list may also hold data sets beside names.
    entries = list(tasks)
    if entries and all(isinstance(entry, Mapping) for entry in entries):
        return [_task_of_rows(entries)]
    listed: list[str | EvaluationTask] = []
    for entry in entries:
        if isinstance(entry, str | EvaluationTask):
            listed.append(entry)
            continue
        rows = list(entry) if _holds_rows(entry) else []
        if not rows or not all(isinstance(row, Mapping) for row in rows):
            raise ValueError(
                f"a task cannot be made of {type(entry).__name__} {entry!r:.80}: {advice}"
            )
        listed.append(_task_of_rows(rows))
    return listed


def _holds_rows(rows: object) -> bool:
    return isinstance(rows, Iterable) and not isinstance(rows, str | bytes | Mapping)


def _task_of_rows(rows: list[Row]) -> EvaluationTask:
    """Make a task of rows, with the name in their `task` column if they all have the same one."""
    # Rows of several tasks, or of none, get a general name.
    names = {str(row.get("task") or "") for row in rows}
    name = names.pop() if len(names) == 1 else ""
    if name in TASKS:
        return EvaluationTask(name, rows, TASKS[name].metrics)
    return EvaluationTask(name or "rows", rows)


def _prepare_task(task: str | EvaluationTask, n: int | None, seed: int) -> EvaluationTask:
    """Load a task, sample its rows and validate them."""
    loaded = load_evaluation_task(task, n, seed) if isinstance(task, str) else task
    rows = _sample_rows(loaded.rows, n, seed)
    # The error of the check does not name the task.
    try:
        validate_dataset(rows)
    except ValueError as error:
        raise ValueError(f"{loaded.name}: {error}") from error
    return EvaluationTask(loaded.name, rows, loaded.metrics)


def _sample_rows(rows: list[Row], n: int | None, seed: int) -> list[Row]:
    if n is None or len(rows) <= n:
        return rows
    return [rows[i] for i in random.Random(seed).sample(range(len(rows)), n)]
