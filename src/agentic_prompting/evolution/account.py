"""Why a child is as it is: what its operator was shown, and every edit that was proposed, with its reason and its fate.

Gathered by the operators as they work, so that nothing has to be guessed afterwards; `journal.py` keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .edits import Edit, EditReport
from .evidence import Evidence
from .templates import shorten

# What is kept of an attempt: a line of the journal stays below about 100 KB.
MAX_CHARS = 600
"""Characters of each text: question, answer, reflection, edit, reason. The middle of a longer one is left out."""
MAX_PROBLEMS = 20
MAX_REFLECTIONS = 8
"""Of a problem."""
MAX_EDITS = 60


@dataclass
class Account:
    """What an operator was shown and what it was told.

    Args:
        parents (`tuple[int, ...]`): Ids of the prompts it works from.
        problems (`list[dict]`): Each `column` (its place in the batch), `question`, `truth`, `reflections` (each
            `reward` and `text`: the summaries of the attempts).
        edits (`list[dict]`): Each `problem` (its place in `problems`; `None` in the final plan), `op`, `ids`, `text`,
            `search`, `reason`, `refused` (why it was not applied, or `None`).
    """

    parents: tuple[int, ...] = ()
    problems: list[dict[str, Any]] = field(default_factory=list)
    edits: list[dict[str, Any]] = field(default_factory=list)

    def show(self, column: int, problem: Evidence, reflections: Sequence[tuple[float, str]] = ()) -> None:
        """Note a problem that the operator looks at."""
        if len(self.problems) < MAX_PROBLEMS:
            kept = [{"reward": reward, "text": _short(text)} for reward, text in reflections[:MAX_REFLECTIONS]]
            shown = {"question": _short(problem.question), "truth": _short(problem.truth), "reflections": kept}
            self.problems.append({"column": column, **shown})

    def propose(self, report: EditReport, problem: int | None = None) -> None:
        """Note edits and what became of them."""
        judged = [*((edit, None) for edit in report.applied), *report.refused]
        self.edits += [_told(edit, why, problem) for edit, why in judged[: MAX_EDITS - len(self.edits)]]


def with_scores(problem: Mapping[str, Any], scores: Mapping[int, Sequence[float | None]]) -> dict[str, Any]:
    """A problem of an account with how each prompt of the batch did on it, and so who won and who lost.

    Args:
        problem (`Mapping`): One of [`Account`]'s.
        scores (`Mapping[int, Sequence[float | None]]`): By prompt id its mean reward on each problem of the batch.

    Returns:
        `dict`: Without `column`; with `scores` by id, and the ids in `won` and `lost`, both empty where all did alike.
    """
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


def _told(edit: Edit, refused: str | None, problem: int | None) -> dict[str, Any]:
    texts = {"text": _short(edit.text), "search": _short(edit.search), "reason": _short(edit.reason)}
    return {"problem": problem, "op": edit.op, "ids": list(edit.ids)[:20], **texts, "refused": refused}


def _short(text: str) -> str:
    return shorten(text, MAX_CHARS)
