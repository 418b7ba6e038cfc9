"""Runs that are killed with groups in flight and resumed with other settings: which of them say
nothing about it?

Used by `benchmarks/reliability/faults.py`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from agentic_prompting.rollout import BatchEngine
from support.asking import Asks, Counts
from support.training import LEAD, trainer_for

CHANGES: dict[str, dict[str, Any]] = {
    "num_generations": {"num_generations": 4},
    "seed": {"seed": 7},
    "max_turns": {"max_turns": 2},
    "max_turn_tokens": {"max_turn_tokens": 23},
    "temperature": {"temperature": 0.5},
    "batch size": {"per_device_train_batch_size": 8},
}
MOMENTS = {
    "before the first checkpoint": 5,
    "after a checkpoint": 14,
}  # replies paid when the run is killed


class Killed(BaseException):
    pass


class Said(logging.Handler):
    """What the library warned of."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def resumed_with(
    policy: Path, folder: Path, rows: Any, change: dict[str, Any], moment: int, scale: float = 1.0
) -> str:
    """What a resume said about the groups in flight that it did not use; empty if nothing."""

    def build(**changes: Any) -> Any:
        trainer = trainer_for(
            policy,
            folder,
            rows,
            environment=Counts(),
            **{**LEAD, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, **changes},
        )
        trainer.policy = BatchEngine(Asks(trainer), on_callers_thread=True)
        return trainer

    first = build()
    paid = first.environment.paid
    sample = first.policy.sampler

    def killed(requests: Any) -> Any:
        if sum(paid.values()) >= moment:
            raise Killed
        return sample(requests)

    first.policy.sampler = killed
    try:
        first.train()
    except Killed:
        pass
    else:
        raise AssertionError("the run ended before the kill")
    said = Said()
    log = logging.getLogger("agentic_prompting")
    log.addHandler(said)
    try:
        again = build(**change)
        for parameter in again.model.parameters():
            parameter.data.mul_(scale)
        again.train(resume_from_checkpoint=True)
    finally:
        log.removeHandler(said)
    return next((line for line in said.lines if "groups in flight are not used" in line), "")


def resume_changes(policy: Path, folder: Path, rows: Any, quick: bool = False) -> dict[str, Any]:
    """Resumes with one setting changed, at two moments each, and one with other weights; `silent`
    are those that used what was not theirs, or dropped it, without a line.
    """
    cases = [(name, when) for name in CHANGES for when in MOMENTS][:: 6 if quick else 1]
    silent = [
        f"{name}, {when}"
        for name, when in cases
        if not resumed_with(policy, folder / f"{name} {when}", rows, CHANGES[name], MOMENTS[when])
    ]
    if not resumed_with(policy, folder / "weights", rows, {}, 5, scale=1.5):
        silent.append("other weights")
    return {"tried": len(cases) + 1, "silent": len(silent), "which": silent}
