"""What the programs do alike: options that several have, training with Ctrl-C, and an end that a shell can read.

Light to import: the command takes its options from here for every `--help`.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Trainer

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""


def setting(help: str, default: Any = None) -> Any:
    """An option of a program or of the command: a dataclass's field with its help."""
    return field(default=default, metadata={"help": help})


@dataclass
class Recording:
    """Where replies are kept."""

    replay_cache: Path | None = setting("SQLite file of recorded replies: those in it are not paid twice.")


@dataclass
class EnvironmentModel(Recording):
    """The large LLM in the environment."""

    environment_model: str | None = setting("The large LLM, by its name at its endpoint.")
    environment_base_url: str | None = setting("Its OpenAI-compatible endpoint.")


@dataclass
class TaskRows:
    """What is taken of a task's data set."""

    task_split: str = setting("Its split.", "train")
    task_rows: int | None = setting("Sample this many rows; all by default.")
    data_files: str | None = setting("Local files instead of the hub.")


@dataclass
class DataAndEnvironment(TaskRows, EnvironmentModel):
    """What is trained on, and the large LLM in the environment."""

    n_test: int = setting("Sandbox: held-out questions.", 256)


def parse(kinds: Sequence[type], arguments: Sequence[str] | None) -> tuple[Any, ...]:
    """One object of each kind, from the command line or from `arguments`, and from the file of `--config`."""
    from trl import TrlParser

    from ..trainers.progress import quiet_libraries

    # About transformers' own renamed arguments, which TRL still sets under the old names; nothing a user can act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    quiet_libraries()
    return TrlParser(kinds).parse_args_and_config(arguments)


def train(trainer: Trainer) -> None:
    """Train, or go on from `args.resume_from_checkpoint`; Ctrl-C ends it with a checkpoint.

    `--resume_from_checkpoint true` is the newest checkpoint, and the beginning where there is none. The log of the run
    is in the output folder afterwards, as `trainer_state.json`.

    Raises:
        [`TrainingInterrupted`]: After Ctrl-C.
        `SystemExit`: With status 1 and the reason, where training stopped because of the environment.
    """
    from ..trainers import TrainingInterrupted, TrainingStopped, checkpoint_on_interrupt

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
    trainer.save_state()


def end(trainer: Trainer) -> None:
    """Close trackers and the process group: without it gloo may abort at exit."""
    trainer.accelerator.end_training()


def run_script(main: Callable[[], object]) -> None:
    """Run a program's `main`: no traceback for what the user can mend.

    Args:
        main (`Callable`): Called without arguments.

    Raises:
        `SystemExit`: With status 1 and a line about a bad option, file or endpoint; with 130 after Ctrl-C.
    """
    from ..llm import LLMError

    try:
        main()
    except (ValueError, FileNotFoundError, LLMError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except KeyboardInterrupt as interrupted:
        if os.environ.get("RANK", "0") == "0":  # the first process of the job speaks for all
            print(str(interrupted) or "interrupted; what is not in a checkpoint is lost", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)
