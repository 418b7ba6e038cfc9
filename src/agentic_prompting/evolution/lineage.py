"""E-SPL's evolutionary tree (Figure 3): parents, ratings, positions in the picture, and the
picture.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .journal import journal_beside, read_journal
from .population import Member, Population, best_of, read_members
from .selection import EXPLORATION

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The tree -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A system prompt in the tree.

    Args:
        member ([`Member`]): The prompt and its rating.
        lane (`int`): Its row in the picture, 0 at the top.
        in_window (`bool`): Whether it can still be selected.
        best (`bool`): Whether it is [`Population.best`].
        story (`dict`, *optional*): Its line of the journal; see [`attempt_records`].
    """

    member: Member
    lane: int
    in_window: bool
    best: bool
    story: Mapping[str, Any] | None = None

    @property
    def counts(self) -> Mapping[str, int] | None:
        """The counts of its operator: edits proposed, applied, refused."""
        counts = (self.story or {}).get("counts")
        return counts if isinstance(counts, dict) else None


@dataclass(frozen=True)
class Lineage:
    """All prompts of a run, in the order in which they joined.

    Args:
        nodes (`list[Node]`): A prompt's id is its position.
        window (`int`): K.
        refused (`list[dict]`): The journal's attempts without a child, oldest first.
    """

    nodes: list[Node]
    window: int
    refused: list[dict[str, Any]] = field(default_factory=list)

    @property
    def edges(self) -> list[tuple[int, int]]:
        """From parent to child, by id."""
        edges = []
        for child, node in enumerate(self.nodes):
            edges += [(parent, child) for parent in node.member.prompt.parents]
        return edges


def read_lineage(path: str | Path) -> Lineage:
    """Read a trainer's `population.json` or a checkpoint of [`evolve`], and the journal beside it.

    Raises:
        `ValueError`: If the file is neither.
    """
    # Older files do not name the rule of the best prompt.
    try:
        saved = json.loads(Path(path).read_text(encoding="utf-8"))["population"]
        members = read_members(saved["members"])
        window = saved["window"]
        best_rule = saved.get("best_rule", "conservative")
        best = best_of(members, best_rule, saved.get("exploration", EXPLORATION))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no population that this version can read: {error!r}") from None
    return _build_lineage(members, best, window, read_journal(journal_beside(path)))


def lineage_of(population: Population) -> Lineage:
    """Return the tree of a population as it is now."""
    best = best_of(population.members, population.best_rule, population.exploration)
    return _build_lineage(population.members, best, population.window)


def _build_lineage(
    members: Sequence[Member], best: Member, window: int, attempts: Iterable[dict[str, Any]] = ()
) -> Lineage:
    # The journal's line of each child, and the attempts without a child.
    stories: dict[int, dict[str, Any]] = {}
    refused = []
    for attempt in attempts:
        if attempt.get("child") is None:
            refused.append(attempt)
        else:
            stories[attempt["child"]] = attempt
    # Only the newest prompts can still be selected.
    window_positions = range(len(members))[-window:]
    nodes = []
    for position, (member, lane) in enumerate(zip(members, lanes(members), strict=True)):
        nodes.append(
            Node(
                member=member,
                lane=lane,
                in_window=position in window_positions,
                best=member is best,
                story=stories.get(position),
            )
        )
    return Lineage(nodes, window, refused)


def lanes(members: Sequence[Member]) -> list[int]:
    """Return the row of the picture for each prompt.

    A line of descent runs straight, and side branches are below it. The first child of a prompt by
    mutation continues its branch. Every other child opens a new branch, directly under the branch
    of its (first) parent. Branches of different times share a row: the first one, from the top,
    that is free for them.
    """
    # Branches are lists of ids, from top to bottom.
    branches: list[list[int]] = []
    branch_of: dict[int, list[int]] = {}
    for position, member in enumerate(members):
        parents = member.prompt.parents
        # A prompt without parents opens a branch at the bottom.
        if not parents:
            branch: list[int] = []
            branches.append(branch)
        else:
            branch = branch_of[parents[0]]
            # Only the first child of a single parent continues that parent's branch.
            if branch[-1] != parents[0] or len(parents) > 1:
                above = branches.index(branch)
                branch = []
                branches.insert(above + 1, branch)
        branch.append(position)
        branch_of[position] = branch

    # Put each branch into the first row in which it overlaps no other.
    rows: list[list[list[int]]] = []
    lane_of: dict[int, int] = {}
    for branch in branches:
        lane = 0
        while lane < len(rows) and any(_overlap(branch, other) for other in rows[lane]):
            lane += 1
        if lane == len(rows):
            rows.append([])
        rows[lane].append(branch)
        lane_of |= dict.fromkeys(branch, lane)
    return [lane_of[position] for position in range(len(members))]


