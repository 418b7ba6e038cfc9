"""Checkpoints that are whole or absent.

transformers fills `checkpoint-<step>` file by file, on every process, and then deletes the oldest
one. Here the folder is filled under `.saving/` and renamed when every process has finished, and an
older one is deleted only after that: whenever a job is killed, the newest checkpoint is whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

STAGING_NAME = ".saving"


@dataclass
class CheckpointStaging:
    """Where a checkpoint is being filled.

    Args:
        folder (`Path`, *optional*): The parent of the unfinished checkpoint, `None` between
            checkpoints.
    """

    folder: Path | None = None


@contextmanager
def stage_checkpoint(
    trainer: Trainer, staging: CheckpointStaging, run_folder: Path
) -> Iterator[Path]:
    """The context around `_save_checkpoint`: yields a folder to fill, and makes it the checkpoint.

    Must be entered on every process. Within the context, the trainer's `_get_output_dir` must
    return `staging.folder`. If the body raises, the half-filled folder stays where it is, and the
    next save removes it.

    Args:
        trainer (`Trainer`): The trainer of the checkpoint.
        staging ([`CheckpointStaging`]): Its `folder` is set within the context.
        run_folder (`Path`): The run's folder.
    """
    accelerator = trainer.accelerator
    name = f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    staging_folder = run_folder / STAGING_NAME
    staged_checkpoint = staging_folder / name
    checkpoint = run_folder / name

    # Remove what a killed save left, on every node.
    if accelerator.is_local_main_process:
        shutil.rmtree(staging_folder, ignore_errors=True)
    accelerator.wait_for_everyone()

    # Let transformers fill the staging folder, to which `_get_output_dir` now points.
    staging.folder = staging_folder
    try:
        yield staged_checkpoint
        # transformers has recorded the best checkpoint under the name of the staging folder.
        is_best = trainer.state.best_model_checkpoint == str(staged_checkpoint)
        if trainer.args.should_save and is_best:
            trainer.state.best_model_checkpoint = str(checkpoint)
            trainer.state.save_to_json(str(staged_checkpoint / TRAINER_STATE_NAME))
    finally:
        staging.folder = None
    accelerator.wait_for_everyone()

    # On a shared disk the main process of the job moves it; on nodes with their own disks the main
    # process of each node.
    for is_mover in (accelerator.is_main_process, accelerator.is_local_main_process):
        if is_mover and staged_checkpoint.exists():
            _move_checkpoint(staged_checkpoint, checkpoint)
        accelerator.wait_for_everyone()

    # Delete the oldest checkpoints, by step: file times change with clocks, nodes and copies.
    if trainer.args.should_save:
        shutil.rmtree(staging_folder, ignore_errors=True)
        rotate_checkpoints(
            str(run_folder), trainer.args.save_total_limit, trainer.state.best_model_checkpoint
        )


def _move_checkpoint(staged_checkpoint: Path, checkpoint: Path) -> None:
    """Rename the folder; it replaces one that an earlier run left there."""
    replaced = checkpoint.with_name(STAGING_NAME) / f"{checkpoint.name}.old"
    # A folder with files cannot be replaced, so the old one is moved out of the way first.
    if checkpoint.exists():
        os.replace(checkpoint, replaced)
    os.replace(staged_checkpoint, checkpoint)
    shutil.rmtree(replaced, ignore_errors=True)
