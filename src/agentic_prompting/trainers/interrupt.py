"""Ctrl-C while training: the step is finished, a checkpoint saved, and the run can go on from there."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import reduce
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

# A launcher passes on the signal that the terminal has already delivered: within this time two are one.
SAME_SECONDS = 1.0


class TrainingInterrupted(KeyboardInterrupt):
    """Training was ended by Ctrl-C, after a whole step and with a checkpoint. Says how to go on.

    Not an `Exception`: what handles errors on the way must not take it for one.
    """


@contextmanager
def checkpoint_on_interrupt(trainer: Trainer) -> Iterator[None]:
    """Within it the first Ctrl-C (SIGINT) ends training after the step at hand, with a checkpoint.

    The second one, more than a second later, interrupts at once, as it does without this. One process of a job that is
    told is enough: all stop after the same step. On another thread than the main one, where Python delivers no signals,
    this changes nothing.

    Args:
        trainer (`Trainer`): Whose `train` is called in the body.

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
