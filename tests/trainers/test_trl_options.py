"""TRL's options through conversations of several turns: one training each, and the page's table of
the same list.
"""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from agentic_prompting import MultiTurnGRPOConfig
from agentic_prompting.rewards import PromptR1Reward, exact_match_reward
from agentic_prompting.rollout import BatchEngine
from support.training import Acts, trainer_for

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "trl_script.md"
LORA = {"peft_config": LoraConfig(r=4, target_modules="all-linear")}
TWO = {"reward_funcs": [PromptR1Reward(), exact_match_reward]}
# Options of the configuration, and arguments of the trainer, by the name in the table.
TRAINED = {
    "LoRA": ({}, LORA),
    "full weights, GRPO with a KL term": ({"loss_type": "grpo", "beta": 0.04}, {}),
    "BNPO": ({"loss_type": "bnpo"}, {}),
    "Dr. GRPO": ({"loss_type": "dr_grpo", "scale_rewards": "none"}, {}),
    "DAPO with clip-higher": (
        {"loss_type": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": True},
        {},
    ),
    "two-sided clipping": ({"delta": 4.0}, {}),
    "CISPO": ({"loss_type": "cispo", "epsilon_high": 5.0}, {}),
    "SAPO": ({"loss_type": "sapo"}, {}),
    "VESPO": ({"loss_type": "vespo"}, {}),
    "GSPO": ({"importance_sampling_level": "sequence"}, {}),
    "LUSPO": ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, {}),
    "entropy bonus": ({"entropy_coef": 0.01}, {}),
    "adaptive entropy bonus": ({"use_adaptive_entropy": True}, {}),
    "only tokens of high entropy": ({"top_entropy_quantile": 0.5}, {}),
    "rewards normalised one by one (GDPO)": (
        {"multi_objective_aggregation": "normalize_then_sum"},
        TWO,
    ),
    "several updates from a batch": ({"num_iterations": 2}, {}),
    "off-policy masking": ({"off_policy_mask_threshold": 0.5}, {}),
}


def table():
    """The page's table."""
    lines = ["| | trained with |", "|---|---|"]
    for name, (options, arguments) in TRAINED.items():
        shown = [f"`{key}={value!r}`" for key, value in options.items()]
        shown += ["`peft_config=LoraConfig(...)`"] * (arguments is LORA) + [
            "two reward functions"
        ] * (arguments is TWO)
        lines.append(f"| {name} | {', '.join(shown) or 'the defaults'} |")
    return "\n".join(lines)


def test_the_page_has_what_was_trained():
    assert table() in PAGE.read_text(encoding="utf-8"), f"copy this into {PAGE}:\n{table()}"


@pytest.mark.parametrize("name", TRAINED)
def test_trained_with_masks_over_several_turns(tiny_policy, rows, tmp_path, name):
    options, arguments = TRAINED[name]
    trainer = trainer_for(tiny_policy, tmp_path, rows, options=arguments, max_steps=1, **options)
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    before = {one: tensor.clone() for one, tensor in trainer.model.state_dict().items()}
    trainer.train()
    assert trainer.state.global_step == 1
    (batch,) = trainer._buffered_inputs[:1]
    for row in batch["tool_mask"].tolist():  # the agent's turn, the reply, the agent's turn
        ends = "".join(map(str, row)).rstrip("0")
        assert ends.strip("1") and set(ends.strip("1")) == {"0"}
    after = trainer.model.state_dict()
    changed = {one for one, tensor in before.items() if not torch.equal(tensor, after[one])}
    assert changed and all(after[one].isfinite().all() for one in changed)
    assert all("lora_" in one for one in changed) == (arguments is LORA)


def test_trls_own_limit_of_calls_is_refused():
    with pytest.raises(ValueError, match="max_tool_calling_iterations=3.*max_turns"):
        MultiTurnGRPOConfig("x", max_tool_calling_iterations=3, use_cpu=True, bf16=False)
