"""`evaluate_agent`: systems on tasks, several runs each, with every answer on disk and an interval at every number.

Nothing that was answered is asked again: a run that was killed goes on. Failed answers are counted apart, and never as
wrong ones.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..data import TASKS, find_task, is_user_data, load_task, validate_dataset
from ..llm import spans
from ..records import Record, RecordFile, digest, only_writer
from ..rewards.answer_checks import check_answers_of_rows
from ..rollout.progress import progress as progress_of
from .metrics import Encoder, Metric, find_metrics
from .scoring import Result, summarise
from .systems import Answer, Row, System, as_system


class EvaluationStopped(RuntimeError):
    """A system cannot continue: a wrong key, a spent budget. Its answers are on disk; run again to resume."""


@dataclass(frozen=True)
class EvaluationTask:
    """Questions to be asked.

    Args:
        name (`str`): For tables and files.
        rows (`list`): With `question` and `answers`.
        metrics (`tuple[str, ...]`): The metrics to report, the main one first.
    """

    name: str
    rows: list[Row]
    metrics: tuple[str, ...] = ("exact_match", "token_f1")


@dataclass
class Evaluation:
    """The result of [`evaluate_agent`].

    Args:
        results (`list[Result]`): One per system and task.
        records (`list[dict]`): Every answer.
    """

    results: list[Result] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def result(self, system: str, task: str) -> Result:
        """One system on one task.

        Raises:
            `KeyError`: There is none.
        """
        return {(result.system, result.task): result for result in self.results}[system, task]


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
    """Ask systems the questions of tasks, score their answers.

    Args:
        system ([`System`], `Callable` or `dict` of them by name): A [`System`], or a function from questions to answers
            (lists of texts). [`PromptAgent`] becomes one by [`AgentSystem`].
        tasks (`list`, `dict` or `datasets.Dataset`): Names that [`load_task`] knows (`"hotpotqa"`, or
            `"hotpotqa/validation"` with its split; `test` where there is one, else `validation`), [`EvaluationTask`]s,
            rows by name, or the rows of one task: a data set, or a list of dicts.
        metrics (`list` or `dict`, *optional*): Names of [`METRICS`]; names, paths or objects of `evaluate` metrics;
            functions. See [`find_metrics`]. By default each task's own.
        n (`int`, *optional*, defaults to `128`): Questions per task, sampled with `seed`; `None`, or a task with fewer:
            all. 128 is the paper's (Appendix E).
        runs (`int`, *optional*, defaults to `3`): How often each question is asked; with seeds `seed`, `seed + 1`, ...
            From 2 on the results also have pass@1 to pass@`runs`, the majority's score and the spread between runs.
        seed (`int`, *optional*, defaults to `0`): Of samples and runs.
        output (`str` or `Path`, *optional*): Folder for `<system>.jsonl`, one line per answer. If it holds some
            already, only the others are asked for.
        encoder (`str` or [`Encoder`], *optional*): For `semantic_similarity`.
        progress (`bool`, *optional*, defaults to `True`): Show a progress bar after two seconds.

    Returns:
        [`Evaluation`]

    Raises:
        `ValueError`: Before anything is asked: a task, split or metric does not exist, a row lacks its question or its
            answers (names it), `output` holds another system's answers, or another process is writing them.
        [`EvaluationStopped`]: A system failed in a way that no other question can escape.
    """
    if runs < 1 or (n is not None and n < 1):
        raise ValueError(f"runs and n must be at least 1, got {runs} and {n}")
    systems = system if isinstance(system, Mapping) else {"system": system}
    prepared = [_prepared(task, n, seed) for task in _listed_tasks(tasks)]
    names = [task.name for task in prepared]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"two tasks are called {twice[0]!r}: give each a name of its own (a file's is its task's)"
        )
    shared = None if metrics is None else find_metrics(metrics, encoder)
    chosen = {
        task.name: find_metrics(task.metrics, encoder) if shared is None else shared
        for task in prepared
    }
    for task in prepared:
        for metric in chosen[task.name].values():
            check_answers_of_rows(metric, task.rows)
    evaluation = Evaluation()
    for name, one in systems.items():
        answering = as_system(one)
        path = None if output is None else Path(output) / f"{file_name(name)}.jsonl"
        with (
            nullcontext() if path is None else only_writer(path),
            spans.workflow("evaluation", runs=runs),
        ):
            records = _answers(name, answering, prepared, runs, seed, path, progress)
        evaluation.records += records
        for task in prepared:
            of_task = [record for record in records if record["task"] == task.name]
            evaluation.results.append(
                summarise(name, task.name, of_task, chosen[task.name], answering.fit_calls)
            )
    return evaluation


def file_name(name: str) -> str:
    """A system's name as a file's."""
    return re.sub(r"[^\w.+-]+", "_", name)


def load_evaluation_task(
    name: str, n: int | None = None, seed: int = 0, **options: Any
) -> EvaluationTask:
    """A task by its name, `name` or `name/split`, or a file of one's own; `options` go to [`load_task`].

    Raises:
        `ValueError`: It does not exist.
    """
    if is_user_data(name):
        return EvaluationTask(Path(name).stem, _sampled(list(load_task(name, **options)), n, seed))
    base, _, split = name.partition("/")
    has = TASKS[base].expected_rows if base in TASKS else {"test": 0}
    base, split, task = find_task(
        base, split or next((one for one in ("test", "validation") if one in has), next(iter(has)))
    )
    few = split in task.expected_rows and n is not None and task.expected_rows[split] <= n
    rows = load_task(base, split, None if few else n, seed, **options)
    return EvaluationTask(name, list(rows), task.metrics)


def _listed_tasks(tasks: Any) -> list[str | EvaluationTask]:
    """The tasks of [`evaluate_agent`] as a list of names and [`EvaluationTask`]s.

    Raises:
        `ValueError`: It holds something else; the message says how to pass it.
    """
    advice = 'pass a list of names, {"my task": rows}, or the rows of one task (a data set or a list of dicts)'
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


def _holds_rows(rows: Any) -> bool:
    return isinstance(rows, Iterable) and not isinstance(rows, str | bytes | Mapping)


def _task_of_rows(rows: list[Row]) -> EvaluationTask:
    """Rows as one task, named after their column `task` if all have the same one, with that task's metrics."""
    names = {str(row.get("task") or "") for row in rows}
    name = names.pop() if len(names) == 1 else ""
    if name in TASKS:
        return EvaluationTask(name, rows, TASKS[name].metrics)
    return EvaluationTask(name or "rows", rows)


