"""Memory of a run before anything is loaded: the peak and its moment, what fits, and what to turn on next."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any

import yaml
from transformers import PretrainedConfig

from ..trainers import MultiTurnGRPOConfig
from .layout import FRAGMENTATION, SAMPLING, UNMEASURED, Layout, Moments
from .shapes import Unplannable, estimate, shape_of
from .step import Job
from .workers import Workers

SECONDS = 40.0
"""How long `plan` measures at most."""


@dataclass
class Plan:
    """The needs of a run.

    Args:
        model (`str`): Its name.
        layout ([`Layout`]): Where it trains.
        parameters (`int`), trained (`int`): Numbers of the model, and those that learn.
        batch (`int`), context (`int`): Rollouts of a micro-batch, and tokens of each, that were asked for.
        moments (`dict`): For each moment of a step GiB by part.
        largest_batch (`int`, *optional*), largest_context (`int`, *optional*): That fit, the other one as asked;
            `None` where there was no time to find out, 0 where none fits.
        kv_bytes (`int`): Bytes of the keys and values of one token; 0 for a model that the engine cannot run.
        options (`dict`): Lines for the run's YAML file: those that it needs to fit, or the largest batch.
        notes (`list[str]`): Everything that is estimated, assumed, or was not looked at.
    """

    model: str
    layout: Layout
    parameters: int
    trained: int
    batch: int
    context: int
    moments: Moments
    largest_batch: int | None = None
    largest_context: int | None = None
    kv_bytes: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def moment(self) -> str:
        """When the peak occurs."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def peak(self) -> float:
        """GiB of tensors on one GPU at most."""
        return sum(self.moments[self.moment].values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.layout.usable

    @property
    def verdict(self) -> str:
        """Peak, its moment, and whether that fits, in a line."""
        verdict = "fits" if self.fits else "does not fit"
        return f"peak {self.peak:.1f} GiB in {self.moment}; {self.layout.usable:.1f} usable: it {verdict}"

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        more = {"peak": self.peak, "moment": self.moment, "usable": self.layout.usable, "fits": self.fits}
        return {**asdict(self), **more}

    def __str__(self) -> str:
        billions = f"{self.parameters / 1e9:.2f} billion parameters, {self.trained / 1e9:.2f} trained"
        rows = [f"{self.model}: {billions}; {self.layout}"]
        rows.append(f"GiB on one GPU, {self.batch} rollouts of {self.context} tokens in a micro-batch:")
        for name, of in self.moments.items():
            parts = ", ".join(f"{part} {size:.1f}" for part, size in of.items() if size >= 0.05)
            rows.append(f"  {name + ':':29}{sum(of.values()):6.1f}  ({parts})")
        rows.append(self.verdict)
        largest = (("per_device_train_batch_size", self.largest_batch), ("context", self.largest_context))
        rows += [f"largest {name} that fits: {size}" for name, size in largest if size is not None]
        if self.options:
            own = {name: value for name, value in self.options.items() if name != "accelerate_config"}
            pasted = yaml.safe_dump(own, sort_keys=False).splitlines()
            rows += ["for the configuration:", *("  " + line for line in pasted)]
            if len(own) < len(self.options):
                rows.append(f"for the launch: --accelerate-config {self.options['accelerate_config']}")
        return "\n".join([*rows, *(f"note: {one}" for one in self.notes)])


def plan(
    args: Any,
    model: str | PretrainedConfig,
    *,
    gpus: int | None = None,
    gpu_memory: float = 80.0,
    accelerate: Mapping[str, Any] | None = None,
    peft_config: Any = None,
    seconds: float = SECONDS,
    wait: float = 600.0,
) -> Plan:
    """The memory of a training run on GPUs, from the model's configuration alone.

    The real trainer's step runs on fake tensors, in processes of their own: no weights are loaded, no GPU is touched,
    nothing is downloaded but `config.json`.

    Args:
        args ([`MultiTurnGRPOConfig`] or `dict`): Training arguments, or their values by name.
        model (`str` or `PretrainedConfig`): A folder, a name on the hub, or a configuration.
        gpus (`int`, *optional*): GPUs that train. Defaults to `num_processes` of `accelerate`, else 1.
        gpu_memory (`float`, *optional*, defaults to `80.0`): GiB of one.
        accelerate (`dict`, *optional*): The values of an accelerate configuration: how the model is sharded.
        peft_config (`PeftConfig`, *optional*): The adapters that are trained.
        seconds (`float`, *optional*): When to stop looking for what fits better.
        wait (`float`, *optional*, defaults to `600.0`): Seconds until the run itself has to be measured.

    Returns:
        [`Plan`]: Its notes say what is estimated.

    Raises:
        [`Unplannable`]: The model cannot be measured; says what was tried, with a plain estimate.
        `ValueError`: For a layout that cannot be.
    """
    layout = Layout.of(accelerate or {}, gpus, gpu_memory)
    shape = shape_of(model) if isinstance(model, str) else model
    name = model if isinstance(model, str) else type(model).__name__
    given = vars(args) if is_dataclass(args) else args
    names = {one.name for one in fields(MultiTurnGRPOConfig)}
    values = {key: value for key, value in given.items() if key in names}
    values.setdefault("bf16", True)
    search = _Search(name, values, layout, _job(values, shape, layout, peft_config))
    started = time.monotonic()
    with Workers(seconds, wait) as workers:
        made = search.run(workers)
    made.notes.append(f"measured on fake tensors in {time.monotonic() - started:.0f} s")
    return made


def _job(values: Mapping[str, Any], shape: PretrainedConfig, layout: Layout, peft: Any) -> Job:
    """The longest micro-batch that the arguments allow."""
    loading = values.get("model_init_kwargs") or {}
    if loading.get("quantization_config") is not None:
        raise Unplannable(
            "Quantised weights are not made on fake tensors, so this model cannot be measured. "
            + estimate(shape.to_dict())
        )
    dtype = str(loading.get("dtype") or "float32").removeprefix("torch.")
    if dtype == "auto":
        dtype = str(getattr(shape.get_text_config(), "dtype", None) or "float32").removeprefix("torch.")
    if layout.sharding.startswith("zero") and layout.gpus > 1 and values.get("bf16"):
        dtype = "bfloat16"  # DeepSpeed casts the weights and keeps fp32 ones in its optimizer
    readable = getattr(shape.get_text_config(), "max_position_embeddings", None)
    response = values.get("max_completion_length") or readable or 8192
    context = min(filter(None, (values.get("max_context"), readable, response + 512)))
    own = (values.get("max_turns") or 5) * (values.get("max_turn_tokens") or 1024)
    made = Job(
        dict(values), shape, dtype, int(values.get("per_device_train_batch_size") or 8), context, peft=peft,
        off_policy=bool(values.get("use_vllm") or values.get("async_lead")),
        processes=layout.gpus if layout.sharding == "fsdp2" else 1,
    )  # fmt: skip
    return replace(made, scored=min(1.0, own / (context - made.prompt)))


@dataclass
class _Search:
    """Measures the run as it was asked for, then looks for a batch, a context and options that fit."""

    name: str
    values: dict[str, Any]
    layout: Layout
    asked: Job

    def run(self, workers: Workers) -> Plan:
        asked = self.asked
        other = replace(asked, rows=1 if asked.rows > 1 else 2)
        half = replace(asked, context=asked.context // 2)
        found = workers.measure({"asked": asked, "other": other, "half": half})
        first = found.get("asked", {})
        if "moments" not in first:
            why = first.get("error", f"there was no result in {workers.waited:.0f} s")
            tried = f"a training step of {self.name} was run on fake tensors and failed: {why}"
            raise Unplannable(f"{tried}. {estimate(asked.model.to_dict())}")
        made = Plan(
            self.name, self.layout, first["parameters"], first["trained"], asked.rows, asked.context,
            self.moments(asked, first), kv_bytes=first["sampling"].get("token", 0),
        )  # fmt: skip
        made.notes += self.notes(first)
        if "moments" in found.get("other", {}):
            line = made.moments, self.moments(other, found["other"]), asked.rows, other.rows
            made.largest_batch = self.largest(*line, step=1)
        if "moments" in found.get("half", {}):
            line = made.moments, self.moments(half, found["half"]), asked.context, half.context
            made.largest_context = self.largest(*line, step=256)
        if None in (made.largest_batch, made.largest_context):
            made.notes.append("there was no time to look for the largest batch or context: a larger `seconds`")
        self.advise(made, workers)
        return made

    def moments(self, job: Job, measured: Mapping[str, Any]) -> Moments:
        """GiB by moment and part, sampling included."""
        moments = self.layout.moments(measured, getattr(job.model.get_text_config(), "hidden_size", 0))
        of = self.values.get
        rollouts = job.rows * int(of("steps_per_generation") or of("gradient_accumulation_steps") or 1)
        if whole := self.values.get("generation_batch_size"):
            rollouts = math.ceil(whole / self.layout.gpus)
        moments = {SAMPLING: self.layout.sampling(measured, moments, rollouts, job.context, self.values), **moments}
        if self.values.get("use_vllm") and self.values.get("vllm_mode", "colocate") == "colocate":
            share = float(self.values.get("vllm_gpu_memory_utilization") or 0.3) * self.layout.memory
            for name, parts in moments.items():
                if name == SAMPLING or not self.values.get("vllm_enable_sleep_mode"):
                    parts["vLLM's share"] = share
        return moments

    def largest(self, moments: Moments, others: Moments, size: int, other: int, step: int) -> int:
        """The largest size at which every moment fits, on the straight line through two measured ones."""
        most = math.inf
        for name in moments.keys() - {SAMPLING}:
            here, there = (sum(of[name].values()) for of in (moments, others))
            slope = (here - there) / (size - other)
            start = here - slope * size
            if slope > 0:
                most = min(most, (self.layout.usable - start) / slope)
            elif here > self.layout.usable:
                return 0
        readable = getattr(self.asked.model.get_text_config(), "max_position_embeddings", None) if step > 1 else 1024
        return max(0, int(min(most, readable or 2**20)) // step * step)

    def advise(self, made: Plan, workers: Workers) -> None:
        """Set the options that make the run fit, or use the memory that is left."""
        rows = int(self.values.get("per_device_train_batch_size") or self.asked.rows)
        whole = rows * int(self.values.get("gradient_accumulation_steps") or 1)
        if made.largest_batch:
            size = max(one for one in range(1, whole + 1) if whole % one == 0 and one <= made.largest_batch)
            if size != rows:
                made.options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": whole // size}
            if made.fits or size < rows:
                return
        elif made.fits:
            return
        one_row = replace(self.asked, rows=1)
        options: dict[str, Any] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": whole}
        for more, job, layout in self.next_options(one_row):
            options |= more
            found = workers.measure({"next": job})
            if "moments" not in found.get("next", {}):
                break
            search = replace(self, layout=layout, values={**self.values, **options})
            moments = search.moments(job, found["next"])
            if max(sum(of.values()) for of in moments.values()) <= layout.usable:
                made.options = options
                return
        made.options = {}
        tried = ", ".join(f"{key}: {value}" for key, value in options.items())
        made.notes.append(f"nothing that was tried fits or was measured in time ({tried}): take more GPUs")

    def next_options(self, job: Job) -> Iterator[tuple[dict[str, Any], Job, Layout]]:
        """Options to turn on, the cheapest first, each together with those before it."""
        layout = self.layout
        if self.values.get("use_vllm") and self.values.get("vllm_mode", "colocate") == "colocate":
            yield {"vllm_mode": "server"}, job, layout
        if not job.args.get("gradient_checkpointing"):
            job = replace(job, args={**job.args, "gradient_checkpointing": True})
            yield {"gradient_checkpointing": True}, job, layout
        if layout.gpus > 1 and not layout.is_sharded:
            layout, job = replace(layout, sharding="fsdp2"), replace(job, processes=layout.gpus)
            yield {"accelerate_config": "examples/accelerate/fsdp2.yaml"}, job, layout
        if job.peft is None:
            from peft import LoraConfig

            job = replace(job, peft=LoraConfig(r=32, target_modules="all-linear", task_type="CAUSAL_LM"))
            yield {"use_peft": True, "lora_r": 32, "lora_target_modules": "all-linear"}, job, layout
            if job.dtype == "float32":
                yield {"dtype": "bfloat16"}, replace(job, dtype="bfloat16"), layout

    def notes(self, measured: Mapping[str, Any]) -> list[str]:
        """The parts that are not measured."""
        assumed = ", ".join(f"{size} GiB {name}" for name, size in UNMEASURED.items())
        notes = [f"usable leaves out {assumed}, {FRAGMENTATION:.0%} fragmentation: assumed, measured on no GPU"]
        if self.layout.gpus > 1 and self.layout.sharding.startswith("zero"):
            notes.append("what ZeRO shards and its buckets are an estimate, by DeepSpeed's partition rule and defaults")
        elif self.layout.gpus > 1 and self.layout.sharding == "ddp":
            notes.append("DDP's buckets are an estimate: as large as the gradients")
        if self.values.get("use_vllm"):
            notes.append("vLLM's share is its setting, vllm_gpu_memory_utilization; its own peaks are not measured")
        elif not measured.get("sampling"):
            notes.append("this architecture is sampled in batches, whose state is not counted")
        attention = getattr(self.asked.model, "_attn_implementation", None)
        if attention not in (None, "sdpa", "eager"):
            notes.append(f"{attention} is planned as sdpa")
        return notes
