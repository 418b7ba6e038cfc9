"""`agentic-prompting evaluate`: a trained agent on rows of one's own, a table of systems, or two tables compared."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..records import digest
from .loader import register_judge
from .options import (
    AsJson,
    LargeLLM,
    OutputDir,
    RunOption,
    TaskRows,
    Tracing,
    busy,
    check_agent,
    check_model,
    hub_answers,
    option,
    say,
)
from .train import CLONE, example, shared

if TYPE_CHECKING:
    from ..agent import PromptAgent
    from ..evaluation import Comparison

POPULATION = "population.json"
_NOTHING = {"0", "0.0", "0.00000", "–", ""}
"""A column with nothing else in it is not shown."""


def evaluate(
    llm: LargeLLM,
    rows: TaskRows,
    tracing: Tracing,
    config: Annotated[
        Path | None, option("A table, such as examples/configs/eval_prorefine_table1.yaml.")
    ] = None,
    run: RunOption = None,
    base: Annotated[
        str | None,
        option(
            "With --run of E-SPL: the model before training. Both are asked under the first and the final prompt."
        ),
    ] = None,
    samples: Annotated[int, option("With --run: how often each question is asked: 1.")] = 1,
    metric: Annotated[
        list[str] | None,
        option(
            "Instead of the table's metrics; several times for several: ours, or `evaluate`'s by name."
        ),
    ] = None,
    judge: Annotated[
        list[str] | None,
        option(
            "Your own score besides: module:name of judge(answer, answers), from 0 to 1; several times for several."
        ),
    ] = None,
    output_dir: OutputDir = None,
    compare: Annotated[tuple[Path, Path] | None, option("Folders of two finished tables.")] = None,
    seeds: Annotated[
        list[int] | None, option("`--seeds 1 2 3`: a training each, intervals over them.")
    ] = None,
    more_seeds: Annotated[
        list[int] | None, typer.Argument(hidden=True, metavar="SEED", help="More of --seeds.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Ask systems the questions of tasks and write a table; run again, a stopped run goes on.

    --config fills a table of systems and tasks, --run asks one trained agent the rows of --dataset.
    """
    from ..evaluation import EvaluationStopped

    if [config, run, compare].count(None) != 2 or (more_seeds and not seeds):
        raise ValueError(
            "say what to do: --config FILE, --run RUN --dataset FILE, or --compare FOLDER FOLDER"
        )
    if compare is not None:
        return _compared(*compare, as_json)
    if base is not None and (run is None or not (run / POPULATION).is_file()):
        raise ValueError(f"--base needs --run with a folder of E-SPL, which holds {POPULATION}")
    tracing.start()
    judges = [register_judge(name) for name in judge or ()]
    where = output_dir or (None if run is None else run / "evaluation")
    try:
        if run is not None:
            left_out, title, metrics = {}, "", [*(metric or ["exact_match", "token_f1"]), *judges]
            files, comparisons = _evaluated(run, base, llm, rows, metrics, samples, where)
        else:
            table = _table(Path(str(config)), metric, judges)
            if not llm.sandbox:
                hub_answers()
            all_seeds = [*(seeds or ()), *(more_seeds or ())]
            filled = paper_tables().run_table(
                table, llm.sandbox, where, sys.stderr.isatty(), all_seeds
            )
            files, comparisons, left_out = (
                filled.files,
                filled.comparisons,
                {**filled.skipped, **filled.left_out},
            )
            title, where = (
                files["md"].read_text(encoding="utf-8").split("\n")[0].lstrip("# "),
                where or table.output,
            )
    except EvaluationStopped as error:
        print(f"agentic-prompting: {error}; run the same command again to go on", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            f"agentic-prompting: stopped; the same command goes on from {where or table.output}",
            file=sys.stderr,
        )
        return 130
    if as_json:
        read = json.loads(files["json"].read_text(encoding="utf-8"))
        paths = {kind: str(path) for kind, path in files.items()}
        say(json.dumps({**read, "skipped": left_out, "files": paths}, ensure_ascii=False))
    else:
        _show_results(files, title, comparisons, left_out)
    return 0


def _show_results(
    files: Mapping[str, Path],
    title: str,
    comparisons: Sequence[Comparison],
    left_out: Mapping[str, str],
) -> None:
    """Print a finished table, its differences, the systems left out, and the names of the files."""
    from ..evaluation import differences_table

    with open(files["csv"], newline="", encoding="utf-8") as lines:
        show_table(list(csv.DictReader(lines)), title)
    if comparisons:
        show_table(differences_table(comparisons))
    for name, reason in left_out.items():
        say(f"left out: {name}: {reason}")
    print("written to " + ", ".join(str(path) for path in files.values()))


def _compared(first: Path, second: Path, as_json: bool) -> int:
    from ..evaluation import compare_runs, differences_table, load_run

    found = compare_runs(load_run(first), load_run(second), (first.name, second.name))
    if as_json:
        print(json.dumps({"comparisons": [asdict(one) for one in found]}, ensure_ascii=False))
    else:
        show_table(differences_table(found))
    return 0


