"""Back ends that can only do batches: TRL's own paths. Where a batch is a collective, all processes stay in step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel

from ...rollout import BatchEngine, Sample, Sampler, SampleRequest
from ..rank_barrier import PeerFailed

if TYPE_CHECKING:
    from ..multi_turn_grpo import MultiTurnGRPOTrainer


class CollectivePolicy(BatchEngine):
    """Makes a sampler whose calls are collectives usable for rollouts of uneven length: equal numbers of calls, with
    equal numbers of prompts, on every process.

    Before each call the processes tell each other how much they have; who has less adds fillers of one token, and who
    has no rollouts left plays on with fillers alone until all are done. So each round waits for the slowest process:
    prefer a back end that is no collective.

    Args:
        sampler ([`Sampler`]): The collective one.
        filler (`list[int]`): A context that may be sampled for nothing.
    """

    def __init__(self, sampler: Sampler, filler: list[int]):
        super().__init__(self._in_step, lent=True)
        self.collective, self.filler = sampler, filler

    @contextmanager
    def session(self) -> Iterator[None]:
        """Around the rollouts of a batch: stays until every process is through with its own.

        Raises:
            [`PeerFailed`]: If another process failed in its rollouts.
        """
        try:
            yield
        except PeerFailed:
            raise  # every process raises it in the same round
        except BaseException as error:
            gather_object([f"{type(error).__name__}: {error}"])
            raise
        while width := self._widest(0):
            self._sample([], width)

    def _in_step(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        return self._sample(list(requests), self._widest(len(requests)))

    def _widest(self, own: int) -> int:
        told = gather_object([own])
        for process, word in enumerate(told):
            if isinstance(word, str):
                raise PeerFailed(f"process {process} of {len(told)} failed in its rollouts: {word}")
        return max(told)

    def _sample(self, requests: list[SampleRequest], width: int) -> list[Sample]:
        fillers = [SampleRequest(self.filler, 1, seed=0)] * (width - len(requests))
        if requests:
            return self.collective([*requests, *fillers])[: len(requests)]
        # What only keeps others company must leave no trace in this process's random state.
        with torch.random.fork_rng():
            self.collective(fillers)
        return []


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
