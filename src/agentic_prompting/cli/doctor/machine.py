"""Can this machine do it: devices, number formats, disk, the recording?"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .finding import Finding, Level, Setup

_SCARCE, _TOO_LITTLE = 20 * 2**30, 2**30  # bytes: a checkpoint of Qwen3-4B with optimizer is 24 GB in bf16


def devices(setup: Setup) -> Iterator[Finding]:
    """What torch can compute on."""
    import torch

    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            memory = torch.cuda.get_device_properties(i).total_memory / 2**30
            yield Finding("ok", f"GPU {i}: {torch.cuda.get_device_name(i)}, {memory:.0f} GiB")
    elif setup.values.get("use_vllm"):
        yield Finding("problem", "use_vllm, but torch sees no GPU", "use_vllm: false")
    else:
        yield Finding("ok", f"no GPU, {os.cpu_count()} CPU cores: enough for the sandbox, not for a model of billions")


def bf16(setup: Setup) -> Iterator[Finding]:
    """bfloat16, which TRL trains in unless it is told otherwise."""
    import torch

    wanted = setup.values.get("bf16", not setup.values.get("fp16", False))
    gpu, trains = torch.cuda.is_available(), setup.trains
    if gpu and torch.cuda.is_bf16_supported(including_emulation=False):
        yield Finding("ok", "the GPU computes in bf16")
    elif gpu:
        if trains and wanted:
            yield Finding("problem", "the GPU does not compute in bf16", "bf16: false and fp16: true")
        else:
            yield Finding("warning", "the GPU does not compute in bf16", "--bf16 false in training")
    elif trains and wanted and not setup.values.get("use_cpu"):
        fix = f"bf16: false and use_cpu: true in {setup.config}, or run it on a machine with a GPU"
        yield Finding("problem", "training in bf16 (TRL's default) needs a GPU, and there is none", fix)


def output_folder(setup: Setup) -> Iterator[Finding]:
    """Whether what the run writes can be written, and has room."""
    folder = Path(setup.value("output_dir") or "runs")
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    elsewhere = "another folder with --output-dir"
    if not there.is_dir():
        yield Finding("problem", f"{folder} cannot be made: {there} is a file", f"rm {there}, or {elsewhere}")
        return
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        says = f"{folder} cannot be written: {error.strerror or error}"
        yield Finding("problem", says, f"chmod u+w {there}, or {elsewhere}")
        return
    free = shutil.disk_usage(there).free
    room = f"{free / 2**30:.0f} GiB free"
    if free < _SCARCE:
        level: Level = "problem" if free < _TOO_LITTLE else "warning"
        fix = "make room, keep fewer checkpoints (save_total_limit: 1), or another disk with --output-dir"
        yield Finding(level, f"only {room} for {folder}", fix)
    else:
        yield Finding("ok", f"{folder} can be written, {room}")


def replay_cache(setup: Setup) -> Iterator[Finding]:
    """Whether the recording can be opened. Nothing is made or written here."""
    from ...llm import ReplayCache

    named = setup.value("replay_cache")
    if not named:
        return
    path = Path(named)
    if not path.exists():
        yield Finding("ok", f"replay cache {path} is not there yet; it will be made")
        return
    try:
        cache = ReplayCache(path, mode="replay")
        yield Finding("ok", f"replay cache {path}: {len(cache)} replies")
        cache.close()
    except (ValueError, OSError) as error:
        yield Finding("problem", str(error), f"mv {path} {path}.broken, or another file with --replay-cache")
