"""From rows to records: dropped rows, samples, errors that name the row."""

import json
import logging
import random

import pytest

from agentic_prompting.data import (
    load_task,
)
from support.data_rows import ROWS, released, written


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"prompt": [{"content": "Question: Who?", "role": "user"}]},
            r"row 1 \(line 2\) of .* cannot be read: .*released wrapper",
        ),
        (
            {"prompt": [{"content": "…", "role": "system"}] * 2},
            r"row 1 \(line 2\) of .* cannot be read: .*exactly one user message",
        ),
    ],
)
def test_a_row_that_is_not_as_documented_is_named(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_task(
            "prompt_r1",
            data_files=written(tmp_path, [ROWS["prompt_r1"][0], released("q", ["a"], **change)]),
        )


def test_rows_without_a_gold_are_dropped_and_counted(tmp_path, caplog):
    rows = [
        *ROWS["hotpotqa"],
        {**ROWS["hotpotqa"][0], "answer": None},
        {**ROWS["hotpotqa"][0], "answer": " "},
    ]
    with caplog.at_level(logging.WARNING, "agentic_prompting"):
        assert load_task("hotpotqa", data_files=written(tmp_path, rows)).num_rows == 3
    assert "2 rows" in caplog.text and "dropped" in caplog.text


def test_a_sample_is_seeded_in_drawn_order_and_of_different_questions(tmp_path):
    rows = [{"id": str(i), "question": f"q{i // 2}", "answer": f"a{i}"} for i in range(40)]
    path = written(tmp_path, rows)
    sample = load_task("2wiki", n=10, seed=3, data_files=path)
    assert sample["id"][:] == [str(2 * i) for i in random.Random(3).sample(range(20), 10)]
    assert load_task("2wiki", n=10, seed=3, data_files=path)["id"][:] == sample["id"][:]
    assert load_task("2wiki", n=10, seed=4, data_files=path)["id"][:] != sample["id"][:]
    assert len(set(load_task("2wiki", n=20, data_files=path)["question"])) == 20
    with pytest.raises(ValueError, match="n=21.*20"):
        load_task("2wiki", n=21, data_files=path)
    with pytest.raises(ValueError, match="n must be at least 1"):
        load_task("2wiki", n=0, data_files=path)


def test_how_a_sample_was_drawn_is_recorded(tmp_path):
    path = written(tmp_path, ROWS["gsm8k"])
    meta = json.loads(load_task("gsm8k", n=2, seed=7, data_files=path)["meta"][0])
    assert meta["sample"] == {"n": 2, "seed": 7, "of": 3}
    assert "sample" not in json.loads(load_task("gsm8k", data_files=path)["meta"][0])


@pytest.mark.parametrize("question", [None, "  ", float("nan")])
def test_a_row_without_a_question_is_named(question, tmp_path):
    rows = [ROWS["2wiki"][0], {"id": "1", "question": question, "answer": "a"}]
    with pytest.raises(ValueError, match=r"1 row of .*'question'.*row 1 \(line 2\)"):
        load_task("2wiki", data_files=written(tmp_path, rows))


def test_a_question_that_is_no_text_is_named(tmp_path):
    rows = [ROWS["2wiki"][0], {"id": "1", "question": ["a"], "answer": "a"}]
    with pytest.raises(ValueError, match=r"row 1 \(line 2\).*`question`"):
        load_task("2wiki", data_files=written(tmp_path, rows))


def test_all_rows_without_a_question_are_counted(tmp_path, monkeypatch):
    """They are refused at once, by the name of the user's column."""
    monkeypatch.chdir(tmp_path)
    lines = [f"ticket {i},reply" if i % 4 else " ,reply" for i in range(30)]
    (tmp_path / "mine.csv").write_text("Ticket text,Reply\n" + "\n".join(lines) + "\n")
    with pytest.raises(ValueError) as refused:
        load_task("mine.csv", columns={"question": "Ticket text", "answer": "Reply"})
    message = str(refused.value)
    assert "8 rows of mine.csv" in message and "'Ticket text'" in message
    assert "row 0 (line 2), row 4 (line 6)" in message and "3 other rows" in message
    assert "\n" not in message and "`question`" not in message


@pytest.mark.parametrize("golds", ['["a", {"b": 1}]', "[True, 'a']", '["a", ["b"]]'])
def test_mixed_types_among_answers_are_named(golds, tmp_path):
    rows = [ROWS["popqa"][0], {**ROWS["popqa"][1], "possible_answers": golds}]
    with pytest.raises(
        ValueError, match=r"row 1 \(line 2\) of .*must be a text or a number, got (dict|bool|list)"
    ):
        load_task("popqa", split="test", data_files=written(tmp_path, rows))


def test_numbers_among_answers_are_texts(tmp_path):
    rows = [{**ROWS["popqa"][0], "possible_answers": '["a", 3]'}]
    assert load_task("popqa", split="test", data_files=written(tmp_path, rows))["answers"][:] == [
        ["a", "3"]
    ]


def test_an_empty_cell_is_no_id(tmp_path):
    """Rows of one empty id would be taken for one another where rows are found by it."""
    (tmp_path / "mine.csv").write_text("id,question,answer\n,a?,x\nb,b?,x\n  ,c?,x\n")
    assert load_task(str(tmp_path / "mine.csv"))["id"] == ["mine-0", "b", "mine-2"]
