"""E-SPL's data sets."""

import json
import random

import pytest

from agentic_prompting.data import (
    PAIRS,
    TASKS,
    load_task,
)
from support.data_rows import dapo, written


def test_dapo_is_unwrapped_and_each_problem_kept_once(tmp_path):
    rows = [dapo("a", "1"), dapo("b\nc", "2"), dapo("a", "3")]
    loaded = load_task("dapo_math", data_files=written(tmp_path, rows))
    assert loaded["question"][:] == ["a", "b\nc"] and loaded["answers"][:] == [
        ["3"],
        ["2"],
    ]  # the last answer wins


def test_dapo100_is_the_released_codes_shuffle(tmp_path):
    rows = [dapo(f"p{i % 150}", str(i)) for i in range(300)]
    problems = [f"p{i}" for i in range(150)]
    random.Random(42).shuffle(problems)
    assert load_task("dapo100", data_files=written(tmp_path, rows))["question"][:] == problems[:100]


def test_pairs_are_two_sets(hub):
    for name in ("hmmt_feb_2023", "hmmt_feb_2024", "hmmt_feb_2025"):
        answer = 3 if name.endswith("3") else "3/4"  # the years differ in type
        hub.rows[f"MathArena/{name}"] = [
            {"problem": f"{name} {i}", "answer": answer} for i in range(30)
        ]
    hub.rows["MathArena/hmmt_nov_2025"] = [{"problem": "n", "answer": "\\sqrt{2}"}] * 30
    train = load_task("hmmt", "train")
    test = load_task("hmmt", "test")
    expected = [f"hmmt_feb_{year} {i}" for year in (2023, 2024, 2025) for i in range(30)]
    random.Random(42).shuffle(expected)
    assert train["question"][:] == expected and len(set(train["id"])) == 90
    assert set(test["task"]) == {"hmmt_nov25"} and test["answers"][0] == ["\\sqrt{2}"]
    assert [options["split"] for _, _, options in hub.calls] == ["train"] * 4
    with pytest.raises(ValueError, match="hmmt.*'validation'.*train, test"):
        load_task("hmmt", "validation")
    with pytest.raises(ValueError, match="single revision cannot pin"):
        load_task("hmmt", "train", revision="abc")
    assert all(
        part in TASKS and split in TASKS[part].expected_rows
        for of in PAIRS.values()
        for part, split in of.values()
    )


def test_search_parts_are_cut_out_of_the_test_file(hub):
    hub.rows["parquet"] = [
        {"id": f"test_{i}", "question": f"q{i}", "golden_answers": ["a", "b"], "data_source": "x"}
        for i in range(51_713)
    ]
    hotpot = load_task("nq_hotpotqa", "test/hotpotqa", n=64, seed=1)
    assert hotpot.num_rows == 64
    assert all(29_190 <= json.loads(meta)["row"] < 36_595 for meta in hotpot["meta"])
    assert hub.calls[0][2]["columns"] == ["id", "question", "golden_answers", "data_source"]
