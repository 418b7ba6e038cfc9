"""The data sets: one [`Task`] for each, with its sources and the readers of its rows.

Adding a set is adding a [`Task`] to [`TASKS`]. The hub ids, splits, sizes and licences are facts about other people's
repositories. They were collected with their sources in August 2026; `agentic-prompting data check --online` compares
them with what is there now.
"""

from __future__ import annotations

import re
from typing import Any

from .task import Cut, Reader, Row, Source, Task, answers_of, as_list, whole_number


def _parquet(path: str, data_dir: str, **options: Any) -> Source:
    """The hub's own conversion of a repository: no loading script, and folders instead of configurations."""
    return Source(path, revision="refs/convert/parquet", data_dir=data_dir, **options)


def _also_parquet(path: str, config: str, **options: Any) -> tuple[Source, Source]:
    """A repository, and behind it the hub's conversion under the same name."""
    return Source(path, config, **options), _parquet(path, config, **options)


def _flashrag(config: str, **splits: str) -> Source:
    """A copy in the one shape of FlashRAG's collection: the last resort of several chains."""
    return Source("RUC-NLPIR/FlashRAG_datasets", config, splits=splits)


# The released Prompt-R1 files: the paper's own samples of its twelve sets, the best source for its tables. In the
# GSM8K evaluation file 111 of 128 rows are GSM8K *training* questions; `contamination_report` counts such rows.

_HEAD = "Question: "
_CUT = "\nFirst, provide a simple explanation of the question"  # occurs exactly once in every released message

EVALUATION_FILES = (
    *(
        "2WikiMultihopQA",
        "BookSum",
        "DAPO-Math",
        "MathQA_ood",
        "MusiQue",
        "PopQA",
        "WritingPrompts",
        "Xsum_ood",
    ),
    *("gsm8k", "hotpot", "squad_v2_ood", "triviaqa_ood"),
)
"""Names of the twelve evaluation files; each is a split, `test/hotpot` for example."""

_FILES: dict[str, str | list[str]] = {
    "train": "train_data/train.parquet",
    "validation": "train_data/validation.parquet",
    "test": [f"eval_data/{name}.parquet" for name in EVALUATION_FILES],
    **{f"test/{name}": f"eval_data/{name}.parquet" for name in EVALUATION_FILES},
}


def prompt_r1_question(row: Row) -> str:
    """The question in a released row's only message.

    Raises:
        `ValueError`: If the message is not one user message in the released wrapper.
    """
    return _split_prompt_r1(row)[0].strip()


def prompt_r1_meta(row: Row) -> dict[str, Any]:
    """The row's own instruction, as `prompt_template` with `{question}` where the question stood, and its source.

    Filling the template with the question gives the released message again, character by character: the spaces around
    some questions stay in the template.
    """
    question, tail = _split_prompt_r1(row)
    before, after = question.split(question.strip()) if question.strip() else (question, "")
    return {
        "prompt_template": f"{_HEAD}{before}{{question}}{after}{tail}",
        "data_source": row.get("data_source"),
    }


def _split_prompt_r1(row: Row) -> tuple[str, str]:
    messages = row["prompt"]
    if len(messages) != 1 or messages[0]["role"] != "user":
        raise ValueError("a released Prompt-R1 row has exactly one user message in `prompt`")
    content = messages[0]["content"]
    if not content.startswith(_HEAD) or _CUT not in content:
        raise ValueError(
            f"`prompt` is not in the released wrapper, '{_HEAD}…{_CUT.strip()}…': {content[:60]!r}"
        )
    # Not at the first newline: DAPO's questions have several lines.
    question, cut, instruction = content.removeprefix(_HEAD).partition(_CUT)
    return question, cut + instruction


# The three writing sets (Table 3): long answers, compared by meaning. What the authors asked differs in each: the task
# texts are ours. Their BookSum task (an article for a title) uses columns that public BookSum does not have and exists
# in the released files alone: `prompt_r1`, split `test/BookSum`. Here it is a chapter and its summary.

SUMMARY_TASK = "Summarise this chapter of a book in a few paragraphs.\n\n{text}"
"""For BookSum. Variable: `{text}` (str), the chapter."""

