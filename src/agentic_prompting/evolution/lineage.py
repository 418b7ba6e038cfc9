"""The records of an evolution: the journal, one line per attempted child with its cause, and E-SPL's evolutionary tree
(Figure 3): parents, ratings, positions in the picture, and the picture itself.

A line of the journal is identified by its step and its number within the step.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..records import RecordFile
from .operators import Outcome
from .population import Member, Population, best_of, read_members
from .ratings import EXPLORATION
from .system_prompt import SystemPrompt

logger = logging.getLogger(__name__)

JOURNAL_FILE = "evolution.jsonl"


def journal_beside(state: str | Path) -> Path:
    """The path of the journal that belongs to a state file: `evolution.jsonl` beside a trainer's `population.json`,
    `<name>.evolution.jsonl` beside any other, because a folder may hold several."""
    state = Path(state)
    return state.with_name(
        JOURNAL_FILE if state.name == "population.json" else f"{state.stem}.{JOURNAL_FILE}"
    )


class EvolutionJournal(RecordFile):
    """A file of [`attempt_records`]. Only one process of a job may write it."""

    def __init__(self, path: str | Path):
        super().__init__(path, sync=True)
        self._unwritten: deque[dict[str, Any]] = deque(maxlen=100)

    def write(self, attempts: Sequence[dict[str, Any]]) -> None:
        """Append attempts. Never raises: a full disk must not end a run. The latest 100 attempts that it refused are
        written with the next ones; the first refusal is logged."""
        late = bool(self._unwritten)
        self._unwritten.extend(attempts)
        try:
            if late:  # a part of them may have been written
                self.keep_before(self._unwritten[0]["step"])
            self.append(list(self._unwritten))
            self._unwritten.clear()
        except OSError as error:
            if not late:
                logger.warning(
                    "%s cannot be written, training goes on without: %s", self.path, error
                )

    def keep_before(self, step: int) -> None:
        """Remove the attempts of this step and later ones: a resumed run does these steps again, perhaps with other
        children, and no attempt may be listed twice."""
        self.keep(lambda attempt: attempt["step"] < step)


def read_journal(path: str | Path) -> list[dict[str, Any]]:
    """All attempts of a journal, oldest first.

    Raises:
        `ValueError`: A line that was written to its end is no JSON object; names file and line.
    """
    return list(RecordFile(path))


def attempt_records(
    step: int,
    outcomes: Sequence[Outcome],
    children: Sequence[SystemPrompt | None],
    scores: Mapping[int, Sequence[float | None]],
    population: Population,
) -> list[dict[str, Any]]:
    """The lines of a step.

    Args:
        step (`int`): The batch that the operators worked on, from 0.
        outcomes (`Sequence[Outcome]`): Of its operators, in order.
        children (`Sequence[SystemPrompt | None]`): The children that joined the population, with their ids.
        scores (`Mapping[int, Sequence[float | None]]`): By prompt id its mean reward on each problem of the batch.
        population ([`Population`]): Has the parents' scores on held-out problems.

    Returns:
        `list[dict]`: Each `step`, `attempt`, `operator`, `reason`, `child` (id or `None`), `parents`, `counts`, `edits`
            and `evidence` (of the [`OperatorTrace`]; each problem with the `scores` of the batch's prompts on it by id,
            and the ids in `won` and `lost`, both empty if all scores are equal), `held_out` of the parents that were
            evaluated.
    """
    records = []
    for attempt, (outcome, child) in enumerate(zip(outcomes, children, strict=True)):
        trace = outcome.trace
        measured = {str(name): population.members[name].held_out for name in trace.parents}
        records.append(
            {
                "step": step,
                "attempt": attempt,
                "operator": outcome.operator,
                "reason": outcome.reason,
                "child": None if child is None else child.id,
                "parents": list(trace.parents),
                "counts": dict(outcome.counts),
                "edits": trace.edits,
                "evidence": [_with_scores(problem, scores) for problem in trace.problems],
                "held_out": {name: value for name, value in measured.items() if value is not None},
            }
        )
    return records


def _with_scores(
    problem: Mapping[str, Any], scores: Mapping[int, Sequence[float | None]]
) -> dict[str, Any]:
    column = problem["column"]
    scored = {
        name: row[column] or 0.0
        for name, row in scores.items()
        if row[column : column + 1] not in ([], [None])
    }
    top = max(scored.values(), default=0.0)
    lost = [name for name, value in scored.items() if value < top]
    return {
        **{name: value for name, value in problem.items() if name != "column"},
        "scores": {str(name): round(value, 6) for name, value in scored.items()},
        "won": [name for name in scored if name not in lost] if lost else [],
        "lost": lost,
    }


# The tree ------------------------------------------------------------------------------------------------------------


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
        nodes (`list[Node]`): A prompt's id is its place.
        window (`int`): K.
        refused (`list[dict]`): The journal's attempts that gave no child, oldest first.
    """

    nodes: list[Node]
    window: int
    refused: list[dict[str, Any]] = field(default_factory=list)

    @property
    def edges(self) -> list[tuple[int, int]]:
        """From parent to child, by id."""
        return [
            (parent, place)
            for place, node in enumerate(self.nodes)
            for parent in node.member.prompt.parents
        ]


