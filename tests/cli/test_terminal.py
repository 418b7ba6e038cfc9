"""What a command prints while it works."""

import time

from agentic_prompting.cli import terminal


def test_a_log_has_a_line_for_what_takes_long(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "_SECONDS_IN_SILENCE", 0.05)
    with terminal.show_progress("loading the questions"):
        time.sleep(0.5)
    assert capsys.readouterr().err.count("loading the questions") == 1
    with terminal.show_progress("loading the questions"):
        pass
    time.sleep(0.2)
    assert capsys.readouterr().err == "", "nothing about what is over soon"
