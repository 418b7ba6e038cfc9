"""One training step of the real trainer on fake tensors: which part takes memory, and when.

[`measure_training`] builds [`MultiTurnGRPOTrainer`] around a model without weights and runs
`train()` for one step: scoring without gradient, forward and backward passes, clipping, the
optimizer. Only the rollouts are made up, as long as they may become. The replacements of
`fake_gpu.py` are global, so `plan` runs this file in its own process: jobs as pickles on standard
input, a line of JSON for each on standard output.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    TrainerCallback,
)
from transformers.initialization import no_init_weights

from ..local.sampling import borrow_model
from ..local.slab import Slab, attention_with_masks, can_slab, masks_of
from ..rollout import Rollout, Sample
from ..rollout.grammar import Turn
from ..sandbox.policy import world_tokenizer
from ..trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from ..trainers.loss_inputs import ScoredTokensModel
from ..trainers.rollouts import Batch, BatchPosition
from .fake_gpu import (
    as_on_a_gpu,
    fsdp2_environment,
    fsdp_on_a_cpu,
    patched,
    patched_path,
)
from .memory_counter import MemoryCounter

SCORING = "passes without gradient"
PASSES = "forward and backward passes"
OPTIMIZER = "the optimizer's step"
TOKEN = 5
"""Any token: only the number of tokens matters."""


@dataclass
class TrainingJob:
    """A training step to measure.

    Args:
        args (`dict[str, Any]`): Values of [`MultiTurnGRPOConfig`]. Those that say where to run are
            replaced.
        model (`PretrainedConfig`): The shape of the model.
        dtype (`str`, *optional*, defaults to `"float32"`): Type of the weights.
        rows (`int`, *optional*, defaults to `2`): Rollouts of a micro-batch.
        context (`int`, *optional*, defaults to `1024`): Tokens of each, prompt and response.
        scored (`float`, *optional*, defaults to `1.0`): Share of the response that the agent wrote.
        peft (`PeftConfig`, *optional*): The adapters that are trained.
        off_policy (`bool`, *optional*, defaults to `False`): Whether the sampler's
            log-probabilities are corrected for, as with vLLM and `async_lead`.
        processes (`int`, *optional*, defaults to `1`): Processes over which FSDP2 shards.
        gpu (`bool`, *optional*, defaults to `True`): Whether to take a GPU's paths.
    """

    args: dict[str, Any]
    model: PretrainedConfig
    dtype: str = "float32"
    rows: int = 2
    context: int = 1024
    scored: float = 1.0
    peft: PeftConfig | None = None
    off_policy: bool = False
    processes: int = 1
    gpu: bool = True

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return min(self.context // 2, 512)

    @property
    def sampled_length(self) -> int:
        """Tokens of the response that the agent wrote. TRL appends the end token."""
        response_length = self.context - self.prompt_length
        return max(1, int(response_length * self.scored) - 1)

    def training_args(self, folder: str, steps: int = 1) -> MultiTurnGRPOConfig:
        """Return the arguments of a few steps on a CPU.

        A step has at most two micro-batches: a third adds no memory.
        """
        accumulation = self.args.get("gradient_accumulation_steps") or 1
        micro_batches = min(2, accumulation)
        # Rollouts that are used for several steps are scored once more, without gradient.
        steps_per_generation = micro_batches
        if (self.args.get("steps_per_generation") or 1) > accumulation:
            steps_per_generation *= 2
        # TRL refuses groups of one.
        if self.rows * micro_batches * self.processes % 2:
            steps_per_generation *= 2

        replaced = {
            # Where to run and what to write.
            "output_dir": folder,
            "use_cpu": True,
            "save_strategy": "no",
            "eval_strategy": "no",
            "logging_steps": 1,
            "report_to": "none",
            "disable_tqdm": True,
            "rollouts_max_mb": 0,
            "overwrite": False,
            "push_to_hub": False,
            "dataloader_num_workers": 0,
            "deepspeed": None,
            "model_init_kwargs": None,
            "budget_usd": None,
            "budget_tokens": None,
            # The size of the step.
            "max_steps": steps,
            "warmup_steps": 0,
            "per_device_train_batch_size": self.rows,
            "gradient_accumulation_steps": micro_batches,
            "steps_per_generation": steps_per_generation,
            "generation_batch_size": None,
            "num_generations": 2,
            "max_context": None,
            "max_completion_length": self.context,
            # The rollouts are made up.
            "use_vllm": False,
            "vllm_sync": "nccl",
            "vllm_server_base_url": None,
            "vllm_structured_outputs_regex": None,
            "generation_kwargs": None,
            "cache_implementation": None,
            "async_lead": 0,
        }
        if self.args.get("fp16"):
            # bf16 takes as many bytes, and needs no gradient scaler, which a CPU does not have.
            replaced |= {"fp16": False, "bf16": True}
        # Only fields that the constructor accepts: a finished configuration has others too.
        names = {setting.name for setting in fields(MultiTurnGRPOConfig) if setting.init}
        configured = {name: value for name, value in self.args.items() if name in names}
        return MultiTurnGRPOConfig(**{**configured, **replaced})


@dataclass
class SamplingMemory:
    """Bytes that sampling in this process takes. All 0 for a model that the engine cannot run.

    Args:
        kv_bytes_per_token (`int`): Keys and values of one token of one conversation.
        reading (`int`): Bytes of a pass over one whole context, without its keys and values.
        weights (`int`): The whole weights.
    """

    kv_bytes_per_token: int = 0
    reading: int = 0
    weights: int = 0


@dataclass
class MeasuredStep:
    """The memory of a training step of one process, from the second step on.

    Args:
        moments (`dict[str, dict[str, int]]`): Bytes by part for each moment of the step.
        optimizer_states (`int`): Bytes of the optimizer.
        parameters (`int`): Parameters of the whole model.
        trained (`int`): Parameters that are trained.
        sampling ([`SamplingMemory`], *optional*): The memory of sampling.
    """

    moments: dict[str, dict[str, int]]
    optimizer_states: int
    parameters: int
    trained: int
    sampling: SamplingMemory = field(default_factory=SamplingMemory)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> MeasuredStep:
        """Return the inverse of `asdict`."""
        return cls(**{**values, "sampling": SamplingMemory(**values["sampling"])})


# ---- the step ----


@dataclass
class FullLengthRollouts:
    """A source of batches whose rollouts all have the full length.

    Args:
        job ([`TrainingJob`]): Contains the lengths.
    """

    job: TrainingJob

    def next_batch(self, rows: Sequence[dict[str, Any]], position: BatchPosition) -> Batch:
        """Return a batch of made-up rollouts."""
        job = self.job
        # The environment's tokens fill the rest of the context, but for the end token.
        observed_length = job.context - job.prompt_length - job.sampled_length - 1
        rollouts = []
        for index, row in enumerate(rows):
            # All but the first are one token shorter, so that the batch is padded as real ones are.
            prompt_length = job.prompt_length if index == 0 else job.prompt_length - 1
            rollout = Rollout([TOKEN] * prompt_length, row={**row, "prompt": ""})
            sample = Sample([TOKEN] * job.sampled_length, [-1.0] * job.sampled_length)
            rollout.add_turn(sample, Turn("", "answer", True))
            rollout.add_observed([TOKEN] * observed_length)
            rollouts.append(rollout.finish("answered"))
        played_rows = [rollout.row for rollout in rollouts]
        metadata: list[dict[str, Any]] = [{} for _ in rollouts]
        return Batch(position, played_rows, metadata, rollouts, off_policy=job.off_policy)


class MeasuredTrainer(MultiTurnGRPOTrainer):
    """The trainer, which reports each stage of the step to a memory counter."""

    memory: MemoryCounter

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        with self.memory.during(SCORING):
            return super()._generate_and_score_completions(inputs)

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module | ScoredTokensModel,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        score = super()._get_per_token_logps_and_entropies
        rows = len(input_ids)
        # TRL scores a whole batch without gradient in parts of this size.
        size = kwargs.get("batch_size")
        if torch.is_grad_enabled() or size is None or size >= rows:
            return score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

        # The parts of a batch take the same memory, so only the first one is run.
        first_ids = input_ids[:size]
        first_mask = attention_mask[:size]
        results = score(model, first_ids, first_mask, logits_to_keep, *args, **kwargs)
        # Repeat the rows of the first part, so that the result has the shape of the whole batch.
        repeated = []
        for result in results:
            if result is not None and result.dim():
                result = result.repeat(rows // size, 1)
            repeated.append(result)
        return tuple(repeated)


class MomentCallback(TrainerCallback):
    """Sets the moment of the step, and attributes weights, gradients and optimizer states.

    Args:
        trainer ([`MeasuredTrainer`]): The trainer that is measured.

    Attributes:
        optimizer_states (`int`): Bytes of the optimizer after its first step.
    """

    def __init__(self, trainer: MeasuredTrainer):
        self.trainer = trainer
        self.memory = trainer.memory
        self.optimizer_states = 0

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        # By now the parameters are sharded.
        model = self.trainer.model
        # With adapters, the parameters that are trained count as theirs.
        has_adapters = hasattr(model, "peft_config")
        for parameter in model.parameters():
            is_adapter = has_adapters and parameter.requires_grad
            self.memory.count([parameter], "adapters" if is_adapter else "weights")
        self.memory.count(model.buffers(), "weights")
        self.memory.moment = PASSES

    def on_substep_end(self, *args: object, **kwargs: object) -> None:
        gradients = [parameter.grad for parameter in self.trainer.model.parameters()]
        self.memory.count([grad for grad in gradients if grad is not None], "gradients")

    def on_pre_optimizer_step(self, *args: object, **kwargs: object) -> None:
        # The last micro-batch of a step has no `on_substep_end` of its own.
        self.on_substep_end()
        self.memory.moment = OPTIMIZER

    def on_optimizer_step(self, *args: object, **kwargs: object) -> None:
        for states in self.trainer.optimizer.state.values():
            tensors = [state for state in states.values() if isinstance(state, torch.Tensor)]
            self.memory.count(tensors, "optimizer")
        self.optimizer_states = self.memory.parts.get("optimizer", 0)
        # Work after the update, such as logging, belongs to no moment of the step.
        self.memory.moment = ""


def count_gradients_at_once(model: torch.nn.Module, memory: MemoryCounter) -> None:
    """Count each gradient as such from when it exists.

    FSDP's are counted after a micro-batch only.
    """

    def count_gradient(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        memory.count([parameter.grad], "gradients")

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(count_gradient)


def measure_training(job: TrainingJob) -> MeasuredStep:
    """Run a training step of one process on fake tensors, and return its memory."""
    with tempfile.TemporaryDirectory() as folder, process_group(job), ExitStack() as stack:
        # Before tensors are fake, because torch asks its devices for values.
        args = job.training_args(folder)
        tokenizer = world_tokenizer()
        stack.enter_context(FakeTensorMode())
        stack.enter_context(as_on_a_gpu(is_padded=job.rows > 1, head=job.gpu))
        trainer = build_trainer(job, args, tokenizer)

        # Count the weights.
        # CUDA's allocator rounds up to 512 bytes.
        memory = MemoryCounter(scored_positions_counter(job), block=512 if job.gpu else 1)
        trainer.memory = memory
        # The reference model, if the KL penalty needs one.
        if trainer.ref_model is not None:
            reference = [*trainer.ref_model.parameters(), *trainer.ref_model.buffers()]
            memory.count(reference, "reference")
        memory.count(trainer.model.parameters(), "weights")
        moments = MomentCallback(trainer)
        trainer.add_callback(moments)
        count_gradients_at_once(trainer.model, memory)

        # Whether a process was interrupted is a sum over processes, which is not 0 for fake
        # numbers.
        trainer.handles_interrupts = False
        with memory.counting():
            trainer.train()

    # The first step has no optimizer states before its last moment, where they are created. From
    # the second step on they are there all the time.
    states = moments.optimizer_states
    parts_by_moment = {}
    for moment, parts in memory.peaks.items():
        if moment:
            parts_by_moment[moment] = {**parts, "optimizer": states}
    # The new states were counted as activations when the peak of this moment was recorded.
    if OPTIMIZER in parts_by_moment:
        parts_by_moment[OPTIMIZER]["activations"] -= states

    parameters = list(trainer.model.parameters())
    return MeasuredStep(
        moments=parts_by_moment,
        optimizer_states=states,
        parameters=sum(parameter.numel() for parameter in parameters),
        trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
    )


def scored_positions_counter(job: TrainingJob) -> Any:
    """Return a function that tells how many positions a mask of fake values selects."""
    # Masks over the response, and over the whole row but for its first token.
    scored_widths = (job.context - 1, job.context - job.prompt_length)

    def count_selected(mask: torch.Tensor) -> int:
        # Such a mask selects the tokens that the agent wrote, in each row.
        if mask.dim() == 2 and mask.shape[1] in scored_widths:
            return mask.shape[0] * job.sampled_length
        return mask.numel()

    return count_selected


def build_trainer(
    job: TrainingJob, args: MultiTurnGRPOConfig, tokenizer: PreTrainedTokenizerBase
) -> MeasuredTrainer:
    """Return the trainer around a model without weights, whose rollouts are made up."""

    # The values of rewards do not change the memory.
    def zero_rewards(completions: Sequence[Any], **columns: Any) -> list[float]:
        return [0.0] * len(completions)

    # TRL would load the reference model by its name, with weights.
    def build_reference_model(*args: object, **kwargs: object) -> Any:
        return build_model(job)

    with patched_path("trl.trainer.grpo_trainer.create_model_from_path", build_reference_model):
        trainer = MeasuredTrainer(
            model=build_model(job),
            reward_funcs=zero_rewards,
            args=args,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 64 * job.processes),
            environment=None,
            peft_config=job.peft,
        )
    # Batches come from here instead of from played rollouts.
    trainer.batch_source = FullLengthRollouts(job)
    return trainer


def build_model(job: TrainingJob) -> Any:
    """Return the model without its weights."""
    job.model._name_or_path = ""
    # Skip the random initialization, which takes time and does not change the memory.
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(job.model, dtype=getattr(torch, job.dtype))
    model.tie_weights()
    return model


@contextmanager
def process_group(job: TrainingJob) -> Iterator[None]:
    """Set up FSDP2 within the context if the job has several processes. Nothing is sent."""
    if job.processes == 1:
        yield
        return

    import torch.distributed as dist
    from torch.distributed.fsdp._fully_shard import _fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # All processes hold the same objects, so copies of the local one stand for the others'.
    def gather_copies(
        objects: list[object], local: object, *args: object, **kwargs: object
    ) -> None:
        objects[:] = [local] * len(objects)

    # accelerate reads the size of the group from variables, as under `accelerate launch`.
    variables = environment_variables(fsdp2_environment(job.processes))
    with variables, fsdp_on_a_cpu(), patched(dist, "all_gather_object", gather_copies):
        dist.init_process_group("fake", rank=0, world_size=job.processes, store=FakeStore())
        # Creating a mesh reads values, which fake tensors do not have, so it is created before.
        mesh = dist.device_mesh.init_device_mesh("cpu", (job.processes,))
        try:
            with patched(_fully_shard, "_init_default_mesh", lambda *args, **kwargs: mesh):
                yield
        finally:
            dist.destroy_process_group()


@contextmanager
def environment_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the context."""
    previous = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(previous)


