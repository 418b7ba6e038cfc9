"""Where each data set is, and how to read a row of it: one record per set, no machinery.

Adding a set is adding a [`Task`] to [`TASKS`]. Here are the question-answering sets; the released Prompt-R1 files are
in `prompt_r1.py`, the writing sets in `writing.py`, ProRefine's five in `prorefine.py`, E-SPL's in `espl.py`.

The hub ids, splits, sizes and licences are facts about other people's repositories. They were collected with their
sources in August 2026; `agentic-prompting data check --online` compares them with what is there now.
"""

from __future__ import annotations

from .espl import ESPL_TASKS
from .formats import as_list, gsm8k_answer, mathqa_options, one_answer, squad_answers
from .prompt_r1 import PROMPT_R1_TASKS
from .prorefine import PROREFINE_TASKS
from .records import FLASHRAG_REPOSITORY as _FLASHRAG, PARQUET_BRANCH as _PARQUET, Reader, Source, Task
from .writing import WRITING_TASKS

# Shapes that several sets share -------------------------------------------------------------------------------------

FLASHRAG = Reader(
    ("question", "golden_answers"), lambda row: row["question"], lambda row: as_list(row["golden_answers"])
)


def _question_and_answer(*keep: str) -> Reader:
    """Rows with a `question` and one `answer`; the columns to keep go into `meta` where they exist."""
    return Reader(
        ("question", "answer"),
        lambda row: row["question"],
        lambda row: one_answer(row["answer"]),
        lambda row: {name: row[name] for name in keep if name in row},
        ("id", *keep),
    )


TASKS: dict[str, Task] = {
    **PROMPT_R1_TASKS,
    "hotpotqa": Task(
        sources=(
            Source("hotpotqa/hotpot_qa", "distractor"),
            Source("hotpotqa/hotpot_qa", revision=_PARQUET, data_dir="distractor"),
            Source(_FLASHRAG, "hotpotqa", splits={"validation": "dev"}),
        ),
        readers=(_question_and_answer("type", "level"), FLASHRAG),
        expected_rows={"train": 90_447, "validation": 7_405},
        licence="CC-BY-SA-4.0",
    ),
    "2wiki": Task(
        sources=(
            Source("framolfese/2WikiMultihopQA"),
            Source(  # its root has a loading script, which only the packaged builder passes by
                "parquet",
                files={
                    "train": "hf://datasets/xanhho/2WikiMultihopQA/train.parquet",
                    "validation": "hf://datasets/xanhho/2WikiMultihopQA/dev.parquet",
                },
            ),
            Source(_FLASHRAG, "2wikimultihopqa", splits={"validation": "dev"}),  # train: 15,000 rows only
        ),
        readers=(_question_and_answer("type"), FLASHRAG),
        expected_rows={"train": 167_454, "validation": 12_576},
        licence="Apache-2.0",
    ),
    "gsm8k": Task(
        sources=(Source("openai/gsm8k", "main"), Source("openai/gsm8k", revision=_PARQUET, data_dir="main")),
        readers=(
            Reader(
                ("question", "answer"),
                lambda row: row["question"],
                lambda row: [gsm8k_answer(row["answer"])],
                lambda row: {"solution": row["answer"]},
            ),
        ),
        expected_rows={"train": 7_473, "test": 1_319},
        licence="MIT",
        metrics=("exact_match", "math_match"),
    ),
    "musique": Task(
        sources=(
            Source("bdsaglam/musique", "answerable"),
            Source("dgslibisey/MuSiQue"),
            Source(_FLASHRAG, "musique", splits={"validation": "dev"}),
        ),
        readers=(
            Reader(
                ("question", "answer", "answer_aliases"),
                lambda row: row["question"],
                lambda row: one_answer(row["answer"]) + as_list(row["answer_aliases"]),
            ),
            FLASHRAG,
        ),
        expected_rows={"train": 19_938, "validation": 2_417},
        licence="CC-BY-4.0",
    ),
    "popqa": Task(
        sources=(
            Source("akariasai/PopQA"),
            Source("csv", files={"test": "hf://datasets/akariasai/PopQA/test.tsv"}, options={"sep": "\t"}),
            Source(_FLASHRAG, "popqa"),
        ),
        readers=(
            Reader(
                ("question", "possible_answers"),
                lambda row: row["question"],
                lambda row: as_list(row["possible_answers"]),
                lambda row: {name: row[name] for name in ("prop", "s_pop", "o_pop") if name in row},
                ("id", "prop", "s_pop", "o_pop"),
            ),
            FLASHRAG,
        ),
        expected_rows={"test": 14_267},
        licence="none stated",
    ),
    "squad_v2": Task(  # the question alone, as in the paper; the passage stays in `meta`
        sources=(Source("rajpurkar/squad_v2", "squad_v2"), Source("lighteval/squad_v2")),
        readers=(
            Reader(
                ("question", "answers"),
                lambda row: row["question"],
                lambda row: squad_answers(row["answers"]),
                lambda row: {name: row[name] for name in ("title", "context") if name in row},
                ("id", "title", "context"),
            ),
        ),
        expected_rows={"train": 130_319, "validation": 11_873},
        licence="CC-BY-SA-4.0",
        unanswerable=True,
    ),
    "triviaqa": Task(
        sources=(
            Source("mandarjoshi/trivia_qa", "rc.nocontext"),
            Source("mandarjoshi/trivia_qa", revision=_PARQUET, data_dir="rc.nocontext"),
            Source(_FLASHRAG, "triviaqa", splits={"validation": "dev"}),  # the unfiltered set: other sizes
        ),
        readers=(
            Reader(
                ("question", "answer"),
                lambda row: row["question"],
                lambda row: [row["answer"]["value"], *row["answer"]["aliases"]],
                lambda row: {"question_id": row["question_id"]} if "question_id" in row else {},
                ("question_id",),
            ),
            FLASHRAG,
        ),
        expected_rows={"train": 138_384, "validation": 17_944},
        licence="unknown",
    ),
    "mathqa": Task(  # no options shown and the option's text as the gold, as in the paper
        sources=(Source("regisss/math_qa"), Source("allenai/math_qa", revision=_PARQUET, data_dir="default")),
        readers=(
            Reader(
                ("Problem", "options", "correct"),
                lambda row: row["Problem"],
                lambda row: one_answer(mathqa_options(row["options"]).get(row["correct"])),
                lambda row: {"options": row["options"], "correct": row["correct"]},
            ),
        ),
        expected_rows={"train": 29_837, "validation": 4_475, "test": 2_985},
        licence="Apache-2.0",
    ),
    **WRITING_TASKS,
    **PROREFINE_TASKS,
    **ESPL_TASKS,
}
