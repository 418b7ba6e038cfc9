"""How training ends before its time, always with a checkpoint: the environment is gone, or somebody pressed Ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import reduce
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from ..llm import Budget
from ..rollout import Rollout, RolloutFacts

if TYPE_CHECKING:
    from .multi_turn_grpo import MultiTurnGRPOTrainer

logger = logging.getLogger(__name__)

# A launcher passes on the signal that the terminal has already delivered: within this time two are one.
SAME_SECONDS = 1.0


class TrainingStopped(RuntimeError):
    """Training could not go on because of the environment. A checkpoint was saved first; resume from it."""


class TrainingInterrupted(KeyboardInterrupt):
    """Training was ended by Ctrl-C, after a whole step and with a checkpoint. Says how to go on.

    Not an `Exception`: what handles errors on the way must not take it for one.
    """


# --- because of the environment --------------------------------------------------------------------------------------


class FailureWatch:
    """Tells a run of bad luck from an environment that is gone.

    Args:
        window (`int`): Batches to look at.
        max_share (`float`): Of the rollouts of these batches that may fail.
    """

    def __init__(self, window: int, max_share: float):
        self.max_share = max_share
        self._recent: deque[tuple[int, int]] = deque(maxlen=window)
        self._warned = False

    def why_stop(self, facts: Sequence[RolloutFacts], speaks: bool = True) -> str:
        """Take note of a batch of all processes, and warn of the first failure of all with its cause.

        Args:
            facts (`Sequence[RolloutFacts]`): Of the batch.
            speaks (`bool`, *optional*, defaults to `True`): Whether this process warns.

        Returns:
            `str`: Why to stop after it; empty: there is no reason.
        """
        failed = [fact for fact in facts if fact.status == "failed"]
        self._recent.append((len(failed), len(facts)))
        if failed and speaks and not self._warned:
            logger.warning(
                "%d of %d rollouts of this batch failed; they get no reward, and training goes on "
                "while at most %s fail. The first with %s: %s",
                *(len(failed), len(facts), f"{self.max_share:.0%}", failed[0].error_kind, failed[0].error),
            )
        self._warned |= bool(failed)
        share = sum(n for n, _ in self._recent) / sum(n for _, n in self._recent)
        fatal = next((fact for fact in failed if fact.fatal), None)
        full = len(self._recent) == self._recent.maxlen
        if fatal is None and not (full and share > self.max_share):
            return ""
        cause = fatal or failed[-1]
        return f"{share:.0%} of the recent rollouts failed, the last with {cause.error_kind}: {cause.error}"


@contextmanager
def not_the_rewards_fault(rollouts: Sequence[Rollout]) -> Iterator[None]:
    """Around TRL's rewards: where rollouts failed, its warning that "all reward functions returned None" would point
    the wrong way, and print the row. What failed is said by [`FailureWatch`]."""
    log = logging.getLogger(GRPOTrainer.__module__)
    failed = any(rollout.status == "failed" for rollout in rollouts)

    def keep(record: logging.LogRecord) -> bool:
        return not (failed and "All reward functions returned None" in record.getMessage())

    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)


def save_before_stopping(trainer: MultiTurnGRPOTrainer) -> str:
    """Save a checkpoint, if it can be, and say where it is. On every process alike."""
    try:
        trainer._save_checkpoint(trainer.model, trial=None)
    except Exception as error:  # of any kind: the reason to stop must still be reported
        return f" And no checkpoint could be saved: {_line(error)}"
    return (
        f" A checkpoint is in {trainer.args.output_dir}; mend the cause and continue with resume_from_checkpoint=True."
    )


def spent_so_far(spending: Budget) -> str:
    """What was spent, if the book can be read."""
    try:
        return f"Spent so far: {spending}."
    except Exception as error:
        return f"What was spent so far is not known: {spending.path} cannot be read ({_line(error)})."


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# --- because of Ctrl-C -----------------------------------------------------------------------------------------------


@contextmanager
def checkpoint_on_interrupt(trainer: Trainer) -> Iterator[None]:
    """Within it the first Ctrl-C (SIGINT) ends training after the step at hand, with a checkpoint.

    The second one, more than a second later, interrupts at once, as it does without this. One process of a job that is
    told is enough: all stop after the same step. On another thread than the main one, where Python delivers no signals,
    this changes nothing.

    Args:
        trainer (`Trainer`): The one whose `train` is called within.

    Raises:
        [`TrainingInterrupted`]: At the end of the body, if training ended early because of a signal.

    Example:

    ```python
    with checkpoint_on_interrupt(trainer):
        trainer.train()
    ```
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stop = _StopAfterStep(trainer.args.process_index == 0)
    trainer.add_callback(stop)
    before = signal.signal(signal.SIGINT, stop.interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        trainer.remove_callback(stop)
    if stop.stopped_at is not None:
        checkpoint = Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{stop.stopped_at}"
        raise TrainingInterrupted(
            f"interrupted after step {stop.stopped_at}, a checkpoint was saved; to go on, run the same command with "
            f"--resume_from_checkpoint {checkpoint}"
        )


class _StopAfterStep(TrainerCallback):
    """Ends training after the step during which a signal came, on every process of the job alike.

    Args:
        speaks (`bool`): Whether this process tells the user.
    """

    def __init__(self, speaks: bool):
        self.speaks = speaks
        self.asked_at: float | None = None
        self.stopped_at: int | None = None

    def interrupted(self, *signal_and_frame: Any) -> None:
        """The signal's handler."""
        now = time.monotonic()
        if self.asked_at is None:
            self.asked_at = now
            if self.speaks:  # not `print`, which may be what the signal has interrupted
                os.write(2, b"\nInterrupted: finishing this step, then saving a checkpoint. Ctrl-C again: at once.\n")
        elif now - self.asked_at > SAME_SECONDS:
            raise KeyboardInterrupt

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        asked = self.asked_at is not None
        if args.world_size > 1:
            asked = bool(reduce(torch.tensor(float(asked), device=args.device)).item())
        if asked:
            self.stopped_at = state.global_step
            control.should_save = control.should_training_stop = True
