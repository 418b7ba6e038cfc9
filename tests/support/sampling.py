"""Requests to a policy, many at once."""

import random

from agentic_prompting.llm import gather
from agentic_prompting.rollout import SampleRequest, run_with_engine


def sample(policy, requests):
    """A policy's samples for many requests at once."""
    return run_with_engine(policy, gather(policy(request) for request in requests))


def requests_for(tokenizer, n, rng=None, most=20):
    """Requests with contexts and limits of many lengths."""
    rng = rng or random.Random(0)
    return [
        SampleRequest(
            [rng.randrange(4, len(tokenizer)) for _ in range(rng.randint(2, 30))],
            rng.randint(1, most),
            seed,
        )
        for seed in range(n)
    ]
