"""A policy that asks once and then answers, and an environment that counts what it was paid for."""

import asyncio
from collections import Counter
from types import SimpleNamespace

from agentic_prompting.llm import Reply, Usage
from agentic_prompting.rollout import Observation, Sample


class Asks:
    """A policy that asks once and then answers, with made-up log-probabilities."""

    def __init__(self, trainer):
        self.trainer = trainer

    def __call__(self, requests):
        return [self.sample(request) for request in requests]

    def sample(self, request):
        chat_format = self.trainer.chat_format
        if "<interaction_response>" in chat_format.tokenizer.decode(request.context):
            act = "<answer> yen </answer>"
        else:
            act = "<interaction_prompt> which country ? </interaction_prompt>"
        ids = chat_format.turn_ids(f"<think> {'yen ' * (1 + request.seed % 2)}</think> {act}")
        return Sample(ids, [-0.5] * len(ids))


class Policy(Asks):
    """One turn of it at a time, as a server is asked."""

    def __init__(self, chat_format):
        self.trainer = SimpleNamespace(chat_format=chat_format)

    async def __call__(self, request):
        await asyncio.sleep(0)
        return self.sample(request)


class Counts:
    """Answers at once; counts what it was paid for: which turn of which rollout."""

    def __init__(self):
        self.paid = Counter()

    async def step(self, rollout):
        self.paid[rollout.seed, len(rollout.turns)] += 1
        return Observation(
            "Nairobi", replies=(Reply("Nairobi", usage=Usage(3, 1, 0.5)),), seconds=0.25
        )