STORY_TASK = "Write a short story for this idea: '{text}'"
"""For WritingPrompts. Variable: `{text}` (str), the idea without its tag (`[ WP ]`: what kind of prompt it is)."""

ARTICLE_TASK = "Write the news article that this sentence sums up: '{text}'"
"""For XSum, which the paper turns round. Variable: `{text}` (str), the summary."""

_TAG = re.compile(r"^\s*\[\s*[A-Za-z]{2}\s*\]\s*")


def _asked(task: str, text: str) -> str:
    if not text.strip():
        raise ValueError("its text is empty")
    return task.replace("{text}", text.strip())


# Values in shapes of their own ----------------------------------------------------------------------------------------

_OPTION_LETTER = re.compile(r"(?:^|[\s,])([a-e]) \) ")


def mathqa_options(options: str) -> dict[str, str]:
    """MathQA's options, which are one string: `"a ) 38 , b ) 27.675"` gives `{"a": "38", "b": "27.675"}`."""
    letters = list(_OPTION_LETTER.finditer(options))
    ends = [*(letter.start() for letter in letters[1:]), len(options)]
    return {
        letter[1]: options[letter.end() : end].strip().removesuffix(",").strip()
        for letter, end in zip(letters, ends, strict=False)
    }


def squad_answers(answers: Any) -> list[str]:
    """SQuAD's answer texts, whether the list of structs came back as a dict of lists or as it is."""
    return (
        list(answers["text"])
        if isinstance(answers, dict)
        else [answer["text"] for answer in answers or []]
    )


def gsm8k_answer(solution: str) -> str:
    """GSM8K's final number, commas removed and sign kept: `"… #### 24,960"` gives `"24960"`."""
    return solution.split("####")[-1].strip().replace(",", "")


def last_integer(solution: str) -> str:
    """The last token of a GSM8K solution as an integer: `"… #### 24,960"` gives `"24960"`."""
    return str(int(solution.split()[-1].replace(",", "")))


# Prompt-R1's sets: the released files and their public sources --------------------------------------------------------


def _golds(column: str, keep: tuple[str, ...] = ()) -> Reader:
    """`question`, and a column with a list of accepted answers, which may be written as a text."""
    return Reader("question", lambda row: as_list(row[column]), (column,), keep)


_RELEASED = Reader(
    prompt_r1_question,
    lambda row: row["reward_model"]["ground_truth"],
    ("prompt", "reward_model"),
    keep=("data_source",),
    meta=prompt_r1_meta,
)
_FLASHRAG = _golds("golden_answers")
_GSM8K = Reader(
    "question", lambda row: [gsm8k_answer(row["answer"])], ("answer",), keep={"solution": "answer"}
)
_MUSIQUE = Reader(
    "question",
    lambda row: answers_of(row["answer"]) + as_list(row["answer_aliases"]),
    ("answer", "answer_aliases"),
)
# SQuAD: the question alone, as in the paper; the passage stays in `meta`.
_SQUAD = Reader(
    "question", lambda row: squad_answers(row["answers"]), ("answers",), keep=("title", "context")
)
_TRIVIAQA = Reader(
    "question",
    lambda row: [row["answer"]["value"], *row["answer"]["aliases"]],
    ("answer",),
    keep=("question_id",),
)
_MATHQA = Reader(  # no options shown and the option's text as the gold, as in the paper
    "Problem",
    lambda row: answers_of(mathqa_options(row["options"]).get(row["correct"])),
    ("options", "correct"),
    keep=("options", "correct"),
)
_CHAPTER = Reader(
    lambda row: _asked(SUMMARY_TASK, row["chapter"]),
    "summary_text",
    ("chapter",),
    keep={"book": "bid"},
)
_CHAPTERS = Reader(
    lambda row: _asked(SUMMARY_TASK, row["text"]),
    lambda row: [summary["text"] for summary in row["summary"]],
    ("text", "summary"),
)
_STORY = Reader(lambda row: _asked(STORY_TASK, _TAG.sub("", row["prompt"])), "story", ("prompt",))
_XSUM = Reader(lambda row: _asked(ARTICLE_TASK, row["summary"]), "document", ("summary",))
_WRITING = ("semantic_similarity", "token_f1")

