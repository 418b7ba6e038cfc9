"""Evaluation questions that occur in training data."""

import pytest

from agentic_prompting.data import (
    contamination_report,
    load_task,
)
from support.data_rows import REAL, needs_real_files


def test_contamination_is_exact_near_or_none():
    words = "one two three four five six seven eight nine ten eleven twelve thirteen"
    training = [{"question": "How many, then?"}, {"question": f"before {words} after"}]
    rows = [
        {"id": "same", "question": "how MANY then"},
        {"id": "near", "question": f"Other {words} end"},
        {"id": "short", "question": "one two three four five six"},
        {"id": "new", "question": "Something else?"},
    ]
    report = contamination_report(rows, training)
    assert (report.exact, report.near, report.rows) == (("same",), ("near",), 4)
    assert "1 of 4 evaluation questions are training questions, 1 more" in str(report)
    with pytest.raises(ValueError, match="nothing to compare"):
        contamination_report(rows, [])


@needs_real_files
def test_the_released_gsm8k_evaluation_is_mostly_gsm8k_train(tmp_path):
    rows = load_task("prompt_r1", data_files=str(REAL / "eval" / "gsm8k.parquet"))
    gsm8k = REAL.parent / "prorefine"
    train = load_task("gsm8k", "train", data_files=str(gsm8k / "gsm8k_train.jsonl"))
    test = load_task("gsm8k", "test", data_files=str(gsm8k / "gsm8k_test.jsonl"))
    assert (train.num_rows, test.num_rows) == (7_473, 1_319)
    assert len(contamination_report(rows, train).exact) == 111
    assert len(contamination_report(rows, test).exact) == 17
