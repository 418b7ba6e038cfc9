"""`load_task` on small files in each documented shape, on a hub that fails on purpose, and on the released files."""

import csv
import hashlib
import json
import logging
import os
import random
import subprocess
import sys
from pathlib import Path

import datasets
import numpy
import pandas
import pytest
from datasets import Dataset

from agentic_prompting.data import (
    PAIRS,
    TASKS,
    check_sources,
    check_table,
    contamination_report,
    describe_task,
    list_tasks,
    load_task,
    validate_dataset,
)
from agentic_prompting.data.answer_columns import parse_answers
from agentic_prompting.data.espl_tasks import DAPO_HEAD, DAPO_TAIL
from agentic_prompting.data.prompt_r1_tasks import (
    build_prompt_r1_meta,
    extract_gsm8k_answer,
    extract_prompt_r1_question,
    parse_mathqa_options,
)

COLUMNS = ["id", "question", "answers", "task", "meta"]
REAL = Path(os.environ.get("AGENTIC_PROMPTING_DATA", "nowhere")) / "prompt_r1"
needs_real_files = pytest.mark.skipif(
    not REAL.is_dir(),
    reason=f"the released Prompt-R1 files are not at {REAL}: set AGENTIC_PROMPTING_DATA",
)

INSTRUCTION = "\nFirst, provide a simple explanation of the question, then {ask} and answer."


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def released(question: str, golds: list[str], **changes) -> dict:
    message = {"content": f"Question: {question}{INSTRUCTION}", "role": "user"}
    row = {"data_source": "hotpot-256-test", "prompt": [message], "ability": "multihop_qa"}
    return row | {"reward_model": {"ground_truth": golds, "style": "rule"}} | changes


def dapo(problem: str, answer: str) -> dict:
    message = {"content": DAPO_HEAD + problem + DAPO_TAIL, "role": "user"}
    return {
        "prompt": [message],
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "data_source": "math_dapo",
    }


# Three rows of each set, in the shape that its card or its readers show.
ROWS = {
    "prompt_r1": [
        released("Who wrote it?", ["Ada", " Ada", ""]),
        released(" Two\nlines? ", ["7"]),
        released("Third?", ["x"]),
    ],
    "hotpotqa": [
        {
            "id": f"5a{i}",
            "question": f"  Which of {i}? ",
            "answer": f"a{i}",
            "type": "bridge",
            "level": "hard",
            "context": {"title": ["T"], "sentences": [["S."]]},
        }
        for i in range(3)
    ],
    "2wiki": [
        {"id": str(i), "question": f"q{i}", "answer": f"a{i}", "type": "comparison"}
        for i in range(3)
    ],
    "gsm8k": [
        {"question": f"q{i}", "answer": f"Add.\n#### {a}"}
        for i, a in enumerate(["24,960", "-3", "7"])
    ],
    "musique": [
        {"id": "2hop__1", "question": f"q{i}", "answer": "Ada", "answer_aliases": ["A. L.", "Ada"]}
        for i in range(3)
    ],
    "popqa": [
        {
            "id": i,
            "prop": "capital",
            "question": f"q{i}",
            "possible_answers": golds,
            "s_pop": 12,
            "o_pop": 3,
        }
        for i, golds in enumerate(['["Rome", "Roma"]', "['Oslo']", '["Bern"]'])
    ],
    "squad_v2": [
        {
            "id": f"u{i}",
            "title": "T",
            "context": "C",
            "question": f"q{i}",
            "answers": {"text": golds, "answer_start": []},
        }
        for i, golds in enumerate([["40%"], [], ["a", "b"]])
    ],
    "triviaqa": [
        {
            "question": f"q{i}",
            "question_id": f"tc_{i}",
            "answer": {"value": "Ada", "aliases": ["Lovelace", "Ada"], "type": "W"},
        }
        for i in range(3)
    ],
    "mathqa": [
        {
            "Problem": f"q{i}",
            "Rationale": "…",
            "options": "a ) 38 , b ) 27.675 , c ) 1 , 5 , e ) none",
            "correct": letter,
        }
        for i, letter in enumerate("abe")
    ],
    "booksum": [
        {"bid": i, "chapter": f" C{i} ", "summary_text": f"s{i}", "summary": "{}"} for i in range(3)
    ],
    "writingprompts": [
        {"prompt": f"[ WP ] Idea {i} .", "story": f"It was {i} ."} for i in range(3)
    ],
    "xsum": [{"document": f"Long {i}.", "summary": f"Short {i}.", "id": str(i)} for i in range(3)],
    "dapo_math": [
        {
            "prompt": f"p{i}",
            "solution": str(i),
            "reward_model": {"ground_truth": str(i)},
            "ability": "MATH",
        }
        for i in range(3)
    ],
    "dapo100": [dapo(f"p{i}", str(i)) for i in range(100)],
    "aime25": [{"id": i, "problem": f"p{i}", "answer": str(i), "solution": "…"} for i in range(3)],
    "hmmt_feb": [
        {"problem_idx": i, "problem": f"p{i}", "answer": f"\\frac{{{i}}}{{7}}"} for i in range(3)
    ],
    "hmmt_nov25": [
        {"problem_idx": i, "problem": f"p{i}", "answer": i, "problem_type": ["Algebra"]}
        for i in range(3)
    ],
    "aimo_aime": [{"id": i, "problem": f"p{i}", "answer": f"00{i}", "url": "…"} for i in range(3)],
    "aimo_amc": [{"id": i, "problem": f"p{i}", "answer": 14.0 + i, "url": "…"} for i in range(3)],
    "aime_and_amc": [{"id": i, "problem": f"p{i}", "answer": str(i)} for i in range(3)],
    "beyondaime": [{"problem": f"p{i}", "answer": i} for i in range(3)],
    "svamp": [
        {"Body": f"b{i}.", "Question": f"q{i}?", "Answer": 51.0 + i, "Type": "Addition"}
        for i in range(3)
    ],
    "aqua": [
        {"question": f"q{i}", "options": ["A)1", "B)2"], "correct": "AB"[i % 2]} for i in range(3)
    ],
}

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


