"""`gpu_day.py` in miniature: parts in processes of their own, what becomes of a killed one, and the
pages.
"""

import sys

import pytest

from benchmarks import recompute
from benchmarks.lab import Records
from benchmarks.speed import gpu_day, gpu_parts
from support.marks import long

STEP = "step, 0.6B, all weights"
ENGINE = "engine, 0.6B"


def test_a_killed_part_is_recorded_and_the_next_one_runs(tmp_path):
    records = Records(tmp_path / "gpu_day.jsonl.gz")
    gpu_day.measure_parts([STEP, ENGINE], records, miniature=True, limits={STEP: 0.5})
    killed, done = records.read()
    assert killed["status"] == "killed after 0.5 s" and killed["figures"] == {}
    assert done["status"] == "done" and done["figures"]["mixed"]["engine_tokens_per_s"] > 0
    assert f"| {STEP} | not measured (killed after 0.5 s; a CPU, in miniature, " in gpu_day.table(
        [killed, done]
    )


@long
@pytest.mark.parametrize("name", gpu_day.PARTS)
def test_every_part_runs(name, tmp_path):
    records = Records(tmp_path / "gpu_day.jsonl.gz")
    gpu_day.measure_parts([name], records, miniature=True)
    (record,) = records.read()
    assert record["status"].startswith(("done", "left out")), record
    figures = record.get("figures", {})
    options = gpu_day.PARTS[name].options
    if record["status"] == "done" and gpu_day.PARTS[name].run is gpu_parts.step:
        assert figures["turns"] == 3 and figures["sampled_tokens_per_s"] > 0
        assert ("predicted_gib" in figures) == options.get("predict", False)
        assert figures["type"] == {"zero3": "DEEPSPEED", "fsdp2": "FSDP"}.get(
            options.get("backend"), "NO"
        )


def test_the_day_is_forty_minutes():
    assert sum(part.seconds for part in gpu_day.PARTS.values()) <= 40 * 60


def test_what_is_not_there_is_left_out(monkeypatch):
    monkeypatch.setattr(gpu_day, "has", lambda need: need != "two GPUs")
    record = gpu_day.measure_part("step, 0.6B, LoRA, vLLM server by NCCL", True, 60)
    assert record == {
        "part": "step, 0.6B, LoRA, vLLM server by NCCL",
        "status": "left out: needs two GPUs",
    }


def test_a_failed_part_keeps_what_it_had_found(monkeypatch, tmp_path):
    script = tmp_path / "part.py"
    script.write_text(
        'print(\'{"one": 1}\', flush=True); print(\'{"one": 1, "two": 0.5}\'); raise '
        "SystemExit('burnt')"
    )
    monkeypatch.setattr(gpu_day, "COMMAND", (sys.executable, str(script)))
    record = gpu_day.measure_part(STEP, True, 60)
    assert record["status"] == "failed with status 1" and record["error"] == "burnt"
    assert gpu_day.figures_text(record) == "one 1, two 0.5"


def test_pages_are_made_of_records(monkeypatch):
    """Without records each row is not measured; a later failure does not hide figures."""
    row = {"part": ENGINE, "device": "a GPU", "date": "2026-12-01"}
    found = [
        {**row, "status": "done", "figures": {"mixed": {"speedup": 2.123456}}},
        {**row, "status": "killed"},
    ]
    page = "On a GPU: <!-- recomputed: gpu_day.engine -->old<!-- /recomputed -->."
    for records, text in (
        ([], "not measured"),
        (found, "mixed (speedup 2.123) (a GPU, 2026-12-01)"),
    ):
        monkeypatch.setattr(recompute.Records, "read", lambda self, records=records: records)
        assert text in recompute.recompute(page)[0]
    assert gpu_day.table([]).count("| not measured |") == len(gpu_day.PARTS)
