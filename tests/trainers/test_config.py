"""Training arguments."""

import math

import pytest

from agentic_prompting import ESPLConfig, MultiTurnGRPOConfig
from agentic_prompting.trainers.config import copy_args


def test_copied_arguments_keep_the_hub_token(tmp_path):
    """A plain copy has no token, because a pickle beside a model must have none."""
    args = MultiTurnGRPOConfig(str(tmp_path), hub_token="hf_own", use_cpu=True, bf16=False)
    copied = copy_args(args, reward_weights=[1.0, 2.0])
    assert copied.hub_token == "hf_own"
    assert copied.reward_weights == [1.0, 2.0]
    assert copied.output_dir == args.output_dir
    assert args.reward_weights is None


@pytest.mark.parametrize("name", ["budget_usd", "budget_tokens"])
@pytest.mark.parametrize("budget", [0, -1, math.nan])
def test_a_budget_can_be_reached(tmp_path, name, budget):
    with pytest.raises(ValueError, match=name):
        MultiTurnGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **{name: budget})


def test_batch_sizes_that_work_are_named(tmp_path):
    with pytest.raises(ValueError, match="8.*6 or 9.*per_device_train_batch_size"):
        MultiTurnGRPOConfig(
            str(tmp_path),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=8,
            num_generations=3,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generation_kwargs": {"no_repeat_ngram_size": 3}}, "generation_kwargs.*ignored"),
        ({"vllm_structured_outputs_regex": "a+"}, "vllm_structured_outputs_regex.*ignored"),
        ({"vllm_server_base_url": "http://a:8000"}, "vllm_server_base_url.*vllm_mode='server'"),
        (
            {"vllm_server_base_url": "http://a:8000", "use_vllm": True},
            "vllm_server_base_url.*vllm_mode='server'",
        ),
    ],
    ids=str,
)
def test_options_without_an_effect_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        MultiTurnGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **options)


def test_a_phase_needs_alternating_phases(tmp_path):
    with pytest.raises(ValueError, match="phase_steps=4 would be ignored"):
        ESPLConfig(str(tmp_path), use_cpu=True, bf16=False, phase_steps=4)


def test_a_cache_without_an_effect_is_warned_of(tmp_path, caplog):
    MultiTurnGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, cache_implementation="static")
    assert "cache_implementation='static'" in caplog.text
