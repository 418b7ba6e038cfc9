"""The user's own data: files, frames, data sets and lists."""

import csv
import json

import datasets
import numpy
import pandas
import pytest
from datasets import Dataset

from agentic_prompting.data import (
    as_dataset,
    load_task,
    validate_dataset,
)
from support.data_rows import COLUMNS, written

OWN = [
    {
        "nr": 7,
        "q": " Where is Rome? ",
        "a": ["Italy", "Italia"],
        "level": "easy",
        "context": "long",
    },
    {"nr": 8, "q": "2 + 2?", "a": ["4"], "level": None, "context": "long"},
]

MAP = {"id": "nr", "question": "q", "answers": "a", "difficulty": "level"}


def own_data(kind, tmp_path):
    if kind in (".jsonl", ".parquet"):
        return written(tmp_path, OWN, kind)
    if kind in (".csv", ".tsv"):
        rows = [{**row, "a": json.dumps(row["a"]), "level": row["level"] or ""} for row in OWN]
        path = tmp_path / f"rows{kind}"
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if kind == ".tsv" else ",")
            writer.writeheader(), writer.writerows(rows)
        return path
    kinds = {
        "list": lambda rows: rows,
        "frame": pandas.DataFrame,
        "Dataset": Dataset.from_list,
        "stream": lambda rows: Dataset.from_list(rows).to_iterable_dataset(),
        "splits": lambda rows: datasets.DatasetDict(
            train=Dataset.from_list(rows), test=Dataset.from_list(rows[:1])
        ),
    }
    return kinds[kind](OWN)


@pytest.mark.parametrize(
    "kind", [".jsonl", ".parquet", ".csv", ".tsv", "list", "frame", "Dataset", "stream", "splits"]
)
def test_data_of_ones_own_in_one_line(kind, tmp_path):
    loaded = load_task(own_data(kind, tmp_path), columns=MAP)
    assert loaded.column_names == COLUMNS and loaded["id"][:] == ["7", "8"]
    assert loaded["question"][:] == ["Where is Rome?", "2 + 2?"]
    assert loaded["answers"][:] == [
        ["Italy", "Italia"],
        ["4"],
    ]
    metas = [json.loads(meta) for meta in loaded["meta"]]
    assert [meta["difficulty"] or None for meta in metas] == [
        "easy",
        None,
    ]
    assert "context" not in metas[0]
    assert [meta["row"] for meta in metas] == [0, 1] and all(meta["source"] for meta in metas)
    validate_dataset(loaded)
    assert load_task(own_data(kind, tmp_path), n=1, seed=3, columns=MAP).num_rows == 1


def test_columns_that_are_called_as_ours_need_no_map(tmp_path):
    several = [{"question": "q", "answers": ["a", 3]}]
    one = [{"question": "q", "answer": "[1, 2]"}]
    assert load_task([*several, {"question": "r"}]).num_rows == 1, (
        "no answer: dropped, as in a file"
    )
    assert load_task(several)["answers"][:] == [["a", "3"]]
    assert load_task(several)["id"][:] == ["data-0"]
    assert load_task(one)["answers"][:] == [["[1, 2]"]], "one answer is what it is"
    assert load_task([{"q": "q", "answers": "[1, 2]"}], columns={"question": "q"})["answers"][
        :
    ] == [["1", "2"]]
    loaded = load_task(written(tmp_path, several))
    assert loaded["id"][:] == ["rows-0"] and set(loaded["task"]) == {"rows"}


def test_own_data_by_split_and_in_several_files(tmp_path):
    (tmp_path / "a.csv").write_text("question,answer\nq,a\nr,b\n")
    (tmp_path / "b.jsonl").write_text('{"question": "s", "answers": ["c", "d"]}\n')
    files = [tmp_path / "a.csv", str(tmp_path / "b.jsonl")]
    loaded = load_task(files)
    assert loaded["answers"][:] == [["a"], ["b"], ["c", "d"]] and len(set(loaded["id"])) == 3
    splits = {"train": files, "test": tmp_path / "b.jsonl"}
    assert (load_task(splits).num_rows, load_task(splits, "test").num_rows) == (3, 1)
    with pytest.raises(ValueError, match="'dev'.*train, test"):
        load_task(splits, "dev")


