"""Prompt-R1's data sets: small files in each documented shape, and the released files."""

import hashlib
import json

import pytest
from datasets import Dataset

from agentic_prompting.data import (
    load_task,
    validate_dataset,
)
from agentic_prompting.data.answer_columns import parse_answers
from agentic_prompting.data.prompt_r1_tasks import (
    build_prompt_r1_meta,
    extract_gsm8k_answer,
    extract_prompt_r1_question,
    parse_mathqa_options,
)
from support.data_rows import REAL, ROWS, needs_real_files, written


def test_released_rows_give_back_their_message_character_by_character():
    for row in ROWS["prompt_r1"]:
        template = build_prompt_r1_meta(row)["prompt_template"]
        assert template.count("{question}") == 1
        assert (
            template.replace("{question}", extract_prompt_r1_question(row))
            == row["prompt"][0]["content"]
        )


def test_flashrags_shape_is_read_too(tmp_path):
    rows = [{"id": "dev_0", "question": "q", "golden_answers": ["a", "b"], "metadata": {"x": 1}}]
    assert load_task("musique", data_files=written(tmp_path, rows))["answers"][:] == [["a", "b"]]


def test_questions_of_the_writing_sets_say_what_to_do(tmp_path):
    asked = {
        name: load_task(name, data_files=written(tmp_path, ROWS[name]))["question"][0]
        for name in ("booksum", "xsum")
    }
    assert asked["booksum"].endswith("C0")
    assert asked["xsum"].endswith("'Short 0.'")
    assert "article" in asked["xsum"]
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


def test_prompt_r1_is_asked_for_by_file(hub):
    hub.rows["QwenQKing/Prompt-R1"] = ROWS["prompt_r1"]
    load_task("prompt_r1", split="test/hotpot")
    load_task("prompt_r1", split="test")
    one, twelve = (options["data_files"]["rows"] for _, _, options in hub.calls)
    assert one == "eval_data/hotpot.parquet" and one in twelve and len(twelve) == 12


def test_small_readers():
    assert (
        parse_answers('["a", 1]')
        == parse_answers("['a', 1]")
        == parse_answers(["a", 1])
        == ["a", "1"]
    )
    assert parse_answers(None) == []
    assert parse_answers("plain") == ["plain"]
    assert parse_answers("1984") == ["1984"]
    assert extract_gsm8k_answer("x #### 1 \n#### -24,960 ") == "-24960"
    assert parse_mathqa_options("a ) 38 , b ) 27.675 , c ) 1 , 5 , e ) none") == {
        "a": "38",
        "b": "27.675",
        "c": "1 , 5",
        "e": "none",
    }


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
