"""A table, run: systems made one after another, asked, and put side by side."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentic_prompting.evaluation import (
    Comparison,
    Evaluation,
    EvaluationStopped,
    EvaluationTask,
    compare_systems,
    evaluate_agent,
    load_evaluation_task,
    save_run,
    write_tables,
)
from agentic_prompting.llm import Budget, LLMError, ReplayCache, charge

from .config import SystemConfig, TableConfig
from .systems import Unavailable, Workshop, connect

logger = logging.getLogger(__name__)


@dataclass
class TableRun:
    """What [`run_table`] returns.

    Args:
        evaluation ([`Evaluation`]): Results and answers.
        comparisons (`list[Comparison]`): With the baseline.
        skipped (`dict[str, str]`): Systems that could not be made, and why.
        left_out (`dict[str, str]`): What else of the paper's table is not there, and why.
        files (`dict[str, Path]`): The tables by kind.
    """

    evaluation: Evaluation
    comparisons: list[Comparison]
    skipped: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)


def run_table(
    config: TableConfig, sandbox: bool = False, output: str | Path | None = None, progress: bool = True
) -> TableRun:
    """Fill a table. What is in its folder already is not asked for again.

    An optimiser learns on one set of rows per task: where the tasks differ in kind, so do the prompts it finds.

    Args:
        config ([`TableConfig`]): The table.
        sandbox (`bool`, *optional*, defaults to `False`): Stand-ins for models and tasks; see `sandbox.py`.
        output (`str` or `Path`, *optional*): Instead of the configuration's.
        progress (`bool`, *optional*, defaults to `True`): Show progress bars, or in a file or a pipe a line a minute.

    Raises:
        `ValueError`: A task, model or metric does not exist.
        [`EvaluationStopped`]: A system cannot go on. Run again to go on.
    """
    config = config.in_sandbox() if sandbox else config
    folder = Path(output or config.output)
    run = TableRun(Evaluation(), [], left_out=dict(config.left_out))
    with ExitStack() as stack:
        cache = ReplayCache(folder / "replies.sqlite")
        stack.callback(cache.close)
        tasks, train, models = _sandbox_parts(config, folder) if sandbox else _real_parts(config, cache, stack)
        if sandbox:
            names = ", ".join(task.name for task in tasks)
            run.left_out[", ".join(config.tasks)] = f"no data sets in the sandbox; {names} stand in for them"
        budget = Budget(config.budget_usd, config.budget_tokens, folder / "spending.sqlite")
        charge(budget, **{name: chat for name, (chat, _) in models.items()})
        try:
            for system in config.systems:
                for task in tasks:
                    own = folder / _safe(task.name)
                    workshop = Workshop(config, models, train[task.name], _metric(task), own, cache)
                    _evaluate(run, config, system, workshop, task, sandbox, progress)
        except (EvaluationStopped, LLMError) as error:  # the latter of an optimiser
            raise EvaluationStopped(f"{error}. Spent so far: {budget}") from None
    run.evaluation.results.sort(key=lambda result: [one.name for one in config.systems].index(result.system))
    save_run(folder, run.evaluation)
    if config.baseline is not None and config.baseline not in run.skipped:
        run.comparisons = compare_systems(run.evaluation, config.baseline)
    title = f"{config.title}{' (sandbox: says nothing about real models)' if sandbox else ''}"
    run.files = write_tables(folder, run.evaluation, run.comparisons, title)
    return run


def _evaluate(
    run: TableRun,
    config: TableConfig,
    system: SystemConfig,
    workshop: Workshop,
    task: EvaluationTask,
    sandbox: bool,
    progress: bool,
) -> None:
    """One system on one task, into the run."""
    if sandbox:
        from .sandbox import stand_in

        system = stand_in(system, workshop.folder.parent)
    try:
        made = workshop.make(system)
    except Unavailable as reason:
        if system.name not in run.skipped:
            logger.warning("%s is left out: %s", system.name, reason)
        run.skipped[system.name] = str(reason)
        return
    part = evaluate_agent(
        {system.name: made},
        [task],
        config.metrics,
        config.n,
        config.runs,
        config.seed,
        workshop.folder,
        config.encoder,
        progress,
    )
    run.evaluation.results += part.results
    run.evaluation.records += part.records


Parts = tuple[list[EvaluationTask], Mapping[str, Any], Mapping[str, Any]]


def _real_parts(config: TableConfig, cache: ReplayCache, stack: ExitStack) -> Parts:
    """Tasks, training rows by task and connected models, as the configuration has them."""
    tasks = [load_evaluation_task(name, config.n, config.seed) for name in config.tasks]
    train: list[Any] = []
    if config.train_task is not None:
        train = load_evaluation_task(config.train_task, config.train_rows, config.seed + 1).rows
    return tasks, {task.name: train for task in tasks}, connect(config.models, cache, stack)


def _sandbox_parts(config: TableConfig, folder: Path) -> Parts:
    from .sandbox import SANDBOX_TASKS, sandbox_models, sandbox_task

    size = config.n or 32
    tasks = [sandbox_task(name, size, config.seed) for name in SANDBOX_TASKS]
    train = {name: sandbox_task(name, config.train_rows, config.seed, "train").rows for name in SANDBOX_TASKS}
    return tasks, train, {name: (model, {}) for name, model in sandbox_models(config.seed).items()}


def _metric(task: EvaluationTask) -> str:
    return task.metrics[0]


def _safe(name: str) -> str:
    return name.replace("/", "_")