# 2Wiki's root has a loading script, which only the packaged builder passes by.
_2WIKI_FILES: dict[str, str | list[str]] = {
    ours: f"hf://datasets/xanhho/2WikiMultihopQA/{theirs}.parquet"
    for ours, theirs in {"train": "train", "validation": "dev"}.items()
}
_POPQA_FILE: dict[str, str | list[str]] = {"test": "hf://datasets/akariasai/PopQA/test.tsv"}

PROMPT_R1_TASKS: dict[str, Task] = {
    "prompt_r1": Task(
        (Source("QwenQKing/Prompt-R1", files=_FILES),),
        (_RELEASED,),
        {
            "train": 40_960,
            "validation": 2048,
            "test": 1_536,
            **{f"test/{name}": 128 for name in EVALUATION_FILES},
        },
        "Apache-2.0",
    ),
    "hotpotqa": Task(
        (
            *_also_parquet("hotpotqa/hotpot_qa", "distractor"),
            _flashrag("hotpotqa", validation="dev"),
        ),
        (Reader("question", "answer", keep=("type", "level")), _FLASHRAG),
        {"train": 90_447, "validation": 7_405},
        "CC-BY-SA-4.0",
    ),
    "2wiki": Task(
        (
            Source("framolfese/2WikiMultihopQA"),
            Source("parquet", files=_2WIKI_FILES),
            _flashrag("2wikimultihopqa", validation="dev"),  # train: 15,000 rows only
        ),
        (Reader("question", "answer", keep=("type",)), _FLASHRAG),
        {"train": 167_454, "validation": 12_576},
        "Apache-2.0",
    ),
    "gsm8k": Task(
        _also_parquet("openai/gsm8k", "main"),
        (_GSM8K,),
        {"train": 7_473, "test": 1_319},
        "MIT",
        metrics=("exact_match", "math_match"),
    ),
    "musique": Task(
        (
            Source("bdsaglam/musique", "answerable"),
            Source("dgslibisey/MuSiQue"),
            _flashrag("musique", validation="dev"),
        ),
        (_MUSIQUE, _FLASHRAG),
        {"train": 19_938, "validation": 2_417},
        "CC-BY-4.0",
    ),
    "popqa": Task(
        (
            Source("akariasai/PopQA"),
            Source("csv", files=_POPQA_FILE, options={"sep": "\t"}),
            _flashrag("popqa"),
        ),
        (_golds("possible_answers", ("prop", "s_pop", "o_pop")), _FLASHRAG),
        {"test": 14_267},
        "none stated",
    ),
    "squad_v2": Task(
        (Source("rajpurkar/squad_v2", "squad_v2"), Source("lighteval/squad_v2")),
        (_SQUAD,),
        {"train": 130_319, "validation": 11_873},
        "CC-BY-SA-4.0",
        unanswerable=True,
    ),
    "triviaqa": Task(  # FlashRAG's is the unfiltered set: other sizes
        (
            *_also_parquet("mandarjoshi/trivia_qa", "rc.nocontext"),
            _flashrag("triviaqa", validation="dev"),
        ),
        (_TRIVIAQA, _FLASHRAG),
        {"train": 138_384, "validation": 17_944},
        "unknown",
    ),
    "mathqa": Task(
        (Source("regisss/math_qa"), _parquet("allenai/math_qa", "default")),
        (_MATHQA,),
        {"train": 29_837, "validation": 4_475, "test": 2_985},
        "Apache-2.0",
    ),
    "booksum": Task(
        (Source("kmfoda/booksum"), Source("ubaada/booksum-complete-cleaned", "chapters")),
        (_CHAPTER, _CHAPTERS),
        {"train": 9_600, "validation": 1_484, "test": 1_431},
        "BSD-3-Clause",
        metrics=_WRITING,
    ),
    "writingprompts": Task(  # test: 15,138 rows, but 5,478 different prompts; samples are of different questions
        (Source("euclaise/writingprompts"),),
        (_STORY,),
        {"train": 272_600, "validation": 15_620, "test": 15_138},
        "MIT",
        metrics=_WRITING,
    ),
    "xsum": Task(
        (Source("EdinburghNLP/xsum"), _parquet("EdinburghNLP/xsum", "default")),
        (_XSUM,),
        {"train": 204_045, "validation": 11_332, "test": 11_334},
        "unknown",
        metrics=_WRITING,
    ),
}

