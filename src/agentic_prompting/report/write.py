"""`agentic-prompting report`: everything a run left behind, as one HTML file and pictures beside it."""

from __future__ import annotations

import json
from pathlib import Path

from ..evolution import Lineage, plot_lineage, read_lineage
from ..llm.files import write_whole
from ..rollout import read_rollouts
from .curves import plot_panels
from .history import current_records, history_of
from .packing import data_block
from .page import history_block, lineage_block, render_page
from .refinements import find_results, refinement_blocks
from .trajectories import sample_evenly, trajectory_blocks

POPULATION = "population.json"


def write_report(
    run: str | Path, output: str | Path | None = None, max_trajectories: int = 20_000, pictures: bool = True
) -> Path:
    """Write the report of a run.

    It shows whatever the run has: `rollouts/` as curves and a browser of trajectories, `population.json` (or the
    checkpoint of [`evolve`]) as an evolutionary tree, ProRefine's results (`*.jsonl`) as diffs of its prompts.

    Args:
        run (`str` or `Path`): A run's output folder, or a single file of results or of a population.
        output (`str` or `Path`, *optional*): Folder to write to; `report` in the run's folder by default.
        max_trajectories (`int`, *optional*, defaults to `20000`): Of more than this, so many are shown, drawn over the
            whole run; the curves are of all.
        pictures (`bool`, *optional*, defaults to `True`): Write PNGs as well, which needs matplotlib.

    Returns:
        `Path`: The HTML file. It needs no network and no other file.

    Raises:
        `FileNotFoundError`: If there is no such run, or nothing in it that a report could show.
    """
    run = Path(run)
    folder = Path(output) if output is not None else (run.parent if run.is_file() else run) / "report"
    records = current_records(read_rollouts(run / "rollouts")) if run.is_dir() else []
    lineage, results = _find_lineage(run), find_results(run)
    if not (records or lineage or results):
        raise FileNotFoundError(
            f"nothing to report in {run}: no rollouts/, no {POPULATION}, no refinement results (*.jsonl)"
            if run.exists()
            else f"{run} does not exist"
        )
    history = {mode: history_of(records, mode) for mode in ("train", "eval")}
    title = run.resolve().stem if run.is_file() else run.resolve().name
    blocks = data_block("run", {"name": title, "folder": str(run), "summary": _summary(run)})
    blocks += history_block(history) if records else ""
    blocks += lineage_block(lineage) if lineage else ""
    if records:
        blocks += trajectory_blocks(sample_evenly(records, max_trajectories), len(records))
    blocks += refinement_blocks(results) if results else ""
    page = folder / "index.html"
    write_whole(page, render_page(title, blocks))
    if pictures:
        plot_panels(history["train"], folder)
        if lineage:
            plot_lineage(lineage, folder / "tree.png")
    return page


def _find_lineage(run: Path) -> Lineage | None:
    """The population of a run; `None` if it has none."""
    if run.is_file():
        return read_lineage(run) if run.suffix == ".json" else None
    return read_lineage(run / POPULATION) if (run / POPULATION).exists() else None


def _summary(run: Path) -> dict[str, object] | None:
    path = run / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
