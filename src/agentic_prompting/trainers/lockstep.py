"""Equal numbers of calls, with equal numbers of prompts, on every process: for samplers that are collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from accelerate.utils import gather_object

from ..rollout import Sample, Sampler, SampleRequest
from .roll_call import PeerFailed


class Lockstep:
    """Makes a sampler whose calls are collectives usable for rollouts of uneven length.

    Before each call the processes tell each other how much they have; who has less adds fillers of one token, and who
    has no rollouts left plays on with fillers alone until all are done. So each round waits for the slowest process:
    prefer a back end that needs no lockstep.

    Args:
        sampler ([`Sampler`]): The collective one.
        filler (`list[int]`): A context that may be sampled for nothing.
    """

    def __init__(self, sampler: Sampler, filler: list[int]):
        self.sampler, self.filler = sampler, filler

    @contextmanager
    def session(self) -> Iterator[None]:
        """Around the rollouts of a batch: stays until every process is through with its own.

        Raises:
            [`PeerFailed`]: If another process failed in its rollouts.
        """
        try:
            yield
        except PeerFailed:
            raise  # all heard of it in the same round
        except BaseException as error:
            self._tell(f"{type(error).__name__}: {error}")
            raise
        while width := self._widest(0):
            self._sample([], width)

    def __call__(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        return self._sample(list(requests), self._widest(len(requests)))

    def _widest(self, own: int) -> int:
        told = self._tell(own)
        for process, word in enumerate(told):
            if isinstance(word, str):
                raise PeerFailed(f"process {process} of {len(told)} failed in its rollouts: {word}")
        return max(told)

    def _tell(self, word: int | str) -> list:
        return gather_object([word])

    def _sample(self, requests: list[SampleRequest], width: int) -> list[Sample]:
        fillers = [SampleRequest(self.filler, 1, seed=0)] * (width - len(requests))
        if requests:
            return self.sampler([*requests, *fillers])[: len(requests)]
        # What only keeps others company must leave no trace in this process's random state.
        with torch.random.fork_rng():
            self.sampler(fillers)
        return []