def written(tmp_path: Path, rows: list[dict], suffix: str = ".jsonl") -> str:
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_every_set_has_a_fixture():
    # Sets that are cut by row numbers need all their rows: test_refine_data.py has them.
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


def test_released_rows_give_back_their_message_character_by_character():
    for row in ROWS["prompt_r1"]:
        template = build_prompt_r1_meta(row)["prompt_template"]
        assert template.count("{question}") == 1
        assert (
            template.replace("{question}", extract_prompt_r1_question(row))
            == row["prompt"][0]["content"]
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"prompt": [{"content": "Question: Who?", "role": "user"}]},
            "row 1 of .* cannot be read: .*released wrapper",
        ),
        (
            {"prompt": [{"content": "…", "role": "system"}] * 2},
            "row 1 of .* cannot be read: .*exactly one user message",
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
    with pytest.raises(ValueError, match="n=21, but there are only 20 different questions"):
        load_task("2wiki", n=21, data_files=path)
    with pytest.raises(ValueError, match="n must be at least 1"):
        load_task("2wiki", n=0, data_files=path)


def test_files_by_split_and_several_files(tmp_path):
    path = written(tmp_path, ROWS["gsm8k"])
    assert load_task("gsm8k", data_files=[path, path]).num_rows == 6
    assert load_task("gsm8k", split="dev", data_files={"dev": Path(path)}).num_rows == 3
    with pytest.raises(ValueError, match="data_files has no split 'test'; it has: dev"):
        load_task("gsm8k", split="test", data_files={"dev": path})


def test_tab_separated_files(tmp_path):
    path = tmp_path / "test.tsv"
    path.write_text(
        'id\tquestion\tpossible_answers\n1\tWhere?\t"[""Rome"", ""Roma""]"\n', encoding="utf-8"
    )
    assert load_task("popqa", split="test", data_files=str(path))["answers"][:] == [
        ["Rome", "Roma"]
    ]


def test_flashrags_shape_is_read_too(tmp_path):
    rows = [{"id": "dev_0", "question": "q", "golden_answers": ["a", "b"], "metadata": {"x": 1}}]
    assert load_task("musique", data_files=written(tmp_path, rows))["answers"][:] == [["a", "b"]]


def test_questions_of_the_writing_sets_say_what_to_do(tmp_path):
    asked = {
        name: load_task(name, data_files=written(tmp_path, ROWS[name]))["question"][0]
        for name in ("booksum", "xsum")
    }
    assert (
        asked["booksum"].endswith("C0")
        and asked["xsum"].endswith("'Short 0.'")
        and "article" in asked["xsum"]
    )
    stories = load_task("writingprompts", data_files=written(tmp_path, ROWS["writingprompts"]))[
        "question"
    ]
    assert stories[0].endswith("'Idea 0 .'") and "WP" not in stories[0]
    chapters = [
        {
            "text": "C",
            "summary": [{"source": "x", "text": "s", "analysis": ""}, {"source": "y", "text": "t"}],
        }
    ]
    assert load_task("booksum", data_files=written(tmp_path, chapters))["answers"][:] == [
        ["s", "t"]
    ]


def test_dapo_is_unwrapped_and_each_problem_kept_once(tmp_path):
    rows = [dapo("a", "1"), dapo("b\nc", "2"), dapo("a", "3")]
    found = load_task("dapo_math", data_files=written(tmp_path, rows))
    assert found["question"][:] == ["a", "b\nc"] and found["answers"][:] == [
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
    train, test = load_task("hmmt", "train"), load_task("hmmt", "test")
    expected = [f"hmmt_feb_{year} {i}" for year in (2023, 2024, 2025) for i in range(30)]
    random.Random(42).shuffle(expected)
    assert train["question"][:] == expected and len(set(train["id"])) == 90
    assert set(test["task"]) == {"hmmt_nov25"} and test["answers"][0] == ["\\sqrt{2}"]
    assert [options["split"] for _, _, options in hub.calls] == ["train"] * 4
    with pytest.raises(ValueError, match="hmmt has no split 'validation'; it has: train, test"):
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
    assert hotpot.num_rows == 64 and all(
        29_190 <= json.loads(meta)["row"] < 36_595 for meta in hotpot["meta"]
    )
    assert hub.calls[0][2]["columns"] == ["id", "question", "golden_answers", "data_source"]


def test_how_a_sample_was_drawn_is_recorded(tmp_path):
    path = written(tmp_path, ROWS["gsm8k"])
    meta = json.loads(load_task("gsm8k", n=2, seed=7, data_files=path)["meta"][0])
    assert meta["sample"] == {"n": 2, "seed": 7, "of": 3}
    assert "sample" not in json.loads(load_task("gsm8k", data_files=path)["meta"][0])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"id": "1", "question": None, "answer": "a"},
            "row 1 of .*`question` must be a text .* got None",
        ),
        ({"id": "1", "question": "  ", "answer": "a"}, "row 1 of .*`question` must be a text"),
    ],
)
def test_a_row_without_a_question_is_named(row, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_task("2wiki", data_files=written(tmp_path, [ROWS["2wiki"][0], row]))


@pytest.mark.parametrize("golds", ['["a", {"b": 1}]', "[True, 'a']", '["a", ["b"]]'])
def test_mixed_types_among_answers_are_named(golds, tmp_path):
    rows = [ROWS["popqa"][0], {**ROWS["popqa"][1], "possible_answers": golds}]
    with pytest.raises(
        ValueError, match="row 1 of .*must be a text or a number, got (dict|bool|list)"
    ):
        load_task("popqa", split="test", data_files=written(tmp_path, rows))


def test_numbers_among_answers_are_texts(tmp_path):
    rows = [{**ROWS["popqa"][0], "possible_answers": '["a", 3]'}]
    assert load_task("popqa", split="test", data_files=written(tmp_path, rows))["answers"][:] == [
        ["a", "3"]
    ]


# The catalogue and contamination ------------------------------------------------------------------------------------


def test_the_catalogue_shows_every_set():
    table = list_tasks()
    assert all(name in table for name in [*TASKS, *PAIRS])
    shown = describe_task("squad_v2")
    assert (
        "validation: 11,873" in shown
        and "lighteval/squad_v2" in shown
        and "without an answer are kept" in shown
    )
    assert "aime25" in describe_task("dapo_aime25")
    with pytest.raises(ValueError, match="did you mean 'squad_v2'"):
        describe_task("squad2")


def test_the_records_are_consistent_and_a_broken_one_is_not(monkeypatch):
    assert not [check for check in check_sources() if check.problem]
    from dataclasses import replace

    monkeypatch.setitem(
        TASKS, "bbh_word_sorting", replace(TASKS["bbh_word_sorting"], expected_rows={"test": 99})
    )
    assert "its cut is not of 99 rows" in check_table(check_sources(["bbh_word_sorting"]))


def test_checking_online_reads_a_row_of_every_source(hub, monkeypatch):
    from agentic_prompting.data import catalogue

    monkeypatch.setattr(catalogue, "_find_revision", lambda source: "0123456789abcdef")
    hub.rows["hotpotqa/hotpot_qa"] = ROWS["hotpotqa"]
    checks = {
        (check.source, check.split): check for check in check_sources(["hotpotqa"], online=True)
    }
    fine = checks[("hotpotqa/hotpot_qa distractor", "train")]
    assert fine.problem == "" and fine.revision == "0123456789abcdef" and "question" in fine.columns
    assert "ConnectionError" in checks[("RUC-NLPIR/FlashRAG_datasets hotpotqa", "train")].problem
    assert all(options["streaming"] for _, _, options in hub.calls)


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


# What can be wrong with a request -----------------------------------------------------------------------------------


def test_unknown_task_offers_the_nearest():
    with pytest.raises(ValueError, match="unknown task 'hotpot'; did you mean 'hotpotqa'"):
        load_task("hotpot")
    with pytest.raises(ValueError, match="known: prompt_r1, hotpotqa"):
        load_task("zzz")


def test_unknown_split_names_those_there_are():
    with pytest.raises(ValueError, match="popqa has no split 'train'; it has: test"):
        load_task("popqa")


def test_missing_column_names_those_there_are(tmp_path):
    path = written(tmp_path, [{"query": "q", "answer": "a"}])
    with pytest.raises(ValueError, match="no column 'question'; it has: query, answer"):
        load_task("hotpotqa", data_files=path)


def test_files_that_are_not_there_or_not_readable(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file: nowhere.parquet"):
        load_task("prompt_r1", data_files="nowhere.parquet")
    with pytest.raises(ValueError, match="must all end in one of .parquet"):
        load_task("gsm8k", data_files=__file__)
    with pytest.raises(ValueError, match="names no file"):
        load_task("gsm8k", data_files=[])
    with pytest.raises(ValueError, match="with data_files there is none"):
        load_task("gsm8k", data_files=__file__, revision="main")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"not parquet")
    with pytest.raises(ValueError, match="cannot be read as .parquet"):
        load_task("gsm8k", data_files=str(broken))


# Files keep what is written in them ---------------------------------------------------------------------------------


def test_a_csv_cell_is_the_text_it_is(tmp_path):
    answers = ["1", "", "007", "NA", "null", "None", "true", "1.50", "1e5", "nan"]
    path = tmp_path / "rows.csv"
    path.write_text(
        "question,answer\n" + "".join(f"q{i},{a}\n" for i, a in enumerate(answers)),
        encoding="utf-8",
    )
    found = load_task("hotpotqa", data_files=path)
    assert found["answers"][:] == [[answer] for answer in answers if answer]
    assert found["question"][:] == [f"q{i}" for i, answer in enumerate(answers) if answer]


def test_a_csv_as_spreadsheets_write_it(tmp_path):
    path = tmp_path / "rows.csv"
    long = "x" * 200_000  # the csv module's own limit is 128 KiB
    path.write_bytes(
        f'\ufeffid,question,answer\r\n7,"Two\nlines, ""quoted""","é"\r\n\r\n8,{long},b\r\n'.encode()
    )
    found = load_task("hotpotqa", data_files=path)
    assert found["id"][:] == ["7", "8"] and found["answers"][:] == [["é"], ["b"]]
    assert found["question"][:] == ['Two\nlines, "quoted"', long]


def test_names_of_files_are_no_patterns(tmp_path):
    for name, answer in (("a1.jsonl", "wrong"), ("a[1].jsonl", "right")):
        (tmp_path / name).write_text(json.dumps({"question": "q", "answer": answer}) + "\n")
    assert load_task("hotpotqa", data_files=tmp_path / "a[1].jsonl")["answers"][:] == [["right"]]
    Dataset.from_list([{"question": "q", "answer": "also"}]).to_parquet(tmp_path / "b[1]=x.parquet")
    assert load_task("hotpotqa", data_files=tmp_path / "b[1]=x.parquet")["answers"][:] == [["also"]]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_not_a_number_is_no_answer(suffix, tmp_path):
    rows = [
        {"question": f"q{i}", "answer": answer} for i, answer in enumerate([1.5, float("nan"), 2.0])
    ]
    assert load_task("hotpotqa", data_files=written(tmp_path, rows, suffix))["answers"][:] == [
        ["1.5"],
        ["2"],
    ]
    problems = [
        {"problem": f"p{i}", "answer": answer} for i, answer in enumerate([1.0, float("nan")])
    ]
    assert load_task("aimo_amc", data_files=written(tmp_path, problems, suffix))["answers"][:] == [
        ["1"]
    ]


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "l.csv",
            "question,answer\nq,a\nOù ?,é\n".encode("latin-1"),
            "row 1 .line 3. of .*l.csv.* UTF-8",
        ),
        (
            "l.jsonl",
            '{"question": "Où ?", "answer": "é"}\n'.encode("latin-1"),
            "row 0 .line 1. of .*l.jsonl.* UTF-8",
        ),
        ("l.json", '[{"question": "Où ?", "answer": "é"}]'.encode("latin-1"), "l.json.* UTF-8"),
        (
            "d.jsonl",
            b'{"question": "q", "answer": "a"}\n\n{"a": ' + DEEP + b"}",
            "row 1 .line 3. of .*nested too deep",
        ),
        ("d.json", DEEP, "d.json.*nested too deep"),
        (
            "j.jsonl",
            b'{"question": "q", "answer": "a"}\n{"question"\n',
            "row 1 .line 2. of .*j.jsonl",
        ),
        ("t.json", b'[{"question": "q"', "t.json"),
        ("o.jsonl", b'["q", "a"]\n', "row 0 .line 1. of .*an object .* got list"),
        ("s.jsonl", b'{"question": "\\ud800", "answer": "a"}\n', "row 0 of .*s.jsonl.*surrogate"),
        ("e.jsonl", b"", "e.jsonl has no rows"),
        ("e.json", b"", "e.json has no rows"),
        ("e.csv", b"", "e.csv has no rows"),
        ("e.parquet", b"", "e.parquet cannot be read as .parquet"),
        ("h.csv", b"question,answer\n", "h.csv has no rows"),
        ("b.json", b"[]", "b.json has no rows"),
        (
            "w.csv",
            b"question,answer\nq,a\nq,a,b\n",
            "row 1 .line 3. of .*w.csv .*3 cells where there are 2 columns",
        ),
        ("n.csv", b"question,answer\nq\n", "row 0 .line 2. of .*n.csv .*it has 1 cell where"),
        ("q.csv", b'question,answer\nq,"a\nr,b\n', "row 0 .*q.csv"),
        (
            "two.csv",
            b"question,answer,answer\nq,a,b\n",
            "two.csv .*has several columns called 'answer'",
        ),
        (
            "none.csv",
            b"question,answer\nq,\nr, \n",
            "none of the 2 rows of .*none.csv has an accepted answer",
        ),
    ],
)
def test_a_file_that_is_damaged_is_named_with_its_row(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_task("hotpotqa", data_files=tmp_path / name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert caught.value.__context__ is None or caught.value.__suppress_context__, (
        "no traceback of a library's"
    )


def test_of_several_files_the_one_is_named(tmp_path):
    for name, row in (
        ("a.jsonl", {"question": "q", "answer": "a"}),
        ("b.jsonl", {"question": None, "answer": "a"}),
    ):
        (tmp_path / name).write_text(
            (json.dumps({"question": "x", "answer": "y"}) + "\n") + json.dumps(row) + "\n"
        )
    with pytest.raises(ValueError, match=r"row 1 of \S*b.jsonl cannot be read"):
        load_task("hotpotqa", data_files=[tmp_path / "a.jsonl", tmp_path / "b.jsonl"])


def test_a_damaged_file_is_refused_before_anything_heavy_is_imported(tmp_path):
    """Within a second: the libraries that tables need take longer than that to import."""
    (tmp_path / "bad.jsonl").write_text('{"question"')
    code = (
        "import sys\nfrom agentic_prompting.data import load_task\n"
        "try: load_task('hotpotqa', data_files='bad.jsonl')\n"
        "except ValueError: print(sorted({'datasets', 'pandas', 'pyarrow'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    assert (
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60).stdout
        == "[]\n"
    )


# Data of one's own -------------------------------------------------------------------------------------------------

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
    found = load_task(own_data(kind, tmp_path), columns=MAP)
    assert found.column_names == COLUMNS and found["id"][:] == ["7", "8"]
    assert found["question"][:] == ["Where is Rome?", "2 + 2?"] and found["answers"][:] == [
        ["Italy", "Italia"],
        ["4"],
    ]
    metas = [json.loads(meta) for meta in found["meta"]]
    assert [meta["difficulty"] or None for meta in metas] == [
        "easy",
        None,
    ] and "context" not in metas[0]
    assert [meta["row"] for meta in metas] == [0, 1] and all(meta["source"] for meta in metas)
    validate_dataset(found)
    assert load_task(own_data(kind, tmp_path), n=1, seed=3, columns=MAP).num_rows == 1


def test_columns_that_are_called_as_ours_need_no_map(tmp_path):
    several, one = [{"question": "q", "answers": ["a", 3]}], [{"question": "q", "answer": "[1, 2]"}]
    assert load_task([*several, {"question": "r"}]).num_rows == 1, (
        "no answer: dropped, as in a file"
    )
    assert load_task(several)["answers"][:] == [["a", "3"]] and load_task(several)["id"][:] == [
        "data-0"
    ]
    assert load_task(one)["answers"][:] == [["[1, 2]"]], "one answer is what it is"
    assert load_task([{"q": "q", "answers": "[1, 2]"}], columns={"question": "q"})["answers"][
        :
    ] == [["1", "2"]]
    found = load_task(written(tmp_path, several))
    assert found["id"][:] == ["rows-0"] and set(found["task"]) == {"rows"}


def test_own_data_by_split_and_in_several_files(tmp_path):
    (tmp_path / "a.csv").write_text("question,answer\nq,a\nr,b\n")
    (tmp_path / "b.jsonl").write_text('{"question": "s", "answers": ["c", "d"]}\n')
    files = [tmp_path / "a.csv", str(tmp_path / "b.jsonl")]
    found = load_task(files)
    assert found["answers"][:] == [["a"], ["b"], ["c", "d"]] and len(set(found["id"])) == 3
    splits = {"train": files, "test": tmp_path / "b.jsonl"}
    assert (load_task(splits).num_rows, load_task(splits, "test").num_rows) == (3, 1)
    with pytest.raises(ValueError, match="no split 'dev'; it has: train, test"):
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
            "the list has no column 'question', 'answers'; it has: q, a; say which is which",
        ),
        (
            [{"q": "x", "a": "y"}],
            {"columns": {"question": "q", "answer": "b"}},
            "no column 'b'; it has: q, a",
        ),
        (
            [{"question": "x", "answer": "y"}],
            {"columns": {"level": "hard"}},
            "no column 'hard'; it has: question, answer",
        ),
        (
            [{"question": "x", "answer": "y"}],
            {"columns": {"answer": "y", "answers": "y"}},
            "either .answers. or .answer.",
        ),
        (
            [{"question": "x", "answer": "y"}, {"question": 3, "answer": "y"}],
            {},
            "row 1 of the list cannot be read",
        ),
        (
            [{"question": "x", "answer": "y"}, {"question": "x", "answer": True}],
            {},
            "row 1 of the list.*got bool",
        ),
        ([], {}, "has no rows"),
        ([{"question": "x", "answer": "y"}, ["x", "y"]], {}, "row 1 should be a dict, got list"),
        (17, {}, "got int"),
        (
            [{"question": "x", "answer": ""}],
            {},
            "none of the 1 rows of the list has an accepted answer",
        ),
        ("rows.csv", {"data_files": "other.csv"}, "for the sets that have a name"),
        ("hotpotqa", {"columns": {"question": "q"}}, "columns .*'hotpotqa'"),
    ],
)
def test_what_is_wrong_with_ones_own_data_is_said(data, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_task(data, **options)
    assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match="no such file: nowhere.csv"):
        load_task("nowhere.csv")


