"""Back ends that can only sample batches, as in TRL's own loop, and collectives among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy

import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel
from trl import GRPOTrainer

from ...llm.guard import describe
from ...rollout import BatchEngine, Sample, Sampler, SampleRequest


class PeerFailed(RuntimeError):
    """Another process of the job failed in its rollouts; the message has its number and error."""


class CollectivePolicy(BatchEngine):
    """Makes a sampler whose calls are collectives usable for rollouts of uneven length.

    Every process has to make the same number of calls, with the same number of prompts. Before each
    call the processes exchange their numbers of requests. A process with fewer adds fillers of one
    token, and one without unfinished rollouts sends only fillers until all are done. So each round
    waits for the slowest process: prefer a back end that is no collective.

    Args:
        sampler ([`Sampler`]): The collective sampler.
        filler (`list[int]`): The context of a filler.
    """

    def __init__(self, sampler: Sampler, filler: list[int]):
        super().__init__(self._sample_round, on_callers_thread=True)
        self.collective = sampler
        self.filler = filler

    @contextmanager
    def session(self) -> Iterator[None]:
        """The context around the rollouts of a batch. It ends when every process has finished.

        Raises:
            [`PeerFailed`]: If another process failed in its rollouts.
        """
        try:
            yield
        except PeerFailed:
            raise  # every process raises it in the same round
        except BaseException as error:
            # The other processes wait for this one's number of requests: send them the error
            # instead.
            gather_object([describe(error, 1000)])
            raise

        # Take part in the calls of the other processes until all are done.
        while True:
            request_count = self._max_request_count(0)
            if request_count == 0:
                break
            self._sample([], request_count)

    def _sample_round(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        return self._sample(list(requests), self._max_request_count(len(requests)))

    def _max_request_count(self, request_count: int) -> int:
        counts: list[int | str] = gather_object([request_count])
        highest = 0
        for process, count in enumerate(counts):
            if isinstance(count, str):  # the description of an error instead of a number
                raise PeerFailed(
                    f"process {process} of {len(counts)} failed in its rollouts: {count}"
                )
            highest = max(highest, count)
        return highest

    def _sample(self, requests: list[SampleRequest], request_count: int) -> list[Sample]:
        # Fill up with requests of one token, whose samples are dropped.
        filler_count = request_count - len(requests)
        fillers = [SampleRequest(self.filler, 1, seed=0)] * filler_count
        if requests:
            return self.collective([*requests, *fillers])[: len(requests)]
        # Fillers must not change this process's random state.
        with torch.random.fork_rng():
            self.collective(fillers)
        return []


class TRLSampler:
    """Samples through TRL's `VLLMGeneration`: vLLM, colocated or on a server.

    vLLM draws from a random state of its own here: `SampleRequest.seed` has no effect, so what a
    rollout samples depends on the batch it was sampled in.
    """

    def __init__(self, trainer: GRPOTrainer):
        self.trainer = trainer

    def __call__(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        vllm = self.trainer.vllm_generation
        # vLLM has one limit for the batch; samples are cut to their own afterwards. `generate`
        # reads it from this attribute, and has no argument for it.
        vllm.max_completion_length = max(request.max_new_tokens for request in requests)
        contexts = [request.context for request in requests]
        # num_generations=1, because the contexts have diverged; a larger number makes vLLM's server
        # mode sample only every n-th of them.
        _, completion_ids, logprobs, _ = vllm.generate(contexts, None, num_generations=1)

        samples = []
        for request, ids, token_logprobs in zip(requests, completion_ids, logprobs, strict=True):
            # TRL returns the log-probabilities of the likeliest tokens; only the first was sampled.
            sampled_logprobs = [candidates[0] for candidates in token_logprobs]
            samples.append(
                _cut_sample(request, list(ids), sampled_logprobs, self.trainer.eos_token_ids)
            )
        return samples


class ContinuousBatchingSampler:
    """Samples with transformers' continuous batching.

    It draws from torch's random state and has no log-probabilities: `SampleRequest.seed` has no
    effect. It supports no stop texts either: a turn goes on to its end-of-turn token or its limit.

    Args:
        trainer ([`~trl.GRPOTrainer`]): The trainer whose generation settings are used.
        model (`Callable`): Returns a context manager of the policy.
    """

    def __init__(
        self, trainer: GRPOTrainer, model: Callable[[], AbstractContextManager[PreTrainedModel]]
    ):
        self.trainer = trainer
        self.model = model

    def __call__(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        # One limit for the batch; samples are cut to their own afterwards.
        generation_config = copy(self.trainer.generation_config)
        generation_config.max_new_tokens = max(request.max_new_tokens for request in requests)
        with self.model() as model, torch.no_grad():
            was_training = model.training
            model.eval()
            try:
                outputs = model.generate_batch(
                    [request.context for request in requests],
                    generation_config=generation_config,
                    continuous_batching_config=self.trainer.continuous_batching_config,
                    progress_bar=False,
                ).values()
            finally:
                model.train(was_training)

        # transformers only logs errors. With one result missing, the others would go to the wrong
        # rollouts.
        errors = [output.error for output in outputs if output.error is not None]
        if errors or len(outputs) != len(requests):
            raise RuntimeError(
                f"continuous batching returned {len(outputs)} of {len(requests)} results: "
                f"{errors[:1]}"
            )
        samples = []
        for request, output in zip(requests, outputs, strict=True):
            ids = list(output.generated_tokens)
            samples.append(_cut_sample(request, ids, None, self.trainer.eos_token_ids))
        return samples


def _cut_sample(
    request: SampleRequest, ids: list[int], logprobs: list[float] | None, end_ids: Sequence[int]
) -> Sample:
    """Return a sample cut to the limit of its request, which may be below the batch's."""
    limit = request.max_new_tokens
    # A sample that fills its limit is finished only if it ends there by itself.
    is_finished = len(ids) < limit or ids[limit - 1] in end_ids
    if logprobs is not None:
        logprobs = logprobs[:limit]
    return Sample(ids[:limit], logprobs, is_finished)
