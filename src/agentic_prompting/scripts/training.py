"""What the programs that train do alike."""

from __future__ import annotations

from transformers import Trainer

from ..trainers import TrainingStopped
from ..trainers.interrupt import TrainingInterrupted, checkpoint_on_interrupt


def train(trainer: Trainer) -> None:
    """Train, or go on from `args.resume_from_checkpoint`; Ctrl-C ends it with a checkpoint.

    `--resume_from_checkpoint true` is the newest checkpoint, and the beginning where there is none.

    Raises:
        [`TrainingInterrupted`]: After Ctrl-C.
        `SystemExit`: With status 1 and the reason, where training stopped because of the environment.
    """
    given = trainer.args.resume_from_checkpoint  # text, as it stands on a command line
    resumed = {"true": True, "false": None}.get(str(given).lower(), given)
    try:
        with checkpoint_on_interrupt(trainer):
            trainer.train(resume_from_checkpoint=resumed)
    except TrainingStopped as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except TrainingInterrupted:
        end(trainer)
        raise


def end(trainer: Trainer) -> None:
    """Close trackers and the process group: without it gloo may abort at exit."""
    trainer.accelerator.end_training()
