"""The records of ProRefine's five sets (section "Data") and of E-SPL's: competition mathematics and agentic search.

ProRefine: splits and questions of the BIG-Bench Hard sets and GSM8K are TextGrad's, as the paper says. Of SVAMP its
test set is the whole of the original file; its training rows come from other sets and are not here: nothing is trained.

E-SPL (arXiv 2602.14697): preprocessing is the released code's: DAPO's wrapper is taken off and each problem kept once,
training sets are shuffled with seed 42. The paper's subsample for search (196 and 64 questions) was not released.
"""

from __future__ import annotations

from .task import Cut, Reader, Row, Source, Task, answers_of, as_list, whole_number


def gsm8k_answer(solution: str) -> str:
    """GSM8K's final number, commas removed and sign kept: `"… #### 24,960"` gives `"24960"`."""
    return solution.split("####")[-1].strip().replace(",", "")


def last_integer(solution: str) -> str:
    """The last token of a GSM8K solution as an integer: `"… #### 24,960"` gives `"24960"`."""
    return str(int(solution.split()[-1].replace(",", "")))


def _big_bench_hard(name: str, train: str, validation: str, test: str, metric: str) -> Task:
    """One of the 27 sets: 250 rows in one list, cut by position. The three texts are in each part's first question."""
    ours_to_theirs = {"train": "test", "validation": "test", "test": "test"}
    url = f"https://raw.githubusercontent.com/suzgunmirac/BIG-Bench-Hard/main/bbh/{name}.json"
    return Task(
        (
            Source("SaylorTwift/bbh", name, splits=ours_to_theirs),
            Source("json", files=dict.fromkeys(ours_to_theirs, url), options={"field": "examples"}),
            Source("lukaemon/bbh", name, splits=ours_to_theirs),
        ),
        (Reader(("input", "target"), "input", "target"),),
        {"train": 50, "validation": 100, "test": 100},
        "MIT",
        cuts={
            "train": Cut(0, 50, whole=250, first=train),
            "validation": Cut(50, 150, whole=250, first=validation),
            "test": Cut(150, 250, whole=250, first=test),
        },
        json_field="examples",
        metrics=(metric,),
    )


_GSM8K = Reader(
    ("question", "answer"),
    lambda row: "Question: " + row["question"],
    lambda row: [last_integer(row["answer"])],
    keep={"solution": "answer"},
)
_SVAMP = Reader(
    ("Body", "Question", "Answer"),
    lambda row: f"{row['Body']} {row['Question']}",
    lambda row: [whole_number(answer) for answer in answers_of(row["Answer"])],
    keep={"type": "Type"},
)
_AQUA = Reader(
    ("question", "options", "correct"),
    lambda row: row["question"] + "\n" + "\n".join(row["options"]),
    "correct",
    keep=("options",),
)

PROREFINE_TASKS: dict[str, Task] = {
    "bbh_object_counting": _big_bench_hard(
        "object_counting", "a flute, a piano", "stalks of celery", "a couch, a bed", "integer_match"
    ),
    "bbh_word_sorting": _big_bench_hard(
        "word_sorting", "syndrome therefrom", "hat core sonnet discreet", "oakland seaborg jacobi", "word_sorting_match"
    ),
    "gsm8k_dspy": Task(  # DSPy's split, by way of TextGrad
        (
            Source("openai/gsm8k", "main", splits={"validation": "train"}),
            Source.parquet("openai/gsm8k", "main", splits={"validation": "train"}),
        ),
        (_GSM8K,),
        {"train": 200, "validation": 300, "test": 1_319},
        "MIT",
        cuts={
            "train": Cut(0, 200, seed=0, whole=7_473, first="Marion"),
            "validation": Cut(200, 500, seed=0, whole=7_473, first="birds"),
            "test": Cut(seed=0, whole=1_319, first="Amber, Micah"),
        },
        metrics=("integer_match",),
    ),
    "svamp": Task(
        (
            Source("ChilleD/SVAMP", splits={"test": "train+test"}),  # 700 and 300 of the original thousand
            Source("json", files={"test": "https://raw.githubusercontent.com/arkilpatel/SVAMP/main/SVAMP.json"}),
        ),
        (_SVAMP,),
        {"test": 1_000},
        "MIT",
        metrics=("integer_match",),
    ),
    "aqua": Task(
        (Source("deepmind/aqua_rat", "raw"), Source.parquet("deepmind/aqua_rat", "raw")),
        (_AQUA,),
        {"train": 97_467, "validation": 254, "test": 254},
        "Apache-2.0",
        metrics=("letter_match",),
    ),
}

# E-SPL ----------------------------------------------------------------------------------------------------------------

DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'


def dapo_question(row: Row) -> str:
    """A DAPO problem without the instructions around it."""
    return row["prompt"][0]["content"].replace(DAPO_HEAD, "").replace(DAPO_TAIL, "")


def competition_answers(value: object) -> list[str]:
    """The accepted answer of a competition problem: numbers without needless decimals, LaTeX as it is."""
    return [whole_number(text) if isinstance(value, (int, float)) else text for text in answers_of(value)]


