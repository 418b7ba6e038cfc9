"""The dtype in which a trained agent is loaded on a CPU."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentic_prompting import agent
from agentic_prompting.agent import PromptAgent
from agentic_prompting.local import precision
from agentic_prompting.rollout import AgentSpec


@pytest.fixture(scope="module")
def saved_in_bf16(tmp_path_factory, tiny_policy):
    folder = tmp_path_factory.mktemp("bf16")
    AutoModelForCausalLM.from_pretrained(tiny_policy, dtype="bfloat16").save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_policy).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("has_bf16", "options", "expected"),
    [
        (False, {}, torch.float32),
        (True, {}, torch.bfloat16),
        (False, {"dtype": "bfloat16"}, torch.bfloat16),
    ],
)
def test_an_agent_is_loaded_in_a_fast_dtype(
    saved_in_bf16, monkeypatch, has_bf16, options, expected
):
    monkeypatch.setattr(precision, "has_bf16_instructions", lambda: has_bf16)
    monkeypatch.setattr(precision.platform, "machine", lambda: "x86_64")
    models = []
    monkeypatch.setattr(agent, "local_policy", lambda model, *_, **__: models.append(model))
    PromptAgent.from_pretrained(saved_in_bf16, spec=AgentSpec(), **options)
    assert models[0].dtype == expected
