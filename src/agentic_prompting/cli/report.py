"""`agentic-prompting report`: one HTML page about what a run left behind, or several runs side by
side.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from .script import print_error
from .terminal import print_json


def report(
    runs: Annotated[
        list[Path] | None,
        Argument(
            metavar="RUN",
            help="A run's or an evaluation's folder, or one file; several are put side by side.",
        ),
    ] = None,
    run: Annotated[list[Path] | None, Option("--run", help="The same as RUN.")] = None,
    output_dir: Annotated[
        Path | None,
        Option("--output-dir", "--output", help="Folder to write to, instead of the default."),
    ] = None,
    max_trajectories: Annotated[
        int, Option(help="Show at most this many trajectories, drawn evenly over the run.")
    ] = 20_000,
    pictures: Annotated[bool, Option(help="Write the curves as PNGs as well.")] = True,
    watch: Annotated[
        bool, Option("--watch", help="Write the report anew while the run goes on, until Ctrl-C.")
    ] = False,
    as_json: Annotated[
        bool, Option("--json", help="Print one JSON object instead of text.")
    ] = False,
) -> int:
    """Show what runs left behind: curves, trajectories, evolved and refined prompts, evaluations."""
    from ..report import watch_report, write_report

    # Arguments and options name runs alike.
    runs = [*(runs or ()), *(run or ())]
    if not runs:
        raise ValueError("name the run to show: agentic-prompting report RUN")
    # Follow a single run until Ctrl-C.
    if watch:
        if len(runs) > 1:
            raise ValueError("--watch follows one run; compare several when they have finished")
        if as_json:
            raise ValueError(
                "--json would have no effect: --watch goes on until Ctrl-C; leave one of them out"
            )
        folder = output_dir or runs[0] / "report"
        print(f"{folder}/index.html is written as {runs[0]} goes on (Ctrl-C stops)", flush=True)
        watch_report(runs[0], output_dir, max_trajectories)
        return 0

    # Pictures need an extra; the page does not.
    if pictures and importlib.util.find_spec("matplotlib") is None:
        print_error("no pictures without matplotlib: pip install 'agentic-prompting[report]'")
        pictures = False
    # A single run has a page of its own, several are compared on one.
    page = write_report(runs if len(runs) > 1 else runs[0], output_dir, max_trajectories, pictures)
    if as_json:
        # Pictures are written beside the page.
        files = sorted(str(path) for path in page.parent.glob("*.png")) if pictures else []
        print_json({"page": str(page), "pictures": files})
    else:
        print(page)
    return 0
