"""The data sets of Prompt-R1: the released files, and their public sources."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .answer_columns import list_answers, parse_answers
from .sources import (
    answer_list_reader,
    flashrag,
    parquet_conversion,
    with_parquet_conversion,
)
from .task import Reader, Row, Source, Task

# ---- the released files ----
# They hold the paper's own samples of its twelve sets, and are the best source for its tables. In
# the GSM8K evaluation file 111 of 128 rows are GSM8K *training* questions; `contamination_report`
# counts such rows.

_WRAPPER_HEAD = "Question: "
# Occurs exactly once in every released message.
_WRAPPER_TAIL = "\nFirst, provide a simple explanation of the question"

EVALUATION_FILES = (
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
"""Names of the twelve evaluation files. Each is a split, for example `test/hotpot`."""

_EVALUATION_PATHS = {name: f"eval_data/{name}.parquet" for name in EVALUATION_FILES}
_RELEASED_FILES: dict[str, str | list[str]] = {
    "train": "train_data/train.parquet",
    "validation": "train_data/validation.parquet",
    "test": list(_EVALUATION_PATHS.values()),
    **{f"test/{name}": path for name, path in _EVALUATION_PATHS.items()},
}


def extract_prompt_r1_question(row: Row) -> str:
    """Return the question in a released row's only message.

    Raises:
        `ValueError`: The row does not have one user message in the released wrapper.
    """
    question, _ = _split_released_message(row)
    return question.strip()


def build_prompt_r1_meta(row: Row) -> dict[str, Any]:
    """Return the instruction of a released row as `prompt_template`, and its `data_source`.

    Filling `{question}` in the template gives the released message again, character by character:
    the blanks around some questions stay in the template.
    """
    question, instruction = _split_released_message(row)
    # The blanks around the question go into the template: the question is stripped.
    stripped = question.strip()
    before, after = question.split(stripped) if stripped else (question, "")
    return {
        "prompt_template": f"{_WRAPPER_HEAD}{before}{{question}}{after}{instruction}",
        "data_source": row.get("data_source"),
    }


def _split_released_message(row: Row) -> tuple[str, str]:
    """Return the question and the instruction after it."""
    messages = row["prompt"]
    if len(messages) != 1 or messages[0]["role"] != "user":
        raise ValueError("a released Prompt-R1 row has exactly one user message in `prompt`")

    # The question is what stands between the wrapper's head and its tail.
    content = messages[0]["content"]
    if not content.startswith(_WRAPPER_HEAD) or _WRAPPER_TAIL not in content:
        raise ValueError(
            "`prompt` is not in the released wrapper, "
            f"'{_WRAPPER_HEAD}…{_WRAPPER_TAIL.strip()}…': {content[:60]!r}"
        )
    # The first newline does not end the question: DAPO's questions have several lines.
    question, tail, instruction = content.removeprefix(_WRAPPER_HEAD).partition(_WRAPPER_TAIL)
    return question, tail + instruction


# ---- the three writing sets (Table 3) ----
# Long answers, compared by meaning. The authors' instructions differ from set to set; these are
# ours. Their BookSum task (an article for a title) uses columns that the public BookSum does not
# have; it exists only in the released files: `prompt_r1`, split `test/BookSum`. Here the task is to
# summarise a chapter.

SUMMARY_TASK = "Summarise this chapter of a book in a few paragraphs.\n\n{text}"
"""For BookSum. Variable: `{text}` (`str`), the chapter."""

STORY_TASK = "Write a short story for this idea: '{text}'"
"""For WritingPrompts. Variable: `{text}` (`str`), the idea without its tag, such as `[ WP ]`."""

ARTICLE_TASK = "Write the news article that this sentence sums up: '{text}'"
"""For XSum, which the paper reverses. Variable: `{text}` (`str`), the summary."""

_IDEA_TAG = re.compile(r"^\s*\[\s*[A-Za-z]{2}\s*\]\s*")


def _fill_writing_task(template: str, text: str) -> str:
    if not text.strip():
        raise ValueError("its text is empty")
    return template.replace("{text}", text.strip())


# ---- columns that need parsing ----

_OPTION_LETTER = re.compile(r"(?:^|[\s,])([a-e]) \) ")


def parse_mathqa_options(options: str) -> dict[str, str]:
    """Parse MathQA's options: `"a ) 38 , b ) 27.675"` gives `{"a": "38", "b": "27.675"}`."""
    letters = list(_OPTION_LETTER.finditer(options))
    # An option ends where the next letter starts.
    ends = [letter.start() for letter in letters[1:]]
    ends.append(len(options))
    texts = {}
    for letter, end in zip(letters, ends, strict=False):
        # The comma in front of the next letter belongs to no option.
        option = options[letter.end() : end]
        texts[letter[1]] = option.strip().removesuffix(",").strip()
    return texts


