"""With the same completions our gradient is that of `GRPOTrainer` (a part of
benchmarks/fidelity/trl_gradient.py).
"""

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def gradient(monkeypatch):
    from benchmarks.fidelity import trl_gradient

    yield trl_gradient
    for name in [name for name, module in sys.modules.items() if BENCHMARKS in str(module)]:
        del sys.modules[name]


# Every loss, and both values of everything else, with each other where they could meet.
GRID = [
    ("grpo", 0.0, "token", 1),
    ("grpo", 0.1, "sequence", 2),
    ("bnpo", 0.1, "token", 2),
    ("dr_grpo", 0.0, "sequence", 2),
    ("dapo", 0.1, "token", 1),
    ("dapo", 0.0, "sequence", 2),
    ("cispo", 0.1, "token", 2),
    ("sapo", 0.0, "token", 1),
    ("luspo", 0.1, "sequence", 1),
    ("vespo", 0.0, "token", 2),
]


@pytest.mark.parametrize("loss, beta, level, accumulation", GRID)
def test_same_gradient(gradient, tiny_policy, tmp_path, loss, beta, level, accumulation):
    settings = {"loss_type": loss, "beta": beta, "importance_sampling_level": level}
    comparison = gradient.compare(
        {**settings, "gradient_accumulation_steps": accumulation}, tiny_policy, tmp_path
    )
    assert comparison["largest"] > 1e-3, "there is a gradient"
    assert comparison["apart"] <= gradient.ROUNDING * max(1.0, comparison["largest"])


def test_another_setting_is_another_gradient(gradient, tiny_policy, tmp_path):
    """What the comparisons above would see."""
    theirs = gradient.gradients("trl", tiny_policy, tmp_path / "trl", beta=0.1)
    ours = gradient.gradients("ours", tiny_policy, tmp_path / "ours", beta=0.0)
    assert gradient.largest_difference(theirs, ours) > 100 * gradient.ROUNDING


def test_under_autocast_it_is_as_near_as_trl_is_to_itself(gradient, tiny_policy, tmp_path):
    theirs, other_order, ours = (
        gradient.gradients(kind, tiny_policy, tmp_path / kind, order, bf16=True)
        for kind, order in (("trl", 0), ("trl", 1), ("ours", 0))
    )
    noise = gradient.largest_difference(theirs, other_order)
    assert noise > 0 and gradient.largest_difference(theirs, ours) <= noise


def test_a_population_of_one_unchanging_prompt_is_grpo_with_that_system_prompt(
    gradient, tiny_policy, tmp_path
):
    theirs, ours, espl = (
        gradient.gradients(
            kind, tiny_policy, tmp_path / kind, learning_rate=0.05, epsilon=0.2, temperature=1.0
        )
        for kind in ("trl", "ours", "espl")
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, espl, strict=True)), "to the bit"
    assert gradient.largest_difference(theirs, espl) <= gradient.ROUNDING
