"""E-SPL's data (arXiv 2602.14697): competition mathematics in pairs of training and test sets, and agentic search.

Preprocessing is the released code's: DAPO's wrapper is taken off and each problem kept once, training sets are shuffled
with seed 42. The paper's subsample for search (196 and 64 questions) was not released.
"""

from __future__ import annotations

from .formats import as_list, missing, one_answer, whole_number
from .records import Cut, Reader, Row, Source, Task, shuffled

DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'


def dapo_question(row: Row) -> str:
    """A DAPO problem without the instructions around it."""
    return row["prompt"][0]["content"].replace(DAPO_HEAD, "").replace(DAPO_TAIL, "")


def competition_answer(value: object) -> list[str]:
    """The accepted answer of a competition problem: numbers without needless decimals, LaTeX as it is."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not missing(value):
        return [whole_number(value)]
    return one_answer(value)


_MATHS = ("math_match", "exact_match")
_DAPO = Reader(("prompt", "reward_model"), dapo_question, lambda row: one_answer(row["reward_model"]["ground_truth"]))
_PROBLEM = Reader(("problem", "answer"), lambda row: row["problem"], lambda row: competition_answer(row["answer"]))
_PARTS_OF_TEST = {  # half-open row ranges of the search set's test file, in its order
    "nq": (0, 3_610),
    "triviaqa": (3_610, 14_923),
    "popqa": (14_923, 29_190),
    "hotpotqa": (29_190, 36_595),
    "2wikimultihopqa": (36_595, 49_171),
    "musique": (49_171, 51_588),
    "bamboogle": (51_588, 51_713),
}
_SEARCH_TEST_ROWS = 51_713


def _competition(sources: tuple[Source, ...], split: str, rows: int, licence: str, shuffle: bool = False) -> Task:
    """A set of problems with a single split."""
    order = shuffled(0, seed=42) if shuffle else None
    return Task(sources, (_PROBLEM,), {split: rows}, licence, metrics=_MATHS, order=order)


ESPL_TASKS: dict[str, Task] = {
    "dapo_math": Task(
        sources=(
            Source("open-r1/DAPO-Math-17k-Processed", "all"),
            Source("BytedTsinghua-SIA/DAPO-Math-17k"),  # 1.79 M rows: each problem about a hundred times
        ),
        readers=(
            Reader(("prompt", "solution"), lambda row: row["prompt"], lambda row: one_answer(row["solution"])),
            _DAPO,
        ),
        expected_rows={"train": 17_398},
        licence="Apache-2.0",
        metrics=_MATHS,
        unique=True,
    ),
    "dapo100": Task(  # reproducible from this one repository alone: the shuffle is over all of its problems
        sources=(Source("BytedTsinghua-SIA/DAPO-Math-17k"),),
        readers=(_DAPO,),
        expected_rows={"train": 100},
        licence="Apache-2.0",
        metrics=_MATHS,
        unique=True,
        order=shuffled(0, 100, seed=42),
    ),
    "aime25": _competition(
        (
            Source("yentinglin/aime_2025", splits={"test": "train"}),
            Source("MathArena/aime_2025", splits={"test": "train"}),
            Source("math-ai/aime25"),
        ),
        "test",
        30,
        "none declared",
    ),
    "hmmt_feb": _competition(
        (Source("MathArena/hmmt_feb_2023", also=("MathArena/hmmt_feb_2024", "MathArena/hmmt_feb_2025")),),
        "train",
        90,
        "CC-BY-NC-SA-4.0",
        shuffle=True,
    ),
    "hmmt_nov25": _competition(
        (Source("MathArena/hmmt_nov_2025", splits={"test": "train"}),), "test", 30, "CC-BY-NC-SA-4.0"
    ),
    "aimo_aime": _competition((Source("AI-MO/aimo-validation-aime"),), "train", 90, "Apache-2.0"),
    "aimo_amc": _competition((Source("AI-MO/aimo-validation-amc"),), "train", 83, "Apache-2.0"),
    "aime_and_amc": _competition(
        (Source("AI-MO/aimo-validation-aime", also=("AI-MO/aimo-validation-amc",)),),
        "train",
        173,
        "Apache-2.0",
        shuffle=True,
    ),
    "beyondaime": _competition((Source("ByteDance-Seed/BeyondAIME"),), "test", 100, "CC0-1.0"),
    "nq_hotpotqa": Task(  # test is seven sets in a row; each is a split of its own, `test/nq` for example
        sources=(
            Source(  # file by file and column by column: other columns have different structs in train and test
                "parquet",
                files={
                    "train": "hf://datasets/PeterJinGo/nq_hotpotqa_train/train.parquet",
                    **dict.fromkeys(
                        ("test", *(f"test/{part}" for part in _PARTS_OF_TEST)),
                        "hf://datasets/PeterJinGo/nq_hotpotqa_train/test.parquet",
                    ),
                },
                options={"columns": ["id", "question", "golden_answers", "data_source"]},
            ),
        ),
        readers=(
            Reader(
                ("question", "golden_answers"),
                lambda row: row["question"],
                lambda row: as_list(row["golden_answers"]),
                lambda row: {"data_source": row["data_source"]} if "data_source" in row else {},
                ("id", "data_source"),
            ),
        ),
        expected_rows={
            "train": 169_615,
            "test": _SEARCH_TEST_ROWS,
            **{f"test/{part}": stop - start for part, (start, stop) in _PARTS_OF_TEST.items()},
        },
        licence="not seen",
        cuts={
            f"test/{part}": Cut.rows(_SEARCH_TEST_ROWS, start, stop) for part, (start, stop) in _PARTS_OF_TEST.items()
        },
    ),
}

PAIRS: dict[str, dict[str, tuple[str, str]]] = {
    "dapo_aime25": {"train": ("dapo100", "train"), "test": ("aime25", "test")},
    "hmmt": {"train": ("hmmt_feb", "train"), "test": ("hmmt_nov25", "test")},
    "aimo_beyondaime": {"train": ("aimo_aime", "train"), "test": ("beyondaime", "test")},
    "aime_and_amc_to_beyondaime": {"train": ("aime_and_amc", "train"), "test": ("beyondaime", "test")},
}
"""The released code's pairs by its own names: for each split of a pair, the set and its split."""
