"""`agentic-prompting evaluate`: a trained agent on rows of your own, a table of systems, or two
tables compared.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..llm.guard import count_as_package
from ..llm.numbers import count_in_words
from ..records import digest
from ..versions import file_version, weights_version
from .example_files import CLONE, find_example, find_shared_folder
from .hub import check_model, check_trained_agent, find_model, probe_hub
from .loader import find_source_file, import_file, refuse_own_metrics, register_judge
from .option_parser import OptionParser
from .options import (
    CALL_OPTIONS,
    JSON_HELP,
    LargeLLM,
    Tracing,
    list_option,
    option,
    refuse_all_but,
    refuse_options,
)
from .script import INTERRUPTED, print_error
from .task_rows import TaskRows
from .terminal import print_json, print_table, print_text, show_progress

if TYPE_CHECKING:
    from ..agent import PromptAgent
    from ..environments import Worker
    from ..evaluation import Comparison, Evaluation
    from ..llm import Usage


@dataclass
class EvaluateOptions(LargeLLM, TaskRows, Tracing):
    """The options of `evaluate`."""

    config: Path | None = option("A table, such as examples/configs/eval_prorefine_table1.yaml.")
    run: Path | None = option("A trained agent's folder.")
    base: str | None = option(
        "With --run: the model before training, asked the same. Of E-SPL both, under the first and "
        "the final prompt."
    )
    baselines: bool = option(
        "With --run of a conductor: its workers alone, routers, best-of-n, random plans beside it.",
        False,
    )
    samples: int = option("With --run: how often each question is asked.", 1)
    metric: list[str] | None = list_option(
        "Metrics instead of the table's: ours, those of the package `evaluate`, or your own of "
        "--judge, by name."
    )
    judge: list[str] | None = list_option(
        "Your own score in addition: module:name of judge(answer, answers), a function and not a "
        "model, from 0 to 1."
    )
    output_dir: Path | None = option(
        "Folder to write to, instead of the default.", None, "--output"
    )
    compare: list[Path] | None = list_option("Folders of two finished tables to compare.")
    seeds: list[int] | None = list_option(
        "Train and evaluate once for each of these seeds, such as 1 2 3: intervals over the seeds."
    )
    json: bool = option(JSON_HELP, False)


SETTINGS = (EvaluateOptions,)  # the parser returns an object of each


@dataclass
class FinishedTable:
    """The files of a finished table, and what is printed beside them."""

    title: str
    files: Mapping[str, Path]
    comparisons: Sequence[Comparison]
    left_out: Mapping[str, str]  # reasons by system
    spent: Mapping[str, Usage] = field(default_factory=dict)  # by model, of a table


def evaluate(arguments: Sequence[str]) -> int:
    """Ask systems the questions of tasks and write a table; run again, a stopped run goes on.

    --config fills a table of systems and tasks, --run asks one trained agent the rows of --dataset.
    """
    from ..evaluation import EvaluationStopped

    (options,) = OptionParser("evaluate", SETTINGS, evaluate.__doc__).parse(arguments)
    # Exactly one of the three things that the command can do.
    if [options.config, options.run, options.compare].count(None) != 2:
        raise ValueError(
            "say what to do: --config FILE, --run RUN --dataset FILE, or --compare FOLDER FOLDER"
        )
    if options.baselines and options.run is None:
        raise ValueError("--baselines needs --run with the folder of a trained conductor")
    if options.base is not None and options.run is None:
        raise ValueError("--base needs --run with the folder of a trained agent")
    if options.compare is not None:
        refuse_all_but(
            options, ("compare", "json"), "--compare reads two finished tables as they are"
        )
        return _compare(options.compare, options.json)
    # Judges are metrics of their own names from now on.
    options.start_tracing()
    judges = [register_judge(name) for name in options.judge or ()]
    refuse_own_metrics(options.metric or (), "--judge")

    # The folder is known before anything is asked: the message after Ctrl-C names it.
    config: Any = None
    if options.run is not None:
        folder = options.output_dir or options.run / "evaluation"
    else:
        config = _load_table(options, judges)
        folder = options.output_dir or config.output
    sizes_before = _answer_file_sizes(folder)
    try:
        if config is None:
            table = _evaluate_run(options, judges, folder)
        else:
            table = _fill_table(options, config)
    except EvaluationStopped as error:
        print_error(f"{error}; run the same command again to go on")
        return 1
    except KeyboardInterrupt:
        print_error(f"stopped; the same command goes on from {folder}")
        return INTERRUPTED

    # Read table.json back, so that standard output has what the file has, and a few more fields.
    if options.json:
        record = json.loads(table.files["json"].read_text(encoding="utf-8"))
        record["skipped"] = table.left_out
        record["usage"] = {name: asdict(usage) for name, usage in table.spent.items()}
        record["cost_usd"] = sum(usage.cost_usd for usage in table.spent.values())
        record["files"] = {name: str(path) for name, path in table.files.items()}
        print_json(record)
    else:
        _print_table(table)
    # A table looks new even where every answer was already in the file: say so.
    if sizes_before and sizes_before == _answer_file_sizes(folder):
        results = json.loads(table.files["json"].read_text(encoding="utf-8"))["results"]
        answers = sum(result["answers"] for result in results)
        print_error(
            f"all {count_in_words(answers, 'answer')} were in {folder} already; another "
            "--output-dir asks anew"
        )
    return 0


def _answer_file_sizes(folder: str | Path) -> dict[Path, int]:
    """The sizes of the files of answers in a folder. Every new answer adds a line to one."""
    return {path: path.stat().st_size for path in Path(folder).rglob("*.jsonl")}


def _print_table(table: FinishedTable) -> None:
    """Print a finished table, its differences, the systems left out, and the names of the files."""
    from ..evaluation import differences_table

    # The table as it was written to its file.
    with open(table.files["csv"], newline="", encoding="utf-8") as lines:
        print_table(list(csv.DictReader(lines)), table.title)
    if table.comparisons:
        print_table(differences_table(table.comparisons))
    for name, reason in table.left_out.items():
        print_text(f"left out: {name}: {reason}")
    if table.spent:
        from ..llm.budget import describe_accounts
        from ..llm.types import Usage, cost_in_words

        # The columns of the table are means per answer, without what the optimisers have cost.
        total = sum(table.spent.values(), Usage())
        cost = cost_in_words(total.cost_usd, was_used=total.tokens > 0)
        print_text(
            f"spent on this table so far: {cost}, by model: {describe_accounts(table.spent)}"
        )
    print("written to " + ", ".join(str(path) for path in table.files.values()))


# --- two tables compared --------------------------------------------------------------------------


def _compare(folders: Sequence[Path], as_json: bool) -> int:
    from ..evaluation import compare_runs, differences_table, load_run

    if len(folders) != 2:
        raise ValueError(f"--compare takes two folders, got {len(folders)}")
    # Paired tests on the same questions, named after the two folders.
    first, second = folders
    comparisons = compare_runs(load_run(first), load_run(second), (first.name, second.name))
    if as_json:
        records = [asdict(comparison) for comparison in comparisons]
        print_json({"comparisons": records})
    else:
        print_table(differences_table(comparisons))
    return 0


# --- a trained agent on rows of your own ----------------------------------------------------------


def _evaluate_run(options: EvaluateOptions, judges: Sequence[str], folder: Path) -> FinishedTable:
    """Ask a trained agent your own rows: the tables.

    With `--base` also what prompt and weights are worth, with `--baselines` what leading a pool is.
    """
    if not options.dataset:
        raise ValueError(
            "name the rows: --dataset FILE, with --columns question=q,answer=a where they are "
            "called so"
        )
    refuse_options(
        options,
        ("seeds",),
        "they train the systems of a table, --config FILE; --samples asks each question of --run "
        "several times",
    )
    from ..evaluation import (
        EvaluationTask,
        baselines_at_cost,
        baselines_of_pool,
        compare_systems,
        evaluate_agent,
        save_run,
        write_tables,
    )

    run = options.run
    assert run is not None
    # Everything that can be wrong is found before a model is loaded.
    check_trained_agent(run)
    needs_environment = _needs_environment(options, run)
    if needs_environment:
        options.check_environment()
    else:
        _refuse_environment(options, run)
    if options.base is not None:
        options.base = find_model(options.base)
        check_model(options.base)
    # The rows are a task named after their file, in the metrics of the options.
    options.add_trained_columns(run)
    with show_progress(f"loading {options.dataset}"):
        rows = options.load_for_evaluation("")
    metrics = _with_judges(options.metric or ["exact_match", "token_f1"], judges)

    with ExitStack() as stack:
        # Load the agent, with an environment unless it answers by itself.
        with show_progress(f"loading {run}"):
            from ..agent import PromptAgent

            environment: Any = None
            if needs_environment:
                budget = options.budget(folder / "spending.sqlite")
                environment = options.open_environment(stack, budget)
            task_rows: list[Mapping[str, Any]] = [*options.rows_for(environment, rows)]
            task = EvaluationTask(Path(options.dataset).stem, task_rows)
            agent = PromptAgent.from_pretrained(run, environment)
            baseline, systems = _systems_of_run(options, run, agent, environment)

        # Ask each question as often as `--samples` says; a stopped run goes on from the folder.
        def ask(asked_systems: Mapping[str, Any]) -> Evaluation:
            return evaluate_agent(
                asked_systems, [task], metrics, n=None, runs=options.samples, output=folder
            )

        if options.baselines:
            pool = _pool_of(environment)
            systems = {**systems, **baselines_of_pool(pool)}
            # The other baselines depend on the cost of the agent and of its best worker. Saved
            # answers are not asked for again.
            systems = {**systems, **baselines_at_cost(pool, ask(systems), run.name)}
        evaluation = ask(systems)
    # The agent alone is compared with nothing.
    comparisons: Sequence[Comparison] = []
    if len(systems) > 1:
        comparisons = compare_systems(evaluation, baseline)
    save_run(folder, evaluation)
    return FinishedTable(
        title="",
        files=write_tables(folder, evaluation, comparisons),
        comparisons=comparisons,
        left_out={},
    )


def _needs_environment(options: EvaluateOptions, run: Path) -> bool:
    """Whether a trained agent is asked in an environment: unless it answers with free text, or
    where one is named.

    The free text of a program is not an answer by itself, so `--environment` is always used.
    """
    from ..rollout import AgentSpec, FreeText

    # The environment also brings a grammar of the user's own, without which the spec cannot be
    # read.
    if options.environment is not None:
        return True
    # The spec of an agent on the hub is known only after loading.
    return not (run.is_dir() and isinstance(AgentSpec.load(run).grammar, FreeText))


def _refuse_environment(options: EvaluateOptions, run: Path) -> None:
    """Raise `ValueError` for options of an environment, which an agent that answers by itself does
    not ask.
    """
    refuse_options(
        options,
        ("sandbox", "environment_model", *CALL_OPTIONS, "replay_cache"),
        f"{run} answers with free text and asks nobody; --program MODULE:NAME plays it in a "
        "program",
    )
    if _was_trained_in_program(run):
        print_error(
            f"{run} was trained inside an agent program, and is asked here without it: name it "
            "with --program MODULE:NAME"
        )


def _was_trained_in_program(run: Path) -> bool:
    """Whether the log of a training run counts the calls of an agent program."""
    from ..report.run_summary import LOG

    log = run / LOG
    if not log.is_file():
        return False
    with open(log, encoding="utf-8") as lines:
        return "program/calls" in next(lines, "")


def _systems_of_run(
    options: EvaluateOptions, run: Path, agent: PromptAgent, environment: Any
) -> tuple[str, dict[str, Any]]:
    """The systems of the table, and the name of the one with which the others are compared.

    They are the agent alone, or weights and prompts before and after training. A conductor is the
    baseline of its workers; otherwise the untrained agent is the baseline.
    """
    from ..agent import PromptAgent
    from ..evaluation import AgentSystem
    from ..evolution.run_files import POPULATION_FILE

    version = _source_version(options)
    trained = AgentSystem(agent, _identity(options, run), version=version)
    if options.base is None:
        return run.name, {run.name: trained}
    untrained_agent = PromptAgent.from_pretrained(options.base, environment, agent.spec)
    # Only a run of E-SPL has a first prompt beside its final one.
    if options.baselines or not (run / POPULATION_FILE).is_file():
        identity = _identity(options, options.base, run)
        untrained = AgentSystem(untrained_agent, identity, version=version)
        # The baseline is the first row of the table.
        if options.baselines:
            return run.name, {run.name: trained, "untrained": untrained}
        return "untrained", {"untrained": untrained, run.name: trained}

    # Base and trained weights, each under the first and the final prompt.
    systems = {}
    for weights, model, weighted_agent in (
        ("base", options.base, untrained_agent),
        ("trained", run, agent),
    ):
        identity = _identity(options, model, run)
        for prompt, prompted_agent in _by_prompt(weighted_agent, run).items():
            systems[f"{weights} weights, {prompt} prompt"] = AgentSystem(
                prompted_agent, f"{prompt} prompt, {identity}", version=version
            )
    return "base weights, first prompt", systems


def _pool_of(environment: Any) -> Mapping[str, Worker]:
    """The workers of an environment. Raises `ValueError` if it leads none."""
    from ..environments import Workers

    if not isinstance(environment, Workers):
        raise ValueError(
            "--baselines compares a conductor with its workers: name its Workers with --environment"
        )
    return environment.pool


def _identity(options: LargeLLM, *folders: str | Path) -> str:
    """An identifier of an agent's answers: its folders, when they were written, and whom it asks."""
    from ..rollout import SPEC_FILE

    file_states = []
    for folder in folders:
        file_states += weights_version(folder, [SPEC_FILE])
    # Answers also depend on whom the agent asks.
    environment = [
        options.sandbox,
        options.environment,
        options.environment_model,
        options.environment_max_tokens,
    ]
    return f"{', '.join(map(str, folders))} {digest([file_states, environment])}"