def extract_squad_answers(
    answers: Mapping[str, Sequence[str]] | Sequence[Mapping[str, str]] | None,
) -> list[str]:
    """Return SQuAD's answer texts, from a dict of lists or from a list of dicts."""
    # `datasets` turns a list of dicts into a dict of lists, other readers do not.
    if isinstance(answers, Mapping):
        return list(answers["text"])
    return [answer["text"] for answer in answers or []]


def extract_gsm8k_answer(solution: str) -> str:
    """Return GSM8K's final number, with its sign and without commas: `"… #### 24,960"` gives
    `"24960"`."""
    return solution.split("####")[-1].strip().replace(",", "")


_RELEASED = Reader(
    question=extract_prompt_r1_question,
    answers=lambda row: row["reward_model"]["ground_truth"],
    function_columns=("prompt", "reward_model"),
    meta_columns=("data_source",),
    build_meta=build_prompt_r1_meta,
)
_FLASHRAG = answer_list_reader("golden_answers")
_GSM8K = Reader(
    question="question",
    answers=lambda row: [extract_gsm8k_answer(row["answer"])],
    function_columns=("answer",),
    meta_columns={"solution": "answer"},
)
_MUSIQUE = Reader(
    question="question",
    answers=lambda row: list_answers(row["answer"]) + parse_answers(row["answer_aliases"]),
    function_columns=("answer", "answer_aliases"),
)
# The question alone, as in the paper; the passage goes to `meta`.
_SQUAD = Reader(
    question="question",
    answers=lambda row: extract_squad_answers(row["answers"]),
    function_columns=("answers",),
    meta_columns=("title", "context"),
)
_TRIVIAQA = Reader(
    question="question",
    answers=lambda row: [row["answer"]["value"], *row["answer"]["aliases"]],
    function_columns=("answer",),
    meta_columns=("question_id",),
)
# The question has no options, and the correct option's text is the answer, as in the paper.
_MATHQA = Reader(
    question="Problem",
    answers=lambda row: list_answers(parse_mathqa_options(row["options"]).get(row["correct"])),
    function_columns=("options", "correct"),
    meta_columns=("options", "correct"),
)
_BOOKSUM = Reader(
    question=lambda row: _fill_writing_task(SUMMARY_TASK, row["chapter"]),
    answers="summary_text",
    function_columns=("chapter",),
    meta_columns={"book": "bid"},
)
_BOOKSUM_CHAPTERS = Reader(
    question=lambda row: _fill_writing_task(SUMMARY_TASK, row["text"]),
    answers=lambda row: [summary["text"] for summary in row["summary"]],
    function_columns=("text", "summary"),
)
_WRITING_PROMPTS = Reader(
    question=lambda row: _fill_writing_task(STORY_TASK, _IDEA_TAG.sub("", row["prompt"])),
    answers="story",
    function_columns=("prompt",),
)
_XSUM = Reader(
    question=lambda row: _fill_writing_task(ARTICLE_TASK, row["summary"]),
    answers="document",
    function_columns=("summary",),
)

_WRITING_METRICS = ("semantic_similarity", "token_f1")

# The root of 2Wiki's repository has a loading script; only the packaged builder does without it.
_2WIKI_FILES: dict[str, str | list[str]] = {
    "train": "hf://datasets/xanhho/2WikiMultihopQA/train.parquet",
    "validation": "hf://datasets/xanhho/2WikiMultihopQA/dev.parquet",
}
_POPQA_FILES: dict[str, str | list[str]] = {"test": "hf://datasets/akariasai/PopQA/test.tsv"}

