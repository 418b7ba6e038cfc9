"""A run's folder, read once: the data of the page and of the pictures. No HTML and no drawing here.

The curves are made of the recorded rollouts and not of the trainer's log: every run has records, whether or not it
saved a checkpoint, and the curves then agree with the trajectories that are shown beside them. The log adds the values
that are in no rollout: loss, KL divergence, gradient norm, entropy.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from ..evaluation import METRICS, Evaluation, bootstrap_interval, find_metrics
from ..evaluation.repeats import passes
from ..evaluation.scoring import score_records, summarise
from ..evolution import Lineage, read_lineage
from ..evolution.lineage import JOURNAL_FILE
from ..records import Record
from ..refine import RefinementResult
from ..rewards import PromptR1Reward, exact_match, token_f1
from ..rollout import STATUSES
from .plots import OPTIMISATION
from .sound import (
    LOG_ENTRY,
    is_number,
    read_sound_answers,
    read_sound_refinements,
    read_sound_rollouts,
    sound_objects,
)

POPULATION, STATE, LOG = "population.json", "trainer_state.json", "rollouts/log.jsonl"
_CLOSE = 1e-5  # rewards are recorded with six digits


class CostPoint(NamedTuple):
    """A system's score and cost: mean score with its 95 % interval, US dollars a question, and whether it is on the
    front (no other system is at least as good for no more)."""

    name: str
    usd: float
    mean: float
    low: float
    high: float
    front: bool


class HeldOut(NamedTuple):
    """Exact match on held-out questions, with its 95 % interval, as a run wrote it into `summary.json`."""

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
        history (`dict[str, list]`): Curves, entries in the order of steps: `train` and `eval`, see [`history_of`], and
            `optimisation`, from the trainer's log.
        lineage ([`Lineage`], *optional*): E-SPL's population.
        refinements (`list[RefinementResult]`): ProRefine's results.
        evaluation ([`Evaluation`], *optional*): Answers of [`evaluate_agent`], scored again.
        held_out (`list[HeldOut]`): The scores in `summary.json`, before and after training; the last one is the result.
        sandbox (`bool`): Whether `summary.json` is that of a run in the sandbox.
    """

    name: str
    folder: str
    rollouts: list[Record] = field(default_factory=list)
    history: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    lineage: Lineage | None = None
    refinements: list[RefinementResult] = field(default_factory=list)
    evaluation: Evaluation | None = None
    held_out: list[HeldOut] = field(default_factory=list)
    sandbox: bool = False

    @classmethod
    def read(cls, run: str | Path) -> RunSummary:
        """Read a run's folder, or a single file of refinement results or of a population.

        Raises:
            `FileNotFoundError`: If there is no such run, or nothing in it that could be shown.
            `ValueError`: If a population cannot be read.
        """
        run = Path(run)
        if run.is_file():
            lineage = read_lineage(run) if run.suffix == ".json" else None
            found = cls(
                run.resolve().stem,
                str(run),
                lineage=lineage,
                refinements=read_sound_refinements(run),
            )
        else:
            records = current_records(read_sound_rollouts(run / "rollouts")) if run.is_dir() else []
            history = {mode: history_of(records, mode) for mode in ("train", "eval")}
            written = _json(run / "summary.json")
            files = [
                path for path in sorted(run.glob("*.jsonl")) if not path.name.endswith(JOURNAL_FILE)
            ]
            found = cls(
                run.resolve().name,
                str(run),
                records,
                history | {"optimisation": _optimisation(run)},
                read_lineage(run / POPULATION) if (run / POPULATION).exists() else None,
                [result for path in files for result in read_sound_refinements(path)],
                read_evaluation(run) or read_evaluation(run / "evaluation"),
                _held_out(written),
                bool(written.get("sandbox")),
            )
        if not (found.rollouts or found.lineage or found.refinements or found.evaluation):
            raise FileNotFoundError(
                f"nothing to report in {run}: no rollouts/, no {POPULATION}, no refinement results or answers (*.jsonl)"
                if run.exists()
                else f"{run} does not exist"
            )
        return found


