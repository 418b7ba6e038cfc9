"""`agentic-prompting evaluate`: fill a table from its configuration, or compare two finished ones."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .show import say


def evaluate(
    config: Annotated[Path | None, typer.Option(help="A table: examples/configs/eval_*.yaml.")] = None,
    sandbox: Annotated[bool, typer.Option("--sandbox", help="Stand-ins for its models and tasks; no key.")] = False,
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
    from ..tables import load_config, run_table

    try:
        run = run_table(load_config(config), sandbox, output_dir, progress=sys.stderr.isatty())
    except EvaluationStopped as error:
        print(f"agentic-prompting: {error}; run the same command again to go on", file=sys.stderr)
        return 1
    if as_json:
        found = json.loads(run.files["json"].read_text(encoding="utf-8"))
        files = {kind: str(path) for kind, path in run.files.items()}
        say(json.dumps({**found, "skipped": run.skipped, "files": files}, ensure_ascii=False))
        return 0
    say(run.files["md"].read_text(encoding="utf-8"))
    for name, reason in run.skipped.items():
        say(f"left out: {name}: {reason}")
    print("written to " + ", ".join(str(path) for path in run.files.values()))
    return 0


def _compare(first: Path, second: Path, as_json: bool) -> int:
    from ..evaluation import compare_runs, differences_table, load_run, to_markdown

    comparisons = compare_runs(load_run(first), load_run(second), (first.name, second.name))
    if as_json:
        print(json.dumps({"comparisons": [asdict(one) for one in comparisons]}, ensure_ascii=False))
    else:
        print(to_markdown(differences_table(comparisons)))
    return 0
