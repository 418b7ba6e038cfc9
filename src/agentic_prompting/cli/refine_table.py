"""A row group of ProRefine's Table 1: one of its sets in three verifier settings.

The program behind `agentic-prompting demo --method prorefine` and `examples/refine.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..llm import Budget, charge
from ..records import only_writer
from ..refine import START_PROMPTS, LabelVerifier, ProRefiner, RefinementResult
from .option_parser import OptionParser
from .options import Spending, option, refuse_options
from .refine import RefineModels


@dataclass
class RefineTableOptions(Spending):
    """The data set and the models."""

    task: str | None = option("One of ProRefine's five sets; by default the sandbox's puzzles.")
    split: str = option("The split to take the questions from.", "test")
    rows: int = option("Number of questions.", 100)
    data_files: str | None = option("Local file with the questions, instead of the hub.")
    task_model: str | None = option("The model that answers.")
    task_base_url: str | None = option("The answering model's OpenAI-compatible endpoint.")
    critic_model: str | None = option("The model that is feedback, optimizer and verifier in one.")
    critic_base_url: str | None = option("The critic's endpoint.")
    output_dir: Path = option("Folder for results, replies and the picture.", Path("runs/refine"))


SETTINGS = (RefineTableOptions,)  # the parser returns an object of each


def refine_table(arguments: Sequence[str]) -> None:
    """Refine, and print accuracy and iterations in the three verifier settings.

    Each setting writes its results to a file of its own in `--output_dir`; a run that was stopped
    goes on when started again.

    Args:
        arguments (`Sequence[str]`): The command line.
    """
    from ..report.refine_plots import accuracy_of, accuracy_table, iterations_of, plot_iterations
    from ..rewards import REASONING_SCORERS
    from ..sandbox.puzzles import SORTING, make_puzzles, puzzle_models

    (options,) = OptionParser("demo --method prorefine", SETTINGS).parse(arguments)
    # By default the puzzles of the sandbox, whose models are scripted.
    if options.task is None:
        refuse_options(
            options,
            (
                "split",
                "data_files",
                "task_model",
                "task_base_url",
                "critic_model",
                "critic_base_url",
            ),
            "without --task the models are scripted and the puzzles made up",
        )
    task = options.task or SORTING
    folder = options.output_dir
    score = REASONING_SCORERS.get(task)
    if score is None or (options.task and not (options.task_model and options.critic_model)):
        raise ValueError(
            f"--task is one of {', '.join(REASONING_SCORERS)}, with --task_model and --critic_model"
        )
    results: dict[str, list[RefinementResult]] = {}
    with ExitStack() as stack:
        # Only one run at a time may write to the folder.
        stack.enter_context(only_writer(folder / "refine"))
        # Scripted models and puzzles, or real models and one of the paper's sets.
        if options.task is None:
            roles: dict[str, Any] = dict(puzzle_models())
            rows: list[Any] = make_puzzles(options.rows, kinds=(SORTING,))
        else:
            roles = dict(_connect_roles(options, stack))
            rows = _load_rows(options)
        # One budget for all models and settings.
        budget = options.budget(folder / "spending.sqlite")
        charge(budget, **roles)

        # The three settings share all roles but the verifier.
        verifiers = {
            "no verifier": None,
            "verifier": roles.pop("verifier"),
            "optimal verifier": LabelVerifier(score),
        }
        # Each setting has a file of results, from which a stopped run goes on.
        for setting, verifier in verifiers.items():
            file = folder / f"{setting.replace(' ', '_')}.jsonl"
            refiner = ProRefiner(**roles, verifier=verifier)
            results[setting] = refiner.refine_all(START_PROMPTS[task], rows, output=file)
            _stop_at_fatal_error(results[setting], budget)

    # Accuracy laid out as in the paper, then iterations, then a picture of them.
    model = options.task_model or "scripted (sandbox)"
    accuracies = {}
    for setting, setting_results in results.items():
        accuracies[setting] = {model: accuracy_of(setting_results, rows, score)}
    print(accuracy_table({task: accuracies}))
    for setting, setting_results in results.items():
        print(f"{setting:18} {iterations_of(setting_results).mean:.2f} iterations")
    try:
        plot_iterations({task: results}, folder / "iterations.png")
    except ImportError as error:
        print(f"no picture: {error}")


def _stop_at_fatal_error(results: Sequence[RefinementResult], budget: Budget) -> None:
    """End the run at an error that cannot be waited out."""
    for result in results:
        if result.error is not None and result.error.fatal:
            raise SystemExit(
                f"stopped: {result.error}. Spent so far: {budget}; the same command goes on"
            )


def _connect_roles(options: RefineTableOptions, stack: ExitStack) -> dict[str, Any]:
    """A client for each role at two endpoints, with a recording of the replies."""
    models = RefineModels(
        replay_cache=options.output_dir / "replies.sqlite",
        task_model=options.task_model,
        task_base_url=options.task_base_url,
        feedback_model=options.critic_model,
        feedback_base_url=options.critic_base_url,
    )
    return dict(models.connect_roles(stack))


def _load_rows(options: RefineTableOptions) -> list[Any]:
    from ..data import is_user_data, load_task

    task = str(options.task)
    split = "train" if is_user_data(task) else options.split  # a file has none
    return list(load_task(task, split, options.rows, data_files=options.data_files))
