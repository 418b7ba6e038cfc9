"""A run as one HTML file: our own page, style and script, and the run's data in inert blocks.

Text of a model cannot run, for two independent reasons: data is packed and shown with `textContent`
only, and the page's content security policy allows our own script by its hash, no other, and no
network.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..evolution import plot_lineage
from ..records import atomic_write
from .headroom_plot import plot_headroom
from .page_data import Block, comparison_blocks, run_blocks
from .plots import plot_panels
from .run_summary import RunSummary

_PAGE = Path(__file__).parent / "page"
# Building blocks, then sections of the page; `main` draws it.
_SCRIPTS = (
    "elements",
    "text",
    "data",
    "filters",
    "item_browser",
    "charts",
    "line_chart",
    "cost_chart",
    "headroom",
    "training",
    "comparison",
    "evolution",
    "evolution_tree",
    "evolution_story",
    "refinements",
    "evaluation",
    "trajectories",
    "trajectory_detail",
    "main",
)


def write_report(
    run: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    max_trajectories: int = 20_000,
    pictures: bool = True,
    watch: bool = False,
) -> Path:
    """Write the report of a run, or of several side by side.

    It shows whatever the run has: `rollouts/` as curves and a browser of trajectories, the
    trainer's log as curves, `population.json` (or the checkpoint of [`evolve`], `state.json`) as an
    evolutionary tree, ProRefine's results (`*.jsonl`) as diffs of its prompts, `summary.json` as
    the held-out result, the answers of [`evaluate_agent`] (`*.jsonl`) with tables, intervals and
    paired tests, `headroom.json` beside what the run brought. Several runs have their curves in the
    same charts, paired evaluations, and a chart of scores against costs.

    Args:
        run (`str`, `Path` or a list of them): A run's output folder, or a single file of results or
            of a population.
        output (`str` or `Path`, *optional*): Folder to write to; `report` in the (first) run's
            folder by default, `comparison` for several.
        max_trajectories (`int`, *optional*, defaults to `20000`): The most trajectories on the
            page, chosen evenly from the run; curves are made of all.
        watch (`bool`, *optional*, defaults to `False`): The page reloads itself while it is not in
            use.
        pictures (`bool`, *optional*, defaults to `True`): Write PNGs as well, which needs
            matplotlib.

    Returns:
        `Path`: The HTML file. It needs no network and no other file.

    Raises:
        `FileNotFoundError`: If there is no such run, or nothing in it that a report could show.
        `ValueError`: If a population cannot be read.
    """
    # Read the runs, and find the folder of the page.
    paths = [Path(run)] if isinstance(run, str | Path) else [Path(path) for path in run]
    summaries = [RunSummary.read(path) for path in paths]
    is_comparison = len(paths) > 1
    folder = paths[0].parent if paths[0].is_file() else paths[0]
    folder = folder / ("comparison" if is_comparison else "report")
    if output is not None:
        folder = Path(output)
    page = folder / "index.html"
    # Several runs have one page of what they have in common, and no pictures.
    if is_comparison:
        title = f"{len(paths)} runs"
        atomic_write(page, render_page(title, comparison_blocks(summaries)))
        return page

    # A single run has its page and, if wanted, a picture of each panel.
    (summary,) = summaries
    atomic_write(page, render_page(summary.name, run_blocks(summary, max_trajectories, watch)))
    if pictures:
        for mode in ("train", "optimisation", "evolution"):
            plot_panels(summary.history.get(mode, []), folder)
        if summary.headroom:
            plot_headroom(summary.headroom, folder / "headroom.png")
        if summary.lineage:
            plot_lineage(summary.lineage, folder / "tree.png")
    return page


def render_page(title: str, blocks: Iterable[Block]) -> str:
    """The whole page around its data."""
    from jinja2 import Environment, FileSystemLoader

    # Style and script are parts of the page, which needs no other file.
    style = (_PAGE / "page.css").read_text(encoding="utf-8")
    scripts = [(_PAGE / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS]
    script = '"use strict";\n' + "\n".join(scripts)
    # Only this script and this style are allowed, by their hashes, and no network.
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'"
    )
    # Only the title is escaped: style and script are ours, and packed data needs no escaping.
    template = Environment(loader=FileSystemLoader(_PAGE), autoescape=True)
    page = template.get_template("page.html")
    # Blocks are packed one at a time, while the page is rendered.
    packed = ((name, pack(data)) for name, data in blocks)
    return page.render(title=title, policy=policy, style=style, script=script, blocks=packed)


def _hash(text: str) -> str:
    # In the form of a content security policy.
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def pack(data: Any) -> str:
    """Data as base64 of compressed JSON: no `<`, quote or ampersand, whatever a model wrote, so
    nothing to escape.

    It is also a tenth of the size, and the browser unpacks a piece only when it is shown. Lone
    surrogates survive, as JSON's escapes.
    """
    text = json.dumps(data, separators=(",", ":"))
    # The same data gives the same page: no time stamp.
    compressed = gzip.compress(text.encode(), 6, mtime=0)
    return base64.b64encode(compressed).decode()