def _overlap(branch: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two branches overlap or touch in time."""
    return branch[0] <= other[-1] + 1 and other[0] <= branch[-1] + 1


# Its picture --------------------------------------------------------------------------------------

# Okabe and Ito's colours, darkest contrasts first; each line has dashes of its own as well, so that
# colour is not the only difference.
LINES: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("#0072B2", (1, 0)),
    ("#E69F00", (5, 2)),
    ("#CC79A7", (2, 2)),
    ("#009E73", (7, 2, 2, 2)),
    ("#D55E00", (1, 1)),
)
_BLUE = LINES[0][0]
_ORANGE = LINES[1][0]


def figure_class() -> type[Figure]:
    """Return matplotlib's `Figure`, without its global state.

    Raises:
        `ImportError`: If matplotlib is missing; says what to install.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "drawing needs matplotlib: pip install 'agentic-prompting[report]'"
        ) from error
    return Figure


def plot_lineage(lineage: Lineage, path: str | Path) -> None:
    """Draw the tree over the steps at which prompts joined, and the ratings below.

    Mutations are solid lines and crossovers dashed ones; the colour is μ, a filled circle can still
    be selected, the star is the best. Below are μ ± σ, in the order in which the prompts joined.

    Raises:
        `ImportError`: If matplotlib is missing.
    """
    nodes = lineage.nodes
    # The columns to draw, and a picture that grows with the number of rows.
    row_count = 1 + max(node.lane for node in nodes)
    births = [node.member.prompt.born_at for node in nodes]
    means = [node.member.rating.mu for node in nodes]
    sigmas = [node.member.rating.sigma for node in nodes]
    figure = figure_class()(figsize=(9, min(14.0, 3.5 + 0.28 * row_count)), layout="constrained")
    tree, ratings = figure.subplots(2, 1, height_ratios=[max(2.0, 0.3 * row_count), 2.0])

    # Lines of descent.
    for parent, child in lineage.edges:
        is_crossover = nodes[child].member.prompt.operator == "crossover"
        tree.plot(
            [births[parent], births[child]],
            [nodes[parent].lane, nodes[child].lane],
            color=LINES[2][0] if is_crossover else "#777777",
            linestyle="--" if is_crossover else "-",
            linewidth=1.2,
            zorder=1,
        )

    # A circle for each prompt.
    lane_numbers = [node.lane for node in nodes]
    circles = tree.scatter(births, lane_numbers, c=means, cmap="cividis", s=130, zorder=3)
    # An orange edge marks the best prompt; a grey edge and a pale circle one out of the window.
    edge_colours = []
    for node in nodes:
        if node.best:
            edge_colours.append(_ORANGE)
        else:
            edge_colours.append("white" if node.in_window else "#888888")
    circles.set_edgecolor(edge_colours)
    circles.set_linewidth([3.0 if node.best else 1.0 for node in nodes])
    circles.set_alpha([1.0 if node.in_window or node.best else 0.45 for node in nodes])
    for position, node in enumerate(nodes):
        # The id stands above the circle.
        label = f"{position} ★" if node.best else str(position)
        point = (births[position], node.lane)
        tree.annotate(label, point, (0, 8), textcoords="offset points")
    figure.colorbar(circles, ax=tree, label="rating μ")
    # The vertical axis points down: lane 0 is at the top.
    tree.set(
        ylim=(row_count - 0.4, -0.8),
        yticks=[],
        xlabel="born at step",
        title="system prompts and their descent",
    )
    tree.xaxis.get_major_locator().set_params(integer=True)

    # Ratings with their uncertainty.
    ratings.errorbar(
        range(len(nodes)), means, sigmas, fmt="o", color=_BLUE, ecolor="#9CC9E3", capsize=2
    )
    ratings.set(xlabel="system prompt", ylabel="rating μ ± σ")
    ratings.grid(alpha=0.3)
    ratings.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=110)
