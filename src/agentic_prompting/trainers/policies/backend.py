"""Chooses the policy over a TRL trainer's generation back end.

Rollouts end at different times on different processes. If each process samples by itself (from
weights in its memory, or from a server) the processes need no coordination. [`GatheredWeights`]
gathers sharded weights once for a batch, so that they need none in between. If sampling is a
collective, [`CollectivePolicy`] keeps them at equal numbers of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer
from trl.models import unwrap_model_for_generation

from ...local import Sampling, TransformersEngine, local_policy
from ...rollout import BatchEngine, Policy
from ..patches import keep_unsharded, remove_zero3_start_hook
from .batch_samplers import CollectivePolicy, ContinuousBatchingSampler, TRLSampler
from .vllm import VLLMEnginePolicy, VLLMServerPolicy, warn_of_shaped_logprobs
from .vllm_client import VLLMServer, connect_servers
from .weight_sync import WeightSync


@dataclass(frozen=True)
class Backend:
    """The way in which a trainer samples: a policy, and what has to happen around its use.

    Args:
        policy ([`Policy`]): Samples one turn at a time.
        session (`Callable`): Returns the context that all processes enter together around the
            rollouts of a batch, and that each leaves when its own are done.
        max_context (`int`, *optional*): Tokens that it can read, prompt and response together.
            Defaults to the model's limit.
        wait_for_server (`Callable`, *optional*): Waits until a policy on a server answers; raises
            [`PolicyUnreachable`]. `None` for a policy in this process.
        weight_sync ([`WeightSync`], *optional*): Pushes the weights to the server, if TRL does not.
        around_push (`Callable`, *optional*): Returns the context around a push while turns are in
            flight; see [`VLLMServerPolicy.around_push`].
    """

    policy: Policy
    session: Callable[[], AbstractContextManager[None]] = nullcontext
    max_context: int | None = None
    wait_for_server: Callable[[], list[VLLMServer]] | None = None
    weight_sync: WeightSync | None = None
    around_push: Callable[[int, Callable[[], None]], AbstractContextManager[None]] = (
        lambda updates, wait: nullcontext()
    )


def sampling_of(args: GRPOConfig) -> Sampling:
    """Return the sampling parameters of a `GRPOConfig`."""
    return Sampling(args.temperature, args.top_p, args.top_k, args.min_p, args.repetition_penalty)


def tokenizer_of(trainer: GRPOTrainer) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a trainer's model: its processing class, or that of a processor."""
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


def trainer_backend(trainer: GRPOTrainer, stop_texts: Sequence[str]) -> Backend:
    """Return the back end that a trainer's arguments name.

    That is vLLM, continuous batching or transformers.
    """
    args = trainer.args
    if not trainer.use_vllm:
        return _transformers_backend(trainer, stop_texts)

    # The importance ratio needs log-probabilities that are computed like the trainer's.
    corrects_importance = args.vllm_importance_sampling_correction
    if corrects_importance and trainer.accelerator.is_main_process:
        warn_of_shaped_logprobs(sampling_of(args), _logprobs_mode(trainer))

    if args.vllm_mode == "server":
        return _server_backend(trainer)
    # Within a tensor-parallel group TRL slices by equal numbers of prompts. A sleeping engine gets
    # its weights again at every call, gathered from all processes.
    if args.vllm_tensor_parallel_size > 1 or args.vllm_enable_sleep_mode:
        policy = CollectivePolicy(TRLSampler(trainer), filler=[trainer.eos_token_ids[0]])
        return Backend(policy, policy.session, args.vllm_max_model_length)
    # Otherwise each process has an engine of its own, and needs no others.
    engine = VLLMEnginePolicy(trainer.vllm_generation.llm, args, sampling_of(args))
    return Backend(engine, max_context=args.vllm_max_model_length)


def _logprobs_mode(trainer: GRPOTrainer) -> str:
    """Return vLLM's `--logprobs-mode`. Only the main process can ask a server for it."""
    if trainer.args.vllm_mode != "server":
        return "processed_logprobs"  # TRL's choice
    return trainer.vllm_generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]


