"""`benchmarks/reliability/first_hour.py`: a part and some mistakes of the hour, played; how lines
are counted.
"""

import json

import pytest

from benchmarks.reliability import first_hour


def test_a_small_part_is_played(capsys):
    assert first_hour.main(["--json", "--only", "data", "misspelt option", "missing column"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert (results["long_errors"], results["silent"], results["failed_parts"]) == (0, 0, 0)
    part = results["parts"]["data and check-env"]
    assert part["ok"] and part["seconds"] > 0
    lines = {name: mistake["lines"] for name, mistake in results["mistakes"].items()}
    assert lines == {"misspelt option": 1, "missing column": 1}


def test_there_are_thirty_mistakes_and_each_needs_a_part():
    needed_parts = {mistake.needs for mistake in first_hour.MISTAKES.values()}
    assert len(first_hour.MISTAKES) >= 30 and needed_parts <= {"", *first_hour.PARTS}


def test_a_silent_or_long_mistake_is_counted(monkeypatch, capsys):
    outcomes = {
        "check-env": (0, "", 1.0),
        "ask": (1, "it does not answer: see --environment-base-url\n" * 4, 1.0),
        "model.py": (0, "", 1.0),
    }
    monkeypatch.setattr(first_hour, "run_line", lambda words, folder: outcomes[words[0]])
    results = first_hour.play(["missing file", "wrong address"], log=lambda line: None)
    assert (results["long_errors"], results["silent"], [*results["parts"]]) == (1, 1, ["model"])
    assert (
        results["mistakes"]["wrong address"]["said"]
        == ["it does not answer: see --environment-base-url"] * 4
    )


@pytest.mark.parametrize(("status", "silent"), [(0, 0), (1, 1)])
def test_a_warning_that_a_run_survives_is_told(monkeypatch, status, silent):
    outcomes = {
        "flat.py": (status, "the reward is flat: every reward is 0.5\n", 1.0),
        "model.py": (0, "", 1.0),
    }
    monkeypatch.setattr(first_hour, "run_line", lambda words, folder: outcomes[words[0]])
    assert first_hour.play(["flat reward"], log=lambda line: None)["silent"] == silent


PROGRESS_AND_WARNING = """\
Loading weights: 100%|
/x.py:1: FutureWarning: y
  warnings.warn(
wrong
"""
TRACEBACK = """\
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    f()
ValueError: no
"""
CHAINED_TRACEBACKS = """\
Traceback (most recent call last):
  File
KeyError: 1

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File
ValueError: a
b
"""


@pytest.mark.parametrize(
    ("printed", "lines"),
    [("one line\n", 1), (PROGRESS_AND_WARNING, 1), (TRACEBACK, 1), (CHAINED_TRACEBACKS, 4)],
    ids=["one line", "progress and warning", "traceback", "chained tracebacks"],
)
def test_lines_are_those_that_a_reader_has_to_read(printed, lines):
    assert len(first_hour.lines_to_read(printed)) == lines
