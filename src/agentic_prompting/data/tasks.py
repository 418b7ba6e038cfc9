"""Where each data set is, and how to read a row of it: one record per set, no machinery.

Adding a set is adding a [`Task`] to [`TASKS`]; ProRefine's five are in `prorefine.py`. The hub ids, splits, sizes and
licences are facts about other people's repositories; they were collected with their sources in August 2026 and should
be looked at again when one moves.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from .prorefine import PROREFINE_TASKS
from .records import Reader, Row, Source, Task

# Small readers of odd formats ---------------------------------------------------------------------------------------


def as_list(value: Any) -> list[str]:
    """A list that may be stored as JSON, as a Python literal or as itself; a scalar is a list of one."""
    if value is None:
        return []
    if not isinstance(value, str):
        return [str(item) for item in value] if isinstance(value, (list, tuple)) else [str(value)]
    for parse in (json.loads, ast.literal_eval):
        try:
            parsed = parse(value)
        except (ValueError, SyntaxError):
            continue
        if isinstance(parsed, list):
            return [str(item) for item in parsed]
    return [value]


def one_answer(value: Any) -> list[str]:
    """One answer, never parsed: `"[1, 2]"` stays the text it is. A missing one is none."""
    return [] if value is None else [str(value)]


def gsm8k_answer(solution: str) -> str:
    """GSM8K's final number, commas removed and sign kept: `"… #### 24,960"` gives `"24960"`."""
    return solution.split("####")[-1].strip().replace(",", "")


_MATHQA_OPTION = re.compile(r"([a-e]) \) (.*?)(?=\s*,?\s*[a-e] \) |\s*$)", re.DOTALL)


def mathqa_options(options: str) -> dict[str, str]:
    """MathQA's options, which are one string: `"a ) 38 , b ) 27.675"` gives `{"a": "38", "b": "27.675"}`."""
    return {letter: text.strip() for letter, text in _MATHQA_OPTION.findall(options)}


def squad_answers(answers: Any) -> list[str]:
    """SQuAD's answer texts, whether the list of structs came back as a dict of lists or as it is."""
    if isinstance(answers, Mapping):
        return list(answers["text"])
    return [answer["text"] for answer in answers or []]


# The released Prompt-R1 rows ----------------------------------------------------------------------------------------

_R1_HEAD = "Question: "
_R1_CUT = "\nFirst, provide a simple explanation of the question"  # occurs exactly once in every released message


def prompt_r1_question(row: Row) -> str:
    """The question in a released row's only message.

    Raises:
        `ValueError`: If the message is not one user message in the released wrapper.
    """
    return _split_prompt_r1(row)[1].strip()


def prompt_r1_meta(row: Row) -> dict[str, Any]:
    """The row's own instruction, as `prompt_template` with `{question}` where the question stood, and its source.

    Filling the template with the question gives the released message again, character by character: the spaces around
    some questions stay in the template.
    """
    head, question, tail = _split_prompt_r1(row)
    before, after = question.split(question.strip()) if question.strip() else (question, "")
    return {"prompt_template": f"{head}{before}{{question}}{after}{tail}", "data_source": row.get("data_source")}


def _split_prompt_r1(row: Row) -> tuple[str, str, str]:
    messages = row["prompt"]
    if len(messages) != 1 or messages[0]["role"] != "user":
        raise ValueError("a released Prompt-R1 row has exactly one user message in `prompt`")
    content = messages[0]["content"]
    if not content.startswith(_R1_HEAD) or _R1_CUT not in content:
        raise ValueError(f"`prompt` is not in the released wrapper, '{_R1_HEAD}…{_R1_CUT.strip()}…': {content[:60]!r}")
    # Not at the first newline: DAPO's questions have several lines.
    question, _, instruction = content.removeprefix(_R1_HEAD).partition(_R1_CUT)
    return _R1_HEAD, question, _R1_CUT + instruction


_R1_EVAL = (
    "2WikiMultihopQA",
    "BookSum",
    "DAPO-Math",
    "MathQA_ood",
    "MusiQue",
    "PopQA",
    "WritingPrompts",
    "Xsum_ood",
    "gsm8k",
    "hotpot",
    "squad_v2_ood",
    "triviaqa_ood",
)
_R1_FILES: dict[str, str | list[str]] = {
    "train": "train_data/train.parquet",
    "validation": "train_data/validation.parquet",
    "test": [f"eval_data/{name}.parquet" for name in _R1_EVAL],
    **{f"test/{name}": f"eval_data/{name}.parquet" for name in _R1_EVAL},
}

# Shapes that several sets share -------------------------------------------------------------------------------------

_PARQUET = "refs/convert/parquet"  # the hub's own conversion: no loading script, and folders instead of configurations
_FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"

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
    # The paper's own samples of its twelve sets; the best source for its tables.
    "prompt_r1": Task(
        sources=(Source("QwenQKing/Prompt-R1", files=_R1_FILES),),
        readers=(
            Reader(
                ("prompt", "reward_model"),
                prompt_r1_question,
                lambda row: list(row["reward_model"]["ground_truth"]),
                prompt_r1_meta,
                ("data_source",),
            ),
        ),
        expected_rows={
            "train": 8 * 5120,
            "validation": 2048,
            "test": 12 * 128,
            **{f"test/{name}": 128 for name in _R1_EVAL},
        },
        licence="Apache-2.0",
    ),
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
    **PROREFINE_TASKS,
}
