"""What the pages say is what the records in `records/` say, and no figure stands on a page without either."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def benchmark(monkeypatch):
    """A script of `benchmarks/` as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def imported(name):
        __import__(name)
        return sys.modules[name]

    yield imported
    for name in [name for name, module in sys.modules.items() if str(ROOT / "benchmarks") in str(module)]:
        del sys.modules[name]


# --- recompute.py ----------------------------------------------------------------------------------------------------


def test_the_pages_say_what_the_records_say():
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "recompute.py"], capture_output=True, text=True, timeout=60
    )
    wrong = [line for line in done.stdout.splitlines() if "NOT as" in line or "NEITHER" in line]
    assert done.returncode == 0 and not wrong, "\n".join([*wrong, done.stderr])
    assert "README.md: speed: " in done.stdout and "Not recomputed, since no records are shipped" in done.stdout


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("it rose to .961 [.930, .979].", 1),
        ("| 0.945 [0.927, 0.959] | +0.030 [-0.043,\n-0.019] |", 2),
        ("**.082** [+.076, +.087]", 1),
        ("exact match before  0.363   95 % interval 0.307 to 0.424", 1),
        ("<!-- recomputed: league -->\n.961 [.930, .979]\n<!-- /recomputed -->", 0),
        ("<!-- not recomputed: make demo -->.961 [.930, .979]<!-- /not recomputed -->", 0),
        ("read it in [the guide](guide.md), `[0.1, 0.2]`; version 0.31.0 [1, 2]", 0),
    ],
)
def test_a_score_with_an_interval_outside_of_marks_is_found(benchmark, text, found):
    assert len(benchmark("recompute").unmarked(text)) == found


def test_a_figure_within_a_line_is_recomputed(benchmark, monkeypatch):
    recompute = benchmark("recompute")
    monkeypatch.setattr(recompute, "read_records", lambda path: [{"of": path.name}])
    monkeypatch.setitem(recompute.TEXTS, "speed.one", lambda records: records[0]["of"])
    page = "made of <!-- recomputed: speed.one -->old<!-- /recomputed -->, it says"
    assert recompute.recompute(page) == (page.replace("old", "speed.jsonl.gz"), ["speed.one"])


def test_the_table_of_speeds_names_what_misses_its_target_and_what_is_not_recorded(benchmark):
    printed = {"population_ms": 1.5, "population_worst_ms": 7.3}
    record = {"script": "growth.py", "quick": False, "date": "2026-11-22", "printed": printed}
    table = benchmark("recompute").speed([{**record, "printed": {}}, record])
    assert "| 1.5 | <= 5 | yes | full, 11-22 |" in table and "| 7.3 | <= 5 | no: `softmax` weighs each" in table
    assert "(`rollout.py`) |  | <= 1.25 | no record |  |" in table
