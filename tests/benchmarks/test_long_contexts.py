"""Long contexts: memory of a step per token does not grow, observations take none of it in the
head, and a turn of the engine reads its new tokens alone.
"""

import importlib

import pytest

from support.marks import long


@pytest.fixture
def script(monkeypatch):
    # The script chooses the branch of TRL's head for the whole process.
    monkeypatch.setattr("trl.trainer.utils._use_triton", lambda device: False)
    return importlib.reload(importlib.import_module("benchmarks.speed.long_contexts"))


@long
def test_memory_grows_with_the_tokens_and_stays_below_trls(script):
    figures = script.compare_memory((8192, 16384))
    assert figures["memory_growth"] <= 1.1 and figures["over_trl"] <= 1.0


def test_steps_and_turns_are_timed(script, monkeypatch):
    """Ours and TRL's train on the same tokens; what would take too long is left out; no turn reads
    anything again.
    """
    monkeypatch.setattr(script, "PATIENCE", 1e-9)
    measured = script.time_steps((128, 256))
    assert measured["left_out"] == [256] and measured["steps"][128].keys() == {"ours", "trl"}
    assert measured["time_over_trl"] > 0
    measured = script.time_turns(200)
    assert len(measured["turns"]) == script.TURNS and measured["read_again"] == 0


def test_the_page_is_made_of_the_latest_records(script):
    old, new = (
        {"rows": {"8192": {"ours": of, "trl": 100.0}, "16384": {"ours": 90.0, "trl": 180.0}}}
        for of in (9, 50)
    )
    figures = script.memory(
        [{**old, "date": "2026-11-01"}, {**new, "date": "2026-11-02"}, {"steps": {}}]
    )
    assert "| 8,192 | 50 | 100 |" in figures and figures.endswith("Counted on 2026-11-02.")
    assert "takes 0.90 times what 8,192 tokens take; ours takes at most 0.50 times TRL's" in figures
    run = {
        "steps": {"2048": {"ours": 1.0, "trl": 2.0}},
        "left_out": [32768],
        "turn_growth": 4.06,
        "read_again": 0,
    }
    figures = script.times([{**run, "date": "2026-11-03", "machine": "two cores"}])
    assert "| 2,048 | 1.0 | 2.0 | 0.50 |" in figures
    assert "takes more than two minutes: 32,768 tokens" in figures
    assert "0 tokens are read twice" in figures
    assert "4.1 times" in figures
    assert "2026-11-03, two cores." in figures
