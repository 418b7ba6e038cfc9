"""The data sets of E-SPL (arXiv 2602.14697), with the preprocessing of the released code.

The instructions around DAPO's problems are removed and each problem is kept once; training sets are
shuffled with seed 42. The paper's sample for search (196 and 64 questions) was not released.
"""

from __future__ import annotations

from .answer_columns import list_answers
from .sources import answer_list_reader
from .task import Reader, Row, Source, Subset, Task

DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'


def extract_dapo_question(row: Row) -> str:
    """Return a DAPO problem without the instructions around it."""
    return row["prompt"][0]["content"].replace(DAPO_HEAD, "").replace(DAPO_TAIL, "")


_MATH_METRICS = ("math_match", "exact_match")
_DAPO = Reader(
    question=extract_dapo_question,
    answers=lambda row: list_answers(row["reward_model"]["ground_truth"]),
    function_columns=("prompt", "reward_model"),
)
# 1.79 M rows: each problem about a hundred times.
_DAPO_REPOSITORY = Source("BytedTsinghua-SIA/DAPO-Math-17k")
_COMPETITION = Reader(question="problem", answers="answer")
_AIMO = "AI-MO/aimo-validation-"
_HMMT = "MathArena/hmmt_"
# Some repositories have their only split under the name `train`.
_TEST_IS_TRAIN = {"test": "train"}

# The test file of the search set consists of seven sets, one after the other: (start, stop).
_SEARCH_TEST_RANGES = {
    "test/nq": (0, 3_610),
    "test/triviaqa": (3_610, 14_923),
    "test/popqa": (14_923, 29_190),
    "test/hotpotqa": (29_190, 36_595),
    "test/2wikimultihopqa": (36_595, 49_171),
    "test/musique": (49_171, 51_588),
    "test/bamboogle": (51_588, 51_713),
}
_SEARCH_TEST_ROWS = 51_713
_SEARCH_FOLDER = "hf://datasets/PeterJinGo/nq_hotpotqa_train"
# Files and columns are named, because the other columns have different structs in train and test.
_SEARCH = Source(
    "parquet",
    files={
        "train": f"{_SEARCH_FOLDER}/train.parquet",
        "test": f"{_SEARCH_FOLDER}/test.parquet",
        **dict.fromkeys(_SEARCH_TEST_RANGES, f"{_SEARCH_FOLDER}/test.parquet"),
    },
    options={"columns": ["id", "question", "golden_answers", "data_source"]},
)


def _competition(
    split: str, rows: int, licence: str, *sources: Source, seed: int | None = None
) -> Task:
    """Return a set of problems with a single split, shuffled if there is a seed."""
    return Task(
        sources=sources,
        readers=(_COMPETITION,),
        expected_rows={split: rows},
        licence=licence,
        metrics=_MATH_METRICS,
        selection=None if seed is None else Subset(seed=seed),
    )


ESPL_TASKS: dict[str, Task] = {
    "dapo_math": Task(
        sources=(Source("open-r1/DAPO-Math-17k-Processed", "all"), _DAPO_REPOSITORY),
        # The processed rows hold the problem alone, the others with the instructions around it.
        readers=(Reader(question="prompt", answers="solution"), _DAPO),
        expected_rows={"train": 17_398},
        licence="Apache-2.0",
        metrics=_MATH_METRICS,
        unique_questions=True,
    ),
    # Reproducible from this one repository only: the shuffle is over all of its problems.
    "dapo100": Task(
        sources=(_DAPO_REPOSITORY,),
        readers=(_DAPO,),
        expected_rows={"train": 100},
        licence="Apache-2.0",
        metrics=_MATH_METRICS,
        unique_questions=True,
        selection=Subset(0, 100, seed=42),
    ),
    "aime25": _competition(
        "test",
        30,
        "none declared",
        Source("yentinglin/aime_2025", splits=_TEST_IS_TRAIN),
        Source("MathArena/aime_2025", splits=_TEST_IS_TRAIN),
        Source("math-ai/aime25"),
    ),
    # Three years put together, then shuffled.
    "hmmt_feb": _competition(
        "train",
        90,
        "CC-BY-NC-SA-4.0",
        Source(f"{_HMMT}feb_2023", also=(f"{_HMMT}feb_2024", f"{_HMMT}feb_2025")),
        seed=42,
    ),
    "hmmt_nov25": _competition(
        "test", 30, "CC-BY-NC-SA-4.0", Source(f"{_HMMT}nov_2025", splits=_TEST_IS_TRAIN)
    ),
    "aimo_aime": _competition("train", 90, "Apache-2.0", Source(f"{_AIMO}aime")),
    "aimo_amc": _competition("train", 83, "Apache-2.0", Source(f"{_AIMO}amc")),
    # Both of the sets above put together, then shuffled.
    "aime_and_amc": _competition(
        "train", 173, "Apache-2.0", Source(f"{_AIMO}aime", also=(f"{_AIMO}amc",)), seed=42
    ),
    "beyondaime": _competition("test", 100, "CC0-1.0", Source("ByteDance-Seed/BeyondAIME")),
    # Each of the seven sets in the test file is also a split, for example `test/nq`.
    "nq_hotpotqa": Task(
        sources=(_SEARCH,),
        readers=(answer_list_reader("golden_answers", meta_columns=("data_source",)),),
        expected_rows={
            "train": 169_615,
            "test": _SEARCH_TEST_ROWS,
            **{split: stop - start for split, (start, stop) in _SEARCH_TEST_RANGES.items()},
        },
        licence="not seen",
        subsets={
            split: Subset(start, stop, total_rows=_SEARCH_TEST_ROWS)
            for split, (start, stop) in _SEARCH_TEST_RANGES.items()
        },
    ),
}

PAIRS: dict[str, dict[str, tuple[str, str]]] = {
    "dapo_aime25": {"train": ("dapo100", "train"), "test": ("aime25", "test")},
    "hmmt": {"train": ("hmmt_feb", "train"), "test": ("hmmt_nov25", "test")},
    "aimo_beyondaime": {"train": ("aimo_aime", "train"), "test": ("beyondaime", "test")},
    "aime_and_amc_to_beyondaime": {
        "train": ("aime_and_amc", "train"),
        "test": ("beyondaime", "test"),
    },
}
"""The pairs of the released code, under its names: the set and its split for each split."""
