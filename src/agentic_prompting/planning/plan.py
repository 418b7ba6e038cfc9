"""The memory of a run before anything is loaded: its peak, what fits, and options that help."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any

import yaml
from peft import LoraConfig, PeftConfig
from transformers import PretrainedConfig

from ..llm.numbers import count_in_words
from ..trainers import MultiTurnGRPOConfig
from .layout import FRAGMENTATION, SAMPLING, UNMEASURED, Layout, Moments
from .measured_step import MeasuredStep, TrainingJob
from .measurement_processes import MeasurementProcesses
from .model_shape import Unplannable, load_shape, rough_estimate

DEFAULT_SECONDS = 40.0
"""The time limit of the search for settings that fit."""
CONTEXT_STEP = 256
"""The largest context is rounded down to a multiple of this."""
FSDP2_CONFIG = "examples/accelerate/fsdp2.yaml"


@dataclass
class Plan:
    """The memory of a run.

    Args:
        model (`str`): Name of the model.
        layout ([`Layout`]): Where it trains.
        parameters (`int`): Parameters of the model.
        trained (`int`): Parameters that are trained.
        batch (`int`): Rollouts of a micro-batch, as configured.
        context (`int`): Tokens of each rollout, as configured.
        moments (`Moments`): GiB by part for each moment of a step.
        largest_batch (`int`, *optional*): The largest micro-batch that fits at this context. 0 if
            none fits, `None` if there was no time to find out.
        largest_context (`int`, *optional*): The largest context that fits at this batch; as above.
        kv_bytes (`int`, *optional*, defaults to `0`): Bytes of the keys and values of one token; 0
            for a model that the engine cannot run.
        options (`dict[str, Any]`, *optional*): Options for the run's configuration: those that it
            needs to fit, or the largest batch.
        notes (`list[str]`, *optional*): Remarks on estimates, assumptions, and parts that were not
            examined.
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
        """The moment of the peak."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def peak(self) -> float:
        """GiB of tensors on one GPU, at most."""
        return sum(self.moments[self.moment].values())

    @property
    def fits(self) -> bool:
        """Whether the peak is within the usable memory of a GPU."""
        return self.peak <= self.layout.usable

    @property
    def verdict(self) -> str:
        """The peak, its moment, and whether it fits, in one line."""
        verdict = "fits" if self.fits else "does not fit"
        usable = f"{self.layout.usable:.1f} usable"
        return f"peak {self.peak:.1f} GiB in {self.moment}; {usable}: it {verdict}"

    def to_json(self) -> dict[str, Any]:
        """Return all fields and properties as plain data."""
        return {
            **asdict(self),
            "peak": self.peak,
            "moment": self.moment,
            "usable": self.layout.usable,
            "fits": self.fits,
        }

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {_parameters_in_words(self.parameters)} parameters, "
            f"{_parameters_in_words(self.trained)} trained; {self.layout}",
            (
                f"GiB on one GPU, {count_in_words(self.batch, 'rollout')} of {self.context} tokens "
                "in a micro-batch:"
            ),
        ]

        # Memory by moment and part.
        for moment, parts in self.moments.items():
            sizes = [f"{part} {size:.1f}" for part, size in parts.items() if size >= 0.05]
            total = sum(parts.values())
            line = f"  {moment + ':':29}{total:6.1f}"
            # Parts that are too small for a tenth are not listed.
            lines.append(f"{line}  ({', '.join(sizes)})" if sizes else line)
        lines.append(self.verdict)

        # The largest sizes that fit, and the options to set.
        if self.largest_batch is not None:
            lines.append(f"largest per_device_train_batch_size that fits: {self.largest_batch}")
        if self.largest_context is not None:
            lines.append(f"largest context that fits: {self.largest_context}")
        options = dict(self.options)
        accelerate_config = options.pop("accelerate_config", None)
        if self.options:
            lines.append("for the configuration:")
            dumped = yaml.safe_dump(options, sort_keys=False)
            lines += [f"  {line}" for line in dumped.splitlines()]
        if accelerate_config:
            lines.append(f"for the launch: --accelerate-config {accelerate_config}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def _parameters_in_words(parameters: int) -> str:
    """A number of parameters, in billions or in millions."""
    if parameters >= 1e8:
        return f"{parameters / 1e9:.2f} billion"
    return f"{parameters / 1e6:.2f} million"


def plan(
    args: MultiTurnGRPOConfig | Mapping[str, Any],
    model: str | PretrainedConfig,
    *,
    gpus: int | None = None,
    gpu_memory: float = 80.0,
    accelerate: Mapping[str, Any] | None = None,
    peft_config: PeftConfig | None = None,
    seconds: float = DEFAULT_SECONDS,
    max_wait: float = 600.0,
) -> Plan:
    """Plan the memory of a training run on GPUs from the model's configuration alone.

    The real trainer's step runs on fake tensors, in processes of their own. No weights are loaded,
    no GPU is used, and only `config.json` is downloaded.

    Args:
        args ([`MultiTurnGRPOConfig`] or `Mapping[str, Any]`): Training arguments, or their values
            by name.
        model (`str` or `PretrainedConfig`): A local folder, a model on the Hub, or a configuration.
        gpus (`int`, *optional*): GPUs that train. Defaults to `num_processes` of `accelerate`, or
            1.
        gpu_memory (`float`, *optional*, defaults to `80.0`): GiB of one GPU.
        accelerate (`Mapping[str, Any]`, *optional*): The values of an accelerate configuration,
            which say how the model is sharded.
        peft_config (`PeftConfig`, *optional*): The adapters that are trained.
        seconds (`float`, *optional*, defaults to `40.0`): Seconds after which the search for better
            options ends.
        max_wait (`float`, *optional*, defaults to `600.0`): Seconds that measuring the run as
            configured may take.

    Returns:
        [`Plan`]: Its notes say what is estimated.

    Raises:
        [`Unplannable`]: If the model cannot be measured. The message says what was tried, with a
            rough estimate.
        `ValueError`: For an impossible layout.
    """
    # The layout and the shape of the model.
    layout = Layout.from_accelerate(accelerate or {}, gpus, gpu_memory)
    if isinstance(model, str):
        name = model
        shape = load_shape(model)
    else:
        name = type(model).__name__
        shape = model

    # Keep the options that the trainer knows.
    values = vars(args) if is_dataclass(args) else dict(args)
    options = {setting.name for setting in fields(MultiTurnGRPOConfig)}
    values = {name: value for name, value in values.items() if name in options}
    values.setdefault("bf16", True)

    # Measure in processes of their own, and end them whatever happens.
    planner = Planner(name, values, layout, longest_job(values, shape, layout, peft_config))
    started = time.monotonic()
    with MeasurementProcesses(seconds, max_wait) as processes:
        result = planner.plan(processes)
    result.notes.append(f"measured on fake tensors in {time.monotonic() - started:.0f} s")
    return result


def longest_job(
    values: Mapping[str, Any],
    shape: PretrainedConfig,
    layout: Layout,
    peft_config: PeftConfig | None,
) -> TrainingJob:
    """Return the step with the longest rollouts that the arguments allow.

    Raises:
        [`Unplannable`]: For quantized weights.
    """
    # A quantized model gets an estimate only.
    loading = values.get("model_init_kwargs") or {}
    if loading.get("quantization_config") is not None:
        raise Unplannable(
            "quantized weights cannot be created on fake tensors, so this model cannot be "
            f"measured. {rough_estimate(shape.to_dict())}"
        )

    # The type of the weights. DeepSpeed casts them and keeps fp32 ones in its optimizer.
    dtype = str(loading.get("dtype") or "float32")
    if dtype == "auto":
        dtype = str(getattr(shape.get_text_config(), "dtype", None) or "float32")
    if layout.uses_zero and values.get("bf16"):
        dtype = "bfloat16"

    # The length of a rollout, and how much of it the agent writes.
    max_positions = max_positions_of(shape)
    response_length = values.get("max_completion_length") or max_positions or 8192
    limits = (values.get("max_context"), max_positions, response_length + 512)
    context = min(limit for limit in limits if limit)
    written_length = (values.get("max_turns") or 5) * (values.get("max_turn_tokens") or 1024)

    job = TrainingJob(
        args=dict(values),
        model=shape,
        dtype=dtype.removeprefix("torch."),
        rows=int(values.get("per_device_train_batch_size") or 8),
        context=context,
        peft=peft_config,
        off_policy=bool(values.get("use_vllm") or values.get("async_lead")),
        processes=layout.gpus if layout.sharding == "fsdp2" else 1,
    )
    return replace(job, scored=min(1.0, written_length / (context - job.prompt_length)))


def max_positions_of(shape: PretrainedConfig) -> int | None:
    """Return the number of tokens that a model can read, if its configuration says so."""
    return getattr(shape.get_text_config(), "max_position_embeddings", None)


@dataclass
class Planner:
    """Measures a run as configured, then looks for a batch, a context and options that fit.

    Args:
        name (`str`): Name of the model.
        values (`dict[str, Any]`): Training arguments by name.
        layout ([`Layout`]): Where it trains.
        job ([`TrainingJob`]): The step as configured.
    """

    name: str
    values: dict[str, Any]
    layout: Layout
    job: TrainingJob

    def plan(self, processes: MeasurementProcesses) -> Plan:
        """Return the plan of the run.

        Raises:
            [`Unplannable`]: If the run as configured cannot be measured.
        """
        # Measure the step as configured, with another batch, and with another context.
        job = self.job
        other_batch = replace(job, rows=1 if job.rows > 1 else 2)
        half_context = replace(job, context=job.context // 2)
        results = processes.measure(
            {"configured": job, "other batch": other_batch, "half context": half_context}
        )
        # Without the step as configured there is no plan.
        step = None
        cause = f"there was no result in {processes.max_wait:.0f} s"
        if "configured" in results:
            step = results["configured"].step
            cause = results["configured"].error or cause
        if step is None:
            raise Unplannable(
                f"a training step of {self.name} was run on fake tensors and failed: {cause}. "
                f"{rough_estimate(job.model.to_dict())}"
            )

        plan = Plan(
            model=self.name,
            layout=self.layout,
            parameters=step.parameters,
            trained=step.trained,
            batch=job.rows,
            context=job.context,
            moments=self.compute_moments(job, step),
            kv_bytes=step.sampling.kv_bytes_per_token,
            notes=self.list_notes(step),
        )

        # Extrapolate to the largest batch and context that fit.
        result = results.get("other batch")
        if result is not None and result.step is not None:
            moments = self.compute_moments(other_batch, result.step)
            size = self.largest_size(plan.moments, moments, job.rows, other_batch.rows)
            plan.largest_batch = min(size, 1024)
        result = results.get("half context")
        if result is not None and result.step is not None:
            moments = self.compute_moments(half_context, result.step)
            size = self.largest_size(plan.moments, moments, job.context, half_context.context)
            size = min(size, max_positions_of(job.model) or 2**20)
            plan.largest_context = size // CONTEXT_STEP * CONTEXT_STEP
        # One of the other measurements is missing, usually because its time ran out.
        if plan.largest_batch is None or plan.largest_context is None:
            plan.notes.append(
                "no time to find the largest batch or context: increase `seconds` (--seconds)"
            )

        self.set_options(plan, processes)
        return plan

    def compute_moments(self, job: TrainingJob, step: MeasuredStep) -> Moments:
        """Return the GiB by moment and part of a measured step, sampling included."""
        hidden_size = getattr(job.model.get_text_config(), "hidden_size", 0)
        moments = self.layout.training_moments(step, hidden_size)

        # Sampling: as many rollouts as a batch has on this process.
        micro_batches = self.values.get("steps_per_generation")
        micro_batches = micro_batches or self.values.get("gradient_accumulation_steps") or 1
        rollouts = job.rows * int(micro_batches)
        if self.values.get("generation_batch_size"):
            rollouts = math.ceil(self.values["generation_batch_size"] / self.layout.gpus)
        sampling = self.layout.sampling_parts(step, moments, rollouts, job.context, self.values)
        moments = {SAMPLING: sampling, **moments}

        # A colocated vLLM takes its share all the time, unless it sleeps during the update.
        if self.has_colocated_vllm:
            share = float(self.values.get("vllm_gpu_memory_utilization") or 0.3)
            for moment, parts in moments.items():
                if moment == SAMPLING or not self.values.get("vllm_enable_sleep_mode"):
                    parts["vLLM's share"] = share * self.layout.memory
        return moments

    @property
    def has_colocated_vllm(self) -> bool:
        """Whether vLLM runs on the GPUs that train."""
        mode = self.values.get("vllm_mode", "colocate")
        return bool(self.values.get("use_vllm")) and mode == "colocate"

    def largest_size(
        self, moments: Moments, other_moments: Moments, size: int, other_size: int
    ) -> int:
        """Return the largest size at which every moment of the update fits, 0 if none does.

        Memory is taken as a straight line through two measured sizes. Sampling is left out: the
        engine adapts to the memory that is free.
        """
        # Start above any real size; each moment may lower it.
        largest = float(2**20)
        for moment in moments:
            if moment == SAMPLING:
                continue
            # A straight line through the two measured sizes, in GiB.
            total = sum(moments[moment].values())
            other_total = sum(other_moments[moment].values())
            slope = (total - other_total) / (size - other_size)
            if slope > 0:
                constant = total - slope * size
                largest = min(largest, (self.layout.usable - constant) / slope)
            # A smaller size does not help a moment whose memory does not grow with the size.
            elif total > self.layout.usable:
                return 0
        return max(0, int(largest))

    def set_options(self, plan: Plan, processes: MeasurementProcesses) -> None:
        """Set the options that make the run fit, or that use the memory that is left."""
        rows = int(self.values.get("per_device_train_batch_size") or self.job.rows)
        step_rows = rows * int(self.values.get("gradient_accumulation_steps") or 1)

        # Split the step into the largest micro-batches that fit.
        if plan.largest_batch:
            divisors = [size for size in range(1, step_rows + 1) if step_rows % size == 0]
            best_rows = max(size for size in divisors if size <= plan.largest_batch)
            if best_rows != rows:
                plan.options = {
                    "per_device_train_batch_size": best_rows,
                    "gradient_accumulation_steps": step_rows // best_rows,
                }
            # Either the run fits already, or the smaller micro-batch makes it fit.
            if plan.fits or best_rows < rows:
                return
        elif plan.fits:
            return

        # Not even one row fits: turn on one option after another, and measure.
        options: dict[str, Any] = {
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": step_rows,
        }
        for change in self.next_changes(replace(self.job, rows=1)):
            options |= change.options
            results = processes.measure({"next": change.job})
            step = results["next"].step if "next" in results else None
            if step is None:
                # No time is left, or this combination cannot be measured.
                break
            # The same run with the options so far, in the layout that they lead to.
            planner = replace(self, layout=change.layout, values={**self.values, **options})
            moments = planner.compute_moments(change.job, step)
            if max(sum(parts.values()) for parts in moments.values()) <= change.layout.usable:
                plan.options = options
                return
        plan.options = {}
        tried = ", ".join(f"{option}: {value}" for option, value in options.items())
        plan.notes.append(f"none of these fit or could be measured in time: {tried}; use more GPUs")

    def next_changes(self, job: TrainingJob) -> Iterator[Change]:
        """Yield options to turn on, the cheapest first, each together with those before it."""
        # Move vLLM off the GPUs that train.
        layout = self.layout
        if self.has_colocated_vllm:
            yield Change({"vllm_mode": "server"}, job, layout)

        # Recompute activations instead of keeping them.
        if not job.args.get("gradient_checkpointing"):
            job = replace(job, args={**job.args, "gradient_checkpointing": True})
            yield Change({"gradient_checkpointing": True}, job, layout)

        # Shard weights, gradients and optimizer states over the GPUs.
        if layout.gpus > 1 and not layout.is_sharded:
            layout = replace(layout, sharding="fsdp2")
            job = replace(job, processes=layout.gpus)
            yield Change({"accelerate_config": FSDP2_CONFIG}, job, layout)

        # Train adapters instead of all weights, and then halve the frozen weights.
        if job.peft is None:
            lora = LoraConfig(r=32, target_modules="all-linear", task_type="CAUSAL_LM")
            job = replace(job, peft=lora)
            options = {"use_peft": True, "lora_r": 32, "lora_target_modules": "all-linear"}
            yield Change(options, job, layout)
            if job.dtype == "float32":
                yield Change({"dtype": "bfloat16"}, replace(job, dtype="bfloat16"), layout)

    def list_notes(self, step: MeasuredStep) -> list[str]:
        """Return what is not measured."""
        unmeasured = ", ".join(f"{size} GiB {part}" for part, size in UNMEASURED.items())
        notes = [
            f"usable memory leaves out {unmeasured} and {FRAGMENTATION:.0%} fragmentation: "
            "assumed, not measured on a GPU"
        ]
        # Estimates that depend on the layout.
        if self.layout.uses_zero:
            notes.append(
                "ZeRO's shards and buckets are estimated by DeepSpeed's partition rule and defaults"
            )
        elif self.layout.gpus > 1 and self.layout.sharding == "ddp":
            notes.append("DDP's buckets are estimated as the size of the gradients")
        # Sampling that does not use the package's engine.
        if self.values.get("use_vllm"):
            notes.append("vLLM's share is vllm_gpu_memory_utilization; its peaks are not measured")
        elif step.sampling.kv_bytes_per_token == 0:
            notes.append("this architecture is sampled in batches, whose state is not counted")
        attention = getattr(self.job.model, "_attn_implementation", None)
        if attention not in (None, "sdpa", "eager"):
            notes.append(f"{attention} is planned as sdpa")
        return notes


@dataclass(frozen=True)
class Change:
    """Options to turn on, and the run with them.

    Args:
        options (`dict[str, Any]`): The options.
        job ([`TrainingJob`]): The step with them.
        layout ([`Layout`]): The layout with them.
    """

    options: dict[str, Any]
    job: TrainingJob
    layout: Layout
