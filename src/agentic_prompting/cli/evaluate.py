"""`agentic-prompting evaluate`: fill a table from its configuration, or compare two finished ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    config: Annotated[Path | None, typer.Option(help="A table: examples/configs/eval_*.yaml.")] = None,
    sandbox: Annotated[bool, typer.Option("--sandbox", help="Stand-ins for its models and tasks; no key.")] = False,
    output: Annotated[Path | None, typer.Option(help="Folder, instead of the configuration's.")] = None,
    compare: Annotated[tuple[Path, Path] | None, typer.Option(help="Folders of two finished tables.")] = None,
) -> int:
    """Ask systems the questions of tasks and write a table; run again, a stopped run goes on."""
    if (config is None) == (compare is None):
        raise ValueError("say what to do: --config FILE, or --compare FOLDER FOLDER")
    if compare is not None:
        return _compare(*compare)
    assert config is not None
    from ..evaluation import EvaluationStopped
    from ..tables import load_config, run_table

    try:
        run = run_table(load_config(config), sandbox, output)
    except EvaluationStopped as error:
        print(f"agentic-prompting: {error}; run the same command again to go on", file=sys.stderr)
        return 1
    print(run.files["md"].read_text(encoding="utf-8"))
    for name, reason in run.skipped.items():
        print(f"left out: {name}: {reason}")
    print("written to " + ", ".join(str(path) for path in run.files.values()))
    return 0


def _compare(first: Path, second: Path) -> int:
    from ..evaluation import compare_runs, differences_table, load_run, to_markdown

    print(to_markdown(differences_table(compare_runs(load_run(first), load_run(second), (first.name, second.name)))))
    return 0