_MATHS = ("math_match", "exact_match")
_DAPO = Reader(("prompt", "reward_model"), dapo_question, lambda row: answers_of(row["reward_model"]["ground_truth"]))
_PROBLEM = Reader(("problem", "answer"), "problem", lambda row: competition_answers(row["answer"]))
_SEARCH = Reader(
    ("question", "golden_answers"), "question", lambda row: as_list(row["golden_answers"]), keep=("data_source",)
)
_PARTS_OF_TEST = {  # half-open row ranges of the search set's test file, in its order
    "nq": (0, 3_610),
    "triviaqa": (3_610, 14_923),
    "popqa": (14_923, 29_190),
    "hotpotqa": (29_190, 36_595),
    "2wikimultihopqa": (36_595, 49_171),
    "musique": (49_171, 51_588),
    "bamboogle": (51_588, 51_713),
}
_SEARCH_FILE = "hf://datasets/PeterJinGo/nq_hotpotqa_train/{}.parquet"


_DAPO_REPOSITORY = Source("BytedTsinghua-SIA/DAPO-Math-17k")  # 1.79 M rows: each problem about a hundred times
_AIMO = "AI-MO/aimo-validation-"
_TRAIN_IS_TEST = {"test": "train"}


def _competition(split: str, rows: int, licence: str, *sources: Source, seed: int | None = None) -> Task:
    """A set of problems with a single split."""
    order = None if seed is None else Cut(seed=seed)
    return Task(sources, (_PROBLEM,), {split: rows}, licence, metrics=_MATHS, order=order)


ESPL_TASKS: dict[str, Task] = {
    "dapo_math": Task(
        (Source("open-r1/DAPO-Math-17k-Processed", "all"), _DAPO_REPOSITORY),
        (Reader(("prompt", "solution"), "prompt", "solution"), _DAPO),
        {"train": 17_398},
        "Apache-2.0",
        metrics=_MATHS,
        unique=True,
    ),
    "dapo100": Task(  # reproducible from this one repository alone: the shuffle is over all of its problems
        (_DAPO_REPOSITORY,),
        (_DAPO,),
        {"train": 100},
        "Apache-2.0",
        metrics=_MATHS,
        unique=True,
        order=Cut(0, 100, seed=42),
    ),
    "aime25": _competition(
        "test",
        30,
        "none declared",
        Source("yentinglin/aime_2025", splits=_TRAIN_IS_TEST),
        Source("MathArena/aime_2025", splits=_TRAIN_IS_TEST),
        Source("math-ai/aime25"),
    ),
    "hmmt_feb": _competition(
        "train",
        90,
        "CC-BY-NC-SA-4.0",
        Source("MathArena/hmmt_feb_2023", also=("MathArena/hmmt_feb_2024", "MathArena/hmmt_feb_2025")),
        seed=42,
    ),
    "hmmt_nov25": _competition("test", 30, "CC-BY-NC-SA-4.0", Source("MathArena/hmmt_nov_2025", splits=_TRAIN_IS_TEST)),
    "aimo_aime": _competition("train", 90, "Apache-2.0", Source(_AIMO + "aime")),
    "aimo_amc": _competition("train", 83, "Apache-2.0", Source(_AIMO + "amc")),
    "aime_and_amc": _competition("train", 173, "Apache-2.0", Source(_AIMO + "aime", also=(_AIMO + "amc",)), seed=42),
    "beyondaime": _competition("test", 100, "CC0-1.0", Source("ByteDance-Seed/BeyondAIME")),
    "nq_hotpotqa": Task(  # test is seven sets in a row; each is a split of its own, `test/nq` for example
        (
            Source(  # file by file and column by column: other columns have different structs in train and test
                "parquet",
                files={
                    split: _SEARCH_FILE.format(split.partition("/")[0])
                    for split in ("train", "test", *(f"test/{part}" for part in _PARTS_OF_TEST))
                },
                options={"columns": ["id", "question", "golden_answers", "data_source"]},
            ),
        ),
        (_SEARCH,),
        {
            **{"train": 169_615, "test": 51_713},
            **{f"test/{part}": stop - start for part, (start, stop) in _PARTS_OF_TEST.items()},
        },
        "not seen",
        cuts={f"test/{part}": Cut(*rows, whole=51_713) for part, rows in _PARTS_OF_TEST.items()},
    ),
}

PAIRS: dict[str, dict[str, tuple[str, str]]] = {
    "dapo_aime25": {"train": ("dapo100", "train"), "test": ("aime25", "test")},
    "hmmt": {"train": ("hmmt_feb", "train"), "test": ("hmmt_nov25", "test")},
    "aimo_beyondaime": {"train": ("aimo_aime", "train"), "test": ("beyondaime", "test")},
    "aime_and_amc_to_beyondaime": {"train": ("aime_and_amc", "train"), "test": ("beyondaime", "test")},
}
"""The released code's pairs by its own names: for each split of a pair, the set and its split."""
