"""What `headroom` said, in the report of a run: beside what came, as a picture, and alone."""

import json
import random

import pytest

from agentic_prompting.cli import main
from agentic_prompting.evaluation.headroom_figures import HEADROOM_FILE, HeadroomFigures
from agentic_prompting.evolution import EvolveConfig
from agentic_prompting.report import plot_headroom, write_report
from agentic_prompting.report.headroom_comparison import compare_with_headroom
from agentic_prompting.report.run_summary import RunSummary
from support.browser import record, write_run
from support.evolving import ROWS, SETTINGS, run
from support.pages import block

RNG = random.Random(0)
INTERVAL = {"mean": 0.4, "low": 0.3, "high": 0.5, "n": 64}
MEASURED = {
    "delta": 0.1,
    "calls": {"signal": 500, "requests": 512},
    "cost_usd": 0.25,
    "signal": {
        "group_size": 8,
        "differing": INTERVAL,
        "lost_to_form": None,
        "pass_at": {"1": INTERVAL, "8": {**INTERVAL, "mean": 0.45}},
        "sentence": "worth it: 40% of groups",
    },
    "requests": {
        "names": ["plain", "other"],
        "each": {"plain": INTERVAL, "other": INTERVAL},
        "low": 0.6,
        "high": 0.9,
        "gain": {"mean": 0.2, "low": 0.1, "high": 0.3, "n": 64},
        "sentence": "the best of 2 for each row between 0.6 and 0.9",
    },
}


@pytest.fixture
def measured(tmp_path):
    (tmp_path / HEADROOM_FILE).write_text(json.dumps(MEASURED))
    return tmp_path


def test_the_run_is_beside_what_headroom_said(measured):
    records = []
    for step in (0, 5):
        for number in range(16):
            right = number < 8 * (1 + (step > 0)) and number % 2 == 0
            answer = {"answer": "Nairobi", "answers": ["Nairobi" if right else "Lagos"]}
            group = {"question": f"question {number // 8}", "rewards": {"a": float(right)}}
            records.append(
                record(0, RNG, 3, step=step, status="answered", cost_usd=0.25, **answer, **group)
            )
    write_run(measured, records)
    rows = {row.name.split(":")[0]: row for row in compare_with_headroom(RunSummary.read(measured))}
    assert rows["floor"].predicted == "0.400 [0.300, 0.500]"
    assert rows["floor"].result == "0.250 exact match in the first step"
    assert rows["ceiling"].predicted == "0.600 to 0.900"
    assert rows["ceiling"].result == "0.500 exact match in the last step"
    assert rows["groups of 8 with a gradient"].result.startswith("0.750 [")
    spending = rows["calls and dollars"]
    assert spending.predicted == "1,012 calls, $0.2500" and "$8.0000" in spending.result


def test_held_out_scores_take_precedence(measured):
    write_run(measured, [record(0, RNG, 3, step=0, status="answered")])
    scores = {"exact_match_before": 0.2, "interval_before": [0.1, 0.3]}
    scores |= {"exact_match_after": 0.9, "interval_after": [0.8, 0.95]}
    (measured / "summary.json").write_text(json.dumps(scores))
    rows = compare_with_headroom(RunSummary.read(measured))
    assert rows[0].result == "0.200 [0.100, 0.300], before"
    assert rows[3].result == "0.900 [0.800, 0.950], after"


def test_the_gain_of_an_evolution_is_held_out(tmp_path):
    """The mean over the prompts of a step would say less than the best one gained."""
    gain = {**INTERVAL, "mean": 0.5}
    prompts = {"gain": gain, "verdict": "worth it", "sentence": "worth it", "scores": []}
    measured = {"delta": 0.1, "calls": {"prompts": 9}, "cost_usd": 0, "prompts": prompts}
    (tmp_path / HEADROOM_FILE).write_text(json.dumps(measured))
    result = run(
        config=EvolveConfig(**{**vars(SETTINGS), "steps": 3}),
        checkpoint=tmp_path / "state.json",
        eval_rows=ROWS,
    )
    first, best = result.population.members[0], result.population.members[result.best.id]
    (row, _) = compare_with_headroom(RunSummary.read(tmp_path))
    expected = f"{best.held_out['mean'] - first.held_out['mean']:+.3f}"
    assert row.result.startswith(expected) and "held-out rows" in row.result


def test_the_page_has_a_section_of_it(measured):
    write_run(measured, [record(0, RNG, 3, step=0, status="answered")])
    page = write_report(measured)
    data = block(page.read_text(), "headroom")
    assert ["signal", "worth it: 40% of groups"] in data["verdicts"]
    assert {row["name"] for row in data["rows"]} >= {"calls and dollars"}
    assert (page.parent / "headroom.png").read_bytes().startswith(b"\x89PNG")


def test_a_measurement_alone_is_reported(measured, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["report", str(measured)])
    assert ended.value.code == 0, capsys.readouterr().err


def test_a_run_without_a_measurement_has_no_section(tmp_path):
    write_run(tmp_path, [record(0, RNG, 3, step=0, status="answered")])
    assert compare_with_headroom(RunSummary.read(tmp_path)) == []
    assert 'id="data-headroom"' not in write_report(tmp_path, pictures=False).read_text()


def test_nothing_measured_is_no_picture(tmp_path):
    plot_headroom(HeadroomFigures(), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
