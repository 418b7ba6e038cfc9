"""The peak that `plan` predicts against the measured peak of real training steps on a CPU.

    python -m benchmarks.speed.plan --json  # 21 settings; about a quarter of an hour on two busy cores
    python -m benchmarks.speed.plan --json --only LoRA  # the settings whose name has this in it
    python -m benchmarks.speed.plan --record  # append each to records/plan.jsonl.gz, of which the page is made

Each setting is predicted in one process, on fake tensors, and run for two steps in another one, or in two under FSDP2,
with random weights. Measured is the running sum of the CPU allocator's events, which also sees what kernels allocate
inside. It says nothing of what a GPU adds: contexts, workspaces, NCCL, fragmentation.

The last line of `--json`: `settings` (each with `predicted` and `measured` in MiB and their `error`), `worst_error` of
one process and `worst_error_fsdp2`.
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
from typing import Any

from benchmarks.lab import RECORDS, Records, markdown

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


def job_of(name: str) -> Any:
    """A setting as the job that is predicted and run."""
    import transformers
    from peft import LoraConfig

    from agentic_prompting.planning.measured_step import TrainingJob

    of = {
        "rows": 2,
        "context": 256,
        "scored": 1.0,
        "processes": 1,
        "dtype": "float32",
        "kind": "Qwen3Config",
    }
    of |= SETTINGS[name]
    args = {
        "bf16": of.get("bf16", False),
        "beta": of.get("beta", 0.0),
        "learning_rate": 1e-5,
        "seed": 0,
        "gradient_checkpointing": of.get("checkpointing", False),
        "gradient_accumulation_steps": of.get("accumulation", 1),
    }
    peft = (
        LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        if of.get("lora")
        else None
    )
    kept = {key: of[key] for key in ("rows", "context", "scored", "processes", "dtype")}
    shape = getattr(transformers, of["kind"])(**of.get("shape", SMALL))
    return TrainingJob(args, shape, peft=peft, gpu=False, **kept)


def predicted(job: Any) -> int:
    """Bytes of the largest moment."""
    from agentic_prompting.planning.measured_step import measure_training

    return max(sum(parts.values()) for parts in measure_training(job).moments.values())


def measured(job: Any) -> int:
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
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            trainer = build_trainer(job, args, world_tokenizer())
            trainer.memory = MemoryCounter()  # counts nothing: it is not entered
            trainer.train()
    return most_held(profiled)


def most_held(profiled: Any) -> int:
    """The largest sum of allocations that were live at once in a profile with memory."""
    waiting = list(profiled.profiler.kineto_results.experimental_event_tree())
    events = []
    while waiting:
        one = waiting.pop()
        waiting += one.children
        if one.name == "[memory]":
            events.append(
                (one.start_time_ns, one.extra_fields.alloc_size, one.extra_fields.total_allocated)
            )
    _, size, total = min(events)
    return max(held for _, _, held in events) - (
        total - size
    )  # less what an earlier profile has left


def in_processes(name: str, real: bool) -> int:
    """Predict or run a setting in processes of its own, as many as it has; the largest of their peaks."""
    from agentic_prompting.planning.fake_gpu import fsdp2_environment

    processes = SETTINGS[name].get("processes", 1) if real else 1
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CI": "1"}
    if processes > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            shared |= fsdp2_environment(processes) | {"MASTER_PORT": str(probe.getsockname()[1])}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "--one", name, *(["--real"] if real else [])],
            env={
                **shared,
                **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    printed = [one.communicate(timeout=600) for one in started]
    if any(one.returncode for one in started):
        raise RuntimeError(f"{name} failed:\n{printed[0][1][-3000:]}")
    return max(int(out.strip().rpartition("\n")[2]) for out, _ in printed)


def compare(name: str) -> dict[str, Any]:
    """A setting's predicted and measured peaks."""
    guess = in_processes(name, real=False)
    real = in_processes(name, real=True)
    error = guess / real - 1
    row = {"setting": name, "predicted": round(guess / MIB, 1), "measured": round(real / MIB, 1)}
    print(
        f"{name}: {row['predicted']} MiB predicted, {row['measured']} measured, {error:+.1%}",
        flush=True,
    )
    return {**row, "error": round(error, 4), "processes": SETTINGS[name].get("processes", 1)}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows with the worst errors."""
    found: dict[str, Any] = {"settings": rows}
    for key, sharded in (("worst_error", False), ("worst_error_fsdp2", True)):
        of = [abs(row["error"]) for row in rows if (row["processes"] > 1) == sharded]
        found[key] = max(of) if of else None
    return found


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """The settings' latest records, with the worst error of one process and of FSDP2 below."""
    latest = {record["setting"]: record for record in records}
    rows = [latest[name] for name in SETTINGS if name in latest]
    cells = [
        [row["setting"], row["predicted"], row["measured"], f"{round(row['error'], 3) or 0.0:.1%}"]
        for row in rows
    ]
    worst = summary([dict(one) for one in rows])
    found = [
        (of, worst[key])
        for of, key in (("one process", "worst_error"), ("FSDP2", "worst_error_fsdp2"))
    ]
    worst_of = ", ".join(f"{error:.1%} with {of}" for of, error in found if error is not None)
    titles = ("setting", "predicted, MiB", "measured, MiB", "error")
    dates = sorted({one["date"] for one in rows})
    return f"{markdown(titles, cells)}\n\nThe worst error: {worst_of}. Measured on {' and '.join(dates)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--only", default="", help="settings whose name has this in it")
    parser.add_argument(
        "--record", action="store_true", help="append the settings to records/plan.jsonl.gz"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--real", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        job = job_of(options.one)
        print((measured if options.real else predicted)(job), flush=True)
        os._exit(0)  # without the teardown of a process group that another process may have left
    rows = []
    for name in SETTINGS:
        if options.only in name:
            rows.append(compare(name))
            if options.record:
                Records(RECORDS / "plan.jsonl.gz").add(rows[-1])
    figures = summary(rows)
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
