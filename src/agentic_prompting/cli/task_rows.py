"""The options that say which rows to use, and how they are loaded.

This module imports no large package by itself: `--help` has to stay quick.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .hub import probe_hub, read_trained_columns
from .options import option, read_columns, refuse_options

if TYPE_CHECKING:
    from datasets import Dataset

    from ..rollout import Environment
    from .rows_file import RowsFile


@dataclass
class TaskRows:
    """The rows to use: a task's, or your own."""

    task_split: str = option("The split to take the rows from.", "train")
    task_rows: int | None = option("Sample this many rows; all by default.")
    data_files: str | None = option("Local files with a task's rows, instead of the hub.")
    dataset: str | None = option(
        "Your own rows instead of a task: a file (.jsonl, .json, .csv, .tsv, .xlsx, .parquet)."
    )
    columns: str | None = option("Which column of your own rows is which: question=q,answers=a.")
    held_out: float | None = option(
        "Share of the rows for evaluation only, such as 0.3: the same rows in every command."
    )

    def column_names(self) -> dict[str, str]:
        """Our name for a column -> that of the file. Raises `ValueError` for another form."""
        return read_columns(self.columns)

    @property
    def reads_whole_rows(self) -> bool:
        """Whether the rows go to an agent program or an environment of the user's own."""
        return ":" in (getattr(self, "environment", None) or "")

    def check_rows(self) -> None:
        """Raise `ValueError` for an option that would have no effect on the named rows."""
        if self.dataset:
            refuse_options(
                self,
                ("task_split",),
                "the rows of --dataset have no splits; --held-out sets a share of them aside",
            )

    def add_trained_columns(self, run: str | Path) -> None:
        """Take the columns of `--dataset` from the training of an agent, where `--columns` does not
        name them.
        """
        trained_columns = read_trained_columns(run) if self.dataset else {}
        if not trained_columns:
            return
        from ..data import is_user_data

        # Anything else is refused where the rows are loaded.
        if not is_user_data(self.dataset):
            return
        columns = self.read_file(str(self.dataset)).choose_columns(trained_columns)
        if columns != self.column_names():
            self.columns = ",".join(f"{name}={file_name}" for name, file_name in columns.items())
            print(f"the columns of training are used: --columns {self.columns}", file=sys.stderr)

    def load(self, task: str, seed: int) -> Dataset:
        """The rows to learn from. Raises `ValueError`, in one line, if they cannot be loaded."""
        if self.held_out is None:
            return self._load_rows(task, self.task_rows, seed)
        from ..data import hold_out

        # Split first, so that the same rows are held out whatever is sampled from the others.
        rows, _ = hold_out(self._load_rows(task, None, seed), self.held_out)
        return self._sample(rows, seed, "are not held out")

    def load_for_evaluation(self, task: str, seed: int = 0) -> Dataset:
        """The rows to evaluate on: the share of `--held-out`, or all; of these `--task-rows`."""
        if self.held_out is None:
            return self.load(task, seed)
        return self._sample(self.load_held_out_share(task, seed), seed, "are held out")

    def load_held_out_share(self, task: str, seed: int = 0) -> Dataset:
        """The held-out rows of `--held-out`, which [`TaskRows.load`] leaves out."""
        from ..data import hold_out

        assert self.held_out is not None
        _, held_out_rows = hold_out(self._load_rows(task, None, seed), self.held_out)
        return held_out_rows

    def _sample(self, rows: Dataset, seed: int, description: str) -> Dataset:
        """`--task-rows` of the rows, or all. Raises `ValueError` if there are fewer."""
        if self.task_rows is None:
            return rows
        if self.task_rows > len(rows):
            raise ValueError(f"--task-rows {self.task_rows}: only {len(rows)} rows {description}")
        return rows.shuffle(seed).select(range(self.task_rows))

    @cached_property
    def _loaded_rows(self) -> dict[tuple[Any, ...], Dataset]:
        """The rows that have been loaded, by what they depend on."""
        return {}

    def _load_rows(self, task: str, n: int | None, seed: int) -> Dataset:
        """The rows before any are held out: loaded once, because loading warns of those that it
        drops.
        """
        self.check_rows()
        key = (self.dataset or task, self.task_split, n, seed, self.data_files, self.columns)
        if key not in self._loaded_rows:
            self._loaded_rows[key] = self._load_task(task, n, seed)
        return self._loaded_rows[key]

    def _load_task(self, task: str, n: int | None, seed: int) -> Dataset:
        from ..data import is_user_data, load_task

        # Only the rows of a task may have to come from the hub.
        source = self.dataset or task
        if not is_user_data(source) and not self.data_files:
            probe_hub()
        try:
            return load_task(
                source,
                self.task_split,
                n,
                seed,
                data_files=self.data_files,
                columns=self.column_names() or None,
                context_columns=self.context_columns(source),
            )
        except RuntimeError as error:
            # On one line, even if the message has several.
            raise ValueError(" ".join(str(error).split())) from error

    @cached_property
    def _files(self) -> dict[tuple[str, str | None], RowsFile]:
        """The files that have been read, by name and `--columns`."""
        return {}

    def read_file(self, file: str) -> RowsFile:
        """A file of the user's own rows, with the names of `--columns`. It is read once."""
        from .rows_file import RowsFile

        key = (file, self.columns)
        if key not in self._files:
            self._files[key] = RowsFile(file, self.column_names())
        return self._files[key]

    def context_columns(self, source: str) -> list[str]:
        """The columns of a file that a program or environment may read beside the question."""
        from ..data import is_user_data

        if not self.reads_whole_rows or not is_user_data(source):
            return []
        return self.read_file(source).context_columns()

    def add_file_columns(self, rows: Dataset) -> list[dict[str, Any]]:
        """The rows with all columns of the file of `--dataset`: what agent programs are given."""
        if not self.dataset:
            return list(rows)
        return self.read_file(self.dataset).join(rows)

    def rows_for(self, environment: Environment | None, rows: Dataset) -> list[dict[str, Any]]:
        """The rows that an environment is given. A program gets those that `train agent` gives it."""
        if environment is not None and environment.plays_whole_episodes:
            return self.add_file_columns(rows)
        return list(rows)


