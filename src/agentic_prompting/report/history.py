"""A run's curves from its recorded trajectories, under the names that the trainer logs them by.

Taken from the records and not from the trainer's log: every run leaves records behind, whether or not it saved a
checkpoint, and what is drawn then agrees with what can be read in the browser beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..rewards import exact_match
from ..rollout.metrics import STATUSES

Record = Mapping[str, Any]


@dataclass
class _Totals:
    """Sums over the records of one step."""

    count: int = 0
    turns: int = 0
    cost: float = 0.0
    rewards: list[float] = field(default_factory=list)
    matches: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    def add(self, record: Record) -> None:
        self.count += 1
        self.turns += len(record["turns"])
        self.cost += record.get("cost_usd") or 0.0
        self.statuses[record["status"]] += 1
        reward, matched = total_reward(record), exact_match_of_record(record)
        self.rewards += [] if reward is None else [reward]
        self.matches += [] if matched is None else [matched]


def total_reward(record: Record) -> float | None:
    """The sum of a record's rewards; `None` if none of them scored it."""
    scored = [reward for reward in (record.get("rewards") or {}).values() if reward is not None]
    return sum(scored) if scored else None


def exact_match_of_record(record: Record) -> float | None:
    """1.0 for a right answer, 0.0 for a wrong one or none; `None` where nobody can say."""
    if record["status"] == "failed" or not record.get("answers"):
        return None
    return exact_match(record.get("answer") or "", record["answers"])


def current_records(records: Iterable[Record]) -> list[Record]:
    """The records without those that a later run in the same folder did over.

    A resumed run repeats what came after its checkpoint, and a run begun anew repeats everything: what an earlier run
    recorded from the later one's first step on does not belong to the result.
    """
    kept = list(records)
    first: dict[int, int] = {}
    for record in kept:
        run = record.get("run", 0)
        first[run] = min(first.get(run, record["step"]), record["step"])
    # For each run the step at which a later one takes over.
    ends, end = {}, float("inf")
    for run in sorted(first, reverse=True):
        ends[run] = end
        end = min(end, first[run])
    return [record for record in kept if record["step"] < ends[record.get("run", 0)]]


def history_of(records: Iterable[Record], mode: str = "train") -> list[dict[str, float]]:
    """One entry per step, in order, as in `trainer.state.log_history`.

    Args:
        records (`Iterable[Mapping]`): As [`read_rollouts`] gives them.
        mode (`str`, *optional*, defaults to `"train"`): `train` or `eval`.

    Returns:
        `list[dict]`: `step` and the means `reward`, `exact_match`, `rollout/turns`, shares `rollout/<status>`; and
        `environment/cost_usd`, the dollars spent from the first step to this one, if any. What there is nothing to say
        of is left out.
    """
    steps: dict[int, _Totals] = {}
    for record in records:
        if record.get("mode", "train") == mode:
            steps.setdefault(record["step"], _Totals()).add(record)
    history, spent = [], 0.0
    for step, totals in sorted(steps.items()):
        spent += totals.cost
        entry = {"step": step, "rollout/turns": totals.turns / totals.count}
        if spent:  # where the price is not known, or nothing costs anything, there is no curve
            entry["environment/cost_usd"] = spent
        for name, values in (("reward", totals.rewards), ("exact_match", totals.matches)):
            if values:
                entry[name] = sum(values) / len(values)
        entry |= {f"rollout/{status}": totals.statuses[status] / totals.count for status in STATUSES}
        history.append(entry)
    return history