def _source_version(options: LargeLLM) -> str | None:
    """A digest of the file of an environment or a program of the user's own."""
    source_file = find_source_file(options.environment) if options.environment else None
    return None if source_file is None else file_version(source_file)


def _by_prompt(agent: PromptAgent, run: Path) -> dict[str, PromptAgent]:
    """The agent under the first prompt of a run of E-SPL and under its final one, with the weights
    loaded once.
    """
    from ..evolution import read_lineage
    from ..evolution.run_files import POPULATION_FILE

    # The first node is the prompt that training began with.
    text = read_lineage(run / POPULATION_FILE).nodes[0].member.prompt.text
    # A shallow copy, which shares the weights.
    agent_with_first_prompt = copy(agent)
    agent_with_first_prompt.spec = replace(agent.spec, system_prompt=text or None)
    return {"first": agent_with_first_prompt, "final": agent}


# --- a table of systems ---------------------------------------------------------------------------


def _fill_table(options: EvaluateOptions, config: Any) -> FinishedTable:
    """Run a table of `benchmarks/paper_tables`."""
    # If the hub is out of reach, its libraries turn to their caches at once.
    if not options.sandbox and _needs_hub(config):
        probe_hub()
    filled = import_paper_tables().run_table(
        config, options.sandbox, options.output_dir, sys.stderr.isatty(), options.seeds or []
    )
    # The title is the first line of the Markdown file.
    title = filled.files["md"].read_text(encoding="utf-8").split("\n")[0].lstrip("# ")
    return FinishedTable(
        title=title,
        files=filled.files,
        comparisons=filled.comparisons,
        left_out={**filled.skipped, **filled.left_out},
        spent=filled.spent,
    )


