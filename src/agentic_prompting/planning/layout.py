"""Where a run trains: the GPUs, their memory, how the model is sharded, and what a step takes
there.

Training steps are measured on fake tensors (`measured_step.py`). Three things are not, and are
labelled as estimates: what ZeRO shards, by DeepSpeed's partition rule, since
`deepspeed.initialize` does not run on fake tensors; DDP's buckets; and what only a GPU shows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .measured_step import PASSES, SCORING, MeasuredStep

GIB = 2**30
SAMPLING = "sampling"
SHARDINGS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
Moments = dict[str, dict[str, float]]
"""GiB by part, for each moment of a step."""

UNMEASURED = {"CUDA context and kernels": 0.6, "workspaces and NCCL": 0.8}
"""GiB of a process that no allocation of torch shows. Assumed; not measured on a GPU."""
FRAGMENTATION = 0.05
"""The assumed share of a GPU that the allocator cannot use."""
MAX_ROWS = 256
"""The most rollouts that the engine samples at once."""

# Defaults of DeepSpeed 0.19 (runtime/zero/config.py), in numbers rather than bytes.
ZERO_DEFAULTS = {
    "reduce_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_max_live_parameters": 1e9,
}
OPTIMIZER_GROUP_SIZE = 1e9


@dataclass(frozen=True)
class Layout:
    """The devices of a run.

    Args:
        gpus (`int`, *optional*, defaults to `1`): Processes of the job, one per GPU.
        memory (`float`, *optional*, defaults to `80.0`): GiB of each GPU.
        sharding (`str`, *optional*, defaults to `"ddp"`): `ddp` (each GPU has a copy of the model),
            `fsdp2`, `zero1`, `zero2` or `zero3`.
        zero (`Mapping[str, Any]`, *optional*): DeepSpeed's `zero_optimization`, as far as it
            differs from the defaults. Offloaded parts are not on the GPU, except for gradients.

    Raises:
        `ValueError`: If there is no GPU or no memory, or `sharding` is unknown.
    """

    gpus: int = 1
    memory: float = 80.0
    sharding: str = "ddp"
    zero: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"gpus={self.gpus} must be at least 1; plan a CPU as one GPU")
        if not self.memory > 0:
            raise ValueError(f"gpu_memory={self.memory} must be the GiB of one GPU, such as 80")
        if self.sharding not in SHARDINGS:
            raise ValueError(f"sharding={self.sharding!r} must be one of {', '.join(SHARDINGS)}")

    @classmethod
    def from_accelerate(cls, values: Mapping[str, Any], gpus: int | None, memory: float) -> Layout:
        """Return the layout of an accelerate configuration.

        Args:
            values (`Mapping[str, Any]`): The values of the file; empty without one.
            gpus (`int`, *optional*): Replaces `num_processes` of the file.
            memory (`float`): GiB of one GPU.

        Raises:
            `ValueError`: For FSDP 1 and for FSDP's offloading, which are not supported.
        """
        # DeepSpeed: the options are in the file itself or in a JSON file that it names.
        zero = dict(values.get("deepspeed_config") or {})
        zero_file = zero.get("deepspeed_config_file")
        if zero_file:
            content = json.loads(Path(zero_file).read_text(encoding="utf-8"))
            zero = content.get("zero_optimization") or {}
        stage = zero.get("zero_stage", zero.get("stage"))
        stage = 2 if stage is None else int(stage)  # 2 is accelerate's default

        # How the model is sharded. Of FSDP, only the second version is supported.
        sharding = "ddp"
        distributed_type = str(values.get("distributed_type", "NO"))
        if distributed_type == "FSDP":
            sharding = "fsdp2"
            fsdp = values.get("fsdp_config") or {}
            if int(fsdp.get("fsdp_version", 1)) != 2:
                raise ValueError("FSDP 1 is not supported: set fsdp_version: 2 in fsdp_config")
            if fsdp.get("fsdp_offload_params"):
                raise ValueError("FSDP's offloading cannot be planned: unset fsdp_offload_params")
        elif distributed_type == "DEEPSPEED" and stage:
            sharding = f"zero{stage}"

        if gpus is None:
            gpus = int(values.get("num_processes") or 1)
        return cls(gpus, memory, sharding, zero)

    def __str__(self) -> str:
        return f"{self.gpus} x {self.memory:g} GiB, {self.sharding}"

    @property
    def uses_zero(self) -> bool:
        """Whether DeepSpeed shards something over several GPUs."""
        return self.gpus > 1 and self.sharding.startswith("zero")

    @property
    def is_sharded(self) -> bool:
        """Whether a process holds only a part of the weights."""
        return self.gpus > 1 and self.sharding in ("fsdp2", "zero3")

    @property
    def usable(self) -> float:
        """GiB of a GPU that tensors may take."""
        return self.memory * (1 - FRAGMENTATION) - sum(UNMEASURED.values())

    def training_moments(self, measured: MeasuredStep, hidden_size: int) -> Moments:
        """Return the memory of a measured step in this layout.

        Args:
            measured ([`MeasuredStep`]): A step of one process; under FSDP2, of one of several.
            hidden_size (`int`): The model's, on which DeepSpeed's `auto` values depend.
        """
        # From bytes to GiB.
        moments: Moments = {}
        for moment, bytes_by_part in measured.moments.items():
            moments[moment] = {part: size / GIB for part, size in bytes_by_part.items()}
        if self.uses_zero:
            return self._shard_by_zero(moments, measured, hidden_size)
        if self.gpus > 1 and self.sharding == "ddp":
            # DDP's buckets hold a second copy of the gradients.
            for parts in moments.values():
                parts["buckets (estimate)"] = parts.get("gradients", 0.0)
        return moments

    def _shard_by_zero(self, moments: Moments, measured: MeasuredStep, hidden_size: int) -> Moments:
        """Replace weights, gradients and optimizer states by the parts that DeepSpeed leaves on a
        GPU."""
        stage = int(self.sharding[-1])
        shard = 1 / self.gpus
        # In 2^30 numbers: multiplied by the bytes of a number, they give GiB.
        parameters = measured.parameters / GIB
        trained = measured.trained / GIB

        # Two bytes per weight and gradient; 12 for the fp32 weight and two moments of the
        # optimizer.
        weight_share = shard if stage == 3 else 1.0
        gradient_share = shard if stage > 1 else 1.0
        optimized = 0.0 if self._is_offloaded("optimizer") else trained * shard
        sharded_parts = {
            "weights": 0.0 if self._is_offloaded("param") else 2 * parameters * weight_share,
            "gradients": 2 * trained * gradient_share,
            "optimizer": 12 * optimized,
        }

        # Buffers.
        live = self._zero_value("stage3_max_live_parameters", hidden_size) / GIB
        prefetched = self._zero_value("stage3_prefetch_bucket_size", hidden_size) / GIB
        gathered = min(live, parameters) + min(prefetched, parameters)
        bucket = min(self._zero_value("reduce_bucket_size", hidden_size) / GIB, trained)

        # The same shards at every moment; what is gathered depends on what runs.
        sharded: Moments = {}
        for moment, parts in moments.items():
            sharded[moment] = {**parts, **sharded_parts, "buckets": 2 * bucket}
            sharded[moment].pop("adapters", None)  # counted in the parts above
            if "reference" in parts:
                sharded[moment]["reference"] = parts["reference"] * weight_share
            if moment in (SCORING, PASSES):
                sharded[moment]["gathered weights"] = 2 * gathered if stage == 3 else 0.0
            else:
                # The optimizer's step needs the fp32 gradients of a group of weights.
                group = min(optimized, OPTIMIZER_GROUP_SIZE / GIB)
                sharded[moment]["activations"] = 4 * group
        return sharded

    def _is_offloaded(self, states: str) -> bool:
        """Return whether ZeRO keeps these states off the GPU, by accelerate's option or
        DeepSpeed's.
        """
        device = (self.zero.get(f"offload_{states}") or {}).get("device")
        device = device or self.zero.get(f"offload_{states}_device")
        return device not in (None, "none")

    def _zero_value(self, name: str, hidden_size: int) -> float:
        """Return a size of DeepSpeed's configuration. accelerate fills in `auto`."""
        value = self.zero.get(name, ZERO_DEFAULTS[name])
        if value != "auto":
            return float(value)
        factor = 0.9 if name == "stage3_prefetch_bucket_size" else 1.0
        return factor * hidden_size * hidden_size

    def sampling_parts(
        self,
        measured: MeasuredStep,
        moments: Moments,
        rollouts: int,
        context: int,
        args: Mapping[str, Any],
    ) -> dict[str, float]:
        """Return the GiB by part while rollouts are played.

        Args:
            measured ([`MeasuredStep`]): A measured training step.
            moments (`Moments`): Its memory in this layout.
            rollouts (`int`): Rollouts that this process plays at once.
            context (`int`): Tokens of each, at most.
            args (`Mapping[str, Any]`): The training arguments.
        """
        # The parts that stay on the GPU while rollouts are played. The plan adds vLLM's own memory.
        parts: dict[str, float] = {}
        for part in ("weights", "adapters", "optimizer", "reference"):
            if part in moments[PASSES]:
                parts[part] = moments[PASSES][part]
        if args.get("use_vllm"):
            return parts

        # The engine of this process: gathered weights, keys and values, and reading a context.
        if self.is_sharded:
            parts["gathered weights"] = measured.sampling.weights / GIB
        context_size = context * measured.sampling.kv_bytes_per_token / GIB
        prefix_cache = float(args.get("prefix_cache_mb") or 0) * 1e6 / GIB
        parts["keys and values"] = min(rollouts, MAX_ROWS) * context_size
        parts["cached between turns"] = min(prefix_cache, rollouts * context_size)
        parts["reading a context"] = measured.sampling.reading / GIB

        # The engine takes at most half of the free memory. Rows that do not fit wait.
        other_parts = sum(parts.values()) - parts["keys and values"]
        free = max(0.0, self.usable - other_parts)
        parts["keys and values"] = min(parts["keys and values"], free / 2)
        return parts
