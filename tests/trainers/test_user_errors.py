"""What is wrong in an environment or a reward of the user's: said with file and line, and with the
function's name.
"""

import logging
import textwrap

import pytest

from agentic_prompting.rollout import BatchEngine, read_rollouts
from agentic_prompting.trainers import TrainingStopped
from support.training import Acts, trainer_for

SHOP = """
import json
from agentic_prompting.llm import run


def price_of(name):
    return json.loads('{"tea": 4}')[name]


class Shop:
    def step(self, rollout):
        return f"it costs {price_of('coffee')} ."


class Stock:
    def step(self, rollout):
        return {"tea": 4}


class Broken:
    def reset(self, row):
        return json.loads("no json")

    def step(self, rollout):
        return "nothing"


class Closed:
    def reset(self, row):
        return [row]

    def step(self, rollout):
        return "nothing"
"""


@pytest.fixture
def shop(tmp_path, monkeypatch):
    (tmp_path / "corner_shop.py").write_text(textwrap.dedent(SHOP))
    monkeypatch.syspath_prepend(tmp_path)
    import corner_shop

    return corner_shop


def warnings_of(environment, policy, folder, rows, caplog, **changes):
    """The warning about the first failed rollout of a run, and its records."""
    trainer = trainer_for(
        policy, folder, rows, environment=environment, failure_window=9, **changes
    )
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(TrainingStopped, match="every rollout of this run failed"),
    ):
        trainer.train()
    (warning,) = [
        record.message
        for record in caplog.records
        if "rollouts of this batch failed" in record.message
    ]
    return warning, list(read_rollouts(folder / "rollouts"))


def test_an_environments_exception_keeps_its_file_and_line(
    shop, tiny_policy, rows, tmp_path, caplog
):
    """In the record and the first warning the last frame of the user's code; the whole traceback
    once, in a file.
    """
    warning, records = warnings_of(shop.Shop(), tiny_policy, tmp_path / "out", rows, caplog)
    raised = (
        f"the environment raised KeyError: 'coffee' ({tmp_path / 'corner_shop.py'}:7 in price_of)"
    )
    assert raised in warning and "\n" not in warning
    assert {record["error"]["what"] for record in records} == {raised} and len(records) == 8
    (file,) = (tmp_path / "out" / "rollouts").glob("errors-*.txt")
    text = file.read_text()
    assert str(file) in warning and text.count("Traceback (most recent call last)") == 1
    assert "return f\"it costs {price_of('coffee')} .\"" in text
    assert text.strip().endswith("KeyError: 'coffee'")


def test_of_an_exception_in_a_library_the_users_own_frame_is_named(
    shop, tiny_policy, rows, tmp_path, caplog
):
    warning, _ = warnings_of(shop.Broken(), tiny_policy, tmp_path / "out", rows, caplog)
    assert (
        f"reset raised JSONDecodeError: Expecting value: line 1 column 1 (char 0) ({tmp_path}"
        in warning
    )
    assert "corner_shop.py:22 in reset)" in warning


@pytest.mark.parametrize(
    ("kind", "line", "message"),
    [
        ("Stock", 16, "Stock.step ({}) must return an Observation, a str or None, not dict"),
        ("Closed", 29, "Closed.reset ({}) must return the row of the episode, a dict, not list"),
    ],
)
def test_a_wrong_return_type_names_the_users_function(
    shop, tiny_policy, rows, tmp_path, caplog, kind, line, message
):
    warning, _ = warnings_of(getattr(shop, kind)(), tiny_policy, tmp_path / "out", rows, caplog)
    assert message.format(f"{tmp_path / 'corner_shop.py'}:{line}") in warning


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_in_which_every_rollout_failed_does_not_end_well(
    shop, tiny_policy, rows, tmp_path, caplog, steps
):
    """However short: shorter than the window that stops a long one."""
    warnings_of(shop.Shop(), tiny_policy, tmp_path / "out", rows, caplog, max_steps=steps)


def test_a_run_in_which_some_did_not_ends_well(shop, tiny_policy, rows, tmp_path):
    class Moody:
        def __init__(self):
            self.asked = 0

        def step(self, rollout):
            self.asked += 1
            return shop.price_of("tea" if self.asked == 1 else "coffee") and "it costs 4 ."

    trainer = trainer_for(
        tiny_policy, tmp_path / "out", rows, environment=Moody(), failure_window=9
    )
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    trainer.train()
    assert trainer.state.global_step == 2


def test_rollouts_outlive_a_mistake_in_a_reward(tiny_policy, rows, tmp_path):
    def broken(rollout, **columns):
        return [{"right": 1.0}[one.row["verdict"]] for one in rollout]

    trainer = trainer_for(tiny_policy, tmp_path, rows, options={"reward_funcs": broken})
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    with pytest.raises(KeyError) as caught:
        trainer.train()
    source, kept = caught.value.__notes__
    assert "the reward function" in source and "broken (" in source and "KeyError" in source
    assert source.count("test_user_errors.py:") == 2 and "rollouts" in kept
    assert trainer._batch is None, "no later hook takes the failed batch for its own"
    records = list(read_rollouts(tmp_path / "rollouts"))
    assert len(records) == 4
    for record in records:
        assert record["reward"] is None and record["rewards"] == {"broken": None}