def test_the_row_of_a_frame_and_of_a_file_is_named(tmp_path):
    rows = [{"question": "q", "answer": "a"}, {"question": None, "answer": "a"}]
    with pytest.raises(
        ValueError, match="row 1 of the DataFrame cannot be read: `question` must be a text"
    ):
        load_task(pandas.DataFrame(rows))
    with pytest.raises(
        ValueError, match=r"row 1 of \S*rows.jsonl cannot be read: `question` must be a text"
    ):
        load_task(written(tmp_path, rows))


# The hub ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """A hub of our own: `hub.rows[path]` is what a repository holds, everything else fails. Records the calls."""

    class Hub:
        def __init__(self):
            self.rows, self.calls = {}, []

        def load_dataset(self, path, config=None, **options):
            self.calls.append((path, config, options))
            if path not in self.rows:
                raise ConnectionError(f"cannot reach {path}\nsecond line")
            return Dataset.from_list(self.rows[path])

    fake = Hub()
    monkeypatch.setattr(datasets, "load_dataset", fake.load_dataset)
    return fake


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


def test_prompt_r1_is_asked_for_by_file(hub):
    hub.rows["QwenQKing/Prompt-R1"] = ROWS["prompt_r1"]
    load_task("prompt_r1", split="test/hotpot")
    load_task("prompt_r1", split="test")
    (one, twelve) = (options["data_files"]["rows"] for _, _, options in hub.calls)
    assert one == "eval_data/hotpot.parquet" and one in twelve and len(twelve) == 12


