"""The policy over a TRL trainer's generation back end, and the session around a batch of rollouts.

Rollouts end at different times on different processes. Where each process samples by itself (from weights in its
memory, or from a server) the processes need no coordination. Where sampling is a collective, [`CollectivePolicy`] keeps
them at equal numbers of calls. This module decides which of the two applies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer
from trl.models import unwrap_model_for_generation

from ...llm.guard import describe
from ...local import Sampling, TransformersEngine, local_policy
from ...rollout import BatchEngine, Policy, Sample, Sampler, SampleRequest
from ..stopping import PeerFailed
from .vllm import VLLMEnginePolicy, VLLMServerPolicy, warn_of_shaped_logprobs
from .vllm_client import PolicyUnreachable, servers_of
from .weight_sync import WeightSync, pushed_by

__all__ = [
    "Backend",
    "CollectivePolicy",
    "PolicyUnreachable",
    "pushed_by",
    "sampling_of",
    "tokenizer_of",
    "trainer_backend",
]


@dataclass(frozen=True)
class Backend:
    """A way to sample.

    Args:
        policy ([`Policy`]): One turn at a time.
        session (`Callable`): Makes the context that all processes enter together around the rollouts of a batch, and
            that each leaves when its own are done.
        max_context (`int`, *optional*): Tokens that it can read, prompt and response together. Defaults to the model's
            limit.
        reach (`Callable`, *optional*): Waits for a back end on a server; raises [`PolicyUnreachable`].
        sync ([`WeightSync`], *optional*): Pushes the weights to the server, if TRL does not.
        changing (`Callable`, *optional*): Makes the context around a push while turns are in flight; see
            [`VLLMServerPolicy.changing`].
    """

    policy: Policy
    session: Callable[[], AbstractContextManager] = nullcontext
    max_context: int | None = None
    reach: Callable[[], Any] | None = None
    sync: WeightSync | None = None
    changing: Callable[..., AbstractContextManager] = lambda updates, wait: nullcontext()


def sampling_of(args: GRPOConfig) -> Sampling:
    """The sampling parameters among a `GRPOConfig`'s arguments."""
    return Sampling(args.temperature, args.top_p, args.top_k, args.min_p, args.repetition_penalty)


def tokenizer_of(trainer: GRPOTrainer) -> Any:
    """The tokenizer of a trainer's model: its processing class, or the part of a processor that tokenises."""
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


def trainer_backend(trainer: GRPOTrainer, stop_texts: Sequence[str]) -> Backend:
    """The trainer's own back end: vLLM, continuous batching or transformers, as its arguments say."""
    args = trainer.args
    if not trainer.use_vllm:
        return _transformers_backend(trainer, stop_texts)
    if args.vllm_importance_sampling_correction and trainer.accelerator.is_main_process:
        warn_of_shaped_logprobs(sampling_of(args), _logprobs_mode(trainer))
    if args.vllm_mode == "server":
        servers, reach = servers_of(args), partial(servers_of, args)
        sync = None if args.vllm_sync == "nccl" else trainer.vllm_generation
        adapters, tell = getattr(sync, "adapters", None), getattr(sync, "tell", None)
        policy = VLLMServerPolicy(servers, args, sampling_of(args), adapters, tell)
        # The first process pushes the weights; the others must not sample from the old ones in the meantime.
        synced = partial(_after, trainer.accelerator.wait_for_everyone)
        return Backend(policy, synced, policy.max_context, reach, sync, policy.changing)
    # Within a tensor-parallel group TRL slices by equal numbers of prompts. A sleeping engine gets its weights again at
    # every call, gathered from all processes.
    if args.vllm_tensor_parallel_size > 1 or args.vllm_enable_sleep_mode:
        return _collective_backend(trainer, args.vllm_max_model_length)
    engine = VLLMEnginePolicy(trainer.vllm_generation.llm, args, sampling_of(args))
    return Backend(engine, max_context=args.vllm_max_model_length)


def _logprobs_mode(trainer: GRPOTrainer) -> str:
    """vLLM's `--logprobs-mode`. Only the main process can ask a server for it."""
    if trainer.args.vllm_mode != "server":
        return "processed_logprobs"  # TRL's choice
    return trainer.vllm_generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]