def test_a_frame_as_pandas_has_it(tmp_path):
    frame = pandas.DataFrame(
        {"question": ["q", "r", "s"], "answers": [numpy.array(["a", "b"]), None, float("nan")]}
    )
    assert load_task(frame)["answers"][:] == [["a", "b"]]
    numbers = pandas.DataFrame(
        {"question": ["q", "r"], "answer": pandas.array([1, None], dtype="Int64")}
    )
    assert load_task(numbers)["answers"][:] == [["1"]]
    # A single answer that is missing makes a column of whole numbers one of floats.
    floats = pandas.DataFrame({"question": ["q", "r", "s"], "answer": [145, None, 7]})
    assert load_task(floats)["answers"][:] == [["145"], ["7"]]
    assert load_task(floats.dropna())["answers"][:] == [["145"], ["7"]]
    halves = pandas.DataFrame({"question": ["q", "r", "s"], "answer": [1.0, None, 2.5]})
    assert load_task(halves)["answers"][:] == [["1"], ["2.5"]]
    floats.to_parquet(tmp_path / "numbers.parquet")
    floats.to_json(tmp_path / "numbers.jsonl", orient="records", lines=True)
    for data in (
        tmp_path / "numbers.parquet",
        tmp_path / "numbers.jsonl",
        floats.to_dict("records"),
    ):
        assert load_task(data)["answers"][:] == [["145"], ["7"]]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (
            [{"q": "x", "a": "y"}],
            {},
            "the list.*'question', 'answers'.*q, a",
        ),
        (
            [{"q": "x", "a": "y"}],
            {"columns": {"question": "q", "answer": "b"}},
            "'b'.*q, a",
        ),
        (
            [{"question": "x", "answer": "y"}],
            {"columns": {"level": "hard"}},
            "'hard'.*question, answer",
        ),
        (
            [{"question": "x", "answer": "y"}],
            {"columns": {"answer": "y", "answers": "y"}},
            "either .answers. or .answer.",
        ),
        (
            [{"question": "x", "answer": "y"}, {"question": 3, "answer": "y"}],
            {},
            "row 1 of the list.*question",
        ),
        (
            [{"question": "x", "answer": "y"}, {"question": "x", "answer": True}],
            {},
            "row 1 of the list.*got bool",
        ),
        ([], {}, "rows"),
        ([{"question": "x", "answer": "y"}, ["x", "y"]], {}, "row 1.*dict.*list"),
        (17, {}, "got int"),
        (
            [{"question": "x", "answer": ""}],
            {},
            "list.*answer",
        ),
        ("rows.csv", {"data_files": "other.csv"}, "data_files"),
        ("hotpotqa", {"columns": {"question": "q"}}, "columns .*'hotpotqa'"),
    ],
)
def test_mistakes_in_own_data_are_named(data, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_task(data, **options)
    assert "\n" not in str(caught.value)


def test_a_file_that_does_not_exist_is_named():
    with pytest.raises(FileNotFoundError, match=r"nowhere\.csv"):
        load_task("nowhere.csv")


def test_a_file_with_another_ending_is_a_file(tmp_path):
    path = tmp_path / "rows.txt"
    path.write_text("question\tanswer\nx\ty\n")
    with pytest.raises(ValueError, match=r"rows\.txt.*\.tsv"):
        load_task(str(path), columns={"answer": "answer"})


def test_the_row_of_a_frame_and_of_a_file_is_named(tmp_path):
    rows = [{"question": "q", "answer": "a"}, {"question": None, "answer": "a"}]
    with pytest.raises(ValueError, match="the DataFrame.*'question'.*row 1"):
        load_task(pandas.DataFrame(rows))
    with pytest.raises(ValueError, match=r"rows\.jsonl.*'question'.*row 1 \(line 2\)"):
        load_task(written(tmp_path, rows))


def test_a_split_without_an_effect_is_warned_of(tmp_path, caplog):
    rows = [{"question": "x", "answer": "y"}]
    assert len(load_task(rows, split="test")) == 1
    assert "split='test' has no effect" in caplog.text
    caplog.clear()
    load_task(rows), load_task({"test": rows}, split="test")
    assert not caplog.messages


def test_contradicting_rows_are_warned_of_once(caplog):
    answers = ["a", "b", "a", "c"]
    load_task([{"question": "x", "answer": answer} for answer in answers])
    (message,) = caplog.messages
    assert "2 rows" in message and "'x'" in message
    caplog.clear()
    load_task([{"question": "x", "answers": ["a", "b"]}, {"question": "x", "answers": ["b"]}])
    assert not caplog.messages


def test_rows_with_another_context_ask_something_else(caplog):
    rows = [{"question": "x", "answer": str(n % 3), "Text": f"text {n % 3}"} for n in range(4)]
    dataset = load_task(rows, n=3, context_columns=["Text"])
    assert len(dataset) == 3 and "context" not in dataset.column_names
    assert not caplog.messages
    # Rows that differ in nothing still contradict each other.
    load_task([*rows, {**rows[0], "answer": "other"}], context_columns=["Text"])
    assert "1 row " in caplog.text
    with pytest.raises(ValueError, match="only 1 different"):
        load_task(rows, n=3)


def test_two_columns_of_one_name_are_refused():
    frame = pandas.DataFrame([["x", "y", "z"]], columns=["question", "answer", "answer"])
    with pytest.raises(ValueError, match="several columns called 'answer'"):
        load_task(frame)


def test_a_column_of_later_rows_is_kept():
    dataset = as_dataset([{"question": "x"}, {"question": "y", "level": "hard"}])
    assert dataset["level"][:] == [None, "hard"]


def test_columns_the_wrong_way_round_are_named(tmp_path):
    (tmp_path / "rows.csv").write_text("frage,antwort\n1+1?,2\n")
    with pytest.raises(ValueError, match="--columns question=frage,answer=antwort"):
        load_task(tmp_path / "rows.csv", columns={"frage": "question", "antwort": "answer"})


def test_an_empty_question_is_named_with_its_line(tmp_path):
    (tmp_path / "rows.csv").write_text('question,answer\n"one\nand one?",2\n,3\n')
    with pytest.raises(ValueError, match=r"rows\.csv.*row 1 \(line 4\)"):
        load_task(tmp_path / "rows.csv")
