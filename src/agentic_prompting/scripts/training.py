"""What the programs that train do alike."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import Trainer
from trl import TrlParser

from ..trainers import TrainingStopped
from ..trainers.interrupt import TrainingInterrupted, checkpoint_on_interrupt
from ..trainers.progress import quiet_libraries


@dataclass
class DataAndEnvironment:
    """What is trained on, and the large LLM in the environment."""

    task_split: str = field(default="train", metadata={"help": "Its split."})
    task_rows: int | None = field(default=None, metadata={"help": "Sample this many rows; all by default."})
    data_files: str | None = field(default=None, metadata={"help": "Local files instead of the hub."})
    n_test: int = field(default=256, metadata={"help": "Sandbox: held-out questions."})
    environment_model: str | None = field(default=None, metadata={"help": "The large LLM's name at its endpoint."})
    environment_base_url: str | None = field(default=None, metadata={"help": "Any OpenAI-compatible endpoint."})
    replay_cache: str | None = field(default=None, metadata={"help": "SQLite file to record replies to and reuse."})


def parse(kinds: Sequence[type], arguments: Sequence[str] | None) -> tuple[Any, ...]:
    """One object of each kind, from the command line or from `arguments`, and from the file of `--config`."""
    # About transformers' own renamed arguments, which TRL still sets under the old names; nothing a user can act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    quiet_libraries()
    return TrlParser(kinds).parse_args_and_config(arguments)


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
