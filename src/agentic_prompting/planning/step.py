"""One training step of the real trainer on fake tensors: which part takes how much memory, and when.

`measure` builds [`MultiTurnGRPOTrainer`] around a model without weights and runs `train()` for one step: scoring
without gradient, forward and backward passes, clipping, the optimizer. Only the rollouts are made up, as long as they
may become. The patches are global, so `plan` runs this file in a process of its own: jobs as a pickle on standard
input, a line of JSON for each on standard output.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PretrainedConfig, TrainerCallback
from transformers.initialization import no_init_weights

from ..local.sampling import in_use
from ..local.slab import Slab, attention_with_masks, can_slab, masks_of
from ..rollout import Rollout, Sample
from ..rollout.grammar import Turn
from ..sandbox.policy import world_tokenizer
from ..trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from ..trainers.fake_gpu import as_on_a_gpu, fsdp2, fsdp_on_a_cpu
from ..trainers.rollouts import Batch
from .memory import Memory

SCORING, PASSES, OPTIMIZER = "passes without gradient", "forward and backward passes", "the optimizer's step"


@dataclass
class Job:
    """A training step to measure.

    Args:
        args (`dict`): Values of [`MultiTurnGRPOConfig`]; those that say where to run are replaced.
        model (`PretrainedConfig`): The shape.
        dtype (`str`, *optional*, defaults to `"float32"`): Type of the weights.
        rows (`int`, *optional*, defaults to `2`): Rollouts of a micro-batch.
        context (`int`, *optional*, defaults to `1024`): Tokens of each, prompt and response.
        scored (`float`, *optional*, defaults to `1.0`): The share of the response that the agent wrote.
        peft (`PeftConfig`, *optional*): The adapters that are trained.
        off_policy (`bool`, *optional*, defaults to `False`): The sampler's log-probabilities are corrected for, as with
            vLLM and `async_lead`.
        processes (`int`, *optional*, defaults to `1`): Over which FSDP2 shards.
        gpu (`bool`, *optional*, defaults to `True`): Take a GPU's paths.
    """

    args: dict[str, Any]
    model: PretrainedConfig
    dtype: str = "float32"
    rows: int = 2
    context: int = 1024
    scored: float = 1.0
    peft: Any = None
    off_policy: bool = False
    processes: int = 1
    gpu: bool = True

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return min(self.context // 2, 512)

    def settings(self, folder: str, steps: int = 1) -> MultiTurnGRPOConfig:
        """The arguments of a few steps on a CPU, of at most two micro-batches each: a third adds nothing."""
        accumulated = self.args.get("gradient_accumulation_steps") or 1
        parts = min(2, accumulated)
        # Rollouts that outlive a step have their log-probabilities computed once more, in passes without gradient.
        blocks = 2 if (self.args.get("steps_per_generation") or 1) > accumulated else 1
        kept = {one.name for one in fields(MultiTurnGRPOConfig) if one.init}
        changed = {
            "output_dir": folder, "max_steps": steps, "use_cpu": True, "per_device_train_batch_size": self.rows,
            "gradient_accumulation_steps": parts, "steps_per_generation": parts * blocks, "generation_batch_size": None,
            "num_generations": 2 if self.rows * parts * self.processes % 2 == 0 else 1, "max_context": None,
            "max_completion_length": self.context, "save_strategy": "no", "eval_strategy": "no", "logging_steps": 1,
            "report_to": "none", "disable_tqdm": True, "rollouts_max_mb": 0, "use_vllm": False, "async_lead": 0,
            "vllm_sync": "nccl", "model_init_kwargs": None, "overwrite": False, "push_to_hub": False,
            "dataloader_num_workers": 0, "deepspeed": None, "warmup_steps": 0,
            "budget_usd": None, "budget_tokens": None,
        }  # fmt: skip
        if changed["num_generations"] == 1:  # a group of one is no group, and TRL refuses it
            changed |= {"steps_per_generation": 2 * parts * blocks, "num_generations": 2}
        if self.args.get("fp16"):  # as many bytes, and no scaler, which a CPU lacks
            changed |= {"fp16": False, "bf16": True}
        return MultiTurnGRPOConfig(**{**{k: v for k, v in self.args.items() if k in kept}, **changed})


@dataclass
class Made:
    """Stands in for the source of rollouts: all of the full length."""

    job: Job
    tokens: int = field(default=0, init=False)

    def next_batch(self, rows: Sequence[dict[str, Any]], place: Any) -> Batch:
        job, length = self.job, self.job.context - self.job.prompt
        own = max(1, int(length * job.scored) - 1)  # TRL appends the end token
        rollouts = []
        for number in range(len(rows)):
            one = Rollout([5] * (job.prompt - (number > 0)), row={**rows[number], "prompt": ""})  # padded, as real rows
            one.add_turn(Sample([5] * own, [-1.0] * own), Turn("", "answer", True))
            one.add_observed([5] * (length - own - 1))
            rollouts.append(one.finish("answered"))
        made = [one.row for one in rollouts]
        return Batch(place, made, [{} for _ in rows], rollouts, off_policy=job.off_policy)


class _Measured(MultiTurnGRPOTrainer):
    """The trainer with the memory of its moments."""

    memory: Memory

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self.memory.during(SCORING):
            return super()._generate_and_score_completions(inputs)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: Any, *args: Any, **kwargs: Any
    ) -> Any:
        of, size, rows = super()._get_per_token_logps_and_entropies, kwargs.get("batch_size"), len(input_ids)
        if torch.is_grad_enabled() or size is None or size >= rows:
            return of(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        # Parts of a batch are alike: the first one is run.
        first = of(model, input_ids[:size], attention_mask[:size], logits_to_keep, *args, **kwargs)
        return tuple(one if one is None or not one.dim() else one.repeat(rows // size, 1) for one in first)


class _Moments(TrainerCallback):
    def __init__(self, trainer: Any):
        self.trainer, self.memory = trainer, trainer.memory

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        for part, tensor in _parameters(self.trainer.model):  # sharded by now
            self.memory.see([tensor], part)
        self.memory.moment = PASSES

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self.memory.see(_gradients(self.trainer.model), "gradients")

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.on_substep_end()
        self.memory.moment = OPTIMIZER

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        states = self.trainer.optimizer.state.values()
        self.memory.see([one for of in states for one in of.values() if isinstance(one, torch.Tensor)], "optimizer")
        self.states = self.memory.parts.get("optimizer", 0)
        self.memory.moment = ""


def _gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [one.grad for one in model.parameters() if one.grad is not None]


def _watch_gradients(model: torch.nn.Module, memory: Memory) -> None:
    """Count gradients as such from when they are there. Of FSDP's this is seen only after a micro-batch."""
    for one in model.parameters():
        if one.requires_grad:
            one.register_post_accumulate_grad_hook(lambda one: memory.see([one.grad], "gradients"))


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights and buffers with their part: adapters are what is trained beside frozen weights."""
    adapters = hasattr(model, "peft_config")
    for one in model.parameters():
        yield "adapters" if adapters and one.requires_grad else "weights", one
    yield from (("weights", one) for one in model.buffers())


def measure(job: Job) -> dict[str, Any]:
    """Bytes of one process in a training step, from the second one on.

    Returns:
        `dict`: `moments`: for each moment its bytes by part. `states`: bytes of the optimizer. `parameters` and
        `trained`: how many numbers the whole model has, and how many of them learn.
    """
    with tempfile.TemporaryDirectory() as folder, _environment(job), ExitStack() as stack:
        args = job.settings(folder)  # before tensors are fake: torch asks its devices for values
        tokenizer = world_tokenizer()
        stack.enter_context(FakeTensorMode())
        stack.enter_context(as_on_a_gpu(is_padded=job.rows > 1, head=job.gpu))
        trainer = build(job, args, tokenizer)
        length, own = job.context - 1, max(1, int((job.context - job.prompt) * job.scored) - 1)

        def chosen(mask: torch.Tensor) -> int:
            scored = mask.dim() == 2 and mask.shape[1] in (length, job.context - job.prompt)
            return mask.shape[0] * own if scored else mask.numel()

        memory = trainer.memory = Memory(chosen, 512 if job.gpu else 1)
        if trainer.ref_model is not None:
            memory.see((*trainer.ref_model.parameters(), *trainer.ref_model.buffers()), "reference")
        memory.see(trainer.model.parameters(), "weights")
        moments = _Moments(trainer)
        trainer.add_callback(moments)
        _watch_gradients(trainer.model, memory)
        # Whether a process was interrupted is a sum over processes, and that of fake numbers is not 0.
        with memory.counting(), mock.patch("agentic_prompting.trainers.resumable.checkpoint_on_interrupt", nullcontext):
            trainer.train()
    return {
        "moments": {
            # The first step has no states before its last moment, where they are made; later they stay.
            moment: {**parts, "optimizer": moments.states}
            | ({"activations": parts["activations"] - moments.states} if moment == OPTIMIZER else {})
            for moment, parts in memory.peaks.items()
            if moment
        },
        "states": moments.states,
        "parameters": sum(one.numel() for one in trainer.model.parameters()),
        "trained": sum(one.numel() for one in trainer.model.parameters() if one.requires_grad),
    }


def read(job: Job) -> dict[str, int]:
    """Bytes that sampling in this process takes beside the whole weights: `token`, keys and values of one token of one
    conversation; `reading`, what a pass over one whole context takes beside those. Empty for a model that the engine
    cannot run."""
    with FakeTensorMode(), as_on_a_gpu(is_padded=False, head=job.gpu):
        model = shaped(job)
        if not can_slab(model):
            return {}
        memory, slab = Memory(), Slab()
        memory.see((*model.parameters(), *model.buffers()), "weights")
        columns = torch.zeros(1, job.context, dtype=torch.long)
        slab.look(0, columns, 1, job.context)
        autocast = torch.autocast("cpu", torch.bfloat16) if job.args.get("bf16") else nullcontext()
        with memory.counting(), autocast, in_use(model), attention_with_masks(model):
            model(
                input_ids=columns, attention_mask=masks_of(model, columns, job.context), position_ids=columns,
                past_key_values=slab, use_cache=True, logits_to_keep=torch.arange(0),
            )  # fmt: skip
        weights = memory.parts["weights"]
        most = max(sum(parts.values()) for parts in memory.peaks.values())
        kept = int(slab.grown_bytes(1, job.context))
        return {"token": int(slab.bytes(1, 1)), "reading": max(0, most - weights - kept), "weights": weights}


def shaped(job: Job) -> Any:
    """The model without its weights."""
    job.model._name_or_path = ""
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(job.model, dtype=getattr(torch, job.dtype))
    model.tie_weights()
    return model


def build(job: Job, args: MultiTurnGRPOConfig, tokenizer: Any) -> _Measured:
    """The trainer around a model without weights, with rollouts that are made up."""
    from datasets import Dataset

    with mock.patch("trl.trainer.grpo_trainer.create_model_from_path", lambda *args, **kwargs: shaped(job)):
        trainer = _Measured(  # that above: its reference model
            model=shaped(job),
            reward_funcs=lambda completions, **columns: [0.0] * len(completions),
            args=args,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 64 * job.processes),
            environment=None,
            peft_config=job.peft,
        )
    trainer.source = Made(job)
    return trainer


@contextmanager
def _environment(job: Job) -> Iterator[None]:
    """The variables and the process group of FSDP2, where the job has several processes. Nothing is sent."""
    if job.processes == 1:
        yield
        return
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def gathered(objects: list[Any], one: Any, *args: Any, **kwargs: Any) -> None:
        objects[:] = [one] * len(objects)

    variables, gather = mock.patch.dict(os.environ, fsdp2(job.processes)), "torch.distributed.all_gather_object"
    with variables, fsdp_on_a_cpu(), mock.patch(gather, gathered):
        dist.init_process_group("fake", rank=0, world_size=job.processes, store=FakeStore())
        mesh = dist.device_mesh.init_device_mesh("cpu", (job.processes,))  # reads values, which fake ones lack
        shards = "torch.distributed.fsdp._fully_shard._fully_shard._init_default_mesh"
        try:
            with mock.patch(shards, lambda *args, **kwargs: mesh):
                yield
        finally:
            dist.destroy_process_group()


def main() -> None:
    """Read jobs until there are no more, and write the figures or the error of each as a line."""
    out, sys.stdout = sys.stdout, sys.stderr
    gc.freeze()  # what was imported: the collector's passes over it took a quarter of the time of a deep model
    gc.set_threshold(10_000, 50, 50)
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            line = {**measure(job), "sampling": read(job)}
        except Exception as error:  # of any library on the way: the caller says what was tried
            line = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(json.dumps(line), file=out, flush=True)


if __name__ == "__main__":
    main()
