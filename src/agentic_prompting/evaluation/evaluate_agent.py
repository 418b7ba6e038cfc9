"""`evaluate_agent`: evaluates systems on tasks, with several runs per question.

Every answer is saved as soon as it arrives, so a run that was killed resumes where it stopped.
Failed answers are counted separately and never scored as wrong.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from ..data import TASKS, find_task, is_user_data, load_task, validate_dataset
from ..llm import spans
from ..records import Record, RecordFile, digest, only_writer
from ..rewards.answer_checks import check_answers_of_rows
from ..rollout.progress import show_progress
from .metrics import Encoder, Metric, find_metrics
from .scoring import Result, summarise
from .systems import Answer, Row, System, as_system

logger = logging.getLogger(__name__)


class EvaluationStopped(RuntimeError):
    """A system cannot continue, for example because of a wrong key or a spent budget.

    The answers so far are saved; run again to resume.
    """


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


@dataclass
class Evaluation:
    """The result of [`evaluate_agent`].

    Args:
        results (`list[Result]`): One result per system and task.
        records (`list[dict]`): One record per answer.
    """

    results: list[Result] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def result(self, system: str, task: str) -> Result:
        """Return the result of one system on one task.

        Raises:
            `KeyError`: If there is no such result.
        """
        results = {(result.system, result.task): result for result in self.results}
        return results[system, task]


def evaluate_agent(
    system: System | Callable[..., Any] | Mapping[str, System | Callable[..., Any]],
    tasks: Sequence[str | EvaluationTask]
    | Mapping[str, Iterable[Row]]
    | Iterable[Row]
    | EvaluationTask,
    metrics: Sequence[Metric] | Mapping[str, Metric] | None = None,
    n: int | None = 128,
    runs: int = 3,
    seed: int = 0,
    output: str | Path | None = None,
    encoder: str | Encoder | None = None,
    progress: bool = True,
) -> Evaluation:
    """Ask systems the questions of tasks and score their answers.

    Args:
        system ([`System`], `Callable` or `dict` of them by name): A [`System`], or a function from
            questions to answers (lists of texts). Wrap a [`PromptAgent`] in [`AgentSystem`].
        tasks (`list`, `dict` or `datasets.Dataset`): Names that [`load_task`] accepts
            (`"hotpotqa"`, or `"hotpotqa/validation"` with a split; the default split is `test` if
            it exists, else `validation`), [`EvaluationTask`]s, rows by task name, or the rows of a
            single task (a data set or a list of dicts).
        metrics (`list` or `dict`, *optional*): Names of [`METRICS`]; names, paths or objects of
            `evaluate` metrics; functions. See [`find_metrics`]. Defaults to the metrics of each
            task.
        n (`int`, *optional*, defaults to `128`): Questions per task, sampled with `seed`. `None`
            asks all of them, and so does a task that has fewer. 128 is the paper's number (Appendix
            E).
        runs (`int`, *optional*, defaults to `3`): How often each question is asked, with the seeds
            `seed`, `seed + 1`, ... With two or more runs the results also contain pass@1 to
            pass@`runs`, the score of the majority answer, and the spread between runs.
        seed (`int`, *optional*, defaults to `0`): Seed of the samples and the runs.
        output (`str` or `Path`, *optional*): Folder for `<system>.jsonl`, one line per answer.
            Answers that it already holds are not asked for again.
        encoder (`str` or [`Encoder`], *optional*): Encoder for `semantic_similarity`.
        progress (`bool`, *optional*, defaults to `True`): Show a progress bar after two seconds.

    Returns:
        [`Evaluation`]

    Raises:
        `ValueError`: Before any question is asked: if a task, split or metric does not exist, a row
            has no question or no answers, `output` holds answers of another system, or another
            process is writing to it.
        [`EvaluationStopped`]: If a system fails in a way that affects all further questions.
    """
    if runs < 1 or (n is not None and n < 1):
        raise ValueError(f"runs and n must be at least 1, got {runs} and {n}")
    # A single system gets a name, which appears in tables and in the name of its file.
    systems = system if isinstance(system, Mapping) else {"system": system}

    if output is not None:
        _check_file_names(systems)

    # Load and check all tasks before the first question is asked.
    prepared_tasks = [_prepare_task(task, n, seed) for task in _list_tasks(tasks)]
    task_names = [task.name for task in prepared_tasks]
    for task_name in task_names:
        if task_names.count(task_name) > 1:
            raise ValueError(
                f"two tasks are called {task_name!r}: give each task a different name (a file's "
                "name is the name of its task)"
            )

    # Metrics passed by the caller apply to all tasks. Otherwise each task has its own.
    metrics_by_task = {}
    if metrics is not None:
        metrics_by_task = dict.fromkeys(task_names, find_metrics(metrics, encoder))
    else:
        for task in prepared_tasks:
            metrics_by_task[task.name] = find_metrics(task.metrics, encoder)
    # Accepted answers that a metric can never match would give every reply the score 0.
    for task in prepared_tasks:
        for metric in metrics_by_task[task.name].values():
            check_answers_of_rows(metric, task.rows)

    # One system after the other. A lock keeps other processes from writing its file.
    evaluation = Evaluation()
    for name, system_or_function in systems.items():
        current_system = as_system(system_or_function)
        path = None if output is None else Path(output) / f"{file_name(name)}.jsonl"
        lock = nullcontext() if path is None else only_writer(path)
        with lock, spans.workflow("evaluation", runs=runs):
            records = _collect_answers(
                name, current_system, prepared_tasks, runs, seed, path, progress
            )
        evaluation.records += records

        # One result per task of this system.
        for task in prepared_tasks:
            task_records = [record for record in records if record["task"] == task.name]
            result = summarise(
                name,
                task.name,
                task_records,
                metrics_by_task[task.name],
                current_system.fit_calls,
            )
            evaluation.results.append(result)
    return evaluation


def _check_file_names(names: Iterable[str]) -> None:
    """Raise `ValueError` if two systems would write to one file, and read each other's answers."""
    name_by_file: dict[str, str] = {}
    for name in names:
        other_name = name_by_file.setdefault(file_name(name), name)
        if other_name != name:
            raise ValueError(
                f"the answers of {other_name!r} and {name!r} would be in one file, "
                f"{file_name(name)}.jsonl: give one of the systems another name"
            )


