"""`agentic-prompting report`: a run as one HTML file and pictures."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="A run's folder, or one file: refinement results, or a population.")],
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "--output", help="Folder to write to; RUN/report by default.")
    ] = None,
    max_trajectories: Annotated[int, typer.Option(help="Of more, so many are shown, drawn over the run.")] = 20_000,
    pictures: Annotated[bool, typer.Option(help="Write PNGs as well.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with the paths.")] = False,
) -> int:
    """Show what a run left behind: curves, trajectories, the evolution of system prompts, refined prompts."""
    from ..report import write_report

    if pictures and find_spec("matplotlib") is None:
        print(
            "agentic-prompting: no pictures without matplotlib: pip install 'agentic-prompting[report]'",
            file=sys.stderr,
        )
        pictures = False
    page = write_report(run, output_dir, max_trajectories, pictures)
    drawn = sorted(str(path) for path in page.parent.glob("*.png")) if pictures else []
    print(json.dumps({"page": str(page), "pictures": drawn}) if as_json else page)
    return 0
