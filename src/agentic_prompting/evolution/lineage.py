"""E-SPL's evolutionary tree (Figure 3) as data: who came from whom, what is believed of each, and where to draw it.

Of a living population, or read from what the trainer and [`evolve`] save; no drawing here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .journal import journal_beside, read_journal
from .member import Member, read_members
from .population import Population, best_of


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
        alive = {name for island in saved["joined"] for name in island[-window:]}
        counts = _counts(state.get("steps") or [])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no population that this version can read: {error!r}") from None
    journal = journal_beside(path)
    attempts = read_journal(journal) if journal.exists() else []
    return _lineage(members, alive, window, counts, attempts)


def lineage_of(population: Population) -> Lineage:
    """The tree of a population as it is now."""
    alive = {member.prompt.id or 0 for member in population.alive()}
    return _lineage(population.members, alive, population.window)


def _lineage(
    members: Sequence[Member],
    alive: Collection[int],
    window: int,
    counts: Mapping[int, Mapping[str, int]] | None = None,
    attempts: Sequence[dict[str, Any]] = (),
) -> Lineage:
    best, counts = best_of(members), dict(counts or {})
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