# ---- sampling ----


def measure_sampling(job: TrainingJob) -> SamplingMemory:
    """Run the engine's pass over one context on fake tensors, and return its memory."""
    with FakeTensorMode(), as_on_a_gpu(is_padded=False, head=job.gpu):
        model = build_model(job)
        if not can_slab(model):
            return SamplingMemory()
        memory = MemoryCounter()
        memory.count([*model.parameters(), *model.buffers()], "weights")

        # Read one context.
        slab = Slab()
        columns = torch.zeros(1, job.context, dtype=torch.long)
        slab.prepare(0, columns, 1, job.context)
        # The pass runs in the type that sampling would use.
        autocast: AbstractContextManager[Any] = nullcontext()
        if job.args.get("bf16"):
            autocast = torch.autocast("cpu", torch.bfloat16)
        with memory.counting(), autocast, borrow_model(model), attention_with_masks(model):
            model(
                input_ids=columns,
                attention_mask=masks_of(model, columns, job.context),
                position_ids=columns,
                past_key_values=slab,
                use_cache=True,
                logits_to_keep=torch.arange(0),  # prefill needs no logits
            )

        # The peak contains weights, keys and values; the rest is what the pass itself takes.
        weights = memory.parts["weights"]
        peak = max(sum(parts.values()) for parts in memory.peaks.values())
        keys_and_values = int(slab.grown_bytes(1, job.context))
        return SamplingMemory(
            kv_bytes_per_token=int(slab.bytes(1, 1)),
            reading=max(0, peak - weights - keys_and_values),
            weights=weights,
        )


# ---- the process that measures ----


def main() -> None:
    """Read jobs until there are no more, and write the result or the error of each as a line."""
    # Standard output holds results only; what libraries print goes to standard error.
    output = sys.stdout
    sys.stdout = sys.stderr
    # The collector's passes over imported modules took a quarter of the time of a deep model.
    gc.freeze()
    gc.set_threshold(10_000, 50, 50)
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            # The caller has closed the pipe: there are no more jobs.
            return
        try:
            step = measure_training(job)
            step.sampling = measure_sampling(job)
            result: dict[str, Any] = {"step": asdict(step)}
        except Exception as error:  # of any library on the way; the caller reports it
            message = " ".join(str(error).split())[:300]
            result = {"error": f"{type(error).__name__}: {message}"}
        print(json.dumps(result), file=output, flush=True)


if __name__ == "__main__":
    main()
