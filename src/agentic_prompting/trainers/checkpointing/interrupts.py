"""Ctrl-C during training: the step is finished and a checkpoint saved."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate.utils import reduce
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

# A launcher passes on the signal that the terminal has already delivered: two signals within this
# time count as one.
SAME_SIGNAL_SECONDS = 1.0


class TrainingInterrupted(KeyboardInterrupt):
    """Training was ended by Ctrl-C, after a whole step and with a checkpoint.

    The message says how to resume. It is not an `Exception`, so no handler of errors catches it.

    Args:
        step (`int`): The step after which training was ended.
        checkpoint (`Path`): The checkpoint.
    """

    def __init__(self, step: int, checkpoint: Path):
        self.step = step
        self.checkpoint = checkpoint
        super().__init__(
            f"interrupted after step {step}, a checkpoint was saved; to continue, call "
            f'train(resume_from_checkpoint="{checkpoint}")'
        )


@contextmanager
def checkpoint_on_interrupt(trainer: Trainer) -> Iterator[None]:
    """Within this context, the first Ctrl-C (SIGINT) ends training after the current step.

    A checkpoint is saved then. A second Ctrl-C, more than a second later, interrupts at once, as
    the first one does outside of the context. If one process of a job gets the signal, all stop
    after the same step. On a thread other than the main one, where Python delivers no signals, the
    context has no effect.

    Args:
        trainer (`Trainer`): The trainer whose `train` is called in the context.

    Raises:
        [`TrainingInterrupted`]: At the end of the context, if a signal has ended training early.

    Example:

    ```python
    with checkpoint_on_interrupt(trainer):
        trainer.train()
    ```
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # From here on a signal only marks the run; the callback stops it after the step.
    callback = InterruptCallback(prints_notice=trainer.args.process_index == 0)
    trainer.add_callback(callback)
    previous_handler = signal.signal(signal.SIGINT, callback.handle_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
        trainer.remove_callback(callback)

    # Training has ended early if a signal came.
    if callback.stopped_at is not None:
        name = f"{PREFIX_CHECKPOINT_DIR}-{callback.stopped_at}"
        checkpoint = Path(trainer.args.output_dir) / name
        raise TrainingInterrupted(callback.stopped_at, checkpoint)


class InterruptCallback(TrainerCallback):
    """Ends training after the step during which a signal came, on every process of the job.

    Args:
        prints_notice (`bool`): Whether this process prints that the step is being finished.

    Attributes:
        interrupted_at (`float`, *optional*): The time of the first signal.
        stopped_at (`int`, *optional*): The step after which training was stopped.
    """

    def __init__(self, prints_notice: bool):
        self.prints_notice = prints_notice
        self.interrupted_at: float | None = None
        self.stopped_at: int | None = None

    def handle_signal(self, signal_number: int, frame: FrameType | None) -> None:
        """Handle SIGINT."""
        now = time.monotonic()
        if self.interrupted_at is None:
            self.interrupted_at = now
            if self.prints_notice:
                # Not `print`, which the signal may have interrupted.
                os.write(
                    2,
                    b"\nInterrupted: finishing this step, then saving a checkpoint. Ctrl-C again: "
                    b"at once.\n",
                )
        elif now - self.interrupted_at > SAME_SIGNAL_SECONDS:
            raise KeyboardInterrupt

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        # One interrupted process stops all of them, after the same step.
        is_interrupted = self.interrupted_at is not None
        if args.world_size > 1:
            flag = torch.tensor(float(is_interrupted), device=args.device)
            is_interrupted = bool(reduce(flag).item())
        if is_interrupted:
            self.stopped_at = state.global_step
            control.should_save = True
            control.should_training_stop = True
