"""Samplers over the generation backends that a TRL trainer owns.

The transformers backend is [`TransformersSampler`], given the trainer's unwrapped weights. The other two, vLLM and
continuous batching, are reached through TRL's own method, which syncs weights and speaks both vLLM modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trl import GRPOConfig
from trl.models import unwrap_model_for_generation

from ..local import Sampling, TransformersSampler
from ..rollout import Sample, Sampler, SampleRequest

if TYPE_CHECKING:
    from .multi_turn_grpo import MultiTurnGRPOTrainer


def trainer_sampler(trainer: MultiTurnGRPOTrainer, stop_texts: Sequence[str]) -> Sampler:
    """The sampler for the trainer's generation backend."""
    if trainer.use_vllm or trainer.use_transformers_continuous_batching:
        return TRLSampler(trainer)

    @contextmanager
    def unwrapped():
        with (
            unwrap_model_for_generation(
                trainer.model_wrapped,
                trainer.accelerator,
                gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
                gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
            ) as model,
            trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False),
        ):
            yield model

    return TransformersSampler(
        unwrapped,
        trainer._tokenizer,
        sampling_of(trainer.args),
        stop_texts=stop_texts,
        end_of_turn_ids=trainer.eos_token_ids,
    )


def sampling_of(args: GRPOConfig) -> Sampling:
    """The sampling parameters among a `GRPOConfig`'s arguments."""
    return Sampling(args.temperature, args.top_p, args.top_k, args.min_p, args.repetition_penalty)


class TRLSampler:
    """Samples through TRL's `_generate_single_turn` (vLLM colocate or server, transformers continuous batching).

    These backends draw from a random state of their own: `SampleRequest.seed` has no effect, so what a rollout samples
    depends on the batch it was sampled in.
    """

    def __init__(self, trainer: MultiTurnGRPOTrainer):
        self.trainer = trainer

    def __call__(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        trainer = self.trainer
        backend_limit = max(request.max_new_tokens for request in requests)
        if trainer.use_vllm:
            trainer.vllm_generation.max_completion_length = backend_limit
        else:
            trainer.generation_config.max_new_tokens = backend_limit
        # num_generations=1: the contexts have diverged; a larger number makes vLLM's server mode sample only every
        # n-th of them.
        ids, logprobs = trainer._generate_single_turn([request.context for request in requests], None, {}, 1)
        return [
            self._cut(request, list(ids[i]), None if logprobs is None else list(logprobs[i]))
            for i, request in enumerate(requests)
        ]

    def _cut(self, request: SampleRequest, ids: list[int], logprobs: list[float] | None) -> Sample:
        """A row's own limit may be below the batch's."""
        limit = request.max_new_tokens
        finished = len(ids) < limit or ids[limit - 1] in self.trainer.eos_token_ids
        return Sample(ids[:limit], None if logprobs is None else logprobs[:limit], finished)
