"""ProRefine's five sets and their scores: on small made-up rows, and on the real files where they
are at hand.
"""

import os
import random
from pathlib import Path

import datasets
import pytest
from datasets import Dataset
from hypothesis import given, strategies as st

from agentic_prompting.data import TASKS, load_task, validate_dataset
from agentic_prompting.data.answer_columns import strip_decimals
from agentic_prompting.data.prorefine_tasks import PROREFINE_TASKS, extract_last_integer
from agentic_prompting.llm import ScriptedChat, ServerFailed, start
from agentic_prompting.refine import START_PROMPTS
from agentic_prompting.rewards import (
    REASONING_SCORERS,
    AccuracyJudge,
    integer_match,
    letter_match,
    parse_integer,
    word_sorting_match,
)

REAL = Path(os.environ.get("AGENTIC_PROMPTING_DATA", "nowhere")) / "prorefine"
needs_real_files = pytest.mark.skipif(
    not REAL.is_dir(),
    reason=f"ProRefine's data files are not at {REAL}: set AGENTIC_PROMPTING_DATA",
)
FILES = {
    "bbh_object_counting": REAL / "object_counting.json",
    "bbh_word_sorting": REAL / "word_sorting.json",
    "gsm8k_dspy": {
        "train": REAL / "gsm8k_train.jsonl",
        "validation": REAL / "gsm8k_train.jsonl",
        "test": REAL / "gsm8k_test.jsonl",
    },
    "svamp": REAL / "SVAMP.json",
    "aqua": REAL / "aqua_test.json",
}


def test_each_set_has_a_record_a_scorer_and_a_prompt():
    assert set(PROREFINE_TASKS) == set(REASONING_SCORERS) == set(START_PROMPTS) == set(FILES)
    assert set(PROREFINE_TASKS) <= set(TASKS)


# The real files
# ------------------------------------------------------------------------------------------------------


@needs_real_files
@pytest.mark.parametrize(
    ("name", "split", "rows", "begins", "gold"),
    [
        (
            "bbh_object_counting",
            "train",
            50,
            "I have a flute, a piano, a trombone, four stoves",
            "8",
        ),
        ("bbh_object_counting", "validation", 100, "I have two stalks of celery", "10"),
        ("bbh_object_counting", "test", 100, "I have a couch, a bed", "9"),
        (
            "bbh_word_sorting",
            "train",
            50,
            "Sort the following words alphabetically: List: syndrome therefrom",
            "syndrome therefrom",
        ),
        (
            "bbh_word_sorting",
            "validation",
            100,
            "Sort the following words",
            "core discreet hat sonnet",
        ),
        (
            "bbh_word_sorting",
            "test",
            100,
            "Sort the following words alphabetically: List: oakland",
            "allis anthology jacobi marmot membrane oakland seaborg toggle trapezoidal",
        ),
        (
            "gsm8k_dspy",
            "train",
            200,
            "Question: The result from the 40-item Statistics exam Marion and Ella",
            "24",
        ),
        ("gsm8k_dspy", "validation", 300, "Question: 20 birds migrate", "2200"),
        ("gsm8k_dspy", "test", 1319, "Question: Amber, Micah, and Ahito ran 52 miles", "16"),
        (
            "svamp",
            "test",
            1000,
            "Each pack of dvds costs 76 dollars. If there is a discount of 25 dollars",
            "51",
        ),
        ("aqua", "test", 254, "A car is being driven, in a straight line", "A"),
    ],
)
def test_counts_and_first_rows(name, split, rows, begins, gold):
    dataset = load_task(name, split, data_files=FILES[name])
    assert dataset.num_rows == rows == len(set(dataset["id"]))
    assert dataset["question"][0].startswith(begins) and dataset["answers"][0] == [gold]
    validate_dataset(dataset)


@needs_real_files
@pytest.mark.parametrize("name", [name for name in FILES if PROREFINE_TASKS[name].subsets])
def test_parts_do_not_overlap(name):
    parts = [
        set(load_task(name, split, data_files=FILES[name])["question"])
        for split in ("train", "validation")
    ]
    assert not parts[0] & parts[1]