def _needs_hub(table: Any) -> bool:
    """Whether a table has rows, metrics or models that may come from the hub."""
    from ..data import is_user_data
    from ..evaluation import METRICS

    # Tasks that are no files of the user's, and have none instead of the hub's.
    names = list(table.tasks)
    for tasks in (table.train_task, table.validation_task, table.fit_task):
        if tasks:
            names += tasks.values() if isinstance(tasks, Mapping) else [tasks]
    for name in names:
        if not is_user_data(name) and name not in table.data_files:
            return True

    # Metrics of the package `evaluate`, and the encoder of one of ours.
    metrics = [metric for name in table.tasks for metric in table.metrics_of(name) or ()]
    if any(metric not in METRICS or metric == "semantic_similarity" for metric in metrics):
        return True
    # Models that are loaded here.
    bases = [system.settings.get("base") for system in table.systems]
    return any(base and not Path(base).exists() for base in bases)


def _load_table(options: EvaluateOptions, judges: Sequence[str]) -> Any:
    """The table of a configuration, with other rows or metrics if some are named, and with those of
    judges.
    """
    assert options.config is not None
    config = find_example(options.config) or options.config
    metrics = options.metric
    tables = import_paper_tables()
    # Name the tables that there are instead.
    if not config.is_file():
        examples = Path(str(tables.__file__)).parents[2] / "examples" / "configs"
        names = sorted(path.stem for path in examples.glob("eval_*.yaml"))
        raise ValueError(
            f"{config} does not exist; in examples/configs/ there are {', '.join(names)}"
        )
    table = tables.load_config(config)
    _refuse_options_of_run(options)
    # A limit of the options replaces that of the table.
    if options.budget_usd is not None:
        table = replace(table, budget_usd=options.budget_usd)
    if options.budget_tokens is not None:
        table = replace(table, budget_tokens=options.budget_tokens)
    # Rows of the options replace those of the table; optimisers learn from the rows not held out.
    if options.dataset is not None:
        table = replace(table, tasks=[options.dataset], train_task=None, averages={})
    if options.columns is not None:
        table = replace(table, columns=options.column_names())
    if options.held_out is not None:
        table = replace(table, held_out=options.held_out)
    # Metrics of the options replace those of the table, in the sandbox, too.
    if metrics:
        table = replace(table, metrics=metrics, sandbox={**table.sandbox, "metrics": metrics})
    if judges:
        sandbox_metrics = _with_judges(table.sandbox.get("metrics"), judges)
        table = replace(
            table,
            metrics=_with_judges(table.metrics, judges),
            sandbox={**table.sandbox, "metrics": sandbox_metrics},
        )
    return table


