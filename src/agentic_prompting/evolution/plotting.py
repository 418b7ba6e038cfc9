"""How pictures are drawn here: colours that stay apart for every kind of colour vision, the way to matplotlib, and
E-SPL's evolutionary tree as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .lineage import Lineage

# Okabe and Ito's, darkest contrasts first; each line has dashes of its own as well, so that colour is not all there is.
LINES: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("#0072B2", (1, 0)),
    ("#E69F00", (5, 2)),
    ("#CC79A7", (2, 2)),
    ("#009E73", (7, 2, 2, 2)),
    ("#D55E00", (1, 1)),
)
_BLUE, _ORANGE = LINES[0][0], LINES[1][0]


def figure_class() -> Any:
    """matplotlib's `Figure`, without its global state.

    Raises:
        `ImportError`: If matplotlib is missing; says what to install.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'agentic-prompting[report]'") from error
    return Figure


def plot_lineage(lineage: Lineage, path: str | Path) -> None:
    """Draw the tree over the steps at which prompts were born: descent above, ratings with their doubt below.

    Mutations are solid lines and crossovers dashed ones; the colour is μ, a filled circle can still be selected, the
    star is the best. Below are μ ± σ, in order of birth.

    Raises:
        `ImportError`: If matplotlib is missing.
    """
    nodes = lineage.nodes
    rows = 1 + max(node.lane for node in nodes)
    figure = figure_class()(figsize=(9, min(14.0, 3.5 + 0.28 * rows)), layout="constrained")
    tree, ratings = figure.subplots(2, 1, height_ratios=[max(2.0, 0.3 * rows), 2.0])
    _draw_edges(tree, lineage)
    means = [node.member.rating.mu for node in nodes]
    births = [node.member.prompt.born_at for node in nodes]
    drawn = tree.scatter(births, [node.lane for node in nodes], c=means, cmap="cividis", s=130, zorder=3)
    drawn.set_edgecolor([_ORANGE if node.best else "white" if node.in_window else "#888888" for node in nodes])
    drawn.set_linewidth([3.0 if node.best else 1.0 for node in nodes])
    drawn.set_alpha([1.0 if node.in_window or node.best else 0.45 for node in nodes])
    for place, (born, node) in enumerate(zip(births, nodes, strict=True)):
        tree.annotate(f"{place}{' ★' if node.best else ''}", (born, node.lane), (0, 8), textcoords="offset points")
    figure.colorbar(drawn, ax=tree, label="rating μ")
    tree.set(ylim=(rows - 0.4, -0.8), yticks=[], xlabel="born at step", title="system prompts and their descent")
    tree.xaxis.get_major_locator().set_params(integer=True)
    sigmas = [node.member.rating.sigma for node in nodes]
    ratings.errorbar(range(len(nodes)), means, sigmas, fmt="o", color=_BLUE, ecolor="#9CC9E3", capsize=2)
    ratings.set(xlabel="system prompt", ylabel="rating μ ± σ")
    ratings.grid(alpha=0.3)
    ratings.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=110)


def _draw_edges(axis: Any, lineage: Lineage) -> None:
    for parent, child in lineage.edges:
        ends = [lineage.nodes[parent], lineage.nodes[child]]
        crossed = ends[1].member.prompt.operator == "crossover"
        axis.plot(
            [node.member.prompt.born_at for node in ends],
            [node.lane for node in ends],
            color=LINES[2][0] if crossed else "#777777",
            linestyle="--" if crossed else "-",
            linewidth=1.2,
            zorder=1,
        )
