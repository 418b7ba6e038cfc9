"""Which settings and weights make another run."""

from types import SimpleNamespace

import torch

from agentic_prompting.rollout import (
    AgentSpec,
    Limits,
    as_environment,
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


def test_an_edited_environment_is_another_run(tmp_path):
    """Replies of the old code would stand in episodes of the new one."""
    file = tmp_path / "my_shop.py"

    def describe(text):
        file.write_text(text)
        names = {"__name__": "my_shop"}
        exec(compile(text, str(file), "exec"), names)
        args = SimpleNamespace(seed=0, num_generations=2, generation_batch_size=4, world_size=1)
        environment = as_environment(names["step"])
        return describe_run(AgentSpec(), Limits(), environment, 2, args)

    code = "def step(rollout):\n    return 'closed'\n"
    assert describe(code) == describe("# A remark.\n" + code)
    assert describe(code) != describe(code.replace("closed", "open"))


def test_other_weights_have_another_fingerprint():
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 40)
    before = fingerprint_weights(model)
    assert fingerprint_weights(model) == before
    with torch.no_grad():
        model.weight += 1e-4
    assert fingerprint_weights(model) != before
