"""A run keeps its settings, without secrets, for `plan --from`."""

import json

from peft import LoraConfig

from agentic_prompting.trainers.settings_file import SETTINGS_FILE, RunSettings
from support.training import trainer_for


def test_a_run_keeps_its_settings(tiny_policy, rows, tmp_path):
    adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = trainer_for(
        tiny_policy,
        tmp_path,
        rows,
        options={"peft_config": adapter},
        max_steps=1,
        hub_token="hf_" + "x" * 34,
    )
    trainer.train()
    settings = RunSettings.read(tmp_path)
    assert settings.model == str(tiny_policy) and settings.rows == len(rows)
    assert settings.processes == 1 and settings.args["max_steps"] == 1
    assert settings.args["max_turn_tokens"] == 24
    assert settings.peft_config.r == 2 and settings.peft_config.target_modules == {"q_proj"}
    text = (tmp_path / SETTINGS_FILE).read_text()
    assert "x" * 34 not in text and json.loads(text)


def test_weights_without_adapter_have_none(tiny_policy, rows, tmp_path):
    trainer_for(tiny_policy, tmp_path, rows, max_steps=1).train()
    assert RunSettings.read(tmp_path).peft_config is None
    # Without records there is no pilot.
    trainer_for(tiny_policy, tmp_path / "b", rows, max_steps=1, rollouts_max_mb=0).train()
    assert not (tmp_path / "b" / SETTINGS_FILE).exists()
