"""The peak that `plan` predicts against the measured peak of real training steps on a CPU.

    python -m benchmarks.speed.plan --json  # 21 settings; about a quarter of an hour on two busy cores
    python -m benchmarks.speed.plan --json --only LoRA  # the settings whose name has this in it
    python -m benchmarks.speed.plan --record  # append each to records/plan.jsonl.gz, of which the page is made

Each setting is predicted in one process, on fake tensors, and run for two steps in another one, or
in two under FSDP2, with random weights. Measured is the running sum of the CPU allocator's events,
which also sees what kernels allocate inside. It says nothing of what a GPU adds: contexts,
workspaces, NCCL, fragmentation.

The last line of `--json`: `settings` (each with `predicted` and `measured` in MiB and their
`error`), `worst_error` of one process and `worst_error_fsdp2`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lab import RECORDS, Records, markdown

if TYPE_CHECKING:
    from torch.profiler import profile

    from agentic_prompting.planning.measured_step import TrainingJob

sys.path[:0] = [str(Path(__file__).parents[2] / "src")]
MIB = 2**20

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8000,
}
LARGER = {
    **SMALL,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "vocab_size": 16000,
}
EXPERTS = {**SMALL, "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "small": {},
    "small, checkpointing": {"checkpointing": True},
    "small, 1,024 tokens, checkpointing": {"checkpointing": True, "context": 1024},
    "small, 4 rows": {"rows": 4},
    "small, 1 row": {"rows": 1},
    "small, 2 micro-batches": {"accumulation": 2},
    "small, LoRA": {"lora": True},
    "small, LoRA, checkpointing": {"lora": True, "checkpointing": True},
    "small, reference model": {"beta": 0.1},
    "small, bf16": {"dtype": "bfloat16", "context": 128},
    "small, autocast": {"bf16": True, "context": 128},
    "small, a third scored": {"scored": 0.33},
    "larger": {"shape": LARGER},
    "larger, checkpointing": {"shape": LARGER, "checkpointing": True},
    "mixture of experts": {"kind": "Qwen3MoeConfig", "shape": EXPERTS},
    "mixture of experts, bf16": {
        "kind": "Qwen3MoeConfig",
        "shape": EXPERTS,
        "dtype": "bfloat16",
        "context": 128,
    },
    "sliding window": {"kind": "Gemma3TextConfig", "shape": {**SMALL, "sliding_window": 64}},
    "small, FSDP2": {"processes": 2},
    "small, FSDP2, checkpointing": {"processes": 2, "checkpointing": True},
    "small, FSDP2, LoRA": {"processes": 2, "lora": True},
    "larger, FSDP2, checkpointing": {"shape": LARGER, "processes": 2, "checkpointing": True},
}


DEFAULTS: dict[str, Any] = {
    "rows": 2,
    "context": 256,
    "scored": 1.0,
    "processes": 1,
    "dtype": "float32",
    "kind": "Qwen3Config",
    "shape": SMALL,
}


def build_job(name: str) -> TrainingJob:
    """A setting as the job that is predicted and run."""
    import transformers
    from peft import LoraConfig

    from agentic_prompting.planning.measured_step import TrainingJob

    setting = {**DEFAULTS, **SETTINGS[name]}
    args = {
        "bf16": setting.get("bf16", False),
        "beta": setting.get("beta", 0.0),
        "learning_rate": 1e-5,
        "seed": 0,
        "gradient_checkpointing": setting.get("checkpointing", False),
        "gradient_accumulation_steps": setting.get("accumulation", 1),
    }
    peft = None
    if setting.get("lora"):
        peft = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    config_class = getattr(transformers, setting["kind"])
    return TrainingJob(
        args,
        config_class(**setting["shape"]),
        dtype=setting["dtype"],
        rows=setting["rows"],
        context=setting["context"],
        scored=setting["scored"],
        peft=peft,
        processes=setting["processes"],
        gpu=False,
    )


def predict_peak(job: TrainingJob) -> int:
    """Bytes of the largest moment."""
    from agentic_prompting.planning.measured_step import measure_training

    return max(sum(parts.values()) for parts in measure_training(job).moments.values())


def measure_peak(job: TrainingJob) -> int:
    """Bytes of the largest sum of all live allocations in two real steps on this process."""
    from contextlib import nullcontext

    from torch.profiler import ProfilerActivity, profile

    from agentic_prompting.planning.fake_gpu import fsdp_on_a_cpu
    from agentic_prompting.planning.measured_step import build_trainer
    from agentic_prompting.planning.memory_counter import MemoryCounter
    from agentic_prompting.sandbox.policy import world_tokenizer

    sharded = fsdp_on_a_cpu() if job.processes > 1 else nullcontext()
    with tempfile.TemporaryDirectory() as folder, sharded:
        args = job.training_args(folder, steps=2)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            trainer = build_trainer(job, args, world_tokenizer())
            trainer.memory = MemoryCounter()  # counts nothing: it is not entered
            trainer.train()
    return peak_of_profile(profiler)


def peak_of_profile(profiler: profile) -> int:
    """The largest sum of allocations that were live at once in a profile with memory."""
    # Start, size of the allocation and sum of all live ones, of each event of the allocator.
    memory_events = []
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]":
            fields = event.extra_fields
            memory_events.append((event.start_time_ns, fields.alloc_size, fields.total_allocated))

    # An earlier profile may have left allocations: they were live before the first event.
    _, first_size, first_total = min(memory_events)
    live_before = first_total - first_size
    return max(total for _, _, total in memory_events) - live_before


def run_in_processes(name: str, real: bool) -> int:
    """Predict or run a setting in processes of its own, as many as it has; the largest of their
    peaks.
    """
    from agentic_prompting.planning.fake_gpu import fsdp2_environment

    process_count = SETTINGS[name].get("processes", 1) if real else 1
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CI": "1"}
    if process_count > 1:
        environment |= fsdp2_environment(process_count) | {"MASTER_PORT": str(find_free_port())}
    command = [sys.executable, "-m", __spec__.name, "--one", name]
    if real:
        command.append("--real")

    # Start all of them before waiting: they need each other.
    processes = []
    for rank in range(process_count):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if process_count > 1 else {}
        process = subprocess.Popen(
            command,
            env={**environment, **ranks},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
    outputs = [process.communicate(timeout=600) for process in processes]
    if any(process.returncode for process in processes):
        first_error = outputs[0][1]
        raise RuntimeError(f"{name} failed:\n{first_error[-3000:]}")
    return max(int(stdout.strip().rpartition("\n")[2]) for stdout, _ in outputs)


def find_free_port() -> int:
    """Return a port of this machine on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def compare(name: str) -> dict[str, Any]:
    """A setting's predicted and measured peaks."""
    predicted = run_in_processes(name, real=False)
    measured = run_in_processes(name, real=True)
    error = predicted / measured - 1
    row = {
        "setting": name,
        "predicted": round(predicted / MIB, 1),
        "measured": round(measured / MIB, 1),
        "error": round(error, 4),
        "processes": SETTINGS[name].get("processes", 1),
    }
    print(
        f"{name}: {row['predicted']} MiB predicted, {row['measured']} measured, {error:+.1%}",
        flush=True,
    )
    return row


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rows with the worst errors, `None` where no row counts."""
    one_process = [abs(row["error"]) for row in rows if row["processes"] == 1]
    sharded = [abs(row["error"]) for row in rows if row["processes"] > 1]
    return {
        "settings": rows,
        "worst_error": max(one_process, default=None),
        "worst_error_fsdp2": max(sharded, default=None),
    }


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """The settings' latest records, with the worst error of one process and of FSDP2 below."""
    latest = {record["setting"]: record for record in records}
    rows = [latest[name] for name in SETTINGS if name in latest]
    cells = []
    for row in rows:
        error = round(row["error"], 3) or 0.0  # never -0.0
        cells.append([row["setting"], row["predicted"], row["measured"], f"{error:.1%}"])
    titles = ("setting", "predicted, MiB", "measured, MiB", "error")

    summary = summarise(rows)
    worst_errors = []
    for way, key in (("one process", "worst_error"), ("FSDP2", "worst_error_fsdp2")):
        if summary[key] is not None:
            worst_errors.append(f"{summary[key]:.1%} with {way}")
    dates = sorted({row["date"] for row in rows})
    return (
        f"{markdown(titles, cells)}\n\nThe worst error: {', '.join(worst_errors)}. "
        f"Measured on {' and '.join(dates)}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--only", default="", help="settings whose name has this in it")
    parser.add_argument(
        "--record", action="store_true", help="append the settings to records/plan.jsonl.gz"
    )
    # A process of this script that predicts or runs one setting.
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--real", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        job = build_job(options.one)
        peak = measure_peak(job) if options.real else predict_peak(job)
        print(peak, flush=True)
        os._exit(0)  # without the teardown of a process group that another process may have left
    rows = []
    for name in SETTINGS:
        if options.only in name:
            row = compare(name)
            rows.append(row)
            if options.record:
                Records(RECORDS / "plan.jsonl.gz").add(row)
    if options.json:
        print(json.dumps(summarise(rows)))


if __name__ == "__main__":
    main()
