"""Requests to a policy, many at once."""

import random

from agentic_prompting.llm import gather
from agentic_prompting.rollout import SampleRequest, run_with_engine


def sample(policy, requests):
    """A policy's samples for many requests at once."""
    return run_with_engine(policy, gather(policy(request) for request in requests))


def requests_for(tokenizer, n, rng=None, max_tokens=20):
    """Requests with contexts and limits of many lengths."""
    rng = rng or random.Random(0)
    requests = []
    for seed in range(n):
        length = rng.randint(2, 30)
        context = [rng.randrange(4, len(tokenizer)) for _ in range(length)]
        requests.append(SampleRequest(context, rng.randint(1, max_tokens), seed))
    return requests
