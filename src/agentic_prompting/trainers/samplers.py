"""Samplers over the generation back ends that a TRL trainer owns, and what each needs around a batch of rollouts.

Rollouts end at different times on different processes. Where sampling is up to each process alone (weights in hand, a
server that each asks by itself) they need nothing of each other; where it is a collective, [`Lockstep`] keeps the
processes at equal numbers of calls. Which it is, is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel
from trl import GRPOConfig

from ..local import Sampling, TransformersSampler
from ..rollout import Sample, Sampler, SampleRequest
from .held_weights import HeldWeights
from .lockstep import Lockstep
from .vllm_server import ServerSampler, served_by

if TYPE_CHECKING:
    from .multi_turn_grpo import MultiTurnGRPOTrainer


@dataclass(frozen=True)
class Backend:
    """A way to sample.

    Args:
        sampler ([`Sampler`]): The policy.
        session (`Callable`): Makes the context that all processes enter together around the rollouts of a batch, and
            that each leaves when its own are done.
        max_context (`int`, *optional*): Tokens that it can read, prompt and response together; `None`: the model's.
    """

    sampler: Sampler
    session: Callable[[], AbstractContextManager] = nullcontext
    max_context: int | None = None


def trainer_backend(trainer: MultiTurnGRPOTrainer, stop_texts: Sequence[str]) -> Backend:
    """The trainer's own back end: vLLM, continuous batching or transformers, as its arguments say."""
    args = trainer.args
    if not trainer.use_vllm:
        held = HeldWeights(trainer)
        if trainer.use_transformers_continuous_batching:
            return Backend(ContinuousBatchingSampler(trainer, held.model), held.hold)
        sampler = TransformersSampler(
            held.model,
            trainer._tokenizer,
            sampling_of(args),
            stop_texts=stop_texts,
            end_of_turn_ids=trainer.eos_token_ids,
            prefix_cache_mb=args.prefix_cache_mb,
        )
        return Backend(sampler, partial(_forgetting, sampler, held))
    if args.vllm_mode == "server":
        server = served_by(args)
        if args.vllm_server_calls == "direct":
            # The first process pushes the weights; the others must not sample from the old ones in the meantime.
            synced = partial(_after, trainer.accelerator.wait_for_everyone)
            return Backend(ServerSampler(server, args, sampling_of(args)), synced, server.max_context)
        return _in_lockstep(trainer, server.max_context)
    # Within a tensor-parallel group TRL slices by equal numbers of prompts. A sleeping engine gets its weights again at
    # every call, gathered from all processes.
    if args.vllm_tensor_parallel_size > 1 or args.vllm_enable_sleep_mode:
        return _in_lockstep(trainer, args.vllm_max_model_length)
    return Backend(TRLSampler(trainer), max_context=args.vllm_max_model_length)


@contextmanager
def _forgetting(sampler: TransformersSampler, held: HeldWeights) -> Iterator[None]:
    """What was kept between turns goes before the weights change, and before the backward pass needs the memory."""
    with held.hold():
        try:
            yield
        finally:
            sampler.forget()


def _in_lockstep(trainer: MultiTurnGRPOTrainer, max_context: int | None) -> Backend:
    lockstep = Lockstep(TRLSampler(trainer), filler=[trainer.eos_token_ids[0]])
    return Backend(lockstep, lockstep.session, max_context)


def _after(wait: Callable[[], None]) -> AbstractContextManager:
    wait()
    return nullcontext()


def sampling_of(args: GRPOConfig) -> Sampling:
    """The sampling parameters among a `GRPOConfig`'s arguments."""
    return Sampling(args.temperature, args.top_p, args.top_k, args.min_p, args.repetition_penalty)


class TRLSampler:
    """Samples through TRL's `_generate_single_turn`: vLLM, colocated or on a server.

    vLLM draws from a random state of its own here: `SampleRequest.seed` has no effect, so what a rollout samples
    depends on the batch it was sampled in.
    """

    def __init__(self, trainer: MultiTurnGRPOTrainer):
        self.trainer = trainer

    def __call__(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        trainer = self.trainer
        trainer.vllm_generation.max_completion_length = max(request.max_new_tokens for request in requests)
        # num_generations=1: the contexts have diverged; a larger number makes vLLM's server mode sample only every
        # n-th of them.
        ids, logprobs = trainer._generate_single_turn([request.context for request in requests], None, {}, 1)
        return [
            _cut(request, list(row), list(row_logprobs), trainer.eos_token_ids)
            for request, row, row_logprobs in zip(requests, ids, logprobs, strict=True)
        ]


class ContinuousBatchingSampler:
    """Samples with transformers' continuous batching, which draws from torch's random state and has no
    log-probabilities: `SampleRequest.seed` has no effect. It knows no stop texts either: a turn goes on to its
    end-of-turn token or its limit.

    Args:
        trainer ([`MultiTurnGRPOTrainer`]): Whose generation settings are used.
        model (`Callable`): Gives a context manager with the policy.
    """

    def __init__(self, trainer: MultiTurnGRPOTrainer, model: Callable[[], AbstractContextManager[PreTrainedModel]]):
        self.trainer, self.model = trainer, model

    def __call__(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        trainer = self.trainer
        trainer.generation_config.max_new_tokens = max(request.max_new_tokens for request in requests)
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
            # transformers only logs it; a result too few would give the rest to the wrong rollouts.
            raise RuntimeError(f"continuous batching gave {len(outputs)} of {len(requests)} results: {errors[:1]}")
        return [
            _cut(request, list(output.generated_tokens), None, trainer.eos_token_ids)
            for request, output in zip(requests, outputs, strict=True)
        ]


def _cut(request: SampleRequest, ids: list[int], logprobs: list[float] | None, end_ids: Sequence[int]) -> Sample:
    """A row's own limit may be below the batch's."""
    limit = request.max_new_tokens
    finished = len(ids) < limit or ids[limit - 1] in end_ids
    return Sample(ids[:limit], None if logprobs is None else logprobs[:limit], finished)
