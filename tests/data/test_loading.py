"""`load_task` from files and from a Hub that fails on purpose."""

import json
from pathlib import Path

import pytest

from agentic_prompting.data import (
    load_task,
)
from support.data_rows import ROWS, written


def test_files_by_split_and_several_files(tmp_path):
    path = written(tmp_path, ROWS["gsm8k"])
    assert load_task("gsm8k", data_files=[path, path]).num_rows == 6
    assert load_task("gsm8k", split="dev", data_files={"dev": Path(path)}).num_rows == 3
    with pytest.raises(ValueError, match="data_files.*'test'.*dev"):
        load_task("gsm8k", split="test", data_files={"dev": path})


def test_missing_column_names_those_there_are(tmp_path):
    path = written(tmp_path, [{"query": "q", "answer": "a"}])
    with pytest.raises(ValueError, match="'question'.*query, answer"):
        load_task("hotpotqa", data_files=path)


def test_files_that_are_not_there_or_not_readable(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file: nowhere.parquet"):
        load_task("prompt_r1", data_files="nowhere.parquet")
    with pytest.raises(ValueError, match=r"\.parquet"):
        load_task("gsm8k", data_files=__file__)
    with pytest.raises(ValueError, match="names no file"):
        load_task("gsm8k", data_files=[])
    with pytest.raises(ValueError, match="with data_files there is none"):
        load_task("gsm8k", data_files=__file__, revision="main")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"not parquet")
    with pytest.raises(ValueError, match="cannot be read as .parquet"):
        load_task("gsm8k", data_files=str(broken))


def test_the_first_source_that_loads_wins(hub, caplog):
    hub.rows["RUC-NLPIR/FlashRAG_datasets"] = [
        {"id": "1", "question": "q", "golden_answers": ["a"]}
    ]
    dataset = load_task("hotpotqa", split="validation")
    assert [(path, options["split"]) for path, _, options in hub.calls] == [
        ("hotpotqa/hotpot_qa", "validation"),
        ("hotpotqa/hotpot_qa", "validation"),
        ("RUC-NLPIR/FlashRAG_datasets", "dev"),
    ]
    assert hub.calls[1][2] == {
        "split": "validation",
        "revision": "refs/convert/parquet",
        "data_dir": "distractor",
    }
    assert (
        json.loads(dataset["meta"][0])["source"]
        == "RUC-NLPIR/FlashRAG_datasets hotpotqa:validation"
    )
    assert "1 rows" in caplog.text and "7,405 were expected" in caplog.text


def test_every_failure_of_the_chain_is_in_the_error(hub):
    hub.rows["dgslibisey/MuSiQue"] = [{"wrong": 1}]
    with pytest.raises(RuntimeError) as caught:
        load_task("musique", split="validation")
    lines = str(caught.value).splitlines()
    assert "pass data_files" in lines[0]
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "bdsaglam/musique answerable",
        "dgslibisey/MuSiQue",
        "RUC-NLPIR/FlashRAG_datasets musique",
    ]
    assert "ConnectionError: cannot reach bdsaglam/musique" in lines[1]
    assert "no column 'question', 'answer', 'answer_aliases'; it has: wrong" in lines[2]


def test_a_pinned_revision_is_not_replaced(hub):
    hub.rows["RUC-NLPIR/FlashRAG_datasets"] = [
        {"id": "1", "question": "q", "golden_answers": ["a"]}
    ]
    with pytest.raises(RuntimeError, match="hotpotqa/hotpot_qa distractor@1908d6"):
        load_task("hotpotqa", revision="1908d6")
    assert hub.calls == [
        ("hotpotqa/hotpot_qa", "distractor", {"split": "train", "revision": "1908d6"})
    ]
