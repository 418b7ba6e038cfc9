"""Where a run may begin: alone in its folder, and at a checkpoint that is whole.

A checkpoint that was renamed into place was whole then. Disks fail, copies break off and people delete what looks large
since: what is missing or cut off is found here, by name, before anything is loaded.
"""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints

logger = logging.getLogger(__name__)

LOCK_FILE = "training.lock"
STATE_FILE = "exact_resume_{}.pt"  # what ResumableGRPOTrainer adds, one per process
_WEIGHTS = ("*.safetensors", "*.bin", "*/adapter_model.*", "global_step*", "pytorch_model_fsdp*")

T = TypeVar("T")


@contextmanager
def alone_in(folder: Path, accelerator: Accelerator) -> Iterator[None]:
    """Within it no other run trains in this folder. The lock is the system's, and ends with the process.

    Raises:
        `ValueError`: On every process, if another run is training there.
    """
    with ExitStack() as held:
        from_first(accelerator, lambda: held.enter_context(_locked(folder)))
        yield


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"another run is training in {folder}: wait for it, end it, or choose another output_dir"
        ) from None
    except (OSError, NotImplementedError) as error:  # a disk without locks, or one that may not be written to
        logger.warning("%s cannot be locked (%s): start no second run in it", folder, error)
    try:
        yield
    finally:
        lock.release()


def whole_checkpoint(given: str | bool | None, folder: Path) -> str | None:
    """The checkpoint to go on from.

    Args:
        given (`str` or `bool`, *optional*): A checkpoint; or `True`, the newest whole one in `folder`. What is damaged
            is passed over with a warning.
        folder (`Path`): The run's.

    Raises:
        `ValueError`: If the checkpoint that was asked for, or every one there is, is damaged; says which file.
    """
    if not given:
        return None
    if given is not True:
        why = damaged(Path(given))
        if why:
            raise ValueError(
                f"{given} cannot be gone on from: {why}; resume from an earlier checkpoint, or restore the file"
            )
        return str(given)
    passed_over: list[str] = []
    for checkpoint in reversed(sort_checkpoints(str(folder))):
        why = damaged(Path(checkpoint))
        if not why:
            if passed_over:
                logger.warning("%s: going on from %s", "; ".join(passed_over), checkpoint)
            return checkpoint
        passed_over.append(f"{Path(checkpoint).name} is damaged, {why}")
    if passed_over:
        raise ValueError(
            f"no checkpoint in {folder} can be gone on from ({'; '.join(passed_over)}): restore one, or move them away "
            "to train anew"
        )
    return None


def damaged(checkpoint: Path) -> str:
    """What is wrong with a checkpoint: a file that is missing or cannot be read. Empty if nothing is."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    return _missing(checkpoint) or next(filter(None, map(_unreadable, files)), "")


def _missing(checkpoint: Path) -> str:
    """Which file a checkpoint of this kind must have and has not."""
    there = {path.name for path in checkpoint.iterdir()}

    def has(*patterns: str) -> bool:
        return any(any(checkpoint.glob(pattern)) for pattern in patterns)

    sharded = has("global_step*")  # DeepSpeed's: optimizer and, mostly, schedule are in there
    own = has(STATE_FILE.format("*"))
    needed = {
        TRAINER_STATE_NAME: True,
        # With `save_only_model` there is nothing but weights; every other checkpoint has the rest.
        OPTIMIZER_NAME: (own or SCHEDULER_NAME in there)
        and not sharded
        and not has("optimizer*", "rank*-optimizer.pt"),
        SCHEDULER_NAME: has("optimizer*") and not sharded,
        "rng_state.pth": own and not has("rng_state*"),
    }
    for name, wanted in needed.items():
        if wanted and name not in there:
            return f"{name} is missing"
    weights = [path for pattern in _WEIGHTS for path in checkpoint.glob(pattern) if path.name != "training_args.bin"]
    for index in checkpoint.glob("*.index.json"):
        if not _unreadable(index):
            weights += [checkpoint / name for name in json.loads(index.read_bytes())["weight_map"].values()]
    gone = [path for path in weights if not path.exists()]
    return f"{gone[0].name} is missing" if gone else "" if weights else "model.safetensors is missing"


def _unreadable(path: Path) -> str:
    """Whether a file was cut off; of the large ones only their tables of contents are read."""
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


def from_first(accelerator: Accelerator, decide: Callable[[], T]) -> T:
    """What `decide` returns on the first process, or the `ValueError` that it raises there: on every process alike."""
    said: list = [None, ""]
    if accelerator.is_main_process:
        try:
            said[0] = decide()
        except ValueError as error:
            said[1] = str(error)
    broadcast_object_list(said)
    if said[1]:
        raise ValueError(said[1])
    return said[0]
