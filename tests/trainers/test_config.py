"""Training arguments."""

from agentic_prompting import MultiTurnGRPOConfig
from agentic_prompting.trainers.config import copy_args


def test_settings_that_follow_from_others_leave_the_callers_as_they_are_and_keep_the_hubs_token(
    tmp_path,
):
    """A plain copy has no token, as what is pickled beside a model must have none."""
    args = MultiTurnGRPOConfig(str(tmp_path), hub_token="hf_own", use_cpu=True, bf16=False)
    changed = copy_args(args, reward_weights=[1.0, 2.0])
    assert changed.hub_token == "hf_own" and changed.reward_weights == [1.0, 2.0]
    assert args.reward_weights is None and changed.output_dir == args.output_dir
