"""The policy over the generation back end that a TRL trainer owns, and what goes around a batch of rollouts.

Rollouts end at different times on different processes. Where sampling is up to each process alone (weights in hand, a
server that each asks by itself) they need nothing of each other; where it is a collective, [`CollectivePolicy`] keeps
the processes at equal numbers of calls. Which it is, is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from trl import GRPOConfig

from ...local import Sampling, TransformersEngine, local_policy
from ...rollout import BatchEngine, Policy
from .adapters import pushed_by
from .collective import CollectivePolicy, ContinuousBatchingSampler, TRLSampler
from .gathered import GatheredPolicy
from .vllm import PolicyUnreachable, VLLMEnginePolicy, VLLMServerPolicy, servers_of

if TYPE_CHECKING:
    from ..multi_turn_grpo import MultiTurnGRPOTrainer

__all__ = ["Backend", "CollectivePolicy", "PolicyUnreachable", "pushed_by", "sampling_of", "trainer_backend"]


@dataclass(frozen=True)
class Backend:
    """A way to sample.

    Args:
        policy ([`Policy`]): One turn at a time.
        session (`Callable`): Makes the context that all processes enter together around the rollouts of a batch, and
            that each leaves when its own are done.
        max_context (`int`, *optional*): Tokens that it can read, prompt and response together; `None`: the model's.
        reach (`Callable`, *optional*): Waits for a back end elsewhere; raises [`PolicyUnreachable`].
    """

    policy: Policy
    session: Callable[[], AbstractContextManager] = nullcontext
    max_context: int | None = None
    reach: Callable[[], Any] | None = None


def trainer_backend(trainer: MultiTurnGRPOTrainer, stop_texts: Sequence[str]) -> Backend:
    """The trainer's own back end: vLLM, continuous batching or transformers, as its arguments say."""
    args = trainer.args
    if not trainer.use_vllm:
        return _transformers_backend(trainer, stop_texts)
    if args.vllm_mode == "server":
        servers, reach = servers_of(args), partial(servers_of, args)
        adapters = getattr(trainer.vllm_generation, "adapters", None)
        policy = VLLMServerPolicy(servers, args, sampling_of(args), adapters)
        if args.vllm_server_calls == "direct":
            # The first process pushes the weights; the others must not sample from the old ones in the meantime.
            synced = partial(_after, trainer.accelerator.wait_for_everyone)
            return Backend(policy, synced, policy.max_context, reach)
        return replace(_collective_backend(trainer, policy.max_context), reach=reach)
    # Within a tensor-parallel group TRL slices by equal numbers of prompts. A sleeping engine gets its weights again at
    # every call, gathered from all processes.
    if args.vllm_tensor_parallel_size > 1 or args.vllm_enable_sleep_mode:
        return _collective_backend(trainer, args.vllm_max_model_length)
    engine = VLLMEnginePolicy(trainer.vllm_generation.llm, args, sampling_of(args))
    return Backend(engine, max_context=args.vllm_max_model_length)


def _transformers_backend(trainer: MultiTurnGRPOTrainer, stop_texts: Sequence[str]) -> Backend:
    gathered = GatheredPolicy(trainer)
    if trainer.use_transformers_continuous_batching:
        return Backend(BatchEngine(ContinuousBatchingSampler(trainer, gathered.model), lent=True), gathered.hold)
    policy = local_policy(
        gathered.model,
        trainer._tokenizer,
        sampling_of(trainer.args),
        stop_texts=stop_texts,
        end_of_turn_ids=trainer.eos_token_ids,
        prefix_cache_mb=trainer.args.prefix_cache_mb,
        lent=True,
        like=trainer.model,
    )
    return Backend(policy, partial(_forgetting, policy, gathered))


@contextmanager
def _forgetting(policy: Policy, gathered: GatheredPolicy) -> Iterator[None]:
    """What was kept between turns goes before the weights change, and before the backward pass needs the memory."""
    with gathered.hold():
        try:
            yield
        finally:
            if isinstance(policy, TransformersEngine):
                policy.forget()


def _collective_backend(trainer: MultiTurnGRPOTrainer, max_context: int | None) -> Backend:
    policy = CollectivePolicy(TRLSampler(trainer), filler=[trainer.eos_token_ids[0]])
    return Backend(policy, policy.session, max_context)


def _after(wait: Callable[[], None]) -> AbstractContextManager:
    wait()
    return nullcontext()


def sampling_of(args: GRPOConfig) -> Sampling:
    """The sampling parameters among a `GRPOConfig`'s arguments."""
    return Sampling(args.temperature, args.top_p, args.top_k, args.min_p, args.repetition_penalty)