@pytest.mark.parametrize("name", TASKS)
def test_records_are_consistent(name):
    task = TASKS[name]
    assert task.sources and task.readers and task.licence
    for source in task.sources:
        assert set(source.splits) <= set(task.expected_rows)
        assert not source.files or set(source.files) >= set(task.expected_rows)


# Small readers ------------------------------------------------------------------------------------------------------


def test_small_readers():
    assert (
        parse_answers('["a", 1]')
        == parse_answers("['a', 1]")
        == parse_answers(["a", 1])
        == ["a", "1"]
    )
    assert (
        parse_answers(None) == []
        and parse_answers("plain") == ["plain"]
        and parse_answers("1984") == ["1984"]
    )
    assert extract_gsm8k_answer("x #### 1 \n#### -24,960 ") == "-24960"
    assert parse_mathqa_options("a ) 38 , b ) 27.675 , c ) 1 , 5 , e ) none") == {
        "a": "38",
        "b": "27.675",
        "c": "1 , 5",
        "e": "none",
    }


# validate_dataset ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "the dataset is empty"),
        ([{"question": "q", "answer": "a"}], "no column 'answers'; it has: question, answer"),
        ([{"prompt": "q"}], "no column 'question', 'answers'; it has: prompt"),
        ([{"text": "q", "answers": ["a"]}], "no column 'question'; it has: text, answers"),
        (
            [{"question": "q", "answers": ["a"]}, {"question": "r", "answers": []}],
            "row 1 .*`answers` is empty",
        ),
        ([{"question": "q", "answers": "a"}], "row 0 .*must be a list of strings, got 'a'"),
        ([{"question": "q", "answers": [1]}], "row 0 .*must be a list of strings"),
        ([{"question": "q", "answers": None}], "row 0 .*must be a list of strings, got None"),
        ([{"question": "q", "answers": ["a", None]}], "row 0 .*must be a list of strings"),
        ([{"question": " ", "answers": ["a"]}], "row 0 .*`question` must be a text"),
        ([{"question": 3, "answers": ["a"]}], "row 0 .*`question` must be a text"),
    ],
)
def test_validate_dataset_names_what_is_wrong(rows, message):
    with pytest.raises(ValueError, match=message) as caught:
        validate_dataset(Dataset.from_list(rows))
    assert "\n" not in str(caught.value)


