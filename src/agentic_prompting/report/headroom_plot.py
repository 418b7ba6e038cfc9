"""The picture of `headroom`: each figure with its interval, scores, gains and shares apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..evaluation.headroom_figures import Figure, HeadroomFigures
from ..evolution.lineage import LINES, figure_class

PANEL_TITLES = {"score": "score", "gain": "gain of score", "share": "share"}


def plot_headroom(headroom: HeadroomFigures, path: str | Path) -> None:
    """Draw the figures of a measurement into a PNG.

    Args:
        headroom ([`HeadroomFigures`]): `Headroom.figures`, or the result of
            [`HeadroomFigures.read`].
        path (`str` or `Path`): The PNG to write. Nothing is written if nothing was measured.

    Raises:
        `ImportError`: If matplotlib is missing.
    """
    # A panel for each type of figure, as high as it has figures.
    panels: list[list[Figure]] = []
    for panel in PANEL_TITLES:
        figures = [figure for figure in headroom.measured if figure.panel == panel]
        if figures:
            panels.append(figures)
    if not panels:
        return
    heights = [len(figures) + 1.5 for figures in panels]
    picture = figure_class()(figsize=(8, 0.5 + 0.34 * sum(heights)), layout="constrained")
    axes = picture.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, figures in zip(axes, panels, strict=True):
        _draw_panel(axis, figures, headroom.delta)
    picture.savefig(path, dpi=110)


def _draw_panel(axis: Any, figures: Sequence[Figure], delta: float) -> None:
    """Draw figures below each other: an interval with its estimate, or a bracket as a bar."""
    colour, _ = LINES[0]
    for position, figure in enumerate(figures):
        if figure.mean is None:
            axis.barh(position, figure.high - figure.low, 0.4, figure.low, color=colour, alpha=0.4)
        else:
            axis.plot([figure.low, figure.high], [position, position], color=colour, linewidth=2)
            axis.plot([figure.mean], [position], "o", color=colour, markersize=5)
    axis.set_yticks(range(len(figures)), [figure.name for figure in figures])
    axis.set_ylim(len(figures) - 0.5, -0.5)

    # Gains are read against 0 and against the smallest gain that is worth it.
    panel = figures[0].panel
    if panel == "gain":
        axis.axvline(0, color="black", linewidth=0.8)
        axis.axvline(delta, color="black", linewidth=0.8, linestyle="--")
        axis.set_xlabel(f"{PANEL_TITLES[panel]} (dashed: worth it from {delta:g} on)")
    else:
        axis.set_xlim(0, 1)
        axis.set_xlabel(PANEL_TITLES[panel])
    axis.grid(axis="x", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