def _refuse_options_of_run(options: EvaluateOptions) -> None:
    """Raise `ValueError` for an option that would have no effect on a table."""
    refuse_options(
        options,
        ("environment", "environment_model", *CALL_OPTIONS),
        "it is for --run; the models of a table are in its file, under `models:`",
    )
    refuse_options(
        options,
        ("replay_cache",),
        "it is for --run; a table records its replies in replies.sqlite of its folder",
    )
    refuse_options(
        options,
        ("samples", "task_rows", "task_split", "data_files"),
        "it is for --run; a table has them in its file: `runs:`, `n:`, `tasks:` and `data_files:`",
    )
    if options.sandbox:
        refuse_options(
            options,
            ("dataset", "columns", "held_out"),
            "the sandbox asks questions of its own; leave out --sandbox to ask yours",
        )


def _with_judges(metrics: Any, judges: Sequence[str]) -> Any:
    """A table's metrics, a list or lists by task, followed by the judges that are not among them."""
    # Metrics may differ by task: every task gets the judges.
    if isinstance(metrics, dict):
        return {task: _with_judges(task_metrics, judges) for task, task_metrics in metrics.items()}
    # A judge may be a metric as well, in the place that --metric or the table gives it.
    return list(dict.fromkeys([*(metrics or ["exact_match"]), *judges]))


def import_paper_tables() -> ModuleType:
    """The module `benchmarks/paper_tables`, which is not part of the package.

    Looked for in the clone that the package is installed from (`pip install -e`), and in the copy
    that a wheel installs beside the package; never in the current folder, which may hold anything.

    Raises:
        `FileNotFoundError`: It is in neither of them.
    """
    name = "paper_tables"
    if name in sys.modules:
        return sys.modules[name]

    # A clone comes before the copy of a wheel. In an installed package CLONE is a folder of the
    # environment.
    roots = [find_shared_folder()]
    if Path(__file__).parents[1] == CLONE / "src" / "agentic_prompting":
        roots.insert(0, CLONE)
    for root in filter(None, roots):
        script = root / "benchmarks" / name / "__init__.py"
        if script.is_file():
            # Its refusals name the file of the table, and no line of its own.
            count_as_package(script.parent)
            # Under its plain name, by which its own modules import each other.
            return import_file(script, name)
    raise FileNotFoundError(
        "what fills tables, benchmarks/paper_tables, was not installed: install the package from a "
        "clone (`pip install -e .`). To compare systems of your own, "
        "`agentic_prompting.evaluate_agent` does without (docs/evaluation.md)"
    )
