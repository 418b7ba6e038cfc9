"""Lists and describes the data sets, and checks their records against the Hub."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from .loading import open_source
from .records import first_line
from .task import Source, Task
from .tasks import PAIRS, TASKS, find_task


def list_tasks() -> str:
    """Return a table of all data sets: name, splits with their sizes, metrics, source, licence."""
    # One row for each data set, then one for each pair.
    rows = []
    for name, task in TASKS.items():
        metrics = ", ".join(task.metrics)
        rows.append((name, _describe_splits(task), metrics, str(task.sources[0]), task.licence))
    for name, pair in PAIRS.items():
        splits = [f"{split}: {'/'.join(task_split)}" for split, task_split in pair.items()]
        rows.append((name, ", ".join(splits), "", "a pair of sets", ""))
    return format_table(("name", "splits", "metrics", "first source", "licence"), rows)


def describe_task(name: str) -> str:
    """Return a description of a data set: splits, columns, and all sources in their order.

    Args:
        name (`str`): A key of `TASKS` or `PAIRS`.

    Raises:
        `ValueError`: There is no such data set.
    """
    if name in PAIRS:
        # The name of a pair: list the set behind each split.
        lines = [f"{name}: a pair of sets"]
        for split, (task_name, task_split) in PAIRS[name].items():
            lines.append(f"  {split}: {task_name}, split {task_split}")
        return "\n".join(lines)

    # A data set: first its splits.
    task = find_task(name).task
    lines = [name, "  splits (rows)"]
    for split, row_count in task.expected_rows.items():
        note = " (cut by row number)" if split in task.subsets else ""
        lines.append(f"    {split}: {row_count:,}{note}")
    # Where its rows come from, and the columns that each reader needs.
    lines.append("  sources, in the order they are tried")
    lines.extend(f"    {source}" for source in task.sources)
    lines.append("  columns needed")
    lines.extend(f"    {', '.join(reader.required_columns)}" for reader in task.readers)
    # Its metrics, and the terms of its use.
    lines.append(f"  metrics: {', '.join(task.metrics)}")
    lines.append(f"  licence: {task.licence}")
    if task.unanswerable:
        lines.append('  questions without an answer are kept; their accepted answer is ""')
    return "\n".join(lines)


@dataclass(frozen=True)
class SourceCheck:
    """The check of one split at one source.

    Args:
        task (`str`): The data set.
        split (`str`): The split.
        source (`str`): The source.
        problem (`str`): How the source differs from the record; empty if it does not.
        revision (`str`): The commit that was checked; empty if not known.
        rows (`int`, *optional*): The number of rows at the source, if the Hub knows it.
        columns (`tuple[str, ...]`): The columns at the source.
    """

    task: str
    split: str
    source: str
    problem: str = ""
    revision: str = ""
    rows: int | None = None
    columns: tuple[str, ...] = ()


def check_sources(names: Sequence[str] = (), online: bool = False) -> list[SourceCheck]:
    """Check that the records of the data sets are consistent and, `online`, still true.

    Online, the first row of each split is streamed from each source and read. Nothing is downloaded
    as a whole.

    Args:
        names (`Sequence[str]`, *optional*): The data sets. All by default.
        online (`bool`, *optional*, defaults to `False`): Whether to ask the Hub.

    Raises:
        `ValueError`: A data set does not exist.
    """
    tasks = _resolve_names(names) if names else TASKS
    check: Callable[[str, Task, str, Source], SourceCheck]
    check = _check_online if online else _check_record

    # Every split at every source, and at each repository that a source is put together from.
    checks = []
    for name, task in tasks.items():
        for split, source in product(task.expected_rows, task.sources):
            # A source that names its files may lack some of the splits.
            if source.files and split not in source.files:
                continue
            for repository in source.repositories():
                checks.append(check(name, task, split, repository))
    return checks


def check_table(checks: Iterable[SourceCheck]) -> str:
    """Return a table of checks."""
    rows = []
    for check in checks:
        row_count = "" if check.rows is None else f"{check.rows:,}"
        state = check.problem or "ok"
        rows.append((check.task, check.split, check.source, check.revision[:10], row_count, state))
    return format_table(("set", "split", "source", "revision", "rows", "state"), rows)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a text table with columns padded to equal width."""
    # A column is as wide as its longest cell.
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    ruler = ["-" * width for width in widths]
    lines = []
    for row in (header, ruler, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _describe_splits(task: Task) -> str:
    """Return a short list of splits. The parts of a split, such as `test/nq`, are only counted."""
    # Parts have a slash in their names.
    splits = [
        f"{split} {row_count:,}"
        for split, row_count in task.expected_rows.items()
        if "/" not in split
    ]
    part_count = len(task.expected_rows) - len(splits)
    text = ", ".join(splits)
    return f"{text} ({part_count} parts)" if part_count else text


def _resolve_names(names: Sequence[str]) -> dict[str, Task]:
    """Return the named data sets; a pair stands for both of its sets."""
    tasks = {}
    for name in names:
        if name in PAIRS:
            task_names = [task_name for task_name, _ in PAIRS[name].values()]
        else:
            task_names = [name]
        for task_name in task_names:
            tasks[task_name] = find_task(task_name).task
    return tasks


def _check_record(name: str, task: Task, split: str, source: Source) -> SourceCheck:
    """Check the consistency of a record, without the source."""
    # The source's split names must be names of splits that exist.
    problems = []
    if not set(source.splits) <= set(task.expected_rows):
        problems.append(f"maps splits that the set does not have: {', '.join(source.splits)}")
    # A subset must pick as many rows as the record expects in the split.
    subset = task.subsets.get(split)
    if subset is not None:
        row_count = len(subset.pick_numbers(subset.total_rows or 0))
        if row_count != task.expected_rows[split]:
            problems.append(f"its cut is not of {task.expected_rows[split]} rows")
    # A reader without columns would fit every source.
    if not all(reader.required_columns for reader in task.readers):
        problems.append("a reader needs no column")
    return SourceCheck(task=name, split=split, source=str(source), problem="; ".join(problems))


def _check_online(name: str, task: Task, split: str, source: Source) -> SourceCheck:
    """Check a source on the Hub: that its first row can be read, and its number of rows."""
    try:
        # Reading one row shows that the source exists and has the columns.
        rows = open_source(source, split, streaming=True)
        revision = _find_revision(source)
        first_row = next(iter(rows))
        reader = task.find_reader(name, first_row, str(source))
        reader.read(first_row)
    except Exception as error:  # errors of the Hub, network and builders have no common type
        problem = f"{type(error).__name__}: {first_line(error)}"
        return SourceCheck(task=name, split=split, source=str(source), problem=problem)

    # The Hub tells the number of rows of most repositories.
    info = getattr(rows, "info", None)
    splits = getattr(info, "splits", None) or {}
    source_split = splits.get(source.splits.get(split, split))
    row_count = getattr(source_split, "num_examples", None) or None

    # Where rows are dropped later, the size of the source is not recorded.
    problem = ""
    has_all_rows = not task.unique_questions and task.selection is None
    if row_count and has_all_rows:
        subset = task.subsets.get(split)
        expected = task.expected_rows[split]
        if subset is not None and subset.total_rows is not None:
            expected = subset.total_rows
        # Up to one percent of difference is taken for a correction of the data.
        if abs(row_count - expected) > 0.01 * expected:
            problem = f"{row_count:,} rows, {expected:,} expected"
    return SourceCheck(
        task=name,
        split=split,
        source=str(source),
        problem=problem,
        revision=revision,
        rows=row_count,
        columns=tuple(first_row),
    )


def _find_revision(source: Source) -> str:
    """Return the current commit of a Hub repository; empty for files that are named one by one."""
    if "/" not in source.path:
        return ""
    # Ask the Hub for the commit at which the branch stands today.
    from huggingface_hub import HfApi

    return str(HfApi().dataset_info(source.path, revision=source.revision).sha or "")