# ProRefine's five sets (section "Data"): splits and questions of the BIG-Bench Hard sets and GSM8K are TextGrad's, as
# the paper says. Of SVAMP its test set is the whole of the original file; its training rows come from other sets and
# are not here: nothing is trained.


def _big_bench_hard(name: str, metric: str, train: str, validation: str, test: str) -> Task:
    """One of the 27 sets: 250 rows in one list, cut by position. The three texts are in each part's first question."""
    ours_to_theirs = {"train": "test", "validation": "test", "test": "test"}
    url = f"https://raw.githubusercontent.com/suzgunmirac/BIG-Bench-Hard/main/bbh/{name}.json"
    return Task(
        (
            Source("SaylorTwift/bbh", name, splits=ours_to_theirs),
            Source("json", files=dict.fromkeys(ours_to_theirs, url), options={"field": "examples"}),
            Source("lukaemon/bbh", name, splits=ours_to_theirs),
        ),
        (Reader("input", "target"),),
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


_GSM8K_DSPY = Reader(
    lambda row: "Question: " + row["question"],
    lambda row: [last_integer(row["answer"])],
    ("question", "answer"),
    keep={"solution": "answer"},
)
_SVAMP = Reader(
    lambda row: f"{row['Body']} {row['Question']}",
    lambda row: [whole_number(answer) for answer in answers_of(row["Answer"])],
    ("Body", "Question", "Answer"),
    keep={"type": "Type"},
)
_AQUA = Reader(
    lambda row: row["question"] + "\n" + "\n".join(row["options"]),
    "correct",
    ("question", "options"),
    ("options",),
)
_SVAMP_FILE: dict[str, str | list[str]] = {
    "test": "https://raw.githubusercontent.com/arkilpatel/SVAMP/main/SVAMP.json"
}

PROREFINE_TASKS: dict[str, Task] = {
    "bbh_object_counting": _big_bench_hard(
        "object_counting", "integer_match", "a flute, a piano", "stalks of celery", "a couch, a bed"
    ),
    "bbh_word_sorting": _big_bench_hard(
        "word_sorting",
        "word_sorting_match",
        "syndrome therefrom",
        "hat core sonnet discreet",
        "oakland seaborg jacobi",
    ),
    "gsm8k_dspy": Task(  # DSPy's split, by way of TextGrad
        _also_parquet("openai/gsm8k", "main", splits={"validation": "train"}),
        (_GSM8K_DSPY,),
        {"train": 200, "validation": 300, "test": 1_319},
        "MIT",
        cuts={
            "train": Cut(0, 200, seed=0, whole=7_473, first="Marion"),
            "validation": Cut(200, 500, seed=0, whole=7_473, first="birds"),
            "test": Cut(seed=0, whole=1_319, first="Amber, Micah"),
        },
        metrics=("integer_match",),
    ),
    "svamp": Task(  # 700 and 300 of the original thousand
        (Source("ChilleD/SVAMP", splits={"test": "train+test"}), Source("json", files=_SVAMP_FILE)),
        (_SVAMP,),
        {"test": 1_000},
        "MIT",
        metrics=("integer_match",),
    ),
    "aqua": Task(
        _also_parquet("deepmind/aqua_rat", "raw"),
        (_AQUA,),
        {"train": 97_467, "validation": 254, "test": 254},
        "Apache-2.0",
        metrics=("letter_match",),
    ),
}

# E-SPL's (arXiv 2602.14697): preprocessing is the released code's. DAPO's wrapper is taken off and each problem kept
# once, training sets are shuffled with seed 42. The paper's subsample for search (196 and 64 questions) was not
# released.

DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'


def dapo_question(row: Row) -> str:
    """A DAPO problem without the instructions around it."""
    return row["prompt"][0]["content"].replace(DAPO_HEAD, "").replace(DAPO_TAIL, "")


_MATHS = ("math_match", "exact_match")
_DAPO = Reader(
    dapo_question,
    lambda row: answers_of(row["reward_model"]["ground_truth"]),
    ("prompt", "reward_model"),
)
_DAPO_REPOSITORY = Source(
    "BytedTsinghua-SIA/DAPO-Math-17k"
)  # 1.79 M rows: each problem about a hundred times
_PROBLEM = Reader("problem", "answer")
_AIMO = "AI-MO/aimo-validation-"
_MATH_ARENA = "MathArena/hmmt_"
_TRAIN_IS_TEST = {"test": "train"}
_PARTS_OF_TEST = {  # half-open row ranges of the search set's test file, in its order
    "test/nq": (0, 3_610),
    "test/triviaqa": (3_610, 14_923),
    "test/popqa": (14_923, 29_190),
    "test/hotpotqa": (29_190, 36_595),
    "test/2wikimultihopqa": (36_595, 49_171),
    "test/musique": (49_171, 51_588),
    "test/bamboogle": (51_588, 51_713),
}
_SEARCH = Source(  # file by file and column by column: other columns have different structs in train and test
    "parquet",
    files={
        split: f"hf://datasets/PeterJinGo/nq_hotpotqa_train/{split.partition('/')[0]}.parquet"
        for split in ("train", "test", *_PARTS_OF_TEST)
    },
    options={"columns": ["id", "question", "golden_answers", "data_source"]},
)


def _competition(
    split: str, rows: int, licence: str, *sources: Source, seed: int | None = None
) -> Task:
    """A set of problems with a single split."""
    order = None if seed is None else Cut(seed=seed)
    return Task(sources, (_PROBLEM,), {split: rows}, licence, metrics=_MATHS, order=order)


ESPL_TASKS: dict[str, Task] = {
    "dapo_math": Task(
        (Source("open-r1/DAPO-Math-17k-Processed", "all"), _DAPO_REPOSITORY),
        (Reader("prompt", "solution"), _DAPO),
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
        Source(f"{_MATH_ARENA}feb_2023", also=(f"{_MATH_ARENA}feb_2024", f"{_MATH_ARENA}feb_2025")),
        seed=42,
    ),
    "hmmt_nov25": _competition(
        "test", 30, "CC-BY-NC-SA-4.0", Source(f"{_MATH_ARENA}nov_2025", splits=_TRAIN_IS_TEST)
    ),
    "aimo_aime": _competition("train", 90, "Apache-2.0", Source(_AIMO + "aime")),
    "aimo_amc": _competition("train", 83, "Apache-2.0", Source(_AIMO + "amc")),
    "aime_and_amc": _competition(
        "train", 173, "Apache-2.0", Source(_AIMO + "aime", also=(_AIMO + "amc",)), seed=42
    ),
    "beyondaime": _competition("test", 100, "CC0-1.0", Source("ByteDance-Seed/BeyondAIME")),
    "nq_hotpotqa": Task(  # test is seven sets in a row; each is a split of its own, `test/nq` for example
        (_SEARCH,),
        (_golds("golden_answers", ("data_source",)),),
        {
            **{"train": 169_615, "test": 51_713},
            **{split: stop - start for split, (start, stop) in _PARTS_OF_TEST.items()},
        },
        "not seen",
        cuts={split: Cut(*rows, whole=51_713) for split, rows in _PARTS_OF_TEST.items()},
    ),
}

TASKS: dict[str, Task] = {**PROMPT_R1_TASKS, **PROREFINE_TASKS, **ESPL_TASKS}

PAIRS: dict[str, dict[str, tuple[str, str]]] = {
    "dapo_aime25": {"train": ("dapo100", "train"), "test": ("aime25", "test")},
    "hmmt": {"train": ("hmmt_feb", "train"), "test": ("hmmt_nov25", "test")},
    "aimo_beyondaime": {"train": ("aimo_aime", "train"), "test": ("beyondaime", "test")},
    "aime_and_amc_to_beyondaime": {
        "train": ("aime_and_amc", "train"),
        "test": ("beyondaime", "test"),
    },
}
"""The released code's pairs by its own names: for each split of a pair, the set and its split."""
