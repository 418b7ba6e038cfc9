"""ProgressLines of progress in a file or a pipe say how long it still takes, as a bar on a terminal
does.
"""

from functools import partial

from transformers import TrainerState

from agentic_prompting.rollout import progress
from agentic_prompting.trainers import callbacks


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
    callback = callbacks.OneLineProgress()
    callback.on_train_begin(None, TrainerState(max_steps=8, global_step=8), None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "resuming after step 8 of 8"
    assert "nothing is left" in lines[1] and "max_steps" in lines[1]


def test_the_line_of_a_step_says_how_long_the_others_take(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    callback = callbacks.OneLineProgress()
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
