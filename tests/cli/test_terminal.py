"""What a command prints while it works."""

import time

from agentic_prompting.cli import terminal
from agentic_prompting.cli.terminal import print_answer, print_turns
from agentic_prompting.rollout import Rollout, Turn


def test_a_log_has_a_line_for_what_takes_long(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "_SECONDS_IN_SILENCE", 0.05)
    with terminal.show_progress("loading the questions"):
        time.sleep(0.5)
    assert capsys.readouterr().err.count("loading the questions") == 1
    with terminal.show_progress("loading the questions"):
        pass
    time.sleep(0.2)
    assert capsys.readouterr().err == "", "nothing about what is over soon"


def test_a_long_answer_of_a_program_is_printed_once(capsys):
    text = "a" * 3000 + "middle" + "b" * 3000
    rollout = Rollout([1], row={"question": "q"}, counts={"program/calls": 1})
    rollout.turns = [Turn(text, "act", True)]
    rollout.returned = {"answer": text}
    rollout.status = "answered"
    print_turns(rollout)
    print_answer(rollout)
    out = capsys.readouterr().out
    assert "middle" not in out and len(out) < 4500
    rollout.returned = {"answer": "Lima"}
    print_answer(rollout)
    assert "Lima" in capsys.readouterr().out