def _json(path: Path) -> dict[str, Any]:
    """A file's JSON object; an empty one if there is no such file, or no object in it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _object(saved: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = saved.get(name)
    return found if isinstance(found, dict) else {}


def read_evaluation(folder: Path) -> Evaluation | None:
    """The evaluation in a folder, by [`evaluate_agent`] or a table of the papers, in the metrics that need no model;
    `None` if there is none."""
    saved = _json(folder / "run.json")
    records = []
    for path in sorted(folder.rglob("*.jsonl") if saved else folder.glob("*.jsonl")):
        records += read_sound_answers(path)
    of_tasks, fit_calls = (_object(saved, name) for name in ("metrics", "fit_calls"))
    known = [name for name in METRICS if name != "semantic_similarity"]
    results = []
    for system, task in dict.fromkeys((record["system"], record["task"]) for record in records):
        own = [record for record in records if (record["system"], record["task"]) == (system, task)]
        named = [name for name in of_tasks.get(task) or () if name in known]
        metrics = find_metrics(named or ["exact_match", "token_f1"])
        results.append(summarise(system, task, own, metrics, fit_calls.get(system, 0)))
    order = list(fit_calls)
    place = {system: number for number, system in enumerate(order)}
    results.sort(key=lambda result: place.get(result.system, len(order)))
    records.sort(key=lambda record: place.get(record["system"], len(order)))
    return Evaluation(results, records) if records else None


def first_scores(evaluation: Evaluation) -> list[float | None]:
    """Each answer's score in the first metric of its task; `None` for an answer that failed."""
    scores: dict[int, float | None] = {}
    for result in evaluation.results:
        of_both = (result.system, result.task)
        own = {
            i: one
            for i, one in enumerate(evaluation.records)
            if (one["system"], one["task"]) == of_both
        }
        first = next(iter(result.values))
        scores |= zip(
            own, score_records(list(own.values()), find_metrics([first]))[first], strict=True
        )
    return [scores[i] for i in range(len(evaluation.records))]


