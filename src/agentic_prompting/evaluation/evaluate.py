"""`evaluate_agent`: evaluates systems on tasks, with several runs per question.

Every answer is saved as soon as it arrives, so a run that was killed resumes where it stopped.
Failed answers are counted separately and never scored as wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from ..llm import spans
from ..records import Record, RecordFile, only_writer
from ..rewards.answer_checks import check_answers_of_rows
from ..rollout.progress import show_progress
from .answer_records import AnswerKey, make_record
from .evaluation_tasks import EvaluationTask, prepare_tasks
from .metrics import Encoder, Metric, find_metrics
from .saved_answers import identity_of, load_saved_answers
from .scoring import Result, summarise
from .systems import Answer, Row, System, as_system


class EvaluationStopped(RuntimeError):
    """A system cannot continue, for example because of a wrong key or a spent budget.

    The answers so far are saved; run again to resume.
    """


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
    prepared_tasks = prepare_tasks(tasks, n, seed)
    # Metrics passed by the caller apply to all tasks. Otherwise each task has its own.
    metrics_by_task = {}
    if metrics is not None:
        metrics_by_task = dict.fromkeys(
            [task.name for task in prepared_tasks], find_metrics(metrics, encoder)
        )
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
    # The answers on disk, as far as their questions are asked.
    records: dict[AnswerKey, Record] = {}
    record_file = None
    if path is not None:
        record_file = RecordFile(path)
        saved_records = load_saved_answers(path, system, tasks)
        records = {key: record for key, record in saved_records.items() if key.run < runs}

    # Each new answer is saved before the next one is awaited.
    rows_by_task = {task.name: task.rows for task in tasks}
    identity = identity_of(system)
    total = runs * sum(len(task.rows) for task in tasks)
    with show_progress(total, name, shown=progress) as bar:
        bar.update(len(records))
        for key, answer in _ask_remaining(system, tasks, runs, seed, answered_keys=set(records)):
            row = rows_by_task[key.task][key.row_index]
            record = make_record(name, key, row, answer)
            records[key] = record
            if record_file is not None:
                row_version = system.row_version(row)
                if row_version is not None:
                    record["row_version"] = row_version
                record_file.append([{**record, **identity}])
            bar.update()
            if answer.fatal and answer.error is not None:
                # A failed answer has a record, too, and is asked again.
                answered = sum(record.get("error") is None for record in records.values())
                raise EvaluationStopped(
                    f"{name}: {answer.error}; {answered} of {total} answers are there"
                )
    # Sorted by task, run and question, whatever the order in which the answers came.
    return [records[key] for key in sorted(records)]


def _ask_remaining(
    system: System,
    tasks: Sequence[EvaluationTask],
    runs: int,
    seed: int,
    answered_keys: Collection[AnswerKey],
) -> Iterator[tuple[AnswerKey, Answer]]:
    """Ask the questions that have no answer yet, and yield the answers as they arrive."""
    # Task by task and run by run, because each run has its own seed.
    for task, run in product(tasks, range(runs)):
        keys = [AnswerKey(task.name, run, row_index) for row_index in range(len(task.rows))]
        remaining_keys = [key for key in keys if key not in answered_keys]
        remaining_rows = [task.rows[key.row_index] for key in remaining_keys]
        for position, answer in system.answer_each(remaining_rows, seed + run):
            yield remaining_keys[position], answer
