"""Every row of the pages that says "not measured", measured on one GPU in at most 40 minutes.

    pip install -c constraints-gpu.txt -e ".[vllm,deepspeed]"   # offline: --no-index --find-links FOLDER_OF_WHEELS
    python -m benchmarks.speed.gpu_day  # records/gpu_day.jsonl.gz, and the pages from it
    python -m benchmarks.speed.gpu_day --only vLLM  # the parts whose name has this in it
    python -m benchmarks.speed.gpu_day --miniature  # the same code with tiny shapes on a CPU; keeps no records

Each part runs in a process of its own with a time limit. A part that fails, is killed, or needs
something that is not there becomes a record that says so, and the next part starts. Models have
random weights. In a training step every episode fills the context, because the environment has
fixed replies and goes on until the last turn; so figures depend on shapes, not on what a model has
learned. The first step of a part, which compiles and allocates, is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lab import RECORDS, REPOSITORY, Records, markdown
from benchmarks.speed.gpu_parts import beside_trl, engine, step

COMMAND = (sys.executable, "-m", "benchmarks.speed.gpu_day")
sys.path[:0] = [str(REPOSITORY / "src"), str(REPOSITORY / "tests")]
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Part:
    """A part of the day.

    Args:
        run (`Callable`): Measures, given a folder and the options.
        seconds (`int`): Its time limit.
        options (`dict`): Of `run`.
        needs (`tuple[str, ...]`): Packages, and `two GPUs`.
    """

    run: Callable[..., None]
    seconds: int
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


PARTS = {
    "engine, 0.6B": Part(engine, 180, {"shape": "0.6B"}),
    "engine, 4B": Part(engine, 240, {"shape": "4B"}),
    "loss and step beside TRL": Part(beside_trl, 150),
    "step, 0.6B, all weights": Part(
        step, 210, {"shape": "0.6B", "lora": False, "sampled": 0.05, "predict": True}
    ),
    "step, 4B, LoRA": Part(step, 270, {"shape": "4B", "sampled": 0.05, "predict": True}),
    "step, 0.6B, LoRA, 32,768 tokens in 20 turns": Part(
        step,
        300,
        {"shape": "0.6B", "context": 32_768, "turns": 20, "sampled": 0.1, "predict": True},
    ),
    "step, 0.6B, LoRA, ZeRO-3 of one process": Part(
        step, 210, {"shape": "0.6B", "backend": "zero3"}, ("deepspeed",)
    ),
    "step, 0.6B, LoRA, FSDP2 of one process": Part(
        step, 180, {"shape": "0.6B", "backend": "fsdp2"}
    ),
    "step, 0.6B, LoRA, vLLM colocated": Part(
        step, 210, {"shape": "0.6B", "vllm": "colocate"}, ("vllm",)
    ),
    "step, 0.6B, LoRA, vLLM server by adapter": Part(
        step, 225, {"shape": "0.6B", "vllm": "adapter"}, ("vllm",)
    ),
    "step, 0.6B, LoRA, vLLM server by NCCL": Part(
        step, 225, {"shape": "0.6B", "vllm": "nccl"}, ("vllm", "two GPUs")
    ),
}
MINIATURE: dict[Callable[..., None], dict[str, Any]] = {
    engine: {"shape": "tiny", "tokens": 10},
    beside_trl: {"flags": ("--quick",)},
    step: {"shape": "tiny", "context": 512, "turns": 3},
}


def measure_here(name: str, miniature: bool) -> None:
    """Measure a part in this process, and end it."""
    part = PARTS[name]
    options = dict(part.options)
    if miniature:
        options |= MINIATURE[part.run]
    with tempfile.TemporaryDirectory() as folder:
        part.run(Path(folder), **options)
    sys.stdout.flush()
    os._exit(0)  # without the teardown of process groups and engines


def measure_part(name: str, miniature: bool, seconds: float) -> dict[str, Any]:
    """A part's record: its figures, or why there are none."""
    missing = [need for need in PARTS[name].needs if not has(need)]
    if missing:
        return {"part": name, "status": f"left out: needs {' and '.join(missing)}"}
    command = [*COMMAND, "--part", name]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CI": "1"}
    if miniature:
        command.append("--miniature")
        environment["CUDA_VISIBLE_DEVICES"] = ""

    # Files instead of pipes: they take any amount of output while the part runs.
    started = time.monotonic()
    status = "done"
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(
            command, stdout=stdout, stderr=stderr, env=environment, start_new_session=True
        )
        try:
            if process.wait(seconds):
                status = f"failed with status {process.returncode}"
        except subprocess.TimeoutExpired:
            status = f"killed after {seconds:g} s"
        finally:
            # Also when this process is ended, and its servers and workers, too: what is left would
            # hold the GPU's memory.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        stdout.seek(0)
        stderr.seek(0)
        printed = [line for line in stdout if line.startswith("{")]
        errors = stderr.read().strip().splitlines()

    # Each line of figures has those of the lines before it.
    record: dict[str, Any] = {
        "part": name,
        "status": status,
        "seconds": round(time.monotonic() - started, 1),
    }
    if status != "done" and errors:
        record["error"] = errors[-1][:300]
    record["figures"] = json.loads(printed[-1]) if printed else {}
    return record


