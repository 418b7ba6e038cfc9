"""Every data set in one schema, and how a name is looked up."""

import json

import datasets
import pytest

from agentic_prompting.data import (
    TASKS,
    load_task,
    validate_dataset,
)
from support.data_rows import COLUMNS, ROWS, written

GOLDS = {
    "prompt_r1": [["Ada"], ["7"], ["x"]],
    "hotpotqa": [["a0"], ["a1"], ["a2"]],
    "2wiki": [["a0"], ["a1"], ["a2"]],
    "gsm8k": [["24960"], ["-3"], ["7"]],
    "musique": [["Ada", "A. L."]] * 3,
    "popqa": [["Rome", "Roma"], ["Oslo"], ["Bern"]],
    "squad_v2": [["40%"], [""], ["a", "b"]],
    "triviaqa": [["Ada", "Lovelace"]] * 3,
    "mathqa": [["38"], ["27.675"], ["none"]],
    "booksum": [["s0"], ["s1"], ["s2"]],
    "writingprompts": [["It was 0 ."], ["It was 1 ."], ["It was 2 ."]],
    "xsum": [["Long 0."], ["Long 1."], ["Long 2."]],
    "dapo_math": [["0"], ["1"], ["2"]],
    "aime25": [["0"], ["1"], ["2"]],
    "hmmt_nov25": [["0"], ["1"], ["2"]],
    "aimo_aime": [["000"], ["001"], ["002"]],
    "aimo_amc": [["14"], ["15"], ["16"]],
    "beyondaime": [["0"], ["1"], ["2"]],
    "svamp": [["51"], ["52"], ["53"]],
    "aqua": [["A"], ["B"], ["A"]],
}


def test_every_set_has_a_fixture():
    # Sets that are cut by row numbers need all their rows: test_prorefine_tasks.py has them.
    assert set(ROWS) == {name for name, task in TASKS.items() if not task.subsets}
    # Of sets that have an order of their own, golds are looked at in tests of their own.
    assert set(GOLDS) == {name for name in ROWS if TASKS[name].selection is None}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", GOLDS)
def test_each_set_in_one_schema(name, suffix, tmp_path):
    dataset = load_task(name, data_files=written(tmp_path, ROWS[name], suffix))
    assert dataset.column_names == COLUMNS
    assert dataset["answers"][:] == GOLDS[name]
    assert set(dataset["task"]) == {name}
    assert all(question == question.strip() and question for question in dataset["question"])
    assert [json.loads(meta)["row"] for meta in dataset["meta"]] == [0, 1, 2]
    validate_dataset(dataset)


def test_sets_can_be_put_together(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    parts = [
        load_task(n, data_files=written(tmp_path / d, ROWS[n]))
        for n, d in (("prompt_r1", "a"), ("popqa", "b"))
    ]
    assert datasets.concatenate_datasets(parts).num_rows == 6


def test_unknown_task_offers_the_nearest():
    with pytest.raises(ValueError, match="'hotpot'.*'hotpotqa'"):
        load_task("hotpot")
    with pytest.raises(ValueError, match="known: prompt_r1, hotpotqa"):
        load_task("zzz")


def test_unknown_split_names_those_there_are():
    with pytest.raises(ValueError, match="popqa.*'train'.*test"):
        load_task("popqa")


@pytest.mark.parametrize("name", TASKS)
def test_records_are_consistent(name):
    task = TASKS[name]
    assert task.sources and task.readers and task.licence
    for source in task.sources:
        assert set(source.splits) <= set(task.expected_rows)
        assert not source.files or set(source.files) >= set(task.expected_rows)
