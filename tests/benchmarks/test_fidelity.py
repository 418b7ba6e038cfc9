"""The papers against the code: `benchmarks/fidelity/papers.py`, and what docs/fidelity.md says of
it.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fidelity import prompt_r1
from benchmarks.fidelity.check import rows_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def printed():
    command = [sys.executable, "-m", "benchmarks.fidelity.papers", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.stdout, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1]) | {"code": run.returncode}


def test_every_row_holds(printed):
    assert printed["wrong"] == [] and printed["false"] == 0 and printed["code"] == 0
    assert printed["rows"] >= 80
    assert {row["paper"] for row in printed["all"]} == {
        "Prompt-R1",
        "E-SPL",
        "ProRefine",
    }
    assert all(rule["why"] for rule in printed["untested"])


def test_no_row_is_there_twice(printed):
    rows = [(row["paper"], row["at"], row["rule"]) for row in printed["all"]]
    assert len(rows) == len(set(rows))


def test_a_wrong_number_is_a_false_row(monkeypatch):
    """The script can fail: a reward with another coefficient is found."""
    rewards = [
        prompt_r1.reward_weights,
        prompt_r1.reward_examples,
        prompt_r1.random_rewards,
        prompt_r1.other_weights,
    ]
    assert all(row["holds"] for row in rows_of("Prompt-R1", rewards))
    monkeypatch.setitem(prompt_r1.WEIGHTS, "gamma", "0.2")
    assert sum(not row["holds"] for row in rows_of("Prompt-R1", rewards)) >= 4


def _checks():
    for section in PAGE.split("\n## ")[1:]:
        paper = section.split(" (")[0]
        for line in section.splitlines():
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if len(cells) == 4 and cells[3] not in ("check", "---"):
                yield paper, cells[0], re.findall(r"`([^`]+)`", cells[3])


def test_the_page_names_a_check_for_every_row(printed):
    checks = list(_checks())
    assert len(checks) > 50
    rows = {
        paper: [f"{row['at']} {row['rule']}" for row in printed["all"] if row["paper"] == paper]
        for paper, _, _ in checks
    }
    for paper, what, named in checks:
        assert named, f"{paper}: {what}"
        for name in named:
            is_file = (ROOT / name).is_file()
            assert is_file or any(name.casefold() in row.casefold() for row in rows[paper]), (
                f"{paper}: {what}: {name}"
            )
