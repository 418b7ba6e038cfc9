"""Lines of progress say how long a run still takes, what it costs, and are on the disk at once."""

from functools import partial

import pytest
from transformers import TrainerCallback, TrainerState

from agentic_prompting.report import RunSummary
from agentic_prompting.rollout import BatchEngine, progress
from agentic_prompting.trainers.one_line_progress import OneLineProgress, log_line
from support.training import Acts, trainer_for


def test_lines_of_long_work_say_how_long_it_still_takes(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        progress, "PrintInterval", partial(progress.PrintInterval, clock=lambda: now[0])
    )
    lines = progress.ProgressLines(10, "rollouts", done=2)
    for _ in range(8):
        now[0] += 61
        lines.update()
    assert capsys.readouterr().err.splitlines() == [
        "rollouts: 3 of 10",
        "rollouts: 4 of 10",
        "rollouts: 5 of 10, about 5 min left",
        "rollouts: 6 of 10, about 4 min left",
        "rollouts: 7 of 10, about 3 min left",
        "rollouts: 8 of 10, about 2 min left",
        "rollouts: 9 of 10, about 61 s left",
        "rollouts: 10 of 10",
    ]


def test_a_finished_run_says_that_nothing_is_left(capsys):
    callback = OneLineProgress()
    callback.on_train_begin(None, TrainerState(max_steps=8, global_step=8), None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "resuming after step 8 of 8"
    assert "nothing is left" in lines[1] and "max_steps" in lines[1]


def test_the_line_of_a_step_says_how_long_the_others_take(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    callback = OneLineProgress()
    state = TrainerState(max_steps=24, global_step=4)
    callback.on_train_begin(None, state, None)  # of a run that goes on after step 4
    for step in (5, 24):
        now[0] += 3
        state.global_step = step
        callback.on_log(None, state, None, {"reward": 0.5})
    callback.on_train_end(None, state, None)
    assert capsys.readouterr().out.splitlines() == [
        "resuming after step 4 of 24",
        "step 5: reward 0.500, about 57 s left",
        "step 24: reward 0.500",
    ]


@pytest.mark.parametrize(
    ("cost", "shown"),
    [(0.0000046, "$0.0000046"), (0.0004, "$0.00040"), (0.0123, "$0.0123"), (3.456, "$3.4560")],
)
def test_small_costs_are_shown_with_more_digits(cost, shown):
    assert (
        log_line({"reward": 1.0, "environment/cost_usd": cost}, 3)
        == f"step 3: reward 1.000, cost {shown}"
    )
    assert "cost" not in log_line({"reward": 1.0, "environment/cost_usd": 0.0}, 3)


def test_the_log_is_on_the_disk_at_once(tiny_policy, rows, tmp_path):
    """Without a tracker and a checkpoint, however the run ends; the report has its curves."""
    trainer = trainer_for(tiny_policy, tmp_path, rows, max_steps=2, logging_steps=1)
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    seen = []

    class Watching(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            seen.append(
                [entry["step"] for entry in RunSummary.read(tmp_path).history["optimisation"]]
            )

    trainer.add_callback(Watching())
    trainer.train()
    assert seen[:2] == [[1], [1, 2]] and not list(tmp_path.glob("**/trainer_state.json"))
    first, last = RunSummary.read(tmp_path).history["optimisation"]
    assert {"loss", "grad_norm", "entropy", "learning_rate"} < set(first)
    assert last["loss"] == trainer.state.log_history[1]["loss"]
