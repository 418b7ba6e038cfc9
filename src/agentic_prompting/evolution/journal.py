"""The journal of an evolution: one line per attempted child with its cause.

A line is identified by its step and the number of the attempt within the step.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..records import RecordFile
from .operators import Outcome
from .population import Population
from .population_evolution import ReflectionTask
from .run_files import JOURNAL_FILE, POPULATION_FILE
from .system_prompt import SystemPrompt

logger = logging.getLogger(__name__)


def journal_beside(state: str | Path) -> Path:
    """Return the path of the journal that belongs to a state file.

    It is `evolution.jsonl` beside a trainer's `population.json`, and `<name>.evolution.jsonl`
    beside any other file, because a folder may hold several.
    """
    state = Path(state)
    if state.name == POPULATION_FILE:
        return state.with_name(JOURNAL_FILE)
    return state.with_name(f"{state.stem}.{JOURNAL_FILE}")


class EvolutionJournal(RecordFile):
    """A file of [`attempt_records`]. Only one process of a job may write it."""

    def __init__(self, path: str | Path):
        super().__init__(path, sync=True)
        # Attempts that the disk has refused so far; the oldest make room for new ones.
        self._unwritten: deque[dict[str, Any]] = deque(maxlen=100)

    def write(self, attempts: Sequence[dict[str, Any]]) -> None:
        """Append attempts. Never raises: a full disk must not end a run.

        The latest 100 attempts that the disk refused are written with the next ones; the first
        refusal is logged.
        """
        is_retry = bool(self._unwritten)
        self._unwritten.extend(attempts)
        try:
            # A part of the earlier attempts may have been written.
            if is_retry:
                self.keep_before(self._unwritten[0]["step"])
            self.append(list(self._unwritten))
            self._unwritten.clear()
        except OSError as error:
            if not is_retry:
                logger.warning(
                    "%s cannot be written, training goes on without: %s", self.path, error
                )

    def keep_before(self, step: int) -> None:
        """Remove the attempts of this step and later ones.

        A resumed run does these steps again, perhaps with other children, and no attempt may be
        listed twice.
        """
        self.keep(lambda attempt: attempt["step"] < step)


def read_journal(path: str | Path) -> list[dict[str, Any]]:
    """Return all attempts of a journal, oldest first.

    Raises:
        `ValueError`: A line that was written to its end is not a JSON object; names file and line.
    """
    return list(RecordFile(path))


def attempt_records(
    task: ReflectionTask,
    outcomes: Sequence[Outcome],
    children: Sequence[SystemPrompt | None],
    population: Population,
) -> list[dict[str, Any]]:
    """Return the journal's lines of a task.

    Args:
        task ([`ReflectionTask`]): What the operators worked on. The number of its batch is the
            step.
        outcomes (`Sequence[Outcome]`): The outcomes of its operators, in order.
        children (`Sequence[SystemPrompt | None]`): The children that joined the population, with
            their ids.
        population ([`Population`]): Has the parents' scores on held-out problems.

    Returns:
        `list[dict]`: Each `step`, `attempt`, `operator`, `reason`, `child` (id or `None`),
            `parents`, `counts`, `edits` and `evidence` (of the [`OperatorTrace`]; each problem with
            the `scores` of the batch's prompts on it by id, and the ids in `won` and `lost`, both
            empty if all scores are equal), `held_out` of the parents that were evaluated, `copied`
            (the `question` that the child repeats most of, and the `share`; `None` for none).
    """
    records = []
    for attempt, (outcome, child) in enumerate(zip(outcomes, children, strict=True)):
        # Held-out scores of the parents that were evaluated.
        trace = outcome.trace
        held_out = {}
        for parent in trace.parents:
            measured = population.members[parent].held_out
            if measured is not None:
                held_out[str(parent)] = measured
        records.append(
            {
                "step": task.batch,
                "attempt": attempt,
                "operator": outcome.operator,
                "reason": outcome.reason,
                "child": None if child is None else child.id,
                "parents": list(trace.parents),
                "counts": dict(outcome.counts),
                "edits": trace.edits,
                "evidence": [_with_scores(problem, task.scores) for problem in trace.problems],
                "held_out": held_out,
                "copied": trace.copied,
            }
        )
    return records


def _with_scores(
    problem: Mapping[str, Any], scores: Mapping[int, Sequence[float | None]]
) -> dict[str, Any]:
    """Return a problem of a trace with the prompts' scores on it instead of its column."""
    # The scores of the prompts that have one, and which of them are below the best.
    column = problem["column"]
    problem_scores: dict[int, float] = {}
    for prompt_id, row in scores.items():
        score = row[column] if column < len(row) else None
        if score is not None:
            problem_scores[prompt_id] = score
    top_score = max(problem_scores.values(), default=0.0)
    lost = [prompt_id for prompt_id, score in problem_scores.items() if score < top_score]
    # Where all scores are equal, no prompt has won.
    won: list[int] = []
    if lost:
        won = [prompt_id for prompt_id in problem_scores if prompt_id not in lost]

    # The scores take the place of the column; their keys are texts, as JSON demands.
    record = {name: value for name, value in problem.items() if name != "column"}
    record["scores"] = {
        str(prompt_id): round(score, 6) for prompt_id, score in problem_scores.items()
    }
    record["won"] = won
    record["lost"] = lost
    return record
