"""Running a table: each system is made and asked in turn, then all are compared."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from agentic_prompting.cli.terminal import show_progress
from agentic_prompting.data import hold_out, is_user_data, load_task
from agentic_prompting.evaluation import (
    Comparison,
    Evaluation,
    EvaluationStopped,
    EvaluationTask,
    Result,
    compare_systems,
    evaluate_agent,
    load_evaluation_task,
    save_run,
    write_tables,
)
from agentic_prompting.evaluation.systems import Row
from agentic_prompting.llm import Budget, LLMError, ReplayCache, Usage, charge
from agentic_prompting.records import only_writer

from .config import TableConfig
from .estimates import average_results, over_seeds, wald_column
from .figures import draw_figures, write_case
from .optimise import calls_to_score_once
from .systems import Lessons, Unavailable, Workshop, connect, folder_of_task

logger = logging.getLogger(__name__)


@dataclass
class TableRun:
    """What [`run_table`] returns.

    Args:
        evaluation ([`Evaluation`]): Results and answers.
        comparisons (`list[Comparison]`): The comparisons with the baseline.
        skipped (`dict[str, str]`): The reason for each system that could not be made.
        left_out (`dict[str, str]`): The reason for each other part of the paper's table that is
            missing.
        not_asked (`dict[tuple[str, str], str]`): The reason for each system and task that it cannot
            answer: a row without figures.
        notes (`dict[tuple[str, str], str]`): Remarks on a system's row, such as that an optimiser
            has found nothing.
        files (`dict[str, Path]`): The tables by kind, the pictures by name.
        spent (`dict[str, Usage]`): Tokens and dollars by model, those of optimisers and of earlier
            runs included.
    """

    evaluation: Evaluation
    comparisons: list[Comparison]
    skipped: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    not_asked: dict[tuple[str, str], str] = field(default_factory=dict)
    notes: dict[tuple[str, str], str] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    spent: dict[str, Usage] = field(default_factory=dict)


def run_table(
    config: TableConfig,
    sandbox: bool = False,
    output: str | Path | None = None,
    progress: bool = True,
    seeds: Sequence[int] = (),
) -> TableRun:
    """Fill a table. Answers that are in its folder are not requested again.

    Args:
        config ([`TableConfig`]): The table.
        sandbox (`bool`, *optional*, defaults to `False`): Use stand-ins for models and tasks; see
            `sandbox.py`.
        output (`str` or `Path`, *optional*): A folder in place of the configuration's.
        progress (`bool`, *optional*, defaults to `True`): Show progress bars, or in a file or a
            pipe a line a minute.
        seeds (`list[int]`, *optional*): Run everything once for each seed, with the agent trained
            with it (`{seed}` in its folder, else `-seed<N>` behind it), baselines trained and
            prompts optimised with it, and each question asked once. The table has the means over
            seeds, with Student's interval over them.

    Raises:
        `ValueError`: A task, model or metric does not exist, `seeds` has only one, or another
        process fills the table.
        [`EvaluationStopped`]: A system cannot continue. The same call resumes the table.
    """
    if len(set(seeds)) != len(seeds) or len(seeds) == 1:
        raise ValueError(
            f"give at least two different seeds for an interval over them, not {list(seeds)}"
        )
    config = config.in_sandbox() if sandbox else config
    folder = Path(output or config.output)
    run = TableRun(Evaluation(), [], left_out=dict(config.left_out))
    with ExitStack() as stack:
        stack.enter_context(only_writer(folder / "evaluation"))
        cache = ReplayCache(folder / "replies.sqlite")
        stack.callback(cache.close)
        if sandbox:
            with show_progress("preparing the questions and models of the sandbox"):
                tasks, lessons, models = _sandbox_parts(config, run)
        else:
            with show_progress("loading the questions"):
                tasks, lessons, models = _real_parts(config, cache, stack)
        _check_calls(config, lessons)
        budget = Budget(config.budget_usd, config.budget_tokens, folder / "spending.sqlite")
        charge(budget, **{name: chat for name, (chat, _) in models.items()})
        try:
            parts = []
            for seed in seeds or (None,):
                seed_config = config
                seed_folder = folder
                if seed is not None:
                    seed_config = replace(config, seed=seed, runs=1)
                    seed_folder = folder / f"seed-{seed}"
                shop = Workshop(seed_config, models, seed_folder, cache, seed)
                part = _evaluated(run, shop, tasks, lessons, sandbox, progress)
                save_run(seed_folder, part)
                part.results += _averages(config, [task.name for task in tasks], part)
                parts.append(part)
        except (EvaluationStopped, LLMError) as error:  # the latter of an optimiser
            raise EvaluationStopped(f"{error}. Spent so far: {budget}") from None
    run.spent = budget.by_account()
    run.evaluation = _together(parts) if seeds else parts[0]
    _finish(run, config, folder, sandbox, seeds)
    return run


def _check_calls(config: TableConfig, lessons: Mapping[str, Lessons]) -> None:
    """Raise `ValueError` if an optimiser may not make the calls that its first prompt's score
    takes.
    """
    for system in config.systems:
        for lesson in lessons.values():
            needed = calls_to_score_once(system.kind, lesson.train, lesson.validation)
            if needed > config.calls_budget:
                raise ValueError(
                    f"calls_budget is {config.calls_budget}, and {system.name} needs {needed} "
                    "calls to score its first prompt: raise calls_budget, or lower train_rows"
                )


def _evaluated(
    run: TableRun,
    shop: Workshop,
    tasks: Sequence[EvaluationTask],
    lessons: Mapping[str, Lessons],
    sandbox: bool,
    progress: bool,
) -> Evaluation:
    """Every system on every task."""
    config = shop.config
    evaluation = Evaluation()
    for system in config.systems:
        if sandbox:
            from .sandbox import no_way_to_answer, stand_in

            for task in tasks:
                reason = no_way_to_answer(system, task)
                if reason:
                    run.not_asked[system.name, task.name] = reason
            folder = shop.folder if shop.seed is None else shop.folder.parent
            system = stand_in(system, folder, shop.seed or 0)
        for task in tasks:
            if (system.name, task.name) in run.not_asked:
                continue
            try:
                with show_progress(f"preparing {system.name} for {task.name}"):
                    answering = shop.make(system, task, lessons[task.name])
            except Unavailable as error:
                if system.name not in run.skipped:
                    logger.warning("%s is left out: %s", system.name, error)
                run.skipped[system.name] = str(error)
                continue
            if (system.name, task.name) in shop.notes:
                run.notes[system.name, task.name] = shop.notes[system.name, task.name]
            # A terminal shows the progress of the answers instead.
            asking = show_progress(f"asking {system.name} the questions of {task.name}")
            with nullcontext() if progress else asking:
                part = evaluate_agent(
                    {system.name: answering},
                    [task],
                    n=None,
                    runs=config.runs,
                    seed=config.seed,
                    output=shop.folder / folder_of_task(task.name),
                    encoder=config.encoder,
                    progress=progress,
                )
            evaluation.results += part.results
            evaluation.records += part.records
    return evaluation


def _averages(config: TableConfig, tasks: Sequence[str], evaluation: Evaluation) -> list[Any]:
    """The rows of means over tasks, for systems that have a result on each task."""
    task_of = dict(zip(config.tasks, tasks, strict=True))
    results_of: dict[str, dict[str, Result]] = {}
    for result in evaluation.results:
        results_of.setdefault(result.system, {})[result.task] = result
    rows = []
    for name, names in config.averages.items():
        averaged = [task_of[task] for task in names]
        for results in results_of.values():
            if all(task in results for task in averaged):
                rows.append(average_results([results[task] for task in averaged], name))
    return rows


def _together(parts: Sequence[Evaluation]) -> Evaluation:
    """The evaluations of several seeds as one; systems without a result for every seed are left
    out.
    """
    results_of: dict[tuple[str, str], list[Result]] = {}
    records: list[dict[str, Any]] = []
    for part in parts:
        records += part.records
        latest = {(result.system, result.task): result for result in part.results}
        for key, result in latest.items():
            results_of.setdefault(key, []).append(result)
    complete = [results for results in results_of.values() if len(results) == len(parts)]
    return Evaluation([over_seeds(results) for results in complete], records)


def _finish(
    run: TableRun, config: TableConfig, folder: Path, sandbox: bool, seeds: Sequence[int]
) -> None:
    """Comparisons, tables, pictures and the case."""
    answered = {result.system for result in run.evaluation.results}

    # What the systems are compared with: one baseline, and those that earn them stars.
    if config.baseline is not None:
        baselines = {system.name: config.baseline_of(system) for system in config.systems}
        against = {name: baseline for name, baseline in baselines.items() if baseline in answered}
        run.comparisons = compare_systems(run.evaluation, against)
    marks = {}
    if config.marks and not seeds:  # the interval over seeds differs
        for system in config.systems:
            marked = [config.baseline_of(system, name) for name in config.marks]
            marks[system.name] = [name for name in marked if name != system.name]

    title = config.title
    if sandbox:
        title += " (sandbox: says nothing about real models)"
    if seeds:
        title += f"; means over seeds {', '.join(map(str, seeds))}, intervals over them"

    # Columns beside the metrics.
    wald = wald_column(run.evaluation.results, marks) if marks else None
    notes = {**run.notes, **run.not_asked}

    def extra_columns(result: Result) -> dict[str, str]:
        columns = {} if wald is None else wald(result)
        if notes:
            columns["note"] = notes.get((result.system, result.task), "")
        return columns

    blank_rows = [_blank_result(system, task) for system, task in run.not_asked]
    rows = Evaluation([*run.evaluation.results, *blank_rows])
    run.files = write_tables(folder, rows, run.comparisons, title, extra_columns)
    draw_figures(run, config, folder)
    if config.case is not None and config.case in answered:
        run.files["case"] = write_case(run.evaluation, config.case, folder / "case.md")


def _blank_result(system: str, task: str) -> Result:
    """The row of a system that is not asked for a task."""
    return Result(
        system=system,
        task=task,
        values={},
        estimates={},
        answers=0,
        failed=0,
        ungraded={},
        fit_calls=0,
        calls=0,
        tokens=0,
        worth_usd=0,
        cost_usd=0,
        seconds=0,
    )


Parts = tuple[list[EvaluationTask], Mapping[str, Lessons], Mapping[str, Any]]


def _real_parts(config: TableConfig, cache_of_replies: ReplayCache, stack: ExitStack) -> Parts:
    """The configuration's tasks, the training rows of each, and the connected models."""
    tasks = []
    lessons = {}
    models = connect(config.models, cache_of_replies, stack)
    for name, (chat, _) in models.items():
        if chat.needs_key and not chat.find_key():
            fix = (
                "export OPENAI_API_KEY=YOUR_KEY, give its `base_url`, or see the table run with "
                "--sandbox"
            )
            raise ValueError(f"no key for {name} ({chat.model}): {fix}")

    def loading_options(name: str) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if name in config.data_files:
            options["data_files"] = config.data_files[name]
        if is_user_data(name) and config.columns:
            options["columns"] = dict(config.columns)
        return options

    @cache
    def load_file(name: str) -> Any:
        """A file of rows, loaded once, because loading warns of the rows that it drops."""
        return load_task(name, **loading_options(name))

    @cache
    def load(name: str, n: int | None, seed: int, learn: bool = True) -> EvaluationTask:
        try:
            if config.held_out is not None and is_user_data(name):
                rows = _part_of_file(load_file(name), n, seed, config.held_out, learn)
                return EvaluationTask(Path(name).stem, rows)
            return load_evaluation_task(name, n, seed, **loading_options(name))
        except RuntimeError as error:  # none of its sources could be loaded
            raise ValueError(" ".join(str(error).split())) from error

    def load_fit_rows() -> Sequence[Row] | None:
        if not config.fit_task:
            return None
        return load(config.fit_task, config.fit_rows, config.seed + 1).rows

    for name in config.tasks:
        task = load(name, config.n, config.seed, learn=False)
        tasks.append(replace(task, metrics=tuple(config.metrics_of(name) or task.metrics)))

        # The rows that optimisers learn from, and those by which they choose.
        train = _for_task(config.train_task, name)
        if train is None and config.held_out is not None and is_user_data(name):
            train = name  # the rows that are not held out
        train_rows: Sequence[Row] = []
        if train:
            train_rows = load(train, config.train_rows, config.seed + 1).rows
        validation = _for_task(config.validation_task, name)
        validation_rows = None
        if validation:
            validation_rows = load(validation, config.validation_rows, config.seed + 1).rows
        lessons[task.name] = Lessons(name, train_rows, validation_rows, load_fit_rows)
    return tasks, lessons, models