def file_name(name: str) -> str:
    """Turn the name of a system into a file name."""
    return re.sub(r"[^\w.+-]+", "_", name)


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


class AnswerKey(NamedTuple):
    """Identifies an answer of a system.

    Args:
        task (`str`): Name of the task.
        run (`int`): Number of the run.
        row_index (`int`): Index of the question in the task's sample.
    """

    task: str
    run: int
    row_index: int


def _collect_answers(
    name: str,
    system: System,
    tasks: Sequence[EvaluationTask],
    runs: int,
    seed: int,
    path: Path | None,
    progress: bool,
) -> list[Record]:
    """Return all records of one system: those already on disk, and new ones for the other
    questions.
    """
    # Answers of a system with other settings must not be mixed with those of this one.
    identity = {"settings": digest(system.settings)}
    if system.version is not None:
        identity["version"] = system.version
    saved_records: dict[AnswerKey, Record] = {}
    record_file = None
    if path is not None:
        saved_records = _load_saved_answers(path, system, identity, tasks)
        record_file = RecordFile(path)

    # Task by task and run by run, because each run has its own seed.
    records: dict[AnswerKey, Record] = {}
    total = runs * sum(len(task.rows) for task in tasks)
    with show_progress(total, name, shown=progress) as bar:
        for task, run in product(tasks, range(runs)):
            # Take the answers that are on disk, and ask the remaining questions.
            keys = [AnswerKey(task.name, run, row_index) for row_index in range(len(task.rows))]
            records |= {key: saved_records[key] for key in keys if key in saved_records}
            remaining_keys = [key for key in keys if key not in saved_records]
            remaining_rows = [task.rows[key.row_index] for key in remaining_keys]
            bar.update(len(keys) - len(remaining_keys))

            # Answers come in any order. Each is saved before the next one is awaited.
            for position, answer in system.answer_each(remaining_rows, seed + run):
                key = remaining_keys[position]
                record = _make_record(name, task, key, answer)
                records[key] = record
                if record_file is not None:
                    row_version = system.row_version(task.rows[key.row_index])
                    if row_version is not None:
                        record["row_version"] = row_version
                    record_file.append([{**record, **identity}])
                bar.update()
                if answer.fatal and answer.error is not None:
                    raise EvaluationStopped(
                        f"{name}: {answer.error}; {len(records)} of {total} answers are there"
                    )
    # Sorted by task, run and question, whatever the order in which the answers came.
    return [records[key] for key in sorted(records)]