def test_validate_dataset_lets_good_ones_pass():
    good = Dataset.from_list([{"question": "q", "answers": [""], "context": "long"}])
    validate_dataset(good)
    validate_dataset(good.to_iterable_dataset())


def test_validate_dataset_with_other_columns():
    rendered = Dataset.from_list([{"prompt": "rendered", "answers": []}])
    validate_dataset(rendered, columns=("prompt",))
    with pytest.raises(ValueError, match="row 0 .*`answers` is empty"):
        validate_dataset(rendered, columns=("prompt", "answers"))
    with pytest.raises(ValueError, match="no column 'level'; it has: prompt, answers"):
        validate_dataset(rendered, columns=("prompt", "level"))


def test_validate_dataset_of_nothing():
    with pytest.raises(ValueError, match="train_dataset is missing"):
        validate_dataset(None)


# The released files -------------------------------------------------------------------------------------------------

EVAL = {  # file -> the first row's golds
    "2WikiMultihopQA": ["no"],
    "BookSum": None,
    "DAPO-Math": ["98"],
    "MathQA_ood": ["5.6"],
    "PopQA": ["psychiatrist", "alienist", "head-shrinker", "shrinker"],
    "WritingPrompts": None,
    "gsm8k": ["30"],
    "hotpot": ["SARS coronavirus"],
    "squad_v2_ood": ["40%"],
}
SUFFIX_SHA256 = "cc03a452446b37c8866dbe4d0ad0fb8e18fe3f9ffab312b349535dc0a44735cb"