def cost_points(runs: Sequence[RunSummary], names: Sequence[str]) -> list[CostPoint]:
    """Each run, or each system of its evaluation, as a point of score against dollars, the cheapest first.

    For a run without an evaluation these are exact match and cost of the training rollouts of the last tenth of its
    steps. A shared or recorded reply costs the price of the original one. Failed answers are left out of both. The
    interval is over questions: answers to the same one say little more than one of them.

    Args:
        runs (`Sequence[RunSummary]`): The runs.
        names (`Sequence[str]`): Their names on the page.
    """
    found: dict[str, tuple[list[float], dict[Any, list[float]]]] = {}
    scored: list[tuple[str, Any, float, float | None]]
    for run, name in zip(runs, names, strict=True):
        if run.evaluation:
            answers = zip(run.evaluation.records, first_scores(run.evaluation), strict=True)
            before = f"{name}: " if len(runs) > 1 else ""
            scored = [
                (
                    before + record["system"],
                    (record["task"], record["place"]),
                    _worth(record),
                    score,
                )
                for record, score in answers
            ]
        else:
            trained = [one for one in run.rollouts if one.get("mode", "train") == "train"]
            steps = max((one["step"] for one in trained), default=0) + 1
            scored = [
                (name, group, _worth(one), exact_match_of_record(one))
                for group, one in zip(groups_of(trained)[0], trained, strict=True)
                if one["step"] >= steps - max(1, steps // 10)
            ]
        for point, question, usd, score in scored:
            if score is not None:
                dollars, scores = found.setdefault(point, ([], defaultdict(list)))
                dollars.append(usd)
                scores[question].append(score)
    points = [
        (name, fmean(usd), bootstrap_interval([fmean(of) for of in scores.values()]))
        for name, (usd, scores) in found.items()
    ]
    return [
        CostPoint(
            *(name, usd, score.mean, score.low, score.high),
            front=not any(
                dollars <= usd
                and other.mean >= score.mean
                and (dollars, other.mean) != (usd, score.mean)
                for _, dollars, other in points
            ),
        )
        for name, usd, score in sorted(points, key=lambda point: (point[1], -point[2].mean))
    ]


def _worth(record: Record) -> float:
    """The dollars of a rollout, or of an answer, as if each of its replies had been paid for it."""
    return record.get("worth_usd", record.get("cost_usd")) or 0.0


def _optimisation(run: Path) -> list[dict[str, float]]:
    """The trainer's log, which is written while a run goes on. Without one (older runs, other trainers) the longest log
    in the state of the trainer or of a checkpoint."""
    states = [_json(path) for path in (run / STATE, *run.glob(f"checkpoint-*/{STATE}"))]
    log: Iterable[Record] = current_records(sound_objects(run / LOG, LOG_ENTRY))
    log = log or max(states, key=_steps_of).get("log_history") or []
    log = [one for one in log if isinstance(one, dict)] if isinstance(log, list) else []
    entries = (
        {name: one[name] for name in ("step", *OPTIMISATION) if is_number(one.get(name))}
        for one in log
    )
    return [entry for entry in entries if len(entry) > 1 and "step" in entry]


def _steps_of(state: Mapping[str, Any]) -> float:
    steps: Any = state.get("global_step")
    return float(steps) if is_number(steps) else 0.0


def _held_out(summary: Mapping[str, Any]) -> list[HeldOut]:
    """Prompt-R1's sandbox writes `exact_match_before` and `_after`, E-SPL's a table of policies and prompts."""
    table: Any = summary.get("exact_match")
    if not isinstance(table, dict):
        whens = [when for when in ("before", "after") if f"exact_match_{when}" in summary]
        table = {
            when: [summary[f"exact_match_{when}"], *(summary.get(f"interval_{when}") or ())]
            for when in whens
        }
    return [
        HeldOut(name, *row)
        for name, row in table.items()
        if len(row) == 3 and all(map(is_number, row))
    ]


# --- rollouts --------------------------------------------------------------------------------------------------------


def current_records(records: Iterable[Record]) -> list[Record]:
    """The records without those that a later run in the same folder has replaced.

    A resumed run repeats the steps after its checkpoint, and a new run repeats all of them. So an earlier run's records
    from the later run's first step on do not belong to the result, but for the evaluation that was made at this step
    before the checkpoint was written.
    """
    kept = list(records)
    first: dict[int, int] = {}
    evaluated: dict[int, int] = {}  # by step: the last run that was evaluated there
    for record in kept:
        run, step = record.get("run", 0), record["step"]
        first[run] = min(first.get(run, step), step)
        if record.get("mode") == "eval":
            evaluated[step] = max(evaluated.get(step, run), run)
    # For each run the step at which a later one takes over.
    ends, end = {}, float("inf")
    for run in sorted(first, reverse=True):
        ends[run] = end
        end = min(end, first[run])

    def is_current(record: Record) -> bool:
        run, step = record.get("run", 0), record["step"]
        return step < ends[run] or (
            record.get("mode") == "eval" and 0 < step == ends[run] and evaluated[step] == run
        )

    return list(filter(is_current, kept))


def total_reward(record: Record) -> float | None:
    """The reward that training used: the weighted sum, `reward`, if it was recorded, else the sum of the rewards;
    `None` if there is none."""
    if "reward" in record:
        return record["reward"] if is_number(record["reward"]) else None
    scored = [reward for reward in (record.get("rewards") or {}).values() if reward is not None]
    return sum(scored) if scored else None


def groups_of(records: Sequence[Record]) -> tuple[list[int], list[float | None]]:
    """For each record the number of its group (the rollouts of one row in one step under one prompt), and its
    advantage by GRPO's default: the difference from the group's mean, divided by its deviation; `None` without a
    reward."""
    names = ("run", "mode", "step", "id", "question", "task", "environment", "system_prompt")
    keys = [tuple(str(record.get(name)) for name in names) for record in records]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    rewards: dict[Any, list[float]] = defaultdict(list)
    totals = [total_reward(record) for record in records]
    for key, total in zip(keys, totals, strict=True):
        rewards[key] += [total] if total is not None else []
    spread = {
        key: (fmean(of), stdev(of) if len(of) > 1 else 0.0) for key, of in rewards.items() if of
    }
    advantages = [
        None if total is None else (total - spread[key][0]) / (spread[key][1] + 1e-4)
        for key, total in zip(keys, totals, strict=True)
    ]
    return [numbers[key] for key in keys], advantages


def exact_match_of_record(record: Record) -> float | None:
    """1.0 for a right answer, 0.0 for a wrong one or none; `None` if there is nothing to compare with."""
    if record["status"] == "failed" or not record.get("answers"):
        return None
    return exact_match(record.get("answer") or "", record["answers"])


def reward_parts(record: Record) -> list[tuple[str, float | None]]:
    """A record's rewards by name, with the format and answer parts of Prompt-R1's, and the scores of the answer.

    The parts are computed from the turns with the paper's coefficients. They are shown only if their sum is the
    recorded reward: for a run with other coefficients the reward alone is shown. The weighted total follows several
    rewards, or one that it differs from.
    """
    rewards: Mapping[str, float | None] = record.get("rewards") or {}
    parts: list[tuple[str, float | None]] = []
    for name, value in rewards.items():
        parts.append((name, value))
        parts += (
            _prompt_r1_parts(record, value)
            if name == "prompt_r1_reward" and value is not None
            else []
        )
    if "reward" in record and list(rewards.values()) != [record["reward"]]:
        parts.append(("total, as weighted in training", total_reward(record)))
    matched = exact_match_of_record(record)
    if matched is not None:
        parts += [
            ("exact match", matched),
            ("token F1", token_f1(record.get("answer") or "", record["answers"])),
        ]
    return parts


def _prompt_r1_parts(record: Record, recorded: float) -> list[tuple[str, float | None]]:
    texts = [turn["text"] for turn in record["turns"]]
    if not record.get("answers"):
        return []
    for gate in ("paper", "strict"):
        score = PromptR1Reward(gate=gate).score_turns(texts, record["answers"])
        if abs(score.total - recorded) < _CLOSE:
            passed = score.answer if score.total >= 0 else 0.0
            return [
                ("· format (−1 + R_fmt)", score.total - passed),
                ("· answer, where the format is whole", passed),
            ]
    return []


def history_of(records: Iterable[Record], mode: str = "train") -> list[dict[str, float]]:
    """One entry per step, in order, as in `trainer.state.log_history`.

    Args:
        records (`Iterable[Mapping]`): As [`read_rollouts`] returns them.
        mode (`str`, *optional*, defaults to `"train"`): `train` or `eval`.

    Returns:
        `list[dict]`: `step` and the means `reward`, `exact_match`, `rollout/turns`, shares `rollout/<status>`; and
        `environment/cost_usd`, the dollars spent from the first step to this one, if any; with several environments
        the means of each, `reward in NAME`; of an evaluation with several rollouts a question `pass@k`, by the first
        reward function as training logs it. Keys without values are left out.
    """
    steps: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        if record.get("mode", "train") == mode:
            steps[record["step"]].append(record)
    history, spent = [], 0.0
    for step, found in sorted(steps.items()):
        spent += sum(record.get("cost_usd") or 0.0 for record in found)
        entry = {
            "step": step,
            "rollout/turns": sum(len(record["turns"]) for record in found) / len(found),
        }
        if spent:  # without a price, or a cost, there is no curve
            entry["environment/cost_usd"] = spent
        for name, score in (("reward", total_reward), ("exact_match", exact_match_of_record)):
            for key, own in {
                name: found,
                **{f"{name} in {one}": of for one, of in _by_environment(found)},
            }.items():
                if values := [value for value in map(score, own) if value is not None]:
                    entry[key] = sum(values) / len(values)
        statuses = [record["status"] for record in found]
        entry |= {f"rollout/{status}": statuses.count(status) / len(found) for status in STATUSES}
        if mode == "eval":
            scores: dict[int, list[float | None]] = defaultdict(list)
            for group, record in zip(groups_of(found)[0], found, strict=True):
                scores[group].append(next(iter((record.get("rewards") or {}).values()), None))
            entry |= passes([*scores.values()])
        history.append(entry)
    return history


def _by_environment(records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """The records of each environment by its name; empty if they name fewer than two."""
    names = sorted(
        {name for record in records if isinstance(name := record.get("environment"), str)}
    )
    several = names if len(names) > 1 else []
    return [
        (name, [record for record in records if record.get("environment") == name])
        for name in several
    ]
