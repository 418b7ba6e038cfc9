"""Checkpoints that are whole or absent, and the choice of the one that a run resumes from.

transformers fills `checkpoint-<step>` file by file, on every process, and then deletes the oldest one. Here the folder
is filled under `.saving/` and renamed when every process has finished, and only then is an older one deleted: whenever
a job is killed, the newest `checkpoint-<step>` is whole. Later a disk may fail, a copy may be incomplete, or somebody
may delete a large file. So files that are missing or cut off are found, and named, before anything is loaded.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError, safe_open
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints, sort_checkpoints

from ..records import only_writer

logger = logging.getLogger(__name__)

STAGING = ".saving"
TRAINING = "training"  # the file training.lock: only one run may train in a folder
STATE_FILE = "exact_resume_{}.pt"  # added by ResumableGRPOTrainer, one per process
_WEIGHTS = ("*.safetensors", "*.bin", "*/adapter_model.*", "global_step*", "pytorch_model_fsdp*")

T = TypeVar("T")


# --- saving ----------------------------------------------------------------------------------------------------------


@dataclass
class Staging:
    """The folder in which a checkpoint is being filled; `None` between checkpoints."""

    folder: Path | None = None


@contextmanager
def saved_whole(
    trainer: Trainer, staging: Staging, run: Path, push: Callable[[str], Any]
) -> Iterator[Path]:
    """The context around `_save_checkpoint`: yields the folder to fill, and makes it the checkpoint at the end.

    Entered on every process. Within it the trainer's `_get_output_dir` must return `staging.folder`. If the body
    raises, the half-filled folder stays where it is, and the next save removes it.

    Args:
        trainer (`Trainer`): The trainer of the checkpoint.
        staging ([`Staging`]): Its `folder` is set within the context.
        run (`Path`): The run's folder.
        push (`Callable`): Uploads the finished checkpoint, if `args.push_to_hub` is set.
    """
    name = f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    filled, final = run / STAGING / name, run / name
    everyone = trainer.accelerator.wait_for_everyone
    if trainer.accelerator.is_local_main_process:
        shutil.rmtree(run / STAGING, ignore_errors=True)
    everyone()
    # transformers uploads the folder that it saved to, on another thread: so upload only after the folder was moved.
    pushes, trainer.args.push_to_hub = trainer.args.push_to_hub, False
    staging.folder = run / STAGING
    try:
        yield filled
        # If this checkpoint is the best so far, transformers has recorded it under the name of the staging folder.
        if trainer.args.should_save and trainer.state.best_model_checkpoint == str(filled):
            trainer.state.best_model_checkpoint = str(final)
            trainer.state.save_to_json(str(filled / TRAINER_STATE_NAME))
    finally:
        staging.folder, trainer.args.push_to_hub = None, pushes
    everyone()
    # On a shared disk the first process of the job moves it; on nodes with their own disks the first one of each node.
    for moves in (trainer.accelerator.is_main_process, trainer.accelerator.is_local_main_process):
        if moves and filled.exists():
            _move(filled, final)
        everyone()
    if trainer.args.should_save:
        shutil.rmtree(run / STAGING, ignore_errors=True)
        # By step and not by file times, which change with clocks, nodes and copies.
        rotate_checkpoints(
            str(run), trainer.args.save_total_limit, trainer.state.best_model_checkpoint
        )
    if pushes:
        push(str(final))


def _move(filled: Path, final: Path) -> None:
    """Rename the folder; it replaces one that an earlier run left there."""
    old = final.with_name(STAGING) / f"{final.name}.old"
    if final.exists():
        os.replace(final, old)
    os.replace(filled, final)
    shutil.rmtree(old, ignore_errors=True)


# --- resuming -------------------------------------------------------------------------------------------------------


def asked_to_resume(args: Any) -> str | bool | None:
    """`args.resume_from_checkpoint`, which a command line gives as text: `true` is the newest checkpoint."""
    given = args.resume_from_checkpoint
    return {"true": True, "false": None}.get(str(given).lower(), given)


def whole_checkpoint(given: str | bool | None, folder: Path) -> str | None:
    """The checkpoint to resume from.

    Args:
        given (`str` or `bool`, *optional*): A checkpoint; or `True`, the newest whole one in `folder`. Damaged ones
            are skipped with a warning. If there is none yet, training starts at the beginning.
        folder (`Path`): The run's.

    Raises:
        `ValueError`: The checkpoint that was asked for is damaged, or all checkpoints are. The message names the file.
    """
    if not given:
        return None
    if given is not True:
        if why := damaged(Path(given)):
            raise ValueError(
                f"{given} cannot be resumed from: {why}; resume from an earlier checkpoint, or restore the file"
            )
        return str(given)
    skipped: list[str] = []
    for checkpoint in reversed(sort_checkpoints(str(folder))):
        if why := damaged(Path(checkpoint)):
            skipped.append(f"{Path(checkpoint).name} is damaged, {why}")
            continue
        if skipped:
            logger.warning("%s: going on from %s", "; ".join(skipped), checkpoint)
        return checkpoint
    if skipped:
        raise ValueError(
            f"no checkpoint in {folder} can be resumed from ({'; '.join(skipped)}): restore one, or move them away "
            "to train from the beginning"
        )
    logger.warning("no checkpoint in %s yet: training starts at the beginning", folder)
    return None


def damaged(checkpoint: Path) -> str:
    """The fault of a checkpoint: a file that is missing or cannot be read. Empty if it is whole."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    return _missing(checkpoint) or next(filter(None, map(_unreadable, files)), "")