@needs_real_files
def test_golds_of_the_real_rows():
    words = [
        row
        for split in ("train", "test")
        for row in load_task("bbh_word_sorting", split, data_files=FILES["bbh_word_sorting"])
    ]
    assert all(row["answers"] == [" ".join(sorted(row["answers"][0].split()))] for row in words)
    assert all(
        word_sorting_match(f"Answer: {row['answers'][0]}", row["answers"]) == 1.0 for row in words
    )
    assert not any(
        word_sorting_match(row["question"], row["answers"])
        for row in words
        if len(row["question"]) > 120
    )
    aqua = load_task("aqua", "test", data_files=FILES["aqua"])
    assert {answers[0] for answers in aqua["answers"]} == set("ABCDE")
    assert all(question.count("\n") >= 5 and "\nE)" in question for question in aqua["question"])
    numbers = load_task("svamp", "test", data_files=FILES["svamp"])["answers"]
    assert max(int(answers[0]) for answers in numbers) == 22_090_603
    test = load_task("gsm8k_dspy", "test", data_files=FILES["gsm8k_dspy"])["answers"]
    assert sum(answers[0].startswith("-") for answers in test) == 2


@needs_real_files
def test_another_order_is_noticed(tmp_path):
    import json

    whole = json.loads(FILES["bbh_object_counting"].read_text())
    random.Random(1).shuffle(whole["examples"])
    (tmp_path / "object_counting.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match="order.*'test'"):
        load_task("bbh_object_counting", "test", data_files=tmp_path / "object_counting.json")


# Records, without the real files
# -------------------------------------------------------------------------------------


def bbh_rows(count=250):
    rows = [{"input": f"I have {i} plums.", "target": str(i)} for i in range(count)]
    for number, begins in (
        (0, "a flute, a piano"),
        (50, "stalks of celery"),
        (150, "a couch, a bed"),
    ):
        if number < count:
            rows[number]["input"] = f"I have {begins}."
    return rows


@pytest.fixture
def hub(monkeypatch):
    """A hub of our own: what `hub[path]` holds, everything else fails.

    `hub["calls"]` records the calls.
    """
    fake = {"calls": []}

    def load_dataset(path, config=None, **options):
        fake["calls"].append((path, config, options))
        if path not in fake:
            raise ConnectionError(f"cannot reach {path}")
        return Dataset.from_list(fake[path])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return fake


def test_a_hub_copy_in_another_order_is_passed_over(hub):
    hub["SaylorTwift/bbh"] = bbh_rows()[::-1]
    hub["json"] = bbh_rows()
    dataset = load_task("bbh_object_counting", "test")
    assert dataset.num_rows == 100
    assert dataset["answers"][1] == ["151"]
    assert dataset["id"][1].endswith("-151")
    assert [(path, config, options["split"]) for path, config, options in hub["calls"]] == [
        ("SaylorTwift/bbh", "object_counting", "test"),
        ("json", None, "rows"),
    ]
    assert hub["calls"][1][2]["field"] == "examples"
    assert hub["calls"][1][2]["data_files"]["rows"].endswith(
        "BIG-Bench-Hard/main/bbh/object_counting.json"
    )


def test_a_copy_of_another_size_is_passed_over(hub):
    hub["SaylorTwift/bbh"] = bbh_rows(249)
    with pytest.raises(RuntimeError, match="250.*249"):
        load_task("bbh_object_counting", "train")


def test_gsm8k_validation_comes_from_train(hub):
    with pytest.raises(RuntimeError):
        load_task("gsm8k_dspy", "validation")
    assert [options["split"] for _, _, options in hub["calls"]] == ["train", "train"]


def test_svamp_is_the_whole_thousand(hub):
    hub["ChilleD/SVAMP"] = [
        {"Body": "Two and two.", "Question": "How many?", "Answer": "4.0", "Type": "Addition"}
    ]
    assert load_task("svamp", "test")[0]["answers"] == ["4"]
    assert hub["calls"][0][2]["split"] == "train+test"
    with pytest.raises(ValueError, match="svamp.*'train'.*test"):
        load_task("svamp")


def test_unknown_splits_of_files_that_are_cut(tmp_path):
    Dataset.from_list(bbh_rows()).to_json(tmp_path / "rows.jsonl")
    assert (
        load_task("bbh_object_counting", "validation", data_files=tmp_path / "rows.jsonl")["id"][0]
        == "rows-50"
    )
    with pytest.raises(ValueError, match="'dev'.*train, validation, test"):
        load_task("bbh_object_counting", "dev", data_files=tmp_path / "rows.jsonl")


def test_small_readers():
    assert [
        strip_decimals(value) for value in (145.0, "145.0", "1,000", 22_090_603.0, 2**53 + 1, "2.5")
    ] == [
        "145",
        "145",
        "1000",
        "22090603",
        "9007199254740993",
        "2.5",
    ]
    assert extract_last_integer("Add.\n#### 24,960") == "24960"
    assert extract_last_integer("#### -7") == "-7"


# Scores
# --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Answer: 12", 12),
        ("3 apples and 4 pears make 7.", 7),
        ("Answer: $1,240.50", 1240),
        ("**24**", 24),
        ("-5", 5),  # the sign is lost
        ("between 10-12", 1012),  # a range runs together
        ("x = .5", 0),  # nothing before the point
        ("no number", 0),
        ("", 0),
        ("4 m²", 0),  # the last token with a digit, by Python's idea of one
        ("9" * 5000, 0),  # more digits than Python converts
    ],
)
def test_the_integer_rule(text, number):
    assert parse_integer(text) == number


