"""A run keeps its settings, without secrets, for `plan --from`."""

import json

import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

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
    rates = resume(
        2, learning_rate=1e-5, temperature=0.5, max_turn_tokens=5, reward_weights=[2.0], **constant
    )
    assert "learning_rate 0.001 -> 1e-05 has no effect" in caplog.text and rates[-1] == 1e-3
    assert "resumed with temperature 1.0 -> 0.5" in caplog.text
    assert "max_turn_tokens" in caplog.text
    assert "reward_weights None -> [2.0]" in caplog.text
    caplog.clear()
    resume(
        3, learning_rate=1e-5, temperature=0.5, max_turn_tokens=5, reward_weights=[2.0], **constant
    )
    assert "resumed with temperature" not in caplog.text
    assert "reward_weights" not in caplog.text


def test_warnings_come_back_until_the_next_checkpoint(tiny_policy, rows, tmp_path, caplog):
    """A run that is killed before it has trained on saves no checkpoint with the new settings."""

    def start(rows, is_killed=False, max_steps=2, **changes):
        caplog.clear()
        options = {
            "max_steps": max_steps,
            "save_strategy": "steps",
            "save_steps": 1,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            **changes,
        }
        trainer = trainer_for(tiny_policy, tmp_path, rows, **options)
        if is_killed:
            trainer.add_callback(Killed())
            with pytest.raises(KeyboardInterrupt, match="killed"):
                trainer.train(resume_from_checkpoint=True)
        else:
            trainer.train(resume_from_checkpoint=True)
        return [record.getMessage() for record in caplog.records]

    start(rows, max_steps=1)
    changed_rows = rows.map(lambda row: {"answers": [*row["answers"], "another"]})
    changes = {"learning_rate": 1e-5, "temperature": 0.5}
    for is_killed in (True, True, False):
        messages = " ".join(start(changed_rows, is_killed, **changes))
        assert "learning_rate 0.001 -> 1e-05 has no effect" in messages
        assert "temperature 1.0 -> 0.5" in messages and "the training rows" in messages

    # Trained with them, the next checkpoint has them; the learning rate is still another.
    messages = " ".join(start(changed_rows, max_steps=3, **changes))
    assert "temperature" not in messages and "the training rows" not in messages
    assert "learning_rate 0.001 -> 1e-05 has no effect" in messages


class Killed(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        raise KeyboardInterrupt("killed")


def test_the_rate_in_effect_is_recorded(tiny_policy, rows, tmp_path):
    """In the settings and on the card, also without records and after another resume."""
    options = {"save_strategy": "steps", "save_steps": 1, "rollouts_max_mb": 0}
    trainer_for(tiny_policy, tmp_path, rows, max_steps=1, learning_rate=1e-3, **options).train()
    for steps, changes in ((2, {}), (3, {"rollouts_max_mb": 10})):
        changed = {**options, "learning_rate": 3e-4, "max_steps": steps, **changes}
        trainer = trainer_for(tiny_policy, tmp_path, rows, **changed)
        trainer.train(resume_from_checkpoint=True)
        trainer.save_model()
        card = (tmp_path / "README.md").read_text()
        assert "| `learning_rate` | 0.001 |" in card
        assert trainer.args.learning_rate == 3e-4
    assert RunSettings.read(tmp_path).args["learning_rate"] == 1e-3


def test_a_changed_scheduler_has_an_effect(tiny_policy, rows, tmp_path, caplog):
    options = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 1, "max_steps": 4}
    options["learning_rate"] = 1e-3
    trainer_for(tiny_policy, tmp_path, rows, lr_scheduler_type="linear", **options).train()
    again = trainer_for(tiny_policy, tmp_path, rows, lr_scheduler_type="constant", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    rates = [entry["learning_rate"] for entry in again.state.log_history if "loss" in entry]
    assert rates == [1e-3, 7.5e-4, 1e-3, 1e-3]
    assert "resumed with lr_scheduler_type linear -> constant" in caplog.text
    assert "no effect" not in caplog.text


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