def _transformers_backend(trainer: GRPOTrainer, stop_texts: Sequence[str]) -> Backend:
    gathered = GatheredPolicy(trainer)
    if trainer.args.use_transformers_continuous_batching:
        return Backend(
            BatchEngine(ContinuousBatchingSampler(trainer, gathered.model), on_callers_thread=True),
            gathered.hold,
        )
    policy = local_policy(
        gathered.model,
        tokenizer_of(trainer),
        sampling_of(trainer.args),
        stop_texts=stop_texts,
        end_of_turn_ids=trainer.eos_token_ids,
        prefix_cache_mb=trainer.args.prefix_cache_mb,
        on_callers_thread=True,
        like=trainer.model,
    )
    return Backend(policy, partial(_forgetting, policy, gathered))


@contextmanager
def _forgetting(policy: Policy, gathered: GatheredPolicy) -> Iterator[None]:
    """Drop the cached keys and values before the weights change and before the backward pass needs the memory."""
    with gathered.hold():
        try:
            yield
        finally:
            if isinstance(policy, TransformersEngine):
                policy.forget()


def _collective_backend(trainer: GRPOTrainer, max_context: int | None) -> Backend:
    policy = CollectivePolicy(TRLSampler(trainer), filler=[trainer.eos_token_ids[0]])
    return Backend(policy, policy.session, max_context)


def _after(wait: Callable[[], None]) -> AbstractContextManager:
    wait()
    return nullcontext()


# --- the model in this process ---------------------------------------------------------------------------------------


class GatheredPolicy:
    """A trainer's policy for engines, gathered once for a whole batch of rollouts.

    ZeRO-3 and FSDP2 keep a shard per process and gather the rest where it is needed: a collective, in which all
    processes must take part. Rollouts differ in length, so processes differ in how often they sample. Hence one gather
    around the rollouts of a batch, after which each process samples as often as it needs to.

    Args:
        trainer ([`~trl.GRPOTrainer`]): Whose policy.

    Raises:
        `ValueError`: Under FSDP's first version, which cannot hold its weights through several forward passes.
    """

    def __init__(self, trainer: GRPOTrainer):
        plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)  # there under FSDP only
        if plugin is not None and plugin.fsdp_version == 1:
            raise ValueError(
                "rollouts of several turns need FSDP2: set `fsdp_version: 2` in accelerate's fsdp_config"
            )
        self.trainer = trainer
        self._held: PreTrainedModel | None = None

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Gather now, and release at the end. All processes enter together; each may leave when it is done."""
        with self._whole() as model:
            self._held = model
            try:
                yield
            finally:
                self._held = None

    @contextmanager
    def model(self) -> Iterator[PreTrainedModel]:
        """The policy that [`GatheredPolicy.hold`] has gathered; without it the policy is gathered for this use, by all
        processes together.

        It runs under the autocast in which the trainer computes log-probabilities. PyTorch keeps the weights that it
        has cast until the context ends, so they are not cast again for each token.
        """
        gathered = self._whole() if self._held is None else nullcontext(self._held)
        with gathered as model, self.trainer.accelerator.autocast():
            yield model

    @contextmanager
    def _whole(self) -> Iterator[PreTrainedModel]:
        trainer = self.trainer
        with (
            unwrap_model_for_generation(
                trainer.model_wrapped,
                trainer.accelerator,
                gather_deepspeed3_params=True,
                gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
            ) as model,
            _without_start_of_forward(trainer.model_wrapped),
            ExitStack() as stack,
        ):
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    stack.enter_context(_unsharded(module))
            yield model


@contextmanager
def _without_start_of_forward(engine: Any) -> Iterator[None]:
    """Within it ZeRO-3 lacks a hook that TRL leaves in place: after a forward pass that DeepSpeed has not seen before,
    the next one would begin with a collective."""
    offload = getattr(getattr(engine, "optimizer", None), "parameter_offload", None)
    if offload is None:
        yield
        return
    hooks, number = offload.module._forward_pre_hooks, offload.fwd_pre_hook.id
    hook = hooks.pop(number)
    try:
        yield
    finally:
        hooks[number] = hook


@contextmanager
def _unsharded(module: FSDPModule) -> Iterator[None]:
    """One FSDP2 unit with its parameters gathered, and left so by its forward pass."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.12 has one group, or none
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    # Private because there is a setter only: the root and the head are not resharded after forward, the layers are.
    before = [group.post_forward_mesh_info for group in groups]
    module.set_reshard_after_forward(False, recurse=False)
    module.unshard()
    try:
        yield
    finally:
        for group, mesh in zip(groups, before, strict=True):
            group.post_forward_mesh_info = mesh
        module.reshard()


# --- back ends that can only do batches: TRL's own paths --------------------------------------------------------------


