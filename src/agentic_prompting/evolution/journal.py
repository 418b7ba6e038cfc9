"""The journal of an evolution: one JSON line for each child that was attempted, and why.

It lies beside the state it belongs to. A line is known by its step and its number within the step. Steps that a killed
run had done after its last checkpoint are done again, perhaps with other children: [`EvolutionJournal.keep_before`]
takes the old lines away, so that no attempt is there twice and every line is of the life that went on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..llm.files import write_whole
from .account import with_scores
from .evidence import Trial
from .population import Population
from .reflection import Outcome
from .system_prompt import SystemPrompt

JOURNAL_FILE = "evolution.jsonl"


def journal_beside(state: str | Path) -> Path:
    """Where the journal of the evolution in this state file is: `evolution.jsonl` beside a trainer's `population.json`,
    `<name>.evolution.jsonl` beside any other, as there may be several in a folder."""
    state = Path(state)
    return state.with_name(JOURNAL_FILE if state.name == "population.json" else f"{state.stem}.{JOURNAL_FILE}")


class EvolutionJournal:
    """Appends attempts to a file. For one process of a job only.

    Args:
        path (`str` or `Path`): The file; created with its first line.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def keep_before(self, step: int) -> None:
        """Take away the attempts of this step and later ones, and a line that was cut off while being written."""
        if self.path.exists():
            lines = [_line(one) for one in read_journal(self.path) if one["step"] < step]
            write_whole(self.path, "".join(lines))

    def write(self, attempts: Iterable[Mapping[str, Any]]) -> None:
        """Append [`attempt_record`]s; they are on the disk when this returns."""
        lines = "".join(map(_line, attempts))
        if not lines:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab") as file:
            file.write(lines.encode("ascii"))
            file.flush()
            os.fsync(file.fileno())


def read_journal(path: str | Path) -> list[dict[str, Any]]:
    """All attempts of a journal, oldest first. Lines that are none, such as one that was cut off, are passed over."""
    attempts = []
    for line in Path(path).read_bytes().split(b"\n"):
        try:
            saved = json.loads(line)
        except ValueError:
            continue
        kinds = {"step": int, "child": int | None, "evidence": list}
        if isinstance(saved, dict) and all(isinstance(saved.get(name), kind) for name, kind in kinds.items()):
            attempts.append(saved)
    return attempts


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
            `edits` and `evidence` (see [`Account`] and [`with_scores`]), `held_out` of the parents where it was
            measured.
    """
    records = []
    for attempt, (outcome, child) in enumerate(zip(outcomes, children, strict=True)):
        account = outcome.account
        measured = {str(name): population.members[name].held_out for name in account.parents}
        records.append(
            {
                "step": step,
                "attempt": attempt,
                "operator": outcome.operator,
                "reason": outcome.reason,
                "child": None if child is None else child.id,
                "parents": list(account.parents),
                "counts": dict(outcome.counts),
                "edits": account.edits,
                "evidence": [with_scores(problem, scores) for problem in account.problems],
                "held_out": {name: value for name, value in measured.items() if value is not None},
            }
        )
    return records


def scores_of(trials: Iterable[Trial]) -> dict[int, list[float | None]]:
    """By prompt id its row of mean rewards; of a prompt that was drawn twice the first."""
    scores: dict[int, list[float | None]] = {}
    for trial in trials:
        if trial.prompt.id is not None:
            scores.setdefault(trial.prompt.id, trial.row)
    return scores


def _line(attempt: Mapping[str, Any]) -> str:
    """ASCII: half a surrogate pair, which no UTF-8 can hold, survives as JSON's escape."""
    return json.dumps(attempt, separators=(",", ":")) + "\n"
