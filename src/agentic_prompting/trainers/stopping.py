"""When training stops because of the environment."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..llm import Budget
from ..rollout import RolloutFacts

if TYPE_CHECKING:
    from .multi_turn_grpo import MultiTurnGRPOTrainer


class TrainingStopped(RuntimeError):
    """Training could not go on because of the environment. A checkpoint was saved first; resume from it."""


def save_before_stopping(trainer: MultiTurnGRPOTrainer) -> str:
    """Save a checkpoint, if it can be, and say where it is. On every process alike."""
    try:
        trainer._save_checkpoint(trainer.model, trial=None)
    except Exception as error:  # of whatever kind: the reason to stop has to be heard
        return f" And no checkpoint could be saved: {_line(error)}"
    return (
        f" A checkpoint is in {trainer.args.output_dir}; mend the cause and continue with resume_from_checkpoint=True."
    )


def said_of(spending: Budget) -> str:
    """What was spent, if the book can be read."""
    try:
        return f"Spent so far: {spending}."
    except Exception as error:
        return f"What was spent so far is not known: {spending.path} cannot be read ({_line(error)})."


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class FailureWatch:
    """Tells a run of bad luck from an environment that is gone.

    Args:
        window (`int`): Batches to look at.
        max_share (`float`): Of the rollouts of these batches that may fail.
    """

    def __init__(self, window: int, max_share: float):
        self.max_share = max_share
        self._recent: deque[tuple[int, int]] = deque(maxlen=window)

    def why_stop(self, facts: Sequence[RolloutFacts]) -> str:
        """Take note of a batch of all processes. Returns why to stop after it; empty: there is no reason."""
        failed = [fact for fact in facts if fact.status == "failed"]
        self._recent.append((len(failed), len(facts)))
        share = sum(n for n, _ in self._recent) / sum(n for _, n in self._recent)
        fatal = next((fact for fact in failed if fact.fatal), None)
        full = len(self._recent) == self._recent.maxlen
        if fatal is None and not (full and share > self.max_share):
            return ""
        cause = fatal or failed[-1]
        return f"{share:.0%} of the recent rollouts failed, the last with {cause.error_kind}: {cause.error}"
