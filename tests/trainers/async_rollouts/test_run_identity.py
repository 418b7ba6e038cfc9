"""Which settings and weights make another run."""

from types import SimpleNamespace

import torch

from agentic_prompting.rollout import (
    AgentSpec,
    Limits,
)
from agentic_prompting.trainers.async_rollouts.run_identity import describe_run, fingerprint_weights


def test_a_time_limit_may_change_on_resume():
    identities = []
    for seconds in (60, 1800):
        limits = Limits(
            step_timeout=seconds, environments={"shop": {"max_turns": 3, "step_timeout": seconds}}
        )
        args = SimpleNamespace(seed=0, num_generations=2, generation_batch_size=4, world_size=1)
        identities.append(describe_run(AgentSpec(), limits, None, 2, args))
    assert identities[0] == identities[1]
    assert identities[0]["limits"]["environments"] == {"shop": {"max_turns": 3}}


def test_other_weights_have_another_fingerprint():
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 40)
    before = fingerprint_weights(model)
    assert fingerprint_weights(model) == before
    with torch.no_grad():
        model.weight += 1e-4
    assert fingerprint_weights(model) != before
