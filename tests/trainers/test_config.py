"""Training arguments."""

import math

import pytest

from agentic_prompting import MultiTurnGRPOConfig
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
    with pytest.raises(ValueError, match="of 8: make that 6 or 9 .per_device_train_batch_size x"):
        MultiTurnGRPOConfig(
            str(tmp_path),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=8,
            num_generations=3,
        )
