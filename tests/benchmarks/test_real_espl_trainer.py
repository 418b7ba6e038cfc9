"""The modes and the table of benchmarks/real/espl_trainer.py."""

import pytest

from agentic_prompting import ESPLConfig
from benchmarks.real import espl_trainer
from benchmarks.real.small_agent import ROLLOUTS


@pytest.mark.parametrize("mode", espl_trainer.MODES)
def test_every_mode_plays_equally_many_rollouts(mode, tmp_path):
    settings = espl_trainer.MODES[mode]
    config = ESPLConfig(
        str(tmp_path),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=ROLLOUTS // 8,
        use_cpu=True,
        bf16=False,
        **settings,
    )
    assert config.generation_batch_size == ROLLOUTS
    assert config.prompts_per_step * config.num_generations == 8
    assert config.evolves == (mode != "weights alone")


def test_the_table_pairs_the_questions():
    before = {"asked": "1100", "correct": "1000", "failed": 0}
    after = {"asked": "1111", "correct": "1111", "failed": 1}
    record = {
        "seed": 5,
        "mode": "joint",
        "before": before,
        "after": after,
        "children": 3,
        "failed": 1,
    }
    weights = {**record, "mode": "weights alone", "after": before}
    lines = espl_trainer.table([record, weights]).splitlines()
    assert lines[-2].startswith("| 5 | weights alone | 0.250")
    assert lines[-1].startswith("| 5 | joint | 0.250")
    assert "+0.750" in lines[-1]
    assert lines[-1].endswith("| 1.000 | 3 | 2 |")
    assert "No run" in espl_trainer.table([])