def _load_saved_answers(
    path: Path, system: System, identity: Mapping[str, str], tasks: Sequence[EvaluationTask]
) -> dict[AnswerKey, Record]:
    """Load the answers on disk and update their accepted answers to those of the tasks.

    Failed answers are removed from the file, so that they are asked for again. Answers to rows that
    have changed since stay in the file, and are asked for again, too.
    """
    # A saved record may belong to a task or a question that is not asked any more.
    rows_by_task = {task.name: task.rows for task in tasks}

    def find_row(key: AnswerKey) -> Row | None:
        rows = rows_by_task.get(key.task, [])
        return rows[key.row_index] if key.row_index < len(rows) else None

    def is_answered(record: Record) -> bool:
        # Another system, or this one with another prompt, model or sampling.
        if record.get("settings") != identity["settings"]:
            raise ValueError(
                f"{path} holds answers of another system, or of this one with other settings: use "
                "another output folder, or the settings that this one was started with"
            )
        # Answers that were saved without a version are not compared.
        versions = {identity.get("version"), record.get("version")} - {None}
        if len(versions) > 1:
            raise ValueError(
                f"{path} holds answers of before the code or the weights of this system were "
                "changed: use another output folder, or undo the change"
            )
        # A record names its question by index, which in another sample is another question.
        key = key_of(record)
        row = find_row(key)
        if row is not None and record["question"] != row["question"]:
            raise ValueError(
                f"{path} holds answers to another sample of {key.task} (question {key.row_index} "
                "differs): use the n, seed and held_out that it was started with, or another output "
                "folder"
            )
        return record.get("error") is None

    # Remove failed answers. Of several records of a key, the last one counts.
    record_file = RecordFile(path)
    records = {key_of(record): record for record in record_file.keep(is_answered)}

    # Bring the accepted answers up to date, in case the task's rows have changed since.
    changed_rows = 0
    for key, record in list(records.items()):
        row = find_row(key)
        if row is None:
            continue
        # An agent may read any column of its row.
        saved_row_version = record.get("row_version")
        if saved_row_version is not None and saved_row_version != system.row_version(row):
            del records[key]
            changed_rows += 1
            continue
        if list(row["answers"]) == record["answers"]:
            continue
        # A verdict of a judge depends on the accepted answers of that time: ask again. Other scores
        # are computed from the record, which is updated. Readers use the last record of a key.
        if record.get("judged") is not None:
            del records[key]
        else:
            records[key] = {**record, "answers": list(row["answers"])}
            record_file.append([records[key]])
    if changed_rows:
        logger.warning(
            "%s: %d questions are asked again, because their rows have changed since they were "
            "answered",
            path,
            changed_rows,
        )
    return records


def _make_record(system: str, task: EvaluationTask, key: AnswerKey, answer: Answer) -> Record:
    fields = answer.to_json()
    row = task.rows[key.row_index]
    # With the question and its accepted answers, a record can be scored without the task.
    return {
        "system": system,
        "task": task.name,
        "run": key.run,
        "place": key.row_index,
        "id": str(row.get("id", key.row_index)),
        "question": row["question"],
        "answers": list(row["answers"]),
        "answer": fields.pop("text", None),
        **fields,
    }


def read_records(paths: Iterable[str | Path]) -> list[Record]:
    """Read all answers in some files. Of several answers with the same key, the last one counts.

    Raises:
        `ValueError`: If a file contains anything else. An incomplete last line is skipped.
    """
    # By system, too, because a file may hold the answers of several.
    records: dict[tuple[str, AnswerKey], Record] = {}
    for path in paths:
        for record in RecordFile(path):
            if not {"system", "task", "run", "place"} <= set(record):
                raise ValueError(f"{path} holds a line that is no record of an evaluation")
            records[record["system"], key_of(record)] = record
    return list(records.values())


def key_of(record: Mapping[str, Any]) -> AnswerKey:
    """Return the key of a record."""
    return AnswerKey(record["task"], record["run"], record["place"])
