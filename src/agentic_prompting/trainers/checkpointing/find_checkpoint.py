"""The choice of the checkpoint that a run resumes from.

A disk may fail, a copy may be incomplete, or somebody may delete a large file. So files that are
missing or cut off are found, and named, before anything is loaded.
"""

from __future__ import annotations

import json
import logging
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints

logger = logging.getLogger(__name__)

STATE_FILE = "exact_resume_{}.pt"  # added by ResumableGRPOTrainer, one per process
WEIGHT_PATTERNS = (
    "*.safetensors",
    "*.bin",
    "*/adapter_model.*",
    "global_step*",
    "pytorch_model_fsdp*",
)


def read_resume_option(args: TrainingArguments) -> str | bool | None:
    """Return `args.resume_from_checkpoint`.

    A command line passes it as text: `true` is the newest checkpoint.
    """
    option = args.resume_from_checkpoint
    return {"true": True, "false": None}.get(str(option).lower(), option)


def find_checkpoint(requested: str | bool | None, folder: Path) -> str | None:
    """Return the checkpoint to resume from, or `None` if training starts at the beginning.

    Args:
        requested (`str` or `bool`, *optional*): A checkpoint; or `True`, the newest whole one in
            `folder`. Damaged ones are skipped with a warning. If there is none yet, training starts
            at the beginning.
        folder (`Path`): The run's folder.

    Raises:
        `ValueError`: If the requested checkpoint is damaged, or all checkpoints are. The message
            names the file.
    """
    if not requested:
        return None

    # A checkpoint that was named must be whole.
    if requested is not True:
        damage = find_damage(Path(requested))
        if damage:
            raise ValueError(
                f"{requested} cannot be resumed from: {damage}; resume from an earlier checkpoint, "
                "or restore the file"
            )
        return str(requested)

    # Otherwise the newest whole one.
    damages: list[str] = []
    for checkpoint in reversed(sort_checkpoints(str(folder))):
        damage = find_damage(Path(checkpoint))
        if not damage:
            if damages:
                logger.warning("%s: continuing from %s", "; ".join(damages), checkpoint)
            return checkpoint
        damages.append(f"{Path(checkpoint).name} is damaged, {damage}")
    # If every checkpoint is damaged, a fresh start would silently give up the run.
    if damages:
        raise ValueError(
            f"no checkpoint in {folder} can be resumed from ({'; '.join(damages)}): restore one, "
            "or move them away to train from the beginning"
        )
    # A run that was killed before its first checkpoint starts again.
    logger.warning("no checkpoint in %s yet: training starts at the beginning", folder)
    return None


def find_damage(checkpoint: Path) -> str:
    """Return which file of a checkpoint is missing or cannot be read, or an empty text."""
    if not checkpoint.is_dir():
        return "there is no such folder"
    # First what is missing, then what was cut off.
    for path in _required_files(checkpoint):
        if not path.exists():
            return f"{path.name} is missing"
    for path in sorted(checkpoint.rglob("*")):
        problem = _find_read_problem(path) if path.is_file() else ""
        if problem:
            return problem
    return ""


def _required_files(checkpoint: Path) -> list[Path]:
    """Return the files that a checkpoint of this type must have, the important ones first."""

    def has_any(*patterns: str) -> bool:
        return any(any(checkpoint.glob(pattern)) for pattern in patterns)

    is_exact = has_any(STATE_FILE.format("*"))
    # DeepSpeed keeps the optimizer and, mostly, the schedule in its own folder.
    is_deepspeed = has_any("global_step*")
    has_optimizer = has_any("optimizer*", "rank*-optimizer.pt")

    # With `save_only_model` there are only weights; every other checkpoint has the rest.
    names = [TRAINER_STATE_NAME]
    is_full = is_exact or has_any(SCHEDULER_NAME)
    if is_full and not is_deepspeed and not has_optimizer:
        names.append(OPTIMIZER_NAME)
    if has_any("optimizer*") and not is_deepspeed:
        names.append(SCHEDULER_NAME)
    if is_exact and not has_any("rng_state*"):
        names.append("rng_state.pth")

    # Weights: the files that are there, and those that an index names.
    weights = []
    for pattern in WEIGHT_PATTERNS:
        weights += [path for path in checkpoint.glob(pattern) if path.name != "training_args.bin"]
    for index in checkpoint.glob("*.index.json"):
        if not _find_read_problem(index):
            shard_names = json.loads(index.read_bytes())["weight_map"].values()
            weights += [checkpoint / shard_name for shard_name in shard_names]
    if not weights:
        weights = [checkpoint / "model.safetensors"]
    return [checkpoint / name for name in names] + weights


def _find_read_problem(path: Path) -> str:
    """Return why a file cannot be read, or an empty text. Only the index of large files is read."""
    try:
        # torch writes zip archives, whose index is at the end: a file that was cut off has none.
        if path.suffix in (".pt", ".pth", ".bin"):
            zipfile.ZipFile(path).close()
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                pass
        elif path.suffix == ".json":
            json.loads(path.read_bytes())
    except (OSError, ValueError, zipfile.BadZipFile, SafetensorError) as error:
        size = f"{path.stat().st_size:,} bytes"
        return f"{path.name} cannot be read ({size}, {type(error).__name__})"
    return ""
