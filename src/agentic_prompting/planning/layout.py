"""Where a run is to train: GPUs, their memory, how the model is sharded; and what each moment of a step takes there.

Training steps are measured on fake tensors (`step.py`). Not measured, and labelled so: what ZeRO shards, by DeepSpeed's
partition rule, since `deepspeed.initialize` does not run on fake tensors; DDP's buckets; and what only a GPU shows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .step import PASSES, SCORING

GIB = 2**30
SAMPLING = "sampling"
Moments = dict[str, dict[str, float]]
"""For each moment of a step, GiB by part."""

UNMEASURED = {"CUDA context and kernels": 0.6, "workspaces and NCCL": 0.8}
"""GiB of a process that no allocation of torch shows. Assumed: none of it was measured by us on a GPU."""
FRAGMENTATION = 0.05
"""The assumed share of a GPU that the allocator cannot use."""

# DeepSpeed 0.19's defaults (runtime/zero/config.py), in numbers, not bytes.
_BUCKET, _PREFETCH, _LIVE, _SUBGROUP = 5e8, 5e7, 1e9, 1e9


@dataclass(frozen=True)
class Layout:
    """Args:
    gpus (`int`, *optional*, defaults to `1`): Processes of the job, one per GPU.
    memory (`float`, *optional*, defaults to `80.0`): GiB of each.
    sharding (`str`, *optional*, defaults to `"ddp"`): `ddp` (a copy of the model on each), `fsdp2`, `zero1`, `zero2` or
        `zero3`.
    zero (`dict`, *optional*): DeepSpeed's `zero_optimization`, where it differs from the defaults; what it offloads is
        not on the GPU, but for gradients, which are counted.

    Raises:
        `ValueError`: For less than one GPU or no memory.
    """

    gpus: int = 1
    memory: float = 80.0
    sharding: str = "ddp"
    zero: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"gpus={self.gpus}: training needs at least 1 GPU; a CPU is planned as one GPU")
        if not self.memory > 0:
            raise ValueError(f"gpu_memory={self.memory}: give the GiB of one GPU, such as 80")
        if self.sharding not in ("ddp", "fsdp2", "zero1", "zero2", "zero3"):
            raise ValueError(f"sharding={self.sharding!r} is none of ddp, fsdp2, zero1, zero2, zero3")

    @classmethod
    def of(cls, values: Mapping[str, Any], gpus: int | None, memory: float) -> Layout:
        """The layout of an accelerate configuration.

        Args:
            values (`dict`): The file's; empty for none.
            gpus (`int`, *optional*): Instead of its `num_processes`.
            memory (`float`): GiB of one GPU.
        """
        kind, zero = str(values.get("distributed_type", "NO")), dict(values.get("deepspeed_config") or {})
        if file := zero.get("deepspeed_config_file"):
            zero = json.loads(Path(file).read_text(encoding="utf-8")).get("zero_optimization") or {}
        given = zero.get("zero_stage", zero.get("stage"))
        stage = 2 if given is None else int(given)  # accelerate's default
        sharding = {"FSDP": "fsdp2", "DEEPSPEED": f"zero{stage}" if stage else "ddp"}.get(kind, "ddp")
        fsdp = values.get("fsdp_config") or {}
        if sharding == "fsdp2" and int(fsdp.get("fsdp_version", 1)) != 2:
            raise ValueError("FSDP's first version does not train here: set fsdp_version: 2 in its fsdp_config")
        if sharding == "fsdp2" and fsdp.get("fsdp_offload_params"):
            raise ValueError("FSDP's offload is not planned: leave fsdp_offload_params out to see what it would move")
        return cls(int(values.get("num_processes") or 1) if gpus is None else gpus, memory, sharding, zero)

    def __str__(self) -> str:
        return f"{self.gpus} x {self.memory:g} GiB, {self.sharding}"

    @property
    def is_sharded(self) -> bool:
        """Whether a process holds a part of the weights only."""
        return self.gpus > 1 and self.sharding in ("fsdp2", "zero3")

    @property
    def usable(self) -> float:
        """GiB of a GPU that tensors may take, after what is assumed for the rest."""
        return self.memory * (1 - FRAGMENTATION) - sum(UNMEASURED.values())

    def moments(self, measured: Mapping[str, Any], hidden: int) -> Moments:
        """A measured step as it is in this layout.

        Args:
            measured (`dict`): The result of [`measure`]; of one process, except under FSDP2.
            hidden (`int`): The model's hidden size, on which DeepSpeed's `auto` values depend.
        """
        moments = {name: {part: size / GIB for part, size in of.items()} for name, of in measured["moments"].items()}
        if self.gpus == 1 or self.sharding == "fsdp2":
            return moments
        trained, whole = measured["trained"] / GIB, measured["parameters"] / GIB
        if self.sharding == "ddp":  # its buckets hold a second copy of the gradients
            return {name: {**of, "buckets (estimate)": of.get("gradients", 0.0)} for name, of in moments.items()}
        stage, own = int(self.sharding[-1]), 1 / self.gpus
        share = own if stage == 3 else 1.0
        stepped = 0.0 if self._offloads("optimizer") else trained * own  # on this GPU
        parts = {
            "weights": 0.0 if self._offloads("param") else 2 * whole * share,
            "gradients": 2 * trained * (own if stage > 1 else 1.0),
            "optimizer": 12 * stepped,  # fp32 weights and two moments
        }
        live = min(self._zero("stage3_max_live_parameters", _LIVE, hidden) / GIB, whole)
        live += min(self._zero("stage3_prefetch_bucket_size", _PREFETCH, hidden) / GIB, whole)
        bucket = 2 * min(self._zero("reduce_bucket_size", _BUCKET, hidden) / GIB, trained)
        made: Moments = {}
        for name, of in moments.items():
            made[name] = {**of, **parts, "buckets": bucket}
            if "reference" in of:
                made[name]["reference"] = of["reference"] * share
            if name in (SCORING, PASSES):
                made[name]["gathered weights"] = 2 * live if stage == 3 else 0.0
            else:  # fp32 gradients of a group of weights
                made[name]["activations"] = 4 * min(stepped, _SUBGROUP / GIB)
            made[name].pop("adapters", None)
        return made

    def _offloads(self, what: str) -> bool:
        """Whether ZeRO keeps the optimizer's states or the weights elsewhere, in accelerate's words or DeepSpeed's."""
        device = (self.zero.get(f"offload_{what}") or {}).get("device") or self.zero.get(f"offload_{what}_device")
        return device not in (None, "none")

    def _zero(self, name: str, default: float, hidden: int) -> float:
        given = self.zero.get(name, default)
        if given == "auto":  # accelerate fills these in
            return float(hidden * hidden) * (0.9 if "prefetch" in name else 1.0)
        return float(given)

    def sampling(
        self, measured: Mapping[str, Any], moments: Moments, rollouts: int, context: int, args: Mapping[str, Any]
    ) -> dict[str, float]:
        """GiB by part while rollouts are played.

        Args:
            measured (`dict`): As above.
            moments (`dict`): The moments of the training step.
            rollouts (`int`): Of this process at once.
            context (`int`): Tokens of each at most.
            args (`dict`): The trainer's.
        """
        held = {part: size for part, size in moments[PASSES].items() if part in ("weights", "adapters", "optimizer")}
        held |= {"reference": moments[PASSES]["reference"]} if "reference" in moments[PASSES] else {}
        if args.get("use_vllm"):
            return held
        taken = measured.get("sampling") or {}
        if self.is_sharded:
            held["gathered weights"] = taken.get("weights", 0) / GIB
        held["keys and values"] = min(rollouts, 256) * context * taken.get("token", 0) / GIB
        cached = float(args.get("prefix_cache_mb") or 0) * 1e6 / GIB
        held["cached between turns"] = min(cached, rollouts * context * taken.get("token", 0) / GIB)
        held["reading a context"] = taken.get("reading", 0) / GIB
        # The engine takes half of what is free at most; rows that do not fit wait.
        room = max(0.0, (self.usable - sum(held.values()) + held["keys and values"]) / 2)
        held["keys and values"] = min(held["keys and values"], room)
        return held
