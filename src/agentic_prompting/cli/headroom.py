"""`agentic-prompting headroom`: what can be gained on a task, before money is spent on it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..environments import Workers
from ..evaluation.headroom_figures import HEADROOM_FILE
from ..refine import ProRefiner
from .example_files import find_example
from .headroom_options import HeadroomOptions
from .hub import check_agent, find_model
from .loader import load_environment, load_reward, load_score, make_untrained_spec
from .option_parser import OptionParser
from .script import print_error
from .terminal import print_json, print_text, show_progress

if TYPE_CHECKING:
    from ..agent import PromptAgent
    from ..evaluation.headroom import Headroom
    from ..llm import Budget
    from ..rollout import Environment

SETTINGS = (HeadroomOptions,)  # the parser returns an object of each


def headroom(arguments: Sequence[str]) -> int:
    """Measure what can be gained on a task, and whether there is a signal, before a run."""
    from ..evaluation.headroom import HeadroomSettings, headroom as measure_headroom

    (options,) = OptionParser("headroom", SETTINGS, headroom.__doc__).parse(arguments)
    options.config = find_example(options.config)
    options.check()
    # Every reply is recorded, so that a later run with the same rows does not pay for it again.
    if options.replay_cache is None and not options.sandbox:
        options.replay_cache = options.folder / "replies.sqlite"
    options.start_tracing()
    with ExitStack() as stack:
        # A scripted task, that of a training run, or your rows and models at real endpoints.
        if options.sandbox:
            settings_fields = _sandbox_settings(options)
        elif options.config is not None:
            from .headroom_run import connect_run

            settings_fields = connect_run(options, stack)
        else:
            settings_fields = _connect_settings(options, stack)
        # Measure, with no more calls in each measurement than the options allow.
        rows = settings_fields.pop("rows")
        settings = HeadroomSettings(
            **settings_fields,
            tried=options.tried,
            repeats=options.repeats,
            calls=options.calls,
            top_up_calls=options.top_up_calls,
            delta=options.delta,
            seed=options.seed,
        )
        with show_progress("measuring"):
            measured = measure_headroom(rows, settings)
    _show(measured, options)
    return 1 if measured.stopped else 0


def _show(measured: Headroom, options: HeadroomOptions) -> None:
    """Save and print what was measured."""
    path = options.folder / HEADROOM_FILE
    # An empty result takes the place of none, and of no earlier one.
    if measured.stopped and not measured.figures.measured:
        if options.json:
            print_json(measured.to_json())
        else:
            print_text(measured.report())
        kept = f"{path} of an earlier run stays" if path.exists() else "no file is written"
        print_error(f"stopped before anything was measured: {measured.stopped}; {kept}")
        return
    measured.save(options.folder)
    files = [str(path)]
    # The picture needs matplotlib, which comes with an extra.
    from ..report import plot_headroom

    picture = path.with_suffix(".png")
    with suppress(ImportError):
        if measured.figures.measured:
            plot_headroom(measured.figures, picture)
            files.append(str(picture))
    if options.json:
        print_json({**measured.to_json(), "file": str(path)})
        return
    print_text(measured.report())
    print(f"written to {', '.join(files)}")
    # The measurements that were made before the stop are saved.
    if measured.stopped:
        print_error(f"stopped early: {measured.stopped}")


def _sandbox_settings(options: HeadroomOptions) -> dict[str, Any]:
    """Puzzles, a scripted solver, and a scripted writer of prompts."""
    from ..evaluation.metrics import each
    from ..sandbox.puzzles import PuzzleSolver, make_puzzles, prompt_writer, score_puzzle

    return {
        "rows": make_puzzles(1000, options.seed),
        "policy": PuzzleSolver(options.seed),
        "prompts": [options.prompt],
        "reference": prompt_writer(),
        "metric": each(score_puzzle),
    }


def _connect_settings(options: HeadroomOptions, stack: ExitStack) -> dict[str, Any]:
    """Rows, and models at real endpoints that are charged to the budget."""
    from ..evaluation.metrics import each
    from ..llm import charge

    # One budget for all models. Its account is apart from that of the run in the folder.
    budget = options.open_budget()
    untrained = find_model(options.untrained) if options.untrained else None
    if untrained is not None:
        # A wrong name is found before the rows are loaded.
        check_agent(untrained)
        options.add_trained_columns(untrained)
    rows = options.load(options.task, options.seed)
    settings_fields: dict[str, Any] = {
        "rows": list(rows),
        "prompts": [options.prompt],
        "metric": options.metric[0] if options.metric else each(load_score(options.score)),
        "reward": None if options.reward is None else load_reward(options.reward),
    }
    if options.group_size is not None:
        settings_fields["group_size"] = options.group_size
    # Each measurement is made only if its model is named.
    if options.policy_model:
        settings_fields["policy"] = options.connect_role(stack, "policy")
        charge(budget, policy=settings_fields["policy"])
    # The reference writes the prompts that are compared.
    if options.policy_model and options.reference_model:
        settings_fields["reference"] = options.connect_role(stack, "reference")
        charge(budget, reference=settings_fields["reference"])
    if options.environment_model:
        settings_fields["llm"] = options.connect_role(stack, "environment")
        charge(budget, requests=settings_fields["llm"])
    # ProRefine, with the models of its roles.
    if options.feedback_model:
        roles: dict[str, Any] = dict(options.connect_roles(stack))
        charge(budget, **roles)
        settings_fields["refiner"] = ProRefiner(**roles)
    # The untrained agent needs somebody to ask. Workers are measured alone, too.
    if untrained is not None:
        environment = options.open_environment(stack, budget)
        settings_fields["rows"] = options.rows_for(environment, rows)
        settings_fields["agent"] = _load_untrained(untrained, environment)
    elif options.environment:
        settings_fields["pool"] = _open_workers(options.environment, budget)
    return settings_fields


def _open_workers(name: str, budget: Budget) -> Workers:
    """The workers of an environment, charged to the budget."""
    from ..llm import charge

    environment = load_environment(name)
    if not isinstance(environment, Workers):
        raise ValueError(
            f"--environment {name} is not Workers, whose members could be measured alone: name "
            "the agent that asks it with --untrained MODEL"
        )
    charge(budget, workers=environment)
    return environment


def _load_untrained(model: str, environment: Environment) -> PromptAgent:
    """The untrained agent: as a trainer saved it, else in the form of its environment."""
    from ..agent import PromptAgent
    from ..rollout import SPEC_FILE

    spec = None
    if not (Path(model) / SPEC_FILE).is_file():
        spec = make_untrained_spec(environment)
    with show_progress(f"loading {model}"):
        return PromptAgent.from_pretrained(model, environment, spec)