def _prepared(task: str | EvaluationTask, n: int | None, seed: int) -> EvaluationTask:
    """A task with its sample drawn and its rows looked at."""
    loaded = load_evaluation_task(task, n, seed) if isinstance(task, str) else task
    rows = _sampled(loaded.rows, n, seed)
    try:
        validate_dataset(rows)
    except ValueError as error:
        raise ValueError(f"{loaded.name}: {error}") from error
    return EvaluationTask(loaded.name, rows, loaded.metrics)


def _sampled(rows: list[Row], n: int | None, seed: int) -> list[Row]:
    if n is None or len(rows) <= n:
        return rows
    return [rows[i] for i in random.Random(seed).sample(range(len(rows)), n)]


Key = tuple[str, int, int]
"""Which answer: of which task, in which run, to the question at which place of the sample."""


def _answers(
    name: str,
    system: System,
    tasks: Sequence[EvaluationTask],
    runs: int,
    seed: int,
    path: Path | None,
    progress: bool,
) -> list[Record]:
    """All records of one system, those that are on disk already among them."""
    own = digest(system.settings)
    done = {} if path is None else _saved(path, own, tasks)
    file = None if path is None else RecordFile(path)
    wanted = [(task, run) for task in tasks for run in range(runs)]
    records: dict[Key, Record] = {}
    total = sum(len(task.rows) for task, _ in wanted)
    with progress_of(total, name, shown=progress) as bar:
        for task, run in wanted:
            keys: list[Key] = [(task.name, run, place) for place in range(len(task.rows))]
            records |= {key: done[key] for key in keys if key in done}
            left = [key for key in keys if key not in done]
            bar.update(len(keys) - len(left))
            for position, answer in system.answer_each(
                [task.rows[place] for _, _, place in left], seed + run
            ):
                record = records[left[position]] = _record(name, task, left[position], answer)
                if file is not None:
                    file.append([{**record, "settings": own}])
                bar.update()
                if answer.fatal and answer.error is not None:
                    raise EvaluationStopped(
                        f"{name}: {answer.error}; {len(records)} of {total} answers are there"
                    )
    return [records[key] for key in sorted(records)]


def _saved(path: Path, settings: str, tasks: Sequence[EvaluationTask]) -> dict[Key, Record]:
    """The answers on disk, with the accepted ones as they are now. Failures are taken away: they are asked again."""
    done: dict[Key, Record] = {}
    rows = {task.name: task.rows for task in tasks}

    def worth_keeping(record: Record) -> bool:
        if record.get("settings") != settings:
            raise ValueError(
                f"{path} holds answers of another system or other settings of it: give another output folder, "
                "or go on with the settings it was begun with"
            )
        place, of_task = record["place"], rows.get(record["task"], [])
        if place < len(of_task) and record["question"] != of_task[place]["question"]:
            raise ValueError(
                f"{path} holds answers to another sample of {record['task']} (question {place} is another): go on "
                "with the n and seed it was begun with, or give another output folder"
            )
        if record.get("error") is not None:
            return False
        done[key_of(record)] = record
        return True

    file = RecordFile(path)
    file.keep(worth_keeping)
    for (task, run, place), record in list(done.items()):
        accepted = (
            list(rows[task][place]["answers"])
            if place < len(rows.get(task, []))
            else record["answers"]
        )
        if accepted == record["answers"]:
            continue
        if record.get("judged") is not None:  # by what was accepted then
            del done[task, run, place]
        else:
            done[task, run, place] = {**record, "answers": accepted}
            file.append([done[task, run, place]])  # readers take the last
    return done


def _record(system: str, task: EvaluationTask, key: Key, answer: Answer) -> Record:
    (_, run, place), fields = key, answer.to_json()
    row = task.rows[place]
    return {
        "system": system,
        "task": task.name,
        "run": run,
        "place": place,
        "id": str(row.get("id", place)),
        "question": row["question"],
        "answers": list(row["answers"]),
        "answer": fields.pop("text", None),
        **fields,
    }


def read_records(paths: Iterable[str | Path]) -> list[Record]:
    """All answers in some files; of a question that was asked again the last one.

    Raises:
        `ValueError`: A file holds something else; names it. A torn last line is left out.
    """
    records: dict[tuple[str, Key], Record] = {}
    for path in paths:
        for record in RecordFile(path):
            if not {"system", "task", "run", "place"} <= set(record):
                raise ValueError(f"{path} holds a line that is no record of an evaluation")
            records[record["system"], key_of(record)] = record
    return list(records.values())


def key_of(record: Mapping[str, Any]) -> Key:
    """Which answer a record is."""
    return record["task"], record["run"], record["place"]