@needs_real_files
@pytest.mark.parametrize("name", EVAL)
def test_real_evaluation_files(name):
    path = REAL / "eval" / f"{name}.parquet"
    dataset = load_task("prompt_r1", split="test", data_files=str(path))
    assert dataset.num_rows == 128
    assert len(set(dataset["question"])) == (126 if name in ("BookSum", "DAPO-Math") else 128)
    assert EVAL[name] is None or dataset["answers"][0] == EVAL[name]
    validate_dataset(dataset)
    messages = [row["prompt"][0]["content"] for row in Dataset.from_parquet(str(path))]
    for row, message in zip(dataset, messages, strict=True):
        template = json.loads(row["meta"])["prompt_template"]
        assert template.replace("{question}", row["question"]) == message
        assert hashlib.sha256(message[-1501:].encode()).hexdigest() == SUFFIX_SHA256
        assert "\nFirst, provide" not in row["question"]


@needs_real_files
def test_real_golds():
    two_wiki = load_task("prompt_r1", data_files=str(REAL / "eval" / "2WikiMultihopQA.parquet"))
    assert sum(answers[0] in ("yes", "no") for answers in two_wiki["answers"]) == 42
    popqa = load_task("prompt_r1", data_files=str(REAL / "eval" / "PopQA.parquet"))
    assert max(map(len, popqa["answers"])) == 22  # 23 as released, one of them twice
    dapo = load_task("prompt_r1", data_files=str(REAL / "eval" / "DAPO-Math.parquet"))
    assert sum("\n" in question for question in dapo["question"]) == 70


