"""A run keeps its settings, without secrets, for `plan --from`."""

import json

from datasets import Dataset
from peft import LoraConfig

from agentic_prompting.trainers.settings_file import SETTINGS_FILE, RunSettings, describe_inputs
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


def test_a_resume_with_other_rows_is_warned_of(tiny_policy, rows, tmp_path, caplog):
    """It trains on, because that may be wanted, but logs and records mix both."""

    def resume(rows, steps, **options):
        trainer = trainer_for(
            tiny_policy,
            tmp_path,
            rows,
            options=options,
            max_steps=steps,
            save_strategy="steps",
            save_steps=1,
        )
        trainer.train(resume_from_checkpoint=True)

    resume(rows, 1)
    resume(rows, 2)
    assert "after a change" not in caplog.text
    changed = rows.map(lambda row: {"answers": [*row["answers"], "another"]})
    resume(changed, 3)
    assert caplog.text.count("resumed after a change of the training rows") == 1
    caplog.clear()
    resume(changed, 4)
    assert "after a change" not in caplog.text


def test_a_resume_says_which_changed_arguments_have_no_effect(tiny_policy, rows, tmp_path, caplog):
    """The learning rate is that of the checkpoint's schedule, as transformers restores it."""

    def resume(steps, **changes):
        options = {"max_steps": steps, "save_strategy": "steps", "save_steps": 1, **changes}
        trainer = trainer_for(tiny_policy, tmp_path, rows, **options)
        trainer.train(resume_from_checkpoint=True)
        return [
            entry["learning_rate"]
            for entry in trainer.state.log_history
            if "learning_rate" in entry
        ]

    constant = {"lr_scheduler_type": "constant", "logging_steps": 1}
    resume(1, learning_rate=1e-3, **constant)
    assert "no effect" not in caplog.text
    rates = resume(2, learning_rate=1e-5, temperature=0.5, **constant)
    assert "learning_rate 0.001 -> 1e-05 has no effect" in caplog.text and rates[-1] == 1e-3
    assert "resumed with temperature 1.0 -> 0.5" in caplog.text


def test_edited_code_is_another_input(tmp_path):
    file = tmp_path / "my_reward.py"

    def describe(text):
        file.write_text(text)
        names = {"__name__": "my_reward"}
        exec(compile(text, str(file), "exec"), names)
        return describe_inputs(Dataset.from_list([{"question": "q"}]), [names["reward"]], None)

    code = "def reward(completions, **columns):\n    return [1.0] * len(completions)\n"
    first = describe(code)
    assert describe("# A remark.\n" + code) == first
    changed = describe(code.replace("1.0", "0.5"))
    assert {name for name in first if first[name] != changed[name]} == {
        "the code of a reward function"
    }
    assert "the code of the environment" not in first