PROMPT_R1_TASKS: dict[str, Task] = {
    "prompt_r1": Task(
        sources=(Source("QwenQKing/Prompt-R1", files=_RELEASED_FILES),),
        readers=(_RELEASED,),
        expected_rows={
            "train": 40_960,
            "validation": 2_048,
            "test": 1_536,
            **{f"test/{name}": 128 for name in EVALUATION_FILES},
        },
        licence="Apache-2.0",
    ),
    "hotpotqa": Task(
        sources=(
            *with_parquet_conversion("hotpotqa/hotpot_qa", "distractor"),
            flashrag("hotpotqa", validation="dev"),
        ),
        readers=(
            Reader(question="question", answers="answer", meta_columns=("type", "level")),
            _FLASHRAG,
        ),
        expected_rows={"train": 90_447, "validation": 7_405},
        licence="CC-BY-SA-4.0",
    ),
    "2wiki": Task(
        sources=(
            Source("framolfese/2WikiMultihopQA"),
            Source("parquet", files=_2WIKI_FILES),
            # Its `train` has only 15,000 rows.
            flashrag("2wikimultihopqa", validation="dev"),
        ),
        readers=(
            Reader(question="question", answers="answer", meta_columns=("type",)),
            _FLASHRAG,
        ),
        expected_rows={"train": 167_454, "validation": 12_576},
        licence="Apache-2.0",
    ),
    "gsm8k": Task(
        sources=with_parquet_conversion("openai/gsm8k", "main"),
        readers=(_GSM8K,),
        expected_rows={"train": 7_473, "test": 1_319},
        licence="MIT",
        metrics=("exact_match", "math_match"),
    ),
    "musique": Task(
        sources=(
            Source("bdsaglam/musique", "answerable"),
            Source("dgslibisey/MuSiQue"),
            flashrag("musique", validation="dev"),
        ),
        readers=(_MUSIQUE, _FLASHRAG),
        expected_rows={"train": 19_938, "validation": 2_417},
        licence="CC-BY-4.0",
    ),
    "popqa": Task(
        sources=(
            Source("akariasai/PopQA"),
            Source("csv", files=_POPQA_FILES, options={"sep": "\t"}),
            flashrag("popqa"),
        ),
        readers=(
            answer_list_reader("possible_answers", meta_columns=("prop", "s_pop", "o_pop")),
            _FLASHRAG,
        ),
        expected_rows={"test": 14_267},
        licence="none stated",
    ),
    "squad_v2": Task(
        sources=(Source("rajpurkar/squad_v2", "squad_v2"), Source("lighteval/squad_v2")),
        readers=(_SQUAD,),
        expected_rows={"train": 130_319, "validation": 11_873},
        licence="CC-BY-SA-4.0",
        unanswerable=True,
    ),
    "triviaqa": Task(
        sources=(
            *with_parquet_conversion("mandarjoshi/trivia_qa", "rc.nocontext"),
            # The unfiltered set, which has other sizes.
            flashrag("triviaqa", validation="dev"),
        ),
        readers=(_TRIVIAQA, _FLASHRAG),
        expected_rows={"train": 138_384, "validation": 17_944},
        licence="unknown",
    ),
    "mathqa": Task(
        sources=(Source("regisss/math_qa"), parquet_conversion("allenai/math_qa", "default")),
        readers=(_MATHQA,),
        expected_rows={"train": 29_837, "validation": 4_475, "test": 2_985},
        licence="Apache-2.0",
    ),
    "booksum": Task(
        sources=(Source("kmfoda/booksum"), Source("ubaada/booksum-complete-cleaned", "chapters")),
        readers=(_BOOKSUM, _BOOKSUM_CHAPTERS),
        expected_rows={"train": 9_600, "validation": 1_484, "test": 1_431},
        licence="BSD-3-Clause",
        metrics=_WRITING_METRICS,
    ),
    # The test split has 15,138 rows but 5,478 different prompts; samples have different questions.
    "writingprompts": Task(
        sources=(Source("euclaise/writingprompts"),),
        readers=(_WRITING_PROMPTS,),
        expected_rows={"train": 272_600, "validation": 15_620, "test": 15_138},
        licence="MIT",
        metrics=_WRITING_METRICS,
    ),
    "xsum": Task(
        sources=(
            Source("EdinburghNLP/xsum"),
            parquet_conversion("EdinburghNLP/xsum", "default"),
        ),
        readers=(_XSUM,),
        expected_rows={"train": 204_045, "validation": 11_332, "test": 11_334},
        licence="unknown",
        metrics=_WRITING_METRICS,
    ),
}