def _part_of_file(file_rows: Any, n: int | None, seed: int, share: float, learn: bool) -> list[Row]:
    """At most `n` rows of a file: of those to learn from, or of the held-out ones."""
    learned, held_out = hold_out(file_rows, share)
    rows = list(learned if learn else held_out)
    if n is not None and n < len(rows):
        rows = random.Random(seed).sample(rows, n)
    return rows


def _for_task(setting: str | Mapping[str, str] | None, task: str) -> str | None:
    """The value for a task of a setting that may differ between tasks."""
    if isinstance(setting, Mapping):
        return setting.get(task, setting.get("default"))
    return setting


def _sandbox_parts(config: TableConfig, run: TableRun) -> Parts:
    from .sandbox import sandbox_models, sandbox_task, sandbox_task_for, stand_in_tasks

    tasks = stand_in_tasks(config)
    lessons = {}
    for name, task in zip(config.tasks, tasks, strict=True):
        rows = sandbox_task(sandbox_task_for(name), config.train_rows, config.seed, "train").rows
        lessons[task.name] = Lessons(name, rows)
    run.left_out["data sets"] = (
        "not read in the sandbox: each has questions of the task in brackets"
    )
    if any("semantic_similarity" in (config.metrics_of(name) or ()) for name in config.tasks):
        run.left_out["semantic_similarity"] = (
            "needs a sentence encoder, which the sandbox does without"
        )
    models = {name: (model, {}) for name, model in sandbox_models(config.seed).items()}
    return tasks, lessons, models