def _server_backend(trainer: GRPOTrainer) -> Backend:
    args = trainer.args
    servers = connect_servers(args)
    # With NCCL, TRL itself pushes the weights.
    weight_sync = None if args.vllm_sync == "nccl" else trainer.vllm_generation
    policy = VLLMServerPolicy(
        servers,
        args,
        sampling_of(args),
        adapters=getattr(weight_sync, "adapters", None),
        before_request=None if weight_sync is None else weight_sync.ensure_current,
    )

    def wait_for_push() -> AbstractContextManager[None]:
        # The first process pushes the weights; the others must not sample from older ones.
        trainer.accelerator.wait_for_everyone()
        return nullcontext()

    return Backend(
        policy,
        session=wait_for_push,
        max_context=policy.max_context,
        wait_for_server=partial(connect_servers, args),
        weight_sync=weight_sync,
        around_push=policy.around_push,
    )


# --- the weights of this process ---------------------------------------------------------------


def _transformers_backend(trainer: GRPOTrainer, stop_texts: Sequence[str]) -> Backend:
    gathered = GatheredWeights(trainer)
    if trainer.args.use_transformers_continuous_batching:
        sampler = ContinuousBatchingSampler(trainer, gathered.model)
        return Backend(BatchEngine(sampler, on_callers_thread=True), gathered.hold)

    policy = local_policy(
        gathered.model,
        tokenizer_of(trainer),
        sampling_of(trainer.args),
        stop_texts=stop_texts,
        end_of_turn_ids=trainer.eos_token_ids,
        prefix_cache_mb=trainer.args.prefix_cache_mb,
        on_callers_thread=True,
        architecture_of=trainer.model,
    )

    @contextmanager
    def session() -> Iterator[None]:
        # Gather the weights once for the whole batch of rollouts.
        with gathered.hold():
            try:
                yield
            finally:
                # Drop the cached keys and values before the weights change, and before the backward
                # pass needs the memory.
                if isinstance(policy, TransformersEngine):
                    policy.forget()

    return Backend(policy, session)


class GatheredWeights:
    """A trainer's model with its sharded weights gathered once for a whole batch of rollouts.

    ZeRO-3 and FSDP2 keep a shard per process and gather the rest where it is needed: a collective,
    in which all processes must take part. Rollouts differ in length, so processes differ in how
    often they sample. Hence one gather around the rollouts of a batch, after which each process
    samples as often as it needs to.

    Args:
        trainer ([`~trl.GRPOTrainer`]): The trainer of the policy.

    Raises:
        `ValueError`: Under FSDP's first version, which cannot hold its weights through several
            forward passes.
    """

    def __init__(self, trainer: GRPOTrainer):
        plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)  # exists with FSDP only
        if plugin is not None and plugin.fsdp_version == 1:
            raise ValueError(
                "rollouts of several turns need FSDP2: set `fsdp_version: 2` in accelerate's "
                "fsdp_config"
            )
        self.trainer = trainer
        self._held_model: PreTrainedModel | None = None

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Gather the policy now, and release it at the end.

        All processes enter together; each may leave when it is done.
        """
        with self._gather() as model:
            self._held_model = model
            try:
                yield
            finally:
                self._held_model = None

    @contextmanager
    def model(self) -> Iterator[PreTrainedModel]:
        """Yield the policy that [`GatheredWeights.hold`] has gathered.

        Without it the policy is gathered for this use, by all processes together. It runs under the
        autocast in which the trainer computes log-probabilities. PyTorch keeps the weights that it
        has cast until the context ends, so they are not cast again for each token.
        """
        gathered: AbstractContextManager[PreTrainedModel] = self._gather()
        # Within `hold` the policy is already gathered.
        if self._held_model is not None:
            gathered = nullcontext(self._held_model)
        with gathered as model, self.trainer.accelerator.autocast():
            yield model

    @contextmanager
    def _gather(self) -> Iterator[PreTrainedModel]:
        trainer = self.trainer
        # TRL gathers the shards of ZeRO-3, FSDP2 gathers those of each of its units.
        unwrapped = unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=True,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        )
        with (
            unwrapped as model,
            remove_zero3_start_hook(trainer.model_wrapped),
            ExitStack() as stack,
        ):
            # Each unit of FSDP2 keeps its parameters until the context ends.
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    stack.enter_context(keep_unsharded(module))
            yield model