@given(st.text(max_size=40))
def test_the_integer_rule_never_raises(text):
    assert parse_integer(text) >= 0


def test_integers_are_compared_as_integers():
    assert integer_match("so the answer is 08 plums", ["8"]) == 1.0
    assert integer_match("Answer: 8", ["7", "8"]) == 1.0
    assert (
        integer_match("", ["0"]) == 1.0 and integer_match("I have 5", ["-5"]) == 1.0
    )  # as released
    assert integer_match("Answer: 9", ["8"]) == 0.0


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: B", "B"),
        ("answer : (C) 21", "C"),
        ("**Answer:** **D**", "D"),
        ("Answer: A. Then again, Answer: E)", "E"),
        ("Answer: $A$", "A"),
        ("Answer:\n  C", "C"),
        ("Answer: Both", None),
        ("Answer: F", None),
        ("Answer: b", None),
        ("B", "B"),
        ("B or C", None),
        ("", None),
    ],
)
def test_the_letter_rule(text, letter):
    assert [option for option in "ABCDE" if letter_match(text, [option])] == (
        [letter] if letter else []
    )


@pytest.mark.parametrize(
    "text",
    [
        "I compare them.\nAnswer: barn it&t we're",
        "Answer: Barn, IT&T, we’re.",
        "Answer:\n1. barn\n2. it&t\n3. we're",
        "Answer:\n- **barn**\n- **it&t**\n- **we're**",
        "Answer: ['barn', 'it&t', \"we're\"]",
        "First thoughts.\nbarn it&t we're\n",
        "Answer: we're barn it&t? No. Answer: barn it&t we're",
    ],
)
def test_sorted_words_in_any_dress(text):
    assert word_sorting_match(text, ["barn it&t we're"]) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "Answer: barn we're it&t",
        "Answer: barn it&t",
        "Answer: barn it&t we're x",
        "",
        "Answer:",
        "barn\nit&t",
    ],
)
def test_words_that_are_not_sorted(text):
    assert word_sorting_match(text, ["barn it&t we're"]) == 0.0


@pytest.mark.parametrize("score", [integer_match, letter_match, word_sorting_match])
def test_golds_that_are_none(score):
    with pytest.raises(ValueError, match="answers is empty"):
        score("Answer: 1", [])
    with pytest.raises(ValueError, match="must be a list of strings"):
        score("Answer: A", "A")


def test_the_judge():
    said = {
        "right one": "Same. <ACCURACY>1</ACCURACY>",
        "wrong one": "<ACCURACY>0</ACCURACY>",
        "odd": "Well.",
    }
    chat = ScriptedChat(said)
    judge = AccuracyJudge(chat)
    scores = [start(judge("Sort: b a", prediction, ["a b"])).result() for prediction in said]
    assert scores == [1.0, 0.0, None]
    shown = chat.calls[0][1]["content"]
    assert all(piece in shown for piece in ("Sort: b a", "a b", "right one"))
    assert chat.sampling[0] == {"temperature": 0}
    assert (
        start(AccuracyJudge(ScriptedChat([ServerFailed("down")]))("q", "{gold}", ["g"])).result()
        is None
    )
    with pytest.raises(ValueError, match="answers is empty"):
        start(judge("q", "p", [])).result()