ROW_OPTIONS = ("task_split", "task_rows", "data_files", "dataset", "columns", "held_out")
"""The options of [`TaskRows`]."""


@dataclass
class HeldOutRows(TaskRows):
    """Rows to learn from, and rows for evaluation only."""

    eval_task: str | None = option(
        "Rows for evaluation only: TASK/SPLIT or a file; several with commas."
    )
    eval_task_rows: int | None = option(
        "Sample this many rows of each evaluation set; all by default."
    )

    def check_rows(self) -> None:
        super().check_rows()
        if self.eval_task is None:
            refuse_options(
                self,
                ("eval_task_rows",),
                "it samples the rows of --eval-task, which is not given",
            )

    def load_held_out(self, task: str, seed: int) -> Dataset | None:
        """The evaluation rows: those of `--eval-task`, the share of `--held-out`, or `None`."""
        from datasets import concatenate_datasets

        if self.held_out is not None:
            if self.eval_task is not None:
                raise ValueError(
                    "--held-out and --eval-task both name the evaluation rows: leave one of them "
                    "out"
                )
            return self.load_held_out_share(task, seed)

        datasets = [self.load_eval_set(name, seed) for name in self.eval_sets]
        return concatenate_datasets(datasets) if datasets else None

    @property
    def eval_sets(self) -> list[str]:
        """The evaluation sets of `--eval-task`."""
        return self.eval_task.split(",") if self.eval_task else []

    def load_eval_set(self, name: str, seed: int) -> Dataset:
        """The rows of one evaluation set.

        A task is named with its split (by default `test`). A file has none, and the columns of
        the training file.
        """
        from ..data import is_user_data, load_task

        if is_user_data(name):
            return load_task(
                name,
                n=self.eval_task_rows,
                seed=seed,
                columns=self.column_names() or None,
                context_columns=self.context_columns(name),
            )
        eval_task, _, split = name.partition("/")
        return load_task(eval_task, split or "test", self.eval_task_rows, seed)
