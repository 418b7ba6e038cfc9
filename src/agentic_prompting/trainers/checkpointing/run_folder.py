"""The folder of a run: one run at a time trains in it, and a second one does not mix with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...evaluation.headroom_figures import HEADROOM_FILE
from ...records import only_writer

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOCK_NAME = "training"  # of the file training.lock
RUN_PATTERNS = (f"{PREFIX_CHECKPOINT_DIR}-*", "rollouts/rollouts-*", TRAINER_STATE_NAME)


def contains_run(folder: Path) -> bool:
    """Return whether a run has left checkpoints, rollouts or results in a folder."""
    return any(any(folder.glob(pattern)) for pattern in RUN_PATTERNS)


def second_run_message(folder: Path, as_options: bool = False) -> str:
    """Return the error message for a second run in a folder.

    Args:
        folder (`Path`): The folder.
        as_options (`bool`, *optional*, defaults to `False`): Whether to name the options of a
            command line instead of arguments in Python.
    """
    options = ["resume_from_checkpoint=True", "overwrite=True", "output_dir"]
    if as_options:
        options = ["--resume_from_checkpoint true", "--overwrite", "--output_dir"]
    resume, overwrite, output_dir = options
    return (
        f"{folder} holds another run: continue it ({resume}), move it aside ({overwrite}), or use "
        f"another {output_dir}"
    )


def move_run_aside(folder: Path, model: object = None) -> None:
    """Move the content of a folder to one beside it, `FOLDER.previous` (or with a number).

    Must be called while the lock is held. The lock's file stays, and so do recorded replies
    (`*.sqlite`), which were paid for, and the headroom that was measured for the next run.

    Args:
        folder (`Path`): The run's folder.
        model (`object`, *optional*): The model to train, which must not be moved away with it.

    Raises:
        `ValueError`: If the model is in the folder, or the files cannot be moved.
    """
    folder = folder.resolve()
    # A model in the folder would be gone before it is loaded.
    is_local_model = isinstance(model, str | Path) and Path(model).exists()
    if is_local_model and Path(str(model)).resolve().is_relative_to(folder):
        raise ValueError(
            f"overwrite would move {model} away, the model to train: use another output_dir"
        )

    # Find a free name.
    names = [f"{folder.name}.previous"]
    names += [f"{folder.name}.previous-{number}" for number in range(2, 1000)]
    candidates = [folder.with_name(name) for name in names]
    previous_folder = next(path for path in candidates if not path.exists())

    # Move everything but the lock, which is held, recorded replies and the headroom.
    try:
        previous_folder.mkdir()
        for path in folder.iterdir():
            is_lock = path.name == f"{LOCK_NAME}.lock"
            is_recording = ".sqlite" in path.name and not path.name.startswith("spending.")
            is_headroom = path.stem == Path(HEADROOM_FILE).stem
            if not is_lock and not is_recording and not is_headroom:
                path.rename(previous_folder / path.name)
    except OSError as error:
        raise ValueError(f"{folder} cannot be moved to {previous_folder}: {error}") from None
    logger.warning("the run that %s held is now in %s", folder, previous_folder)


@contextmanager
def lock_run_folder(folder: Path, processes: Accelerator | PartialState) -> Iterator[None]:
    """Within this context, no other run trains in a folder.

    The operating system releases the lock when the process ends.

    Raises:
        `ValueError`: On every process, if another run is training there.
    """
    message = (
        f"another run is training in {folder}: wait for it, end it, or choose another output_dir"
    )
    # Only the main process takes the lock, and holds it until the context ends.
    with ExitStack() as stack:
        decide_on_main_process(
            processes, lambda: stack.enter_context(only_writer(folder / LOCK_NAME, message))
        )
        yield


def decide_on_main_process(processes: Accelerator | PartialState, decide: Callable[[], T]) -> T:
    """Call `decide` on the main process, and return its result on every process.

    Raises:
        `ValueError`: On every process, if `decide` raised it.
    """
    # An error travels as its message, so that every process raises it.
    decision: list[Any] = [None, ""]  # the result and the message of an error
    if processes.is_main_process:
        try:
            decision[0] = decide()
        except ValueError as error:
            decision[1] = str(error)
    broadcast_object_list(decision)
    result, error_message = decision
    if error_message:
        raise ValueError(error_message)
    return result