class CollectivePolicy(BatchEngine):
    """Makes a sampler whose calls are collectives usable for rollouts of uneven length: equal numbers of calls, with
    equal numbers of prompts, on every process.

    Before each call the processes exchange their numbers of requests. A process with fewer adds fillers of one token,
    and one without unfinished rollouts sends fillers alone until all are done. So each round waits for the slowest
    process: prefer a back end that is no collective.

    Args:
        sampler ([`Sampler`]): The collective one.
        filler (`list[int]`): The context of a filler.
    """

    def __init__(self, sampler: Sampler, filler: list[int]):
        super().__init__(
            lambda requests: self._sample(list(requests), self._widest(len(requests))),
            on_callers_thread=True,
        )
        self.collective, self.filler = sampler, filler

    @contextmanager
    def session(self) -> Iterator[None]:
        """The context around the rollouts of a batch. It ends when every process has finished its own.

        Raises:
            [`PeerFailed`]: If another process failed in its rollouts.
        """
        try:
            yield
        except PeerFailed:
            raise  # every process raises it in the same round
        except BaseException as error:
            gather_object([describe(error, 1000)])
            raise
        while width := self._widest(0):
            self._sample([], width)

    def _widest(self, own: int) -> int:
        counts = gather_object([own])
        for process, count in enumerate(counts):
            if isinstance(count, str):  # an error in place of a number
                raise PeerFailed(
                    f"process {process} of {len(counts)} failed in its rollouts: {count}"
                )
        return max(counts)

    def _sample(self, requests: list[SampleRequest], width: int) -> list[Sample]:
        fillers = [SampleRequest(self.filler, 1, seed=0)] * (width - len(requests))
        if requests:
            return self.collective([*requests, *fillers])[: len(requests)]
        # Fillers must not change this process's random state.
        with torch.random.fork_rng():
            self.collective(fillers)
        return []


class TRLSampler:
    """Samples through TRL's `VLLMGeneration`: vLLM, colocated or on a server.

    vLLM draws from a random state of its own here: `SampleRequest.seed` has no effect, so what a rollout samples
    depends on the batch it was sampled in.
    """

    def __init__(self, trainer: GRPOTrainer):
        self.trainer = trainer

    def __call__(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        vllm = self.trainer.vllm_generation
        vllm.max_completion_length = max(request.max_new_tokens for request in requests)
        # num_generations=1: the contexts have diverged; a larger number makes vLLM's server mode sample only every
        # n-th of them.
        _, ids, logprobs, _ = vllm.generate(
            [request.context for request in requests], None, num_generations=1
        )
        return [
            _cut(request, list(row), [most[0] for most in likely], self.trainer.eos_token_ids)
            for request, row, likely in zip(requests, ids, logprobs, strict=True)
        ]


class ContinuousBatchingSampler:
    """Samples with transformers' continuous batching, which draws from torch's random state and has no
    log-probabilities: `SampleRequest.seed` has no effect. It supports no stop texts either: a turn goes on to its
    end-of-turn token or its limit.

    Args:
        trainer ([`~trl.GRPOTrainer`]): Whose generation settings are used.
        model (`Callable`): Returns a context manager of the policy.
    """

    def __init__(
        self, trainer: GRPOTrainer, model: Callable[[], AbstractContextManager[PreTrainedModel]]
    ):
        self.trainer, self.model = trainer, model

    def __call__(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        trainer = self.trainer
        trainer.generation_config.max_new_tokens = max(
            request.max_new_tokens for request in requests
        )
        with self.model() as model, torch.no_grad():
            was_training = model.training
            model.eval()
            try:
                outputs = model.generate_batch(
                    [request.context for request in requests],
                    generation_config=trainer.generation_config,
                    continuous_batching_config=trainer.continuous_batching_config,
                    progress_bar=False,
                ).values()
            finally:
                model.train(was_training)
        errors = [output.error for output in outputs if output.error is not None]
        if errors or len(outputs) != len(requests):
            # transformers only logs it. With one result missing, the others would go to the wrong rollouts.
            raise RuntimeError(
                f"continuous batching gave {len(outputs)} of {len(requests)} results: {errors[:1]}"
            )
        return [
            _cut(request, list(output.generated_tokens), None, trainer.eos_token_ids)
            for request, output in zip(requests, outputs, strict=True)
        ]


def _cut(
    request: SampleRequest, ids: list[int], logprobs: list[float] | None, end_ids: Sequence[int]
) -> Sample:
    """A row's own limit may be below the batch's."""
    limit = request.max_new_tokens
    finished = len(ids) < limit or ids[limit - 1] in end_ids
    return Sample(ids[:limit], None if logprobs is None else logprobs[:limit], finished)
