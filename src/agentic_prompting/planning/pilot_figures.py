"""Means over the rollouts of a pilot run, with intervals over its questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean

from ..evaluation import bootstrap_interval
from ..llm.numbers import count_in_words
from ..records import Record
from ..rollout import read_rollouts


def count_calls(record: Record) -> list[float]:
    """Return the number of a rollout's calls of the large LLM.

    A program's turns have observations, too: its own calls of large LLMs are counted beside them.
    """
    counts = record.get("counts", {})
    return [float(counts.get("program/llm_calls", len(record["observations"])))]


def list_call_seconds(record: Record) -> list[float]:
    """Return the durations of a rollout's calls. Replayed calls are left out."""
    counts = record.get("counts", {})
    if "program/llm_calls" in counts:
        # Only their sum is recorded: each call has the mean.
        calls = int(counts["program/llm_calls"])
        if calls == 0:
            return []
        return [counts["program/llm_seconds"] / calls] * calls
    observations = record["observations"]
    return [observation["seconds"] for observation in observations if not observation["cached"]]


PILOT_FIGURES: dict[str, Callable[[Record], list[float]]] = {
    "calls": count_calls,
    "agent_tokens": lambda record: [float(record["tokens"]["agent"])],
    "call_seconds": list_call_seconds,
    "usd": lambda record: [float(record["worth_usd"])],
}
"""The figures that are read from a rollout's record, by name."""


@dataclass(frozen=True)
class PilotFigures:
    """The means of a pilot run's rollouts.

    Args:
        folder (`Path`): The folder of the run.
        means (`dict[str, float]`): The mean of each of [`PILOT_FIGURES`] that the records contain.
        intervals (`dict[str, tuple[float, float]]`): The 95 % intervals of these means.
        workers (`dict[str, tuple[float, float]]`): Calls and dollars of each worker of a pool in a
            rollout.
        step_seconds (`float`, *optional*): The mean duration of a step, rollouts included. `None`
            if it is not logged.
        description (`str`): The number of rollouts and questions.
    """

    folder: Path
    means: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    workers: dict[str, tuple[float, float]]
    step_seconds: float | None
    description: str

    @classmethod
    def read(cls, folder: Path) -> PilotFigures:
        """Read the records of a run.

        Raises:
            `ValueError`: If there is no finished training rollout.
        """
        # Group the finished training rollouts by question.
        groups: dict[str, list[Record]] = {}
        for record in read_rollouts(folder / "rollouts"):
            is_training = record.get("mode", "train") == "train"
            if is_training and record["status"] != "failed":
                question = record.get("id", record.get("question", record.get("step")))
                groups.setdefault(f"{record.get('environment')} {question}", []).append(record)
        if not groups:
            raise ValueError(
                f"{folder} holds no finished rollouts: pass the folder of a training run"
            )

        # The mean of each figure over all rollouts, with an interval over questions if there are
        # several.
        means = {}
        intervals = {}
        for name, read_values in PILOT_FIGURES.items():
            # A record may have no value for a figure: replayed calls have no duration.
            values_by_question = []
            for records in groups.values():
                values = list(chain.from_iterable(map(read_values, records)))
                if values:
                    values_by_question.append(values)
            all_values = list(chain.from_iterable(values_by_question))
            is_unknown_price = name == "usd" and not any(all_values)  # recorded as 0
            if not all_values or is_unknown_price:
                continue
            means[name] = fmean(all_values)
            if len(values_by_question) > 1:
                intervals[name] = interval_over_questions(values_by_question, means[name])

        records = list(chain.from_iterable(groups.values()))
        rollouts_in_words = count_in_words(len(records), "rollout")
        return cls(
            folder=folder,
            means=means,
            intervals=intervals,
            workers=read_worker_means(records),
            step_seconds=mean_step_seconds(folder),
            description=f"{rollouts_in_words} of {count_in_words(len(groups), 'question')}",
        )

    @property
    def assumptions(self) -> dict[str, float]:
        """The means that replace fields of [`Assumptions`], by name.

        Dollars are not an assumption: they replace the price instead.
        """
        return {name: mean for name, mean in self.means.items() if name != "usd"}


def read_worker_means(records: Sequence[Record]) -> dict[str, tuple[float, float]]:
    """Return calls and dollars of each worker in a rollout. Empty for runs without a pool."""
    calls: dict[str, float] = {}
    dollars: dict[str, float] = {}
    for record in records:
        # The counts are named `workers/MEMBER` and `workers_usd/MEMBER`.
        for name, count in record.get("counts", {}).items():
            prefix, _, member = name.partition("/")
            if prefix == "workers":
                calls[member] = calls.get(member, 0.0) + count
            elif prefix == "workers_usd":
                dollars[member] = dollars.get(member, 0.0) + count
    return {
        member: (total / len(records), dollars.get(member, 0.0) / len(records))
        for member, total in calls.items()
    }


def interval_over_questions(
    values_by_question: list[list[float]], mean: float
) -> tuple[float, float]:
    """Return the bootstrap interval of a mean over rollouts, resampling whole questions."""
    # A question with more rollouts weighs more in the mean, so it deviates more here too.
    mean_count = sum(len(values) for values in values_by_question) / len(values_by_question)
    contributions = []
    for values in values_by_question:
        deviation = sum(value - mean for value in values)
        contributions.append(mean + deviation / mean_count)
    estimate = bootstrap_interval(contributions)
    return estimate.low, estimate.high


def mean_step_seconds(folder: Path) -> float | None:
    """Return the mean duration of a step in a run's log, `None` if it is not logged."""
    seconds = []
    # A log that is missing or damaged counts as far as it can be read.
    with suppress(OSError, ValueError):
        for line in (folder / "rollouts" / "log.jsonl").read_text(encoding="utf-8").splitlines():
            step_time = json.loads(line).get("step_time")
            if isinstance(step_time, int | float):
                seconds.append(step_time)
    return fmean(seconds) if seconds else None