def show_table(table: Sequence[Mapping[str, str]], title: str = "") -> None:
    """Print rows with the same columns; in a file or a pipe each on one line."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..llm.masking import escape_controls

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(
            highlight=False, width=1000
        )  # a pipe has no width: lines as long as they are
    names = [
        name
        for name in (table[0] if table else ())
        if {row[name] for row in table} - _NOTHING or name == "failed"
    ]
    shown = Table(
        *names, title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for row in table:
        shown.add_row(*(Text(escape_controls(row[name])) for name in names))
    console.print(shown)


def _evaluated(
    run: Path,
    base: str | None,
    llm: LargeLLM,
    rows: TaskRows,
    metrics: list[str],
    samples: int,
    where: Path | None,
) -> tuple[Mapping[str, Path], Sequence[Comparison]]:
    """Ask a trained agent the rows of one's own: the tables, and with `base` what prompt and weights are worth."""
    if not rows.dataset:
        raise ValueError(
            "name the rows: --dataset FILE, with --columns question=q,answer=a where they are called so"
        )
    from ..evaluation import (
        AgentSystem,
        EvaluationTask,
        compare_systems,
        evaluate_agent,
        save_run,
        write_tables,
    )
    from ..rollout import AgentSpec, FreeText

    check_agent(run)
    spec = AgentSpec.load(run) if run.is_dir() else None
    alone = spec is not None and isinstance(spec.grammar, FreeText)
    if not alone or llm.sandbox or llm.environment or llm.environment_model:
        llm.check()
    if base is not None:
        check_model(base)
    task = EvaluationTask(Path(rows.dataset).stem, list(rows.load("", 0)))
    folder = where or Path("runs/evaluation")
    with ExitStack() as stack:
        with busy(f"loading {run}"):
            from ..agent import PromptAgent

            environment: Any = (
                None if alone else llm.opened(stack, llm.budget(folder / "spending.sqlite"))
            )
            agent = PromptAgent.from_pretrained(run, environment)
            systems: dict[str, Any] = {run.name: AgentSystem(agent, _own_name(llm, run))}
            if base is not None:
                before = PromptAgent.from_pretrained(base, environment, spec=agent.spec)
                systems = {
                    f"{weights} weights, {which} prompt": AgentSystem(
                        one, f"{which} prompt, {_own_name(llm, model, run)}"
                    )
                    for weights, model, asked in (("base", base, before), ("trained", run, agent))
                    for which, one in _by_prompt(asked, run).items()
                }
        evaluation = evaluate_agent(systems, [task], metrics, n=None, runs=samples, output=folder)
    comparisons = compare_systems(evaluation, next(iter(systems))) if base is not None else []
    save_run(folder, evaluation)
    return write_tables(folder, evaluation, comparisons), comparisons


def _own_name(llm: LargeLLM, *folders: str | Path) -> str:
    """What tells an agent's answers from others': its folders, when they were written, and whom it asks."""
    from ..rollout import SPEC_FILE

    kinds = ("*.safetensors", "*.bin", SPEC_FILE)
    files = [
        file for folder in folders for kind in kinds for file in sorted(Path(folder).glob(kind))
    ]
    written = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    asked = [llm.sandbox, llm.environment, llm.environment_model, llm.environment_max_tokens]
    return f"{', '.join(map(str, folders))} {digest([written, asked])}"


def _by_prompt(agent: PromptAgent, run: Path) -> dict[str, PromptAgent]:
    """The agent under the first prompt of a run of E-SPL and under its final one, with the weights loaded once."""
    from ..evolution import read_lineage

    first = copy(agent)
    text = read_lineage(run / POPULATION).nodes[0].member.prompt.text
    first.spec = replace(agent.spec, system_prompt=text or None)
    return {"first": first, "final": agent}


def _table(config: Path, metric: list[str] | None, judges: list[str]) -> Any:
    """The table of a configuration, with other metrics where some are given."""
    config, tables = example(config) or config, paper_tables()
    if not config.is_file():
        there = sorted(
            path.stem
            for path in (Path(tables.__file__).parents[2] / "examples/configs").glob("eval_*.yaml")
        )
        raise ValueError(
            f"{config} does not exist; in examples/configs/ there are {', '.join(there)}"
        )
    table = tables.load_config(config)
    if metric:
        table = replace(table, metrics=metric, sandbox={**table.sandbox, "metrics": metric})
    return replace(table, **_judged(table, judges)) if judges else table


def _judged(table: Any, judges: list[str]) -> dict[str, Any]:
    """The table's metrics, the sandbox's too, with those of judges behind them."""

    def more(metrics: Any) -> Any:
        if isinstance(metrics, dict):
            return {task: [*of_task, *judges] for task, of_task in metrics.items()}
        return [*(metrics or ["exact_match"]), *judges]

    return {
        "metrics": more(table.metrics),
        "sandbox": {**table.sandbox, "metrics": more(table.sandbox.get("metrics"))},
    }


def paper_tables() -> Any:
    """The module `benchmarks/paper_tables`, which is not part of the package.

    Looked for in the clone that the package is installed from (`pip install -e`), and in the copy that a wheel installs
    beside the package; never in the current folder, which may hold anything.

    Raises:
        `FileNotFoundError`: It is in neither of them.
    """
    name = "paper_tables"
    if name in sys.modules:
        return sys.modules[name]
    is_clone = Path(__file__).parents[1] == CLONE / "src" / "agentic_prompting"
    roots = [CLONE if is_clone else None, shared()]
    scripts = [root / "benchmarks" / name / "__init__.py" for root in roots if root is not None]
    script = next((script for script in scripts if script.is_file()), None)
    if script is None:
        raise FileNotFoundError(
            "what fills tables, benchmarks/paper_tables, was not installed: install the package from a clone "
            "(`pip install -e .`). To compare systems of your own, `agentic_prompting.evaluate_agent` does without "
            "(docs/evaluation.md)"
        )
    spec = importlib.util.spec_from_file_location(name, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