@needs_real_files
def test_real_validation_file():
    dataset = load_task(
        "prompt_r1", split="validation", data_files={"validation": str(REAL / "validation.parquet")}
    )
    assert dataset.num_rows == 2048
    assert sum("\n" in question for question in dataset["question"]) == 151
    assert {json.loads(meta)["data_source"] for meta in dataset["meta"]} == {"hotpotqa/hotpot_qa"}
    assert len(set(dataset["id"])) == 2048
    validate_dataset(dataset)


# --- damaged and odd files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["1e999", "-1e999", "Infinity"])
def test_a_number_beyond_all_bounds_names_its_line(tmp_path, number):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        f'{{"question": "q", "answer": "a"}}\n{{"question": "r", "answer": {number}}}\n'
    )
    with pytest.raises(ValueError, match=rf"row 1 .line 2. of .*rows.jsonl .*{number[:5]}"):
        load_task(path)


@pytest.mark.parametrize(
    "text",
    [
        "question, answer\nWhat is 2, 2?, 4\n".replace("2, 2", "2 2"),
        '"question", "answer"\n"What is 2 2?", "4"\n',
        "question,\tanswer\n".replace("\t", " ") + "\nWhat is 2 2?, 4\n",
    ],
)
def test_a_header_with_blanks_behind_its_commas_is_read(tmp_path, text):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    (row,) = load_task(path)
    assert (row["question"], row["answers"]) == ("What is 2 2?", ["4"])