def has(need: str) -> bool:
    """Whether this machine has what a part needs."""
    if need == "two GPUs":
        import torch

        return torch.cuda.device_count() > 1
    return importlib.util.find_spec(need) is not None


def measure_parts(
    names: Iterable[str], records: Records, miniature: bool, limits: Mapping[str, float] = {}
) -> None:
    """Measure parts one after the other; each is recorded as soon as it has ended."""
    device = "a CPU, in miniature" if miniature else device_name()
    for name in names:
        seconds = limits.get(name, PARTS[name].seconds)
        record = {**measure_part(name, miniature, seconds), "device": device}
        records.add(record)
        error = record.get("error", "")
        print(f"{name}: {record['status']} {error} {figures_text(record)}", flush=True)


def device_name() -> str:
    """The GPU's name.

    Raises:
        `SystemExit`: There is none.
    """
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no GPU here: --miniature runs the same code on a CPU")
    return torch.cuda.get_device_name()


# --- pages ----------------------------------------------------------------------------------------


def latest(records: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """A part's latest record with figures; else the latest; else nothing."""
    part_records = [record for record in records if record["part"] == name]
    for record in reversed(part_records):
        if record.get("figures"):
            return record
    return part_records[-1] if part_records else {}


def figures_text(record: Mapping[str, Any]) -> str:
    """A record's figures in words."""
    return _listed(record.get("figures") or {})


def _listed(figures: Mapping[str, Any]) -> str:
    words = [f"{name.replace('_', ' ')} {_as_text(value)}" for name, value in figures.items()]
    return ", ".join(words)


def _as_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({_listed(value)})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def figures_of(name: str, records: Sequence[Mapping[str, Any]]) -> str:
    """A part's figures with device and date, or that it is not measured and why."""
    record = latest(records, name)
    if not record:
        return NOT_MEASURED
    where = f"{record['device']}, {record['date']}"
    figures = figures_text(record)
    if not figures:
        return f"{NOT_MEASURED} ({record['status']}; {where})"
    return f"{figures} ({where})"


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """All parts with their figures."""
    return markdown(("what", "figures"), [[name, figures_of(name, records)] for name in PARTS])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="the parts whose name has this in it")
    parser.add_argument(
        "--records",
        type=Path,
        help="default: records/gpu_day.jsonl.gz, and the pages are made anew",
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument(
        "--miniature", action="store_true", help="tiny shapes on a CPU, to see that every part runs"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.part:
        measure_here(options.part, options.miniature)
        return
    path = options.records
    if path is None:
        folder = Path(tempfile.mkdtemp()) if options.miniature else RECORDS
        path = folder / "gpu_day.jsonl.gz"
    names = [name for name in PARTS if options.only in name]
    measure_parts(names, Records(path), options.miniature)
    if not options.miniature and options.records is None:
        subprocess.run([sys.executable, "-m", "benchmarks.recompute", "--write"], check=False)


if __name__ == "__main__":
    main()