def read_lineage(path: str | Path) -> Lineage:
    """Read `population.json` of a trainer, or the checkpoint of [`evolve`], and the journal beside it if there is one.

    Raises:
        `ValueError`: If the file is neither.
    """
    try:
        saved = json.loads(Path(path).read_text(encoding="utf-8"))["population"]
        members, window = read_members(saved["members"]), saved["window"]
        best = best_of(
            members, saved.get("best_rule", "conservative"), saved.get("exploration", EXPLORATION)
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no population that this version can read: {error!r}") from None
    return _lineage(members, best, window, read_journal(journal_beside(path)))


def lineage_of(population: Population) -> Lineage:
    """The tree of a population as it is now."""
    best = best_of(population.members, population.best_rule, population.exploration)
    return _lineage(population.members, best, population.window)


def _lineage(
    members: Sequence[Member], best: Member, window: int, attempts: Iterable[dict[str, Any]] = ()
) -> Lineage:
    attempts, candidates = list(attempts), range(len(members))[-window:]
    stories = {one["child"]: one for one in attempts if one.get("child") is not None}
    nodes = [
        Node(member, lane, place in candidates, member is best, stories.get(place))
        for place, (member, lane) in enumerate(zip(members, lanes(members), strict=True))
    ]
    return Lineage(nodes, window, [one for one in attempts if one.get("child") is None])


def lanes(members: Sequence[Member]) -> list[int]:
    """A row of the picture for each prompt: a line of descent runs straight, and side branches are below it.

    The first child of a prompt by mutation continues its branch. Every other child opens a new branch, directly under
    that of its (first) parent. Branches of different times share a row: the first one, from the top, that has room.
    """
    branches: list[list[int]] = []  # from top to bottom, each a list of ids
    branch_of: dict[int, list[int]] = {}
    for place, member in enumerate(members):
        parents = member.prompt.parents
        branch = branch_of[parents[0]] if parents else []
        if not parents:
            branches.append(branch)
        elif branch[-1] != parents[0] or len(parents) > 1:
            above, branch = branches.index(branch), []
            branches.insert(above + 1, branch)
        branch.append(place)
        branch_of[place] = branch
    rows: list[list[list[int]]] = []
    for branch in branches:
        room = (
            row for row in rows if all(branch[0] > b[-1] + 1 or branch[-1] + 1 < b[0] for b in row)
        )
        if (row := next(room, None)) is None:
            rows.append(row := [])
        row.append(branch)
    lane = {place: number for number, row in enumerate(rows) for branch in row for place in branch}
    return [lane[place] for place in range(len(members))]


# Its picture ----------------------------------------------------------------------------------------------------------

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
        raise ImportError(
            "drawing needs matplotlib: pip install 'agentic-prompting[report]'"
        ) from error
    return Figure


def plot_lineage(lineage: Lineage, path: str | Path) -> None:
    """Draw the tree over the steps at which prompts joined: descent above, ratings with their uncertainty below.

    Mutations are solid lines and crossovers dashed ones; the colour is μ, a filled circle can still be selected, the
    star is the best. Below are μ ± σ, in the order in which the prompts joined.

    Raises:
        `ImportError`: If matplotlib is missing.
    """
    nodes = lineage.nodes
    rows = 1 + max(node.lane for node in nodes)
    figure = figure_class()(figsize=(9, min(14.0, 3.5 + 0.28 * rows)), layout="constrained")
    tree, ratings = figure.subplots(2, 1, height_ratios=[max(2.0, 0.3 * rows), 2.0])
    for parent, child in lineage.edges:
        crossed = nodes[child].member.prompt.operator == "crossover"
        style = {"color": LINES[2][0], "linestyle": "--"} if crossed else {"color": "#777777"}
        ends = (nodes[parent], nodes[child])
        tree.plot(
            [n.member.prompt.born_at for n in ends],
            [n.lane for n in ends],
            linewidth=1.2,
            zorder=1,
            **style,
        )
    means = [node.member.rating.mu for node in nodes]
    births = [node.member.prompt.born_at for node in nodes]
    drawn = tree.scatter(
        births, [node.lane for node in nodes], c=means, cmap="cividis", s=130, zorder=3
    )
    drawn.set_edgecolor(
        [_ORANGE if node.best else "white" if node.in_window else "#888888" for node in nodes]
    )
    drawn.set_linewidth([3.0 if node.best else 1.0 for node in nodes])
    drawn.set_alpha([1.0 if node.in_window or node.best else 0.45 for node in nodes])
    for place, (born, node) in enumerate(zip(births, nodes, strict=True)):
        tree.annotate(
            f"{place}{' ★' if node.best else ''}",
            (born, node.lane),
            (0, 8),
            textcoords="offset points",
        )
    figure.colorbar(drawn, ax=tree, label="rating μ")
    tree.set(
        ylim=(rows - 0.4, -0.8),
        yticks=[],
        xlabel="born at step",
        title="system prompts and their descent",
    )
    tree.xaxis.get_major_locator().set_params(integer=True)
    sigmas = [node.member.rating.sigma for node in nodes]
    ratings.errorbar(
        range(len(nodes)), means, sigmas, fmt="o", color=_BLUE, ecolor="#9CC9E3", capsize=2
    )
    ratings.set(xlabel="system prompt", ylabel="rating μ ± σ")
    ratings.grid(alpha=0.3)
    ratings.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=110)