def test_a_cell_keeps_its_blanks_where_the_header_has_none(tmp_path):
    from agentic_prompting.data.file_formats import read_file

    path = tmp_path / "rows.csv"
    path.write_text("question,answer\nq, a\n")
    assert read_file(str(path), ["question", "answer"]).rows == [{"question": "q", "answer": " a"}]


DAMAGED = """
import io, random, sys
import pyarrow as pa, pyarrow.parquet as pq
from pathlib import Path
from agentic_prompting.data.file_formats import read_file

folder, rng, outcomes = Path(sys.argv[1]), random.Random(0), {"read": 0, "refused": 0}
rows = {"question": [f"question {i} " + "x" * (i % 50) for i in range(2000)], "answer": [str(i) for i in range(2000)]}
for compression in ("NONE", "SNAPPY", "GZIP", "ZSTD"):
    whole = io.BytesIO()
    pq.write_table(pa.table(rows), whole, compression=compression, row_group_size=500)
    whole = whole.getvalue()
    for number in range(60):
        data, path = bytearray(whole), folder / "damaged.parquet"
        place = rng.randrange(4, len(data) - 1)
        if number % 3 == 0:
            data[place : place + 200] = rng.randbytes(min(200, len(data) - place))
        elif number % 3 == 1:
            del data[place : place + 50]
        else:
            data[place] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            found = read_file(str(path), ["question", "answer"]).rows
            assert all(isinstance(row["question"], str | None) for row in found)
            outcomes["read"] += 1
        except ValueError as error:
            assert "damaged.parquet" in str(error) and "\\n" not in str(error) and len(str(error)) < 600, error
            outcomes["refused"] += 1
print(outcomes)
"""


@pytest.mark.timeout(120)
def test_parquet_files_damaged_in_the_middle_end_in_one_line(tmp_path):
    """In a process of its own: what reads them is not Python."""
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", DAMAGED, tmp_path], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "refused" in done.stdout