def _missing(checkpoint: Path) -> str:
    """The first file that a checkpoint of this kind lacks, in words; empty if it lacks none."""

    def has(*patterns: str) -> bool:
        return any(any(checkpoint.glob(pattern)) for pattern in patterns)

    sharded = has("global_step*")  # DeepSpeed's: optimizer and, mostly, schedule are in there
    own = has(STATE_FILE.format("*"))
    needed = {
        TRAINER_STATE_NAME: True,
        # With `save_only_model` there is nothing but weights; every other checkpoint has the rest.
        OPTIMIZER_NAME: (own or has(SCHEDULER_NAME))
        and not sharded
        and not has("optimizer*", "rank*-optimizer.pt"),
        SCHEDULER_NAME: has("optimizer*") and not sharded,
        "rng_state.pth": own and not has("rng_state*"),
    }
    weights = [
        path
        for pattern in _WEIGHTS
        for path in checkpoint.glob(pattern)
        if path.name != "training_args.bin"
    ]
    for index in checkpoint.glob("*.index.json"):
        if not _unreadable(index):
            weights += [
                checkpoint / name for name in json.loads(index.read_bytes())["weight_map"].values()
            ]
    wanted = [checkpoint / name for name, must in needed.items() if must]
    wanted += weights or [checkpoint / "model.safetensors"]
    return next((f"{path.name} is missing" for path in wanted if not path.exists()), "")


def _unreadable(path: Path) -> str:
    """The fault of a file that was cut off, in words; of large files only the table of contents is read."""
    try:
        if path.suffix in (".pt", ".pth", ".bin"):
            zipfile.ZipFile(path).close()
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                pass
        elif path.suffix == ".json":
            json.loads(path.read_bytes())
    except (OSError, ValueError, zipfile.BadZipFile, SafetensorError) as error:
        return f"{path.name} cannot be read ({path.stat().st_size:,} bytes, {type(error).__name__})"
    return ""


# --- one run in a folder, and every process alike --------------------------------------------------------------------


def holds_run(folder: Path) -> bool:
    """Whether a run has trained in a folder and left records, checkpoints or results there."""
    left = (f"{PREFIX_CHECKPOINT_DIR}-*", "rollouts/rollouts-*", TRAINER_STATE_NAME)
    return any(any(folder.glob(pattern)) for pattern in left)


def occupied(folder: Path, as_options: bool = False) -> str:
    """The error message for a second run in a folder, in the words of a script or of a command line."""
    names = ("--resume_from_checkpoint true", "--overwrite", "--output_dir")
    resume, overwrite, other = (
        names if as_options else ("resume_from_checkpoint=True", "overwrite=True", "output_dir")
    )
    return f"{folder} holds another run: continue it ({resume}), move it aside ({overwrite}), or use another {other}"


def move_aside(folder: Path, model: object = None) -> None:
    """Move the content of a folder to one beside it, `FOLDER.previous` (or with a number). Call it while the lock is
    held. The lock's file stays, and so do recorded replies (`*.sqlite`), which are paid for.

    Args:
        folder (`Path`): The run's.
        model (`object`, *optional*): The model to train; one in that folder would be moved away as well.

    Raises:
        `ValueError`: The model is in the folder, or the files cannot be moved.
    """
    folder = folder.resolve()
    if (
        isinstance(model, str | Path)
        and Path(model).exists()
        and Path(model).resolve().is_relative_to(folder)
    ):
        raise ValueError(
            f"overwrite would move {model} away, the model to train: use another output_dir"
        )
    names = [
        f"{folder.name}.previous",
        *(f"{folder.name}.previous-{number}" for number in range(2, 1000)),
    ]
    beside = next(path for name in names if not (path := folder.with_name(name)).exists())
    try:
        beside.mkdir()
        for path in folder.iterdir():
            recorded = ".sqlite" in path.name and not path.name.startswith("spending.")
            if path.name != f"{TRAINING}.lock" and not recorded:
                path.rename(beside / path.name)
    except OSError as error:
        raise ValueError(f"{folder} cannot be moved to {beside}: {error}") from None
    logger.warning("the run that %s held is now in %s", folder, beside)


@contextmanager
def alone_in(folder: Path, accelerator: Accelerator | PartialState) -> Iterator[None]:
    """Within it no other run trains in this folder. The operating system releases the lock when the process ends.

    Raises:
        `ValueError`: On every process, if another run is training there.
    """
    busy = f"another run is training in {folder}: wait for it, end it, or choose another output_dir"
    with ExitStack() as stack:
        from_first(accelerator, lambda: stack.enter_context(only_writer(folder / TRAINING, busy)))
        yield


def from_first(accelerator: Accelerator | PartialState, decide: Callable[[], T]) -> T:
    """Call `decide` on the first process; every process gets its result, or raises its `ValueError`."""
    decided: list = [None, ""]
    if accelerator.is_main_process:
        try:
            decided[0] = decide()
        except ValueError as error:
            decided[1] = str(error)
    broadcast_object_list(decided)
    if decided[1]:
        raise ValueError(decided[1])
    return decided[0]
