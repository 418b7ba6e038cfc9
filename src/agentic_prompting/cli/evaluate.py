"""`agentic-prompting evaluate`: fill a table from its configuration, or compare two finished ones."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from .show import say


def evaluate(
    config: Annotated[Path | None, typer.Option(help="A table: examples/configs/eval_*.yaml, in a clone.")] = None,
    sandbox: Annotated[bool, typer.Option("--sandbox", help="Stand-ins for its models and tasks; no key.")] = False,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="Instead of the table's metrics; several times for several: ours, or `evaluate`'s by name."),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "--output", help="Folder, instead of the configuration's.")
    ] = None,
    compare: Annotated[tuple[Path, Path] | None, typer.Option(help="Folders of two finished tables.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> int:
    """Ask systems the questions of tasks and write a table; run again, a stopped run goes on."""
    if (config is None) == (compare is None):
        raise ValueError("say what to do: --config FILE, or --compare FOLDER FOLDER")
    if compare is not None:
        return _compare(*compare, as_json)
    assert config is not None
    from ..evaluation import EvaluationStopped

    tables = paper_tables()
    table = tables.load_config(config)
    if metric:
        table = replace(table, metrics=metric, sandbox={**table.sandbox, "metrics": metric})
    try:
        run = tables.run_table(table, sandbox, output_dir, progress=sys.stderr.isatty())
    except EvaluationStopped as error:
        print(f"agentic-prompting: {error}; run the same command again to go on", file=sys.stderr)
        return 1
    if as_json:
        found = json.loads(run.files["json"].read_text(encoding="utf-8"))
        files = {kind: str(path) for kind, path in run.files.items()}
        say(json.dumps({**found, "skipped": {**run.skipped, **run.left_out}, "files": files}, ensure_ascii=False))
        return 0
    say(run.files["md"].read_text(encoding="utf-8"))
    for name, reason in {**run.skipped, **run.left_out}.items():
        say(f"left out: {name}: {reason}")
    print("written to " + ", ".join(str(path) for path in run.files.values()))
    return 0


def paper_tables() -> Any:
    """The module `benchmarks/paper_tables`, which comes with a clone of the repository and not with the package.

    Of the clone that the package is installed from (`pip install -e`), else of the one that the current folder is in.

    Raises:
        `FileNotFoundError`: There is no clone; says what to do.
    """
    name, here = "paper_tables", Path.cwd()
    for root in (Path(__file__).parents[3], here, *here.parents):
        script = root / "benchmarks" / name / "__init__.py"
        if script.is_file():
            break
    else:
        raise FileNotFoundError(
            "tables from configurations are filled by benchmarks/paper_tables, which comes with a clone of the "
            "repository and not with the package: run this command inside a clone. To compare systems of your own, "
            "`agentic_prompting.evaluate_agent` needs no clone (docs/evaluation.md)"
        )
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, script)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def _compare(first: Path, second: Path, as_json: bool) -> int:
    from ..evaluation import compare_runs, differences_table, load_run, to_markdown

    comparisons = compare_runs(load_run(first), load_run(second), (first.name, second.name))
    if as_json:
        print(json.dumps({"comparisons": [asdict(one) for one in comparisons]}, ensure_ascii=False))
    else:
        print(to_markdown(differences_table(comparisons)))
    return 0
