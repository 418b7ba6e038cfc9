"""`evaluate_agent`: systems on tasks, several runs each, with every answer on disk and an interval at every number.

Nothing that was answered is asked again: a run that was killed goes on. Failed answers are counted apart, and never as
wrong ones.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..data import TASKS, Task, find_task, is_own, load_task, validate_dataset
from ..rollout.progress import progress as progress_of
from .answers import Answer, Row, System, as_system
from .records import Key, Record, RecordFile
from .scores import Score, find_metrics
from .scoring import Result, summarise
from .similarity import Encoder

Metrics = Sequence[str] | Mapping[str, Score]


class EvaluationStopped(RuntimeError):
    """A system cannot go on: a wrong key, a spent budget. What it answered is on disk; run again to go on."""


@dataclass(frozen=True)
class EvaluationTask:
    """Questions to be asked.

    Args:
        name (`str`): For tables and files.
        rows (`list`): With `question` and `answers`.
        metrics (`tuple[str, ...]`): What it is reported in, the one that counts first.
    """

    name: str
    rows: list[Row]
    metrics: tuple[str, ...] = ("exact_match", "token_f1")


@dataclass
class Evaluation:
    """What [`evaluate_agent`] returns.

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
        for result in self.results:
            if (result.system, result.task) == (system, task):
                return result
        raise KeyError(f"no result of {system!r} on {task!r}")


def evaluate_agent(
    system: System | Callable[..., Any] | Mapping[str, System | Callable[..., Any]],
    tasks: Sequence[str | EvaluationTask] | Mapping[str, Iterable[Row]],
    metrics: Metrics | None = None,
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
        tasks (`list` or `dict`): Names that [`load_task`] knows (`"hotpotqa"`, or `"hotpotqa/validation"` with its
            split; `test` where there is one, else `validation`), [`EvaluationTask`]s, or rows by name.
        metrics (`list[str]` or `dict[str, Callable]`, *optional*): Names of [`METRICS`], or functions by name. By
            default each task's own.
        n (`int`, *optional*, defaults to `128`): Questions per task, sampled with `seed`; `None`, or a task with fewer:
            all. 128 is the paper's (Appendix E).
        runs (`int`, *optional*, defaults to `3`): How often each question is asked; with seeds `seed`, `seed + 1`, ...
        seed (`int`, *optional*, defaults to `0`): Of samples and runs.
        output (`str` or `Path`, *optional*): Folder for `<system>.jsonl`, one line per answer. If it holds some
            already, only the others are asked for.
        encoder (`str` or [`Encoder`], *optional*): For `semantic_similarity`.
        progress (`bool`, *optional*, defaults to `True`): Show how far it is: a bar after two seconds, or in a file
            or a pipe a line a minute.

    Returns:
        [`Evaluation`]

    Raises:
        `ValueError`: Before anything is asked: a task, split or metric does not exist, a row lacks its question or its
            answers (names it), or `output` holds another system's answers.
        [`EvaluationStopped`]: A system failed in a way that no other question can escape.
    """
    if runs < 1 or (n is not None and n < 1):
        raise ValueError(f"runs and n must be at least 1, got {runs} and {n}")
    systems = system if isinstance(system, Mapping) else {"system": system}
    asked = [_prepared(task, n, seed) for task in _tasks(tasks)]
    chosen = {task.name: _metrics(task, metrics, encoder) for task in asked}
    evaluation = Evaluation()
    for name, one in systems.items():
        answering = as_system(one)
        path = None if output is None else Path(output) / f"{file_name(name)}.jsonl"
        records = _answers(name, answering, asked, runs, seed, path, progress)
        evaluation.records += records
        for task in asked:
            of_task = [record for record in records if record["task"] == task.name]
            evaluation.results.append(summarise(name, task.name, of_task, chosen[task.name], answering.fit_calls))
    return evaluation


def file_name(name: str) -> str:
    """A system's name as a file's."""
    return re.sub(r"[^\w.+-]+", "_", name)


def evaluation_split(task: Task) -> str:
    """The split to evaluate on: `test` where it has public answers, else `validation`, else what there is."""
    return next(
        (split for split in ("test", "validation") if split in task.expected_rows), next(iter(task.expected_rows))
    )


def load_evaluation_task(name: str, n: int | None = None, seed: int = 0, **options: Any) -> EvaluationTask:
    """A task by its name, `name` or `name/split`, or a file of one's own; `options` go to [`load_task`].

    Raises:
        `ValueError`: It does not exist.
    """
    if is_own(name):
        return EvaluationTask(Path(name).stem, _sampled(list(load_task(name, **options)), n, seed))
    base, _, split = name.partition("/")
    base, split, task = find_task(base, split or ("test" if base not in TASKS else evaluation_split(TASKS[base])))
    few = split in task.expected_rows and n is not None and task.expected_rows[split] <= n
    rows = load_task(base, split, None if few else n, seed, **options)
    return EvaluationTask(name, list(rows), task.metrics)


def _tasks(tasks: Sequence[str | EvaluationTask] | Mapping[str, Iterable[Row]]) -> list[str | EvaluationTask]:
    if isinstance(tasks, Mapping):
        return [EvaluationTask(name, list(rows)) for name, rows in tasks.items()]
    if isinstance(tasks, str):
        raise ValueError(f"tasks must be a list, got the text {tasks!r}")
    return list(tasks)


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


def _metrics(task: EvaluationTask, metrics: Metrics | None, encoder: str | Encoder | None) -> dict[str, Score]:
    if isinstance(metrics, Mapping):
        return dict(metrics)
    return find_metrics(task.metrics if metrics is None else metrics, encoder)


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
    file = None if path is None else RecordFile(path, system.settings)
    done = {} if file is None else file.done
    wanted = [(task, run) for task in tasks for run in range(runs)]
    records: dict[Key, Record] = {}
    total = sum(len(task.rows) for task, _ in wanted)
    try:
        with progress_of(total, name, shown=progress) as bar:
            for task, run in wanted:
                saved = {place: done[key] for place, key in _keys(task, run) if key in done}
                _check_same(saved, task, path)
                records.update({Key(task.name, run, place): record for place, record in saved.items()})
                bar.update(len(saved))
                left = [place for place in range(len(task.rows)) if place not in saved]
                for position, answer in system.answer_each([task.rows[place] for place in left], seed + run):
                    record = _record(name, task, run, left[position], answer)
                    records[Key(task.name, run, left[position])] = record
                    if file is not None:
                        file.add(record)
                    bar.update()
                    if answer.fatal and answer.error is not None:
                        raise EvaluationStopped(f"{name}: {answer.error}; {len(records)} of {total} answers are there")
    finally:
        if file is not None:
            file.close()
    return [records[key] for key in sorted(records)]


def _keys(task: EvaluationTask, run: int) -> Iterable[tuple[int, Key]]:
    return ((place, Key(task.name, run, place)) for place in range(len(task.rows)))


def _check_same(saved: Mapping[int, Record], task: EvaluationTask, path: Path | None) -> None:
    for place, record in saved.items():
        if record["question"] != task.rows[place]["question"]:
            raise ValueError(
                f"{path} holds answers to another sample of {task.name} (question {place} is another): go on with the "
                "n and seed it was begun with, or give another output folder"
            )


def _record(system: str, task: EvaluationTask, run: int, place: int, answer: Answer) -> Record:
    row, fields = task.rows[place], answer.to_json()
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
