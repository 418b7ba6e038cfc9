"""What the reference LLM is given of a training batch, and the work it does with it beside the weight update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ..evolution import (
    Outcome,
    Reflection,
    Trial,
    crossover_steps,
    mutation_steps,
    question_of,
    run_operators,
    truth_of,
)
from ..llm import ChatModel
from ..rollout import Rollout


class Reflecting:
    """One batch's work for the reference LLM, and where its outcomes will be."""

    def __init__(self, batch: int, island: int, best: Trial, trials: Sequence[Trial] | None):
        self.batch, self.island, self.best, self.trials = batch, island, best, trials
        self.outcomes: Future[list[Outcome]] | None = None

    def run(self, reference: ChatModel, settings: Reflection, **sampling: Any) -> list[Outcome]:
        operators = [mutation_steps(self.best, settings)]
        if self.trials is not None:
            operators.append(crossover_steps(self.trials, settings))
        return run_operators(reference, operators, **sampling)

    def to_json(self) -> dict[str, Any]:
        trials = None if self.trials is None else [trial.to_json() for trial in self.trials]
        return {"batch": self.batch, "island": self.island, "best": self.best.to_json(), "trials": trials}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Reflecting:
        trials = None if saved["trials"] is None else [Trial.from_json(trial) for trial in saved["trials"]]
        return cls(saved["batch"], saved["island"], Trial.from_json(saved["best"]), trials)


def told_of(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """What the reference LLM gets to read of a rollout: question, accepted answers, the conversation."""
    rollout: Rollout = row["rollout"]
    pieces = []
    for i, turn in enumerate(rollout.turns):
        pieces.append(turn.text.strip())
        if i < len(rollout.observations) and rollout.observations[i].error is None:
            pieces.append(f"[reply] {rollout.observations[i].text.strip()}")
    return question_of(row), truth_of(row), "\n".join(pieces)
