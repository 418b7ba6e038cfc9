"""A sampler that follows a script, and a check of finished rollouts."""

from agentic_prompting.rollout import (
    BatchEngine,
    ChatFormat,
    Rollout,
    Sample,
    SampleRequest,
    turn_seed,
)

ASK = "<think> what now </think> <interaction_prompt> Which country? </interaction_prompt>"
END = "<think> done </think> <answer> Kenya </answer>"


def fresh(chat_format, n=1, question="Which currency?"):
    return [
        Rollout(chat_format.prompt_ids([{"role": "user", "content": question}])) for _ in range(n)
    ]


class ScriptedSampler(BatchEngine):
    """A sampler whose n-th turn of every rollout is `turns[n]`; it logs its batches."""

    def __init__(
        self, chat_format: ChatFormat, turns: list[str], cut: bool = False, ended: bool = True
    ):
        super().__init__(self.sample, on_callers_thread=True)
        self.chat_format = chat_format
        self.turns = turns
        self.cut = cut
        self.ended = ended
        self.batches: list[list[SampleRequest]] = []

    def sample(self, requests):
        self.batches.append(list(requests))
        return [self._sample(request) for request in requests]

    def _sample(self, request):
        turn = self._turn_number(request)
        ids = self.chat_format.turn_ids(self.turns[min(turn, len(self.turns) - 1)])
        if not self.ended:
            ids = ids[:-1]
        if len(ids) > request.max_new_tokens or self.cut:
            cut_ids = ids[: request.max_new_tokens]
            return Sample(cut_ids, [-0.5] * len(cut_ids), finished=False)
        return Sample(ids, [-0.5] * len(ids))

    def _turn_number(self, request):
        # All rollouts have the seed 0 here.
        return next(n for n in range(100) if turn_seed(0, n) == request.seed)


def assert_whole(rollout):
    """Check the properties of every finished rollout."""
    assert rollout.done
    assert len(rollout.ids) == len(rollout.mask)
    if rollout.logprobs is not None:
        assert len(rollout.logprobs) == len(rollout.ids)
        for logprob, is_sampled in zip(rollout.logprobs, rollout.mask, strict=True):
            assert is_sampled or logprob == 0.0
    if rollout.ids:
        assert rollout.mask[-1] == 1, "a rollout never ends on an observation"
