"""The five data sets of ProRefine (section "Data").

Splits and questions of the BIG-Bench Hard sets and of GSM8K are TextGrad's, as the paper says. The
test split of SVAMP is the whole original file; its training rows come from other sets and are left
out, because nothing is trained.
"""

from __future__ import annotations

from .answer_columns import list_answers, strip_decimals
from .sources import with_parquet_conversion
from .task import Reader, Source, Subset, Task


def extract_last_integer(solution: str) -> str:
    """Return the last token of a GSM8K solution as an integer: `"… #### 24,960"` gives
    `"24960"`."""
    last_token = solution.split()[-1]
    return str(int(last_token.replace(",", "")))


def _big_bench_hard(
    name: str, metric: str, train_question: str, validation_question: str, test_question: str
) -> Task:
    """Return one of the 27 sets: 250 rows in one list, cut by position.

    Args:
        name (`str`): The name of the set in its repositories.
        metric (`str`): The metric to report.
        train_question (`str`), validation_question (`str`), test_question (`str`): A part of the
            first question of each split.
    """
    # The repositories have a single split, from which all three are cut.
    source_splits = {"train": "test", "validation": "test", "test": "test"}
    url = f"https://raw.githubusercontent.com/suzgunmirac/BIG-Bench-Hard/main/bbh/{name}.json"
    return Task(
        sources=(
            Source("SaylorTwift/bbh", name, splits=source_splits),
            Source("json", files=dict.fromkeys(source_splits, url), options={"field": "examples"}),
            Source("lukaemon/bbh", name, splits=source_splits),
        ),
        readers=(Reader(question="input", answers="target"),),
        expected_rows={"train": 50, "validation": 100, "test": 100},
        licence="MIT",
        # TextGrad's cut, checked by a part of the first question of each split.
        subsets={
            "train": Subset(0, 50, total_rows=250, first_question=train_question),
            "validation": Subset(50, 150, total_rows=250, first_question=validation_question),
            "test": Subset(150, 250, total_rows=250, first_question=test_question),
        },
        json_field="examples",
        metrics=(metric,),
    )


# With the word in front of the question, as in TextGrad.
_GSM8K_DSPY = Reader(
    question=lambda row: "Question: " + row["question"],
    answers=lambda row: [extract_last_integer(row["answer"])],
    function_columns=("question", "answer"),
    meta_columns={"solution": "answer"},
)
# The story and the question about it are separate columns.
_SVAMP = Reader(
    question=lambda row: f"{row['Body']} {row['Question']}",
    answers=lambda row: [strip_decimals(answer) for answer in list_answers(row["Answer"])],
    function_columns=("Body", "Question", "Answer"),
    meta_columns={"type": "Type"},
)
# The options follow the question, one in each line; the answer is a letter.
_AQUA = Reader(
    question=lambda row: "\n".join([row["question"], *row["options"]]),
    answers="correct",
    function_columns=("question", "options"),
    meta_columns=("options",),
)
_SVAMP_FILES: dict[str, str | list[str]] = {
    "test": "https://raw.githubusercontent.com/arkilpatel/SVAMP/main/SVAMP.json"
}

PROREFINE_TASKS: dict[str, Task] = {
    "bbh_object_counting": _big_bench_hard(
        "object_counting",
        metric="integer_match",
        train_question="a flute, a piano",
        validation_question="stalks of celery",
        test_question="a couch, a bed",
    ),
    "bbh_word_sorting": _big_bench_hard(
        "word_sorting",
        metric="word_sorting_match",
        train_question="syndrome therefrom",
        validation_question="hat core sonnet discreet",
        test_question="oakland seaborg jacobi",
    ),
    # DSPy's split, which TextGrad uses.
    "gsm8k_dspy": Task(
        sources=with_parquet_conversion("openai/gsm8k", "main", splits={"validation": "train"}),
        readers=(_GSM8K_DSPY,),
        expected_rows={"train": 200, "validation": 300, "test": 1_319},
        licence="MIT",
        subsets={
            "train": Subset(0, 200, seed=0, total_rows=7_473, first_question="Marion"),
            "validation": Subset(200, 500, seed=0, total_rows=7_473, first_question="birds"),
            "test": Subset(seed=0, total_rows=1_319, first_question="Amber, Micah"),
        },
        metrics=("integer_match",),
    ),
    "svamp": Task(
        sources=(
            # 700 and 300 rows of the original thousand.
            Source("ChilleD/SVAMP", splits={"test": "train+test"}),
            Source("json", files=_SVAMP_FILES),
        ),
        readers=(_SVAMP,),
        expected_rows={"test": 1_000},
        licence="MIT",
        metrics=("integer_match",),
    ),
    "aqua": Task(
        sources=with_parquet_conversion("deepmind/aqua_rat", "raw"),
        readers=(_AQUA,),
        expected_rows={"train": 97_467, "validation": 254, "test": 254},
        licence="Apache-2.0",
        metrics=("letter_match",),
    ),
}
