"""`load_task`: loads the papers' data sets and your own, in one schema."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import FILE_READERS, check_files, read_records_from_files
from .records import (
    Record,
    SourceRows,
    first_line,
    read_records,
    sample_records,
    select_subset,
    to_dataset,
)
from .task import Source, Task
from .tasks import check_split, find_task
from .user_data import is_user_data, read_user_data

if TYPE_CHECKING:
    from datasets import Dataset

    from .user_data import DataFiles, UserData

logger = logging.getLogger(__name__)


def load_task(
    name: UserData | Mapping[str, UserData],
    split: str = "train",
    n: int | None = None,
    seed: int = 0,
    data_files: DataFiles | Mapping[str, DataFiles] | None = None,
    revision: str | None = None,
    columns: Mapping[str, str] | None = None,
    context_columns: Sequence[str] = (),
) -> Dataset:
    """Load a data set as `id`, `question`, `answers`, `task`, `meta`.

    Args:
        name (`str`, or your own data): The name of a data set in `TASKS` (`agentic-prompting data
            list` shows them): `prompt_r1`, `hotpotqa`, `gsm8k`, ... Or one of E-SPL's pairs, whose
            splits are two data sets: `dapo_aime25`, `hmmt`, `aimo_beyondaime`,
            `aime_and_amc_to_beyondaime`. Your own data: a file or a list of files (`.jsonl`,
            `.json`, `.csv`, `.tsv`, `.xlsx`, `.parquet`, also addresses), a pandas `DataFrame`, a
            `datasets.Dataset`, a list of dicts; or a dict of these by split.
        split (`str`, *optional*, defaults to `"train"`): The split. Prompt-R1's twelve evaluation
            files are `test` together, and `test/hotpot` and so on one by one. For files and your
            own data it matters only if they are a dict. Splits that are cut by row number (both
            BBH sets, `gsm8k_dspy`, parts of `nq_hotpotqa`) are then cut out of the files.
        n (`int`, *optional*): Sample this many rows with different questions, in the order in which
            `random.Random(seed).sample` draws them. All rows by default.
        seed (`int`, *optional*, defaults to `0`): The seed of the sample.
        data_files (`str`, `list` or `dict`, *optional*): Files to read for a named data set,
            instead of the Hub.
        revision (`str`, *optional*): The commit or branch of the data set's first Hub repository.
            No other source is tried then: a pinned version is never replaced silently. Pin it for
            results that you report.
        columns (`dict[str, str]`, *optional*): The column names of your own data: `question`;
            `answers` (a list, or a text that may be a list in JSON) or `answer` (a single answer,
            used as it is); `id`; any other name goes to `meta`. By default the columns have these
            names.
        context_columns (`Sequence[str]`, *optional*): Columns of your own data, by its names, that
            an agent program or an environment reads with the question. Rows with the same question
            that differ in one of them are different questions: for `n`, and for the warning of rows
            whose answers contradict each other.

    Returns:
        `datasets.Dataset`: `meta` is JSON with the row's number (`row`) and origin (`source`), how
        a sample was drawn (`sample`: `n`, `seed`, and `of` how many), and further values of the
        data set; for `prompt_r1` also the released instruction as `prompt_template`. A question
        without an answer (SQuAD v2) has the accepted answer `""`. Other rows without an accepted
        answer are dropped, and their number is logged.

    Raises:
        `ValueError`: The task or split does not exist, a column is missing, a file or a row cannot
            be read, no row has an accepted answer, the rows are not those that a split is cut from,
            or there are fewer than `n` different questions. One line, with file and row.
        `FileNotFoundError`: A file does not exist.
        `RuntimeError`: No source could be loaded. Says how each one failed.

    Example:

        >>> from agentic_prompting import load_task
        >>> train = load_task("hotpotqa", split="train", n=5120)  # doctest: +SKIP
        >>> own = load_task("support.csv", columns={"question": "request", "answer": "reply"})  # doctest: +SKIP
    """
    # Refuse combinations of arguments that contradict each other.
    if n is not None and n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if data_files is not None and revision is not None:
        raise ValueError(
            "revision says which version of a hub repository to load; with data_files there is none"
        )

    # The user's own data, which has no other source.
    if not isinstance(name, str) or is_user_data(name):
        if data_files is not None or revision is not None:
            raise ValueError(
                "data_files and revision are for the sets that have a name; pass your own data "
                "alone"
            )
        data = _select_split("data", name, split)
        if split != "train" and not isinstance(name, Mapping):
            logger.warning(
                "split=%r has no effect: this data has no splits, so all of its rows are loaded. "
                "Pass a dict by split, or cut them with hold_out(rows, share)",
                split,
            )
        task_name, records = read_user_data(data, columns or {}, context_columns)
    else:
        # A named data set, from files or from the Hub.
        if Path(name).suffix and Path(name).is_file():
            raise ValueError(
                f"{name} does not end as a file of rows does ({', '.join(FILE_READERS)}); a text "
                "with tabs between its columns is a .tsv, in UTF-8"
            )
        if columns is not None:
            raise ValueError(
                f"columns is for your own data only, but {name!r} is the name of a data set"
            )
        task_name, split, task = find_task(name, split)
        if data_files is None:
            records = _load_from_hub(task_name, task, split, revision)
        else:
            split_files = _select_split(f"{task_name}: data_files", data_files, split)
            files = check_files(task_name, split_files)
            records = read_records_from_files(task_name, task, split, files)

    # Sample last: the draw is from questions that have an answer.
    if n is not None:
        records = sample_records(task_name, records, n, seed)
    return to_dataset(records)


def open_source(source: Source, split: str, revision: str | None = None, **options: Any) -> Dataset:
    """Load a split from one source.

    Args:
        source (`Source`): A source of one repository.
        split (`str`): The split, by our name.
        revision (`str`, *optional*): The commit or branch, in place of the source's.
        **options: Passed on to `datasets.load_dataset`.
    """
    from datasets import load_dataset

    # The source may have another name for the split.
    source_split = source.splits.get(split, split)
    builder_options = {**source.options, **options}
    if source.files:
        # `datasets` does not accept `test/hotpot` as the name of a split, so it gets a plain one.
        builder_options["data_files"] = {"rows": source.files[split]}
        source_split = "rows"
    if source.data_dir:
        builder_options["data_dir"] = source.data_dir
    return load_dataset(
        source.path,
        source.config,
        split=source_split,
        revision=revision or source.revision,
        **builder_options,
    )


def _load_from_hub(name: str, task: Task, split: str, revision: str | None) -> list[Record]:
    """Load a split from the first source that loads and has the expected columns and rows."""
    check_split(name, task, split)
    sources = task.sources
    pin = ""
    # A pinned revision is that of one repository.
    if revision is not None:
        if sources[0].also:
            raise ValueError(
                f"{name} is put together from several repositories: a single revision cannot pin "
                "them"
            )
        sources = sources[:1]
        pin = f"@{revision}"

    failures = []
    for source in sources:
        try:
            parts = _load_parts(name, task, split, source, revision)
        except Exception as error:  # errors of the Hub, network and builders have no common type
            # Remember why, and try the next source.
            failures.append(f"  {source}{pin}: {type(error).__name__}: {first_line(error)}")
            continue
        records = read_records(name, task, parts, id_prefix=name)

        # Warn if the source has clearly more or fewer rows than when it was recorded.
        expected = task.expected_rows[split]
        count = sum(len(part.rows) for part in parts)
        # The recorded size is that after duplicates and other rows are dropped.
        if task.unique_questions or task.selection:
            count = len(records)
        if abs(count - expected) > 0.01 * expected:
            logger.warning(
                f"{name}, split {split!r}: {count:,} rows from {source}{pin}, "
                f"where {expected:,} were expected"
            )
        return records

    # No source is left: say how each one failed.
    failure_list = "\n".join(failures)
    raise RuntimeError(
        f"{name}, split {split!r}: no source could be loaded. Without a network, pass "
        f"data_files=…. Tried:\n{failure_list}"
    )


def _load_parts(
    name: str, task: Task, split: str, source: Source, revision: str | None
) -> list[SourceRows]:
    """Load the rows of a split from each repository of a source."""
    parts = []
    for repository in source.repositories():
        rows = open_source(repository, split, revision)
        origin = f"{repository}@{revision}" if revision else str(repository)
        # Choose the reader by the columns, and cut out the rows of the split.
        reader = task.find_reader(name, rows.column_names, origin)
        source_rows = SourceRows(rows=rows, reader=reader, origin=origin)
        subset = select_subset(name, task, split, source_rows)
        parts.append(replace(subset, origin=f"{origin}:{split}"))
    return parts


def _select_split(label: str, data: Any, split: str) -> Any:
    """Return a split of data by split; data that has no splits is returned as it is."""
    if not isinstance(data, Mapping):
        return data
    if split not in data:
        raise ValueError(f"{label} has no split {split!r}; it has: {', '.join(data)}")
    return data[split]
