"""A run's folder, read once: the data of the page and of the pictures. No HTML and no drawing here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..evaluation import Evaluation
from ..evaluation.headroom_figures import HEADROOM_FILE, HeadroomFigures
from ..evolution import Lineage, read_lineage
from ..evolution.run_files import JOURNAL_FILE, POPULATION_FILE
from ..records import Record
from ..refine import RefinementResult
from .evaluation_summary import read_evaluation, read_json_object, read_optimised_prompts
from .plots import OPTIMISATION
from .rollout_records import current_records, history_of
from .sound_records import (
    LOG_ENTRY,
    is_number,
    read_sound_refinements,
    read_sound_rollouts,
    sound_objects,
)

# Files in a run's folder.
EVOLVE_STATE = "state.json"
TRAINER_STATE = "trainer_state.json"
LOG = "rollouts/log.jsonl"


class HeldOut(NamedTuple):
    """Exact match on held-out questions, with its 95 % interval, as a run wrote it into
    `summary.json`.
    """

    name: str
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class RunSummary:
    """The results of a run.

    Args:
        name (`str`), folder (`str`): Name and path of its folder, or of a single file.
        rollouts (`list[Mapping]`): Records, without those that a later run has replaced.
        history (`dict[str, list]`): Curves, entries in the order of steps: `train` and `eval`, see
            [`history_of`], `optimisation`, from the trainer's log, and `evolution`, from the state
            of [`evolve`].
        lineage ([`Lineage`], *optional*): E-SPL's population.
        refinements (`list[RefinementResult]`): ProRefine's results.
        evaluation ([`Evaluation`], *optional*): Answers of [`evaluate_agent`], scored again.
        optimised_prompts (`dict[str, str]`): The prompts that a table's optimisers found, by
            system.
        held_out (`list[HeldOut]`): The scores in `summary.json`, before and after training; the
            last one is the result.
        sandbox (`bool`): Whether `summary.json` is that of a run in the sandbox.
        headroom ([`HeadroomFigures`], *optional*): What `headroom` measured before the run.
    """

    name: str
    folder: str
    rollouts: list[Record] = field(default_factory=list)
    history: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    lineage: Lineage | None = None
    refinements: list[RefinementResult] = field(default_factory=list)
    evaluation: Evaluation | None = None
    optimised_prompts: dict[str, str] = field(default_factory=dict)
    held_out: list[HeldOut] = field(default_factory=list)
    sandbox: bool = False
    headroom: HeadroomFigures | None = None

    @classmethod
    def read(cls, run: str | Path) -> RunSummary:
        """Read a run's folder, or a single file of refinement results or of a population.

        Raises:
            `FileNotFoundError`: If there is no such run, or nothing in it that could be shown.
            `ValueError`: If a population cannot be read.
        """
        run = Path(run)
        if not run.exists():
            raise FileNotFoundError(f"{run} does not exist")
        # A single file holds refinement results or a population.
        summary = cls._read_file(run) if run.is_file() else cls._read_folder(run)
        # Curves alone are not a run that can be shown.
        contents = (
            summary.rollouts,
            summary.lineage,
            summary.refinements,
            summary.evaluation,
            summary.headroom,
        )
        if not any(contents):
            raise FileNotFoundError(
                f"nothing to report in {run}: no rollouts/, no {POPULATION_FILE}, no "
                f"{HEADROOM_FILE}, no refinement results or answers (*.jsonl); a table is shown "
                "once it is finished"
            )
        return summary

    @classmethod
    def _read_file(cls, file: Path) -> RunSummary:
        # Populations are JSON files, refinement results JSON lines.
        is_population = file.suffix == ".json"
        return cls(
            name=file.resolve().stem,
            folder=str(file),
            history={"evolution": _evolution_history(file)} if is_population else {},
            lineage=read_lineage(file) if is_population else None,
            refinements=read_sound_refinements(file),
        )

    @classmethod
    def _read_folder(cls, folder: Path) -> RunSummary:
        # Curves: from rollouts, the log of the trainer, and the state of an evolution.
        rollouts = current_records(read_sound_rollouts(folder / "rollouts"))
        history = {
            "train": history_of(rollouts, "train"),
            "eval": history_of(rollouts, "eval"),
            "optimisation": _optimisation_history(folder),
            "evolution": _evolution_history(folder / EVOLVE_STATE),
        }

        # A trainer keeps its population in a file of its own, `evolve` in its state.
        lineage = None
        if (folder / POPULATION_FILE).exists():
            lineage = read_lineage(folder / POPULATION_FILE)
        elif "population" in read_json_object(folder / EVOLVE_STATE):
            lineage = read_lineage(folder / EVOLVE_STATE)
        # ProRefine writes results into files of any name, an evaluation into the folder or one
        # below it.
        refinements = []
        for path in sorted(folder.glob("*.jsonl")):
            if not path.name.endswith(JOURNAL_FILE):
                refinements += read_sound_refinements(path)
        # Optimised prompts are in the folder of the evaluation.
        evaluation_folder = folder
        evaluation = read_evaluation(folder)
        if evaluation is None:
            evaluation_folder = folder / "evaluation"
            evaluation = read_evaluation(evaluation_folder)
        # Held-out scores, if the run has written a summary.
        result = read_json_object(folder / "summary.json")
        return cls(
            name=folder.resolve().name,
            folder=str(folder),
            rollouts=rollouts,
            history=history,
            lineage=lineage,
            refinements=refinements,
            evaluation=evaluation,
            optimised_prompts=read_optimised_prompts(evaluation_folder) if evaluation else {},
            held_out=_held_out_scores(result),
            sandbox=bool(result.get("sandbox")),
            headroom=HeadroomFigures.read(folder),
        )


def _optimisation_history(run: Path) -> list[dict[str, float]]:
    """The trainer's log, which is written while a run goes on.

    Without one (older runs, other trainers) the longest log in the state of the trainer or of a
    checkpoint.
    """
    # The log without the steps that a later run has replaced.
    log: Any = current_records(sound_objects(run / LOG, LOG_ENTRY))
    if not log:
        # The state after the most steps has the longest log.
        paths = (run / TRAINER_STATE, *run.glob(f"checkpoint-*/{TRAINER_STATE}"))
        states = [read_json_object(path) for path in paths]
        log = max(states, key=_steps_of).get("log_history")
    # Keep the entries that have at least one number to draw.
    history = []
    for logged in log if isinstance(log, list) else ():
        if not isinstance(logged, dict):
            continue
        names = [name for name in ("step", *OPTIMISATION) if is_number(logged.get(name))]
        if "step" in names and len(names) > 1:
            history.append({name: logged[name] for name in names})
    return history


def _steps_of(state: Mapping[str, Any]) -> float:
    steps = state.get("global_step")
    return float(steps) if is_number(steps) else 0.0  # type: ignore[arg-type]


def _evolution_history(state_file: Path) -> list[dict[str, float]]:
    """Mean and held-out reward of each step of [`evolve`], from its state, which counts from 0.

    As in training, the first step is 1: a prompt that is born at step 1 was made in this step.
    """
    steps = read_json_object(state_file).get("steps")
    history = []
    for log in steps if isinstance(steps, list) else ():
        # The file may have been edited or damaged.
        if not isinstance(log, dict) or not is_number(log.get("step")):
            continue
        entry = {"step": log["step"] + 1}
        # Not every step has a held-out score.
        for key, name in (("reward", "evolution/reward"), ("held_out", "evolution/held_out")):
            if is_number(log.get(key)):
                entry[name] = log[key]
        if len(entry) > 1:
            history.append(entry)
    return history


def _held_out_scores(summary: Mapping[str, Any]) -> list[HeldOut]:
    """Prompt-R1's sandbox writes `exact_match_before` and `_after`, E-SPL's a table of policies and
    prompts.
    """
    table = summary.get("exact_match")
    if not isinstance(table, dict):
        # Bring the fields of Prompt-R1 into the form of E-SPL's table.
        table = {}
        for moment in ("before", "after"):
            if f"exact_match_{moment}" in summary:
                interval = summary.get(f"interval_{moment}") or ()
                table[moment] = [summary[f"exact_match_{moment}"], *interval]
    # A row has the mean and both ends of its interval.
    scores = []
    for name, row in table.items():
        if len(row) == 3 and all(is_number(value) for value in row):
            mean, low, high = row
            scores.append(HeldOut(name, mean, low, high))
    return scores
