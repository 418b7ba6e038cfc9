"""ProRefine's five data sets (section "Data"): two of BIG-Bench Hard, GSM8K, SVAMP and AQuA, as records.

Splits and questions of the first three are TextGrad's, as the paper says. Of SVAMP the paper's test set is the whole of
the original file (1,000 rows); its training rows come from other sets and are not here, since nothing is trained.
"""

from __future__ import annotations

from .formats import last_integer, whole_number
from .records import PARQUET_BRANCH, Cut, Reader, Row, Source, Task, shuffled


def _aqua_question(row: Row) -> str:
    return row["question"] + "\n" + "\n".join(row["options"])


def _big_bench_hard(name: str, train: str, validation: str, test: str, metric: str) -> Task:
    """One of the 27 sets: 250 rows in one list, cut by position. The three texts are in each part's first question."""
    ours_to_theirs = {"train": "test", "validation": "test", "test": "test"}
    url = f"https://raw.githubusercontent.com/suzgunmirac/BIG-Bench-Hard/main/bbh/{name}.json"
    return Task(
        sources=(
            Source("SaylorTwift/bbh", name, splits=ours_to_theirs),
            Source("json", files=dict.fromkeys(ours_to_theirs, url), options={"field": "examples"}),
            Source("lukaemon/bbh", name, splits=ours_to_theirs),
        ),
        readers=(Reader(("input", "target"), lambda row: row["input"], lambda row: [row["target"]]),),
        expected_rows={"train": 50, "validation": 100, "test": 100},
        licence="MIT",
        cuts={
            "train": Cut.rows(250, 0, 50, train),
            "validation": Cut.rows(250, 50, 150, validation),
            "test": Cut.rows(250, 150, 250, test),
        },
        json_field="examples",
        metrics=(metric,),
    )


PROREFINE_TASKS: dict[str, Task] = {
    "bbh_object_counting": _big_bench_hard(
        "object_counting", "a flute, a piano", "stalks of celery", "a couch, a bed", "integer_match"
    ),
    "bbh_word_sorting": _big_bench_hard(
        "word_sorting", "syndrome therefrom", "hat core sonnet discreet", "oakland seaborg jacobi", "word_sorting_match"
    ),
    "gsm8k_dspy": Task(  # DSPy's split, by way of TextGrad
        sources=(
            Source("openai/gsm8k", "main", splits={"validation": "train"}),
            Source(
                "openai/gsm8k",
                revision=PARQUET_BRANCH,
                data_dir="main",
                splits={"validation": "train"},
            ),
        ),
        readers=(
            Reader(
                ("question", "answer"),
                lambda row: "Question: " + row["question"],
                lambda row: [last_integer(row["answer"])],
                lambda row: {"solution": row["answer"]},
            ),
        ),
        expected_rows={"train": 200, "validation": 300, "test": 1_319},
        licence="MIT",
        cuts={
            "train": Cut(7_473, shuffled(0, 200), "Marion"),
            "validation": Cut(7_473, shuffled(200, 500), "birds"),
            "test": Cut(1_319, shuffled(0), "Amber, Micah"),
        },
        metrics=("integer_match",),
    ),
    "svamp": Task(
        sources=(
            Source("ChilleD/SVAMP", splits={"test": "train+test"}),  # 700 and 300 of the original thousand
            Source("json", files={"test": "https://raw.githubusercontent.com/arkilpatel/SVAMP/main/SVAMP.json"}),
        ),
        readers=(
            Reader(
                ("Body", "Question", "Answer"),
                lambda row: f"{row['Body']} {row['Question']}",
                lambda row: [whole_number(row["Answer"])],
                lambda row: {"type": row["Type"]} if "Type" in row else {},
                ("Type",),
            ),
        ),
        expected_rows={"test": 1_000},
        licence="MIT",
        metrics=("integer_match",),
    ),
    "aqua": Task(
        sources=(
            Source("deepmind/aqua_rat", "raw"),
            Source("deepmind/aqua_rat", revision=PARQUET_BRANCH, data_dir="raw"),
        ),
        readers=(
            Reader(
                ("question", "options", "correct"),
                _aqua_question,
                lambda row: [row["correct"]],
                lambda row: {"options": list(row["options"])},
            ),
        ),
        expected_rows={"train": 97_467, "validation": 254, "test": 254},
        licence="Apache-2.0",
        metrics=("letter_match",),
    ),
}
