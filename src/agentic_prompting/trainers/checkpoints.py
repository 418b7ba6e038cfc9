"""Checkpoints that are there whole or not at all.

transformers fills `checkpoint-<step>` file by file, on every process, and then deletes the oldest one. Here the folder
is filled under `.saving/` and renamed when every process has finished, and only then may an older one go: whenever a
job is killed, the newest `checkpoint-<step>` is whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

if TYPE_CHECKING:
    from .resumable import ResumableGRPOTrainer

STAGING = ".saving"


@contextmanager
def saved_whole(trainer: ResumableGRPOTrainer, trial: Any) -> Iterator[Path]:
    """Around `_save_checkpoint`: gives the folder being filled, and makes it the checkpoint at the end.

    Called on every process. While it lasts, `_get_output_dir` must give `trainer.staging`. If the body raises, the
    half-filled folder stays where it is, and the next save removes it.
    """
    run, name = Path(trainer._get_output_dir(trial)), f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    staging, everyone = run / STAGING, trainer.accelerator.wait_for_everyone
    if trainer.accelerator.is_local_main_process:
        shutil.rmtree(staging, ignore_errors=True)
    everyone()
    # transformers uploads from where it saved, and on another thread: only when the folder is where it stays.
    pushes, trainer.args.push_to_hub = trainer.args.push_to_hub, False
    trainer.staging = staging
    try:
        yield staging / name
        if trainer.args.should_save:
            _name_best(trainer, staging / name, run / name)
    finally:
        trainer.staging, trainer.args.push_to_hub = None, pushes
    everyone()
    # The first process of the job on a shared disk; on nodes with disks of their own, then the first of each.
    if trainer.accelerator.is_main_process:
        _move(staging / name, run / name)
    everyone()
    if trainer.accelerator.is_local_main_process and (staging / name).exists():
        _move(staging / name, run / name)
    everyone()
    if trainer.args.should_save:
        shutil.rmtree(staging, ignore_errors=True)
        # By step, never by the clock: it may have been set back, or be another node's, or that of a copy.
        rotate_checkpoints(str(run), trainer.args.save_total_limit, trainer.state.best_model_checkpoint)
    if pushes:
        trainer._push_from_checkpoint(str(run / name))


def _name_best(trainer: ResumableGRPOTrainer, filled: Path, final: Path) -> None:
    """If this one is the best so far, transformers has noted it under the name it has now."""
    if trainer.state.best_model_checkpoint == str(filled):
        trainer.state.best_model_checkpoint = str(final)
        trainer.state.save_to_json(str(filled / TRAINER_STATE_NAME))


def _move(filled: Path, final: Path) -> None:
    """Rename, in place of one that an earlier run left there."""
    old = final.with_name(STAGING) / f"{final.name}.old"
    if final.exists():
        os.replace(final, old)
    os.replace(filled, final)
    shutil.rmtree(old, ignore_errors=True)
