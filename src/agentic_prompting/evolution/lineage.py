"""What a run of evolution leaves behind: its journal, one line for each child that was attempted and why; and
E-SPL's evolutionary tree (Figure 3): who came from whom, what is believed of each, where to draw it, and the picture.

The journal lies beside the state it belongs to. A line is known by its step and its number within the step. Steps that
a killed run had done after its last checkpoint are done again, perhaps with other children:
[`EvolutionJournal.keep_before`] takes the old lines away, so that no attempt is there twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..records import RecordFile
from .operators import Outcome
from .population import Member, Population, best_of, read_members
from .ratings import EXPLORATION
from .system_prompt import SystemPrompt

JOURNAL_FILE = "evolution.jsonl"


def journal_beside(state: str | Path) -> Path:
    """Where the journal of the evolution in this state file is: `evolution.jsonl` beside a trainer's `population.json`,
    `<name>.evolution.jsonl` beside any other, as there may be several in a folder."""
    state = Path(state)
    return state.with_name(JOURNAL_FILE if state.name == "population.json" else f"{state.stem}.{JOURNAL_FILE}")


class EvolutionJournal:
    """Appends attempts to a file, which the first one creates. For one process of a job only."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file = RecordFile(path, sync=True)

    def keep_before(self, step: int) -> None:
        """Take away the attempts of this step and later ones."""
        self._file.keep(lambda attempt: attempt["step"] < step)

    def write(self, attempts: Iterable[Mapping[str, Any]]) -> None:
        """Append [`attempt_records`]; they are on the disk when this returns."""
        self._file.append(attempts)


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
        children (`Sequence[SystemPrompt | None]`): As they joined the population, with their ids.
        scores (`Mapping[int, Sequence[float | None]]`): By prompt id its mean reward on each problem of the batch.
        population ([`Population`]): For what is known of the parents on held-out problems.

    Returns:
        `list[dict]`: Each `step`, `attempt`, `operator`, `reason`, `child` (id or `None`), `parents`, `counts`,
            `edits` and `evidence` (see [`OperatorTrace`] and [`with_scores`]), `held_out` of the parents where it was
            measured.
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
                "evidence": [with_scores(problem, scores) for problem in trace.problems],
                "held_out": {name: value for name, value in measured.items() if value is not None},
            }
        )
    return records


def with_scores(problem: Mapping[str, Any], scores: Mapping[int, Sequence[float | None]]) -> dict[str, Any]:
    """A problem of an [`OperatorTrace`] with how each prompt of the batch did on it: in place of `column` it has
    `scores` by id, and the ids in `won` and `lost`, both empty where all did alike."""
    column = problem["column"]
    known = {name: row[column] for name, row in scores.items() if column < len(row)}
    scored = {name: value for name, value in known.items() if value is not None}
    top = max(scored.values(), default=0.0)
    won = [name for name, value in scored.items() if value == top]
    differ = len(won) < len(scored)
    return {
        **{name: value for name, value in problem.items() if name != "column"},
        "scores": {str(name): round(value, 6) for name, value in scored.items()},
        "won": won if differ else [],
        "lost": [name for name in scored if name not in won] if differ else [],
    }


# The tree ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A system prompt in the tree.

    Args:
        member ([`Member`]): The prompt and its rating.
        lane (`int`): Its row in the picture, 0 at the top.
        in_window (`bool`): Whether it can still be selected.
        best (`bool`): Whether its μ - λσ is the highest of those that were rated.
        counts (`dict[str, int]`, *optional*): What its operator did: edits proposed, applied, refused.
        story (`dict`, *optional*): The line of the journal that tells what led to it; see [`attempt_records`].
    """

    member: Member
    lane: int
    in_window: bool
    best: bool
    counts: Mapping[str, int] | None = None
    story: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Lineage:
    """All prompts of a run, in order of birth.

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
        return [(parent, place) for place, node in enumerate(self.nodes) for parent in node.member.prompt.parents]


def read_lineage(path: str | Path) -> Lineage:
    """Read `population.json` of a trainer, or the checkpoint of [`evolve`], and the journal beside it if there is one.

    Raises:
        `ValueError`: If the file is neither.
    """
    try:
        state = json.loads(Path(path).read_text(encoding="utf-8"))
        saved = state["population"]
        members = read_members(saved["members"])
        window = saved["window"]
        best = best_of(members, saved.get("best_rule", "conservative"), saved.get("exploration", EXPLORATION))
        counts = _counts(state.get("steps") or [])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no population that this version can read: {error!r}") from None
    return _lineage(members, best, window, counts, read_journal(journal_beside(path)))


def lineage_of(population: Population) -> Lineage:
    """The tree of a population as it is now."""
    best = best_of(population.members, population.best_rule, population.exploration)
    return _lineage(population.members, best, population.window)


def _lineage(
    members: Sequence[Member],
    best: Member,
    window: int,
    counts: Mapping[int, Mapping[str, int]] | None = None,
    attempts: Sequence[dict[str, Any]] = (),
) -> Lineage:
    counts, alive = dict(counts or {}), range(len(members))[-window:]
    stories = {one["child"]: one for one in attempts if one.get("child") is not None}
    counts |= {child: story["counts"] for child, story in stories.items() if isinstance(story.get("counts"), dict)}
    nodes = [
        Node(member, lane, place in alive, member is best, counts.get(place), stories.get(place))
        for place, (member, lane) in enumerate(zip(members, lanes(members), strict=True))
    ]
    return Lineage(nodes, window, [one for one in attempts if one.get("child") is None])


def lanes(members: Sequence[Member]) -> list[int]:
    """A row for each prompt, so that a line of descent runs straight and side branches turn off below it.

    The first child of a prompt by mutation goes on in its branch; every other child opens a new one, right under its
    (first) parent's. Branches of different times share a row.
    """
    branches: list[list[int]] = []  # from top to bottom, each a list of ids
    row_of: dict[int, list[int]] = {}
    for place, member in enumerate(members):
        parents = member.prompt.parents
        row = row_of[parents[0]] if parents else None
        if row is None:
            row = []
            branches.append(row)
        elif row[-1] != parents[0] or len(parents) > 1:
            above = branches.index(row)
            row = []
            branches.insert(above + 1, row)
        row.append(place)
        row_of[place] = row
    lane = {place: number for number, row in enumerate(_packed(branches)) for place in row}
    return [lane[place] for place in range(len(members))]


def _packed(branches: Sequence[list[int]]) -> list[list[int]]:
    """Branches that do not live at the same time share a row: the first one, from the top, that has room."""
    rows: list[list[list[int]]] = []
    for branch in branches:
        for row in rows:
            if all(branch[0] > other[-1] + 1 or branch[-1] + 1 < other[0] for other in row):
                row.append(branch)
                break
        else:
            rows.append([branch])
    return [[place for branch in row for place in branch] for row in rows]


def _counts(steps: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, int]]:
    """What the operators did for each child, from the logs of [`evolve`]."""
    made = (operator for step in steps for operator in step["operators"])
    return {operator["child"]: operator["counts"] for operator in made if operator["child"] is not None}


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
