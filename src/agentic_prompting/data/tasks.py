"""Where each data set is, and how to read a row of it: one record per set, no machinery.

Adding a set is adding a [`Task`] to [`TASKS`]. Here are Prompt-R1's sets, the released files and their public sources;
ProRefine's and E-SPL's are in `tasks_reasoning.py`.

The hub ids, splits, sizes and licences are facts about other people's repositories. They were collected with their
sources in August 2026; `agentic-prompting data check --online` compares them with what is there now.
"""

from __future__ import annotations

import re
from typing import Any

from .task import Reader, Row, Source, Task, answers_of, as_list
from .tasks_reasoning import ESPL_TASKS, PAIRS as PAIRS, PROREFINE_TASKS, gsm8k_answer

# The released Prompt-R1 files: the paper's own samples of its twelve sets, the best source for its tables. Of the 128
# rows of the GSM8K evaluation file 111 are GSM8K *training* questions; `contamination_report` counts such rows.

_HEAD = "Question: "
_CUT = "\nFirst, provide a simple explanation of the question"  # occurs exactly once in every released message

EVALUATION_FILES = (
    *("2WikiMultihopQA", "BookSum", "DAPO-Math", "MathQA_ood", "MusiQue", "PopQA", "WritingPrompts", "Xsum_ood"),
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
    return {"prompt_template": f"{_HEAD}{before}{{question}}{after}{tail}", "data_source": row.get("data_source")}


def _split_prompt_r1(row: Row) -> tuple[str, str]:
    messages = row["prompt"]
    if len(messages) != 1 or messages[0]["role"] != "user":
        raise ValueError("a released Prompt-R1 row has exactly one user message in `prompt`")
    content = messages[0]["content"]
    if not content.startswith(_HEAD) or _CUT not in content:
        raise ValueError(f"`prompt` is not in the released wrapper, '{_HEAD}…{_CUT.strip()}…': {content[:60]!r}")
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

_OPTION = re.compile(r"([a-e]) \) (.*?)(?=\s*,?\s*[a-e] \) |\s*$)", re.DOTALL)


def mathqa_options(options: str) -> dict[str, str]:
    """MathQA's options, which are one string: `"a ) 38 , b ) 27.675"` gives `{"a": "38", "b": "27.675"}`."""
    return {letter: text.strip() for letter, text in _OPTION.findall(options)}


def squad_answers(answers: Any) -> list[str]:
    """SQuAD's answer texts, whether the list of structs came back as a dict of lists or as it is."""
    return list(answers["text"]) if isinstance(answers, dict) else [answer["text"] for answer in answers or []]


_FLASHRAG = Reader(("question", "golden_answers"), "question", lambda row: as_list(row["golden_answers"]))
_RELEASED = Reader(
    ("prompt", "reward_model"),
    prompt_r1_question,
    lambda row: row["reward_model"]["ground_truth"],
    ("data_source",),
    prompt_r1_meta,
)
_GSM8K = Reader(
    ("question", "answer"), "question", lambda row: [gsm8k_answer(row["answer"])], keep={"solution": "answer"}
)
_MUSIQUE = Reader(
    ("question", "answer", "answer_aliases"),
    "question",
    lambda row: answers_of(row["answer"]) + as_list(row["answer_aliases"]),
)
_POPQA = Reader(
    ("question", "possible_answers"),
    "question",
    lambda row: as_list(row["possible_answers"]),
    keep=("prop", "s_pop", "o_pop"),
)
_SQUAD = Reader(  # the question alone, as in the paper; the passage stays in `meta`
    ("question", "answers"), "question", lambda row: squad_answers(row["answers"]), keep=("title", "context")
)
_TRIVIAQA = Reader(
    ("question", "answer"),
    "question",
    lambda row: [row["answer"]["value"], *row["answer"]["aliases"]],
    keep=("question_id",),
)
_MATHQA = Reader(  # no options shown and the option's text as the gold, as in the paper
    ("Problem", "options", "correct"),
    "Problem",
    lambda row: answers_of(mathqa_options(row["options"]).get(row["correct"])),
    keep=("options", "correct"),
)
_CHAPTER = Reader(
    ("chapter", "summary_text"), lambda row: _asked(SUMMARY_TASK, row["chapter"]), "summary_text", {"book": "bid"}
)
_CHAPTERS = Reader(
    ("text", "summary"),
    lambda row: _asked(SUMMARY_TASK, row["text"]),
    lambda row: [summary["text"] for summary in row["summary"]],
)
_STORY = Reader(("prompt", "story"), lambda row: _asked(STORY_TASK, _TAG.sub("", row["prompt"])), "story")
_XSUM = Reader(("document", "summary"), lambda row: _asked(ARTICLE_TASK, row["summary"]), "document")
_WRITING = ("semantic_similarity", "token_f1")

TASKS: dict[str, Task] = {
    "prompt_r1": Task(
        (Source("QwenQKing/Prompt-R1", files=_FILES),),
        (_RELEASED,),
        {"train": 40_960, "validation": 2048, "test": 1_536, **{f"test/{name}": 128 for name in EVALUATION_FILES}},
        "Apache-2.0",
    ),
    "hotpotqa": Task(
        (
            Source("hotpotqa/hotpot_qa", "distractor"),
            Source.parquet("hotpotqa/hotpot_qa", "distractor"),
            Source.flashrag("hotpotqa", validation="dev"),
        ),
        (Reader(("question", "answer"), "question", "answer", keep=("type", "level")), _FLASHRAG),
        {"train": 90_447, "validation": 7_405},
        "CC-BY-SA-4.0",
    ),
    "2wiki": Task(
        (
            Source("framolfese/2WikiMultihopQA"),
            Source(  # its root has a loading script, which only the packaged builder passes by
                "parquet",
                files={
                    "train": "hf://datasets/xanhho/2WikiMultihopQA/train.parquet",
                    "validation": "hf://datasets/xanhho/2WikiMultihopQA/dev.parquet",
                },
            ),
            Source.flashrag("2wikimultihopqa", validation="dev"),  # train: 15,000 rows only
        ),
        (Reader(("question", "answer"), "question", "answer", keep=("type",)), _FLASHRAG),
        {"train": 167_454, "validation": 12_576},
        "Apache-2.0",
    ),
    "gsm8k": Task(
        (Source("openai/gsm8k", "main"), Source.parquet("openai/gsm8k", "main")),
        (_GSM8K,),
        {"train": 7_473, "test": 1_319},
        "MIT",
        metrics=("exact_match", "math_match"),
    ),
    "musique": Task(
        (
            Source("bdsaglam/musique", "answerable"),
            Source("dgslibisey/MuSiQue"),
            Source.flashrag("musique", validation="dev"),
        ),
        (_MUSIQUE, _FLASHRAG),
        {"train": 19_938, "validation": 2_417},
        "CC-BY-4.0",
    ),
    "popqa": Task(
        (
            Source("akariasai/PopQA"),
            Source("csv", files={"test": "hf://datasets/akariasai/PopQA/test.tsv"}, options={"sep": "\t"}),
            Source.flashrag("popqa"),
        ),
        (_POPQA, _FLASHRAG),
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
    "triviaqa": Task(
        (
            Source("mandarjoshi/trivia_qa", "rc.nocontext"),
            Source.parquet("mandarjoshi/trivia_qa", "rc.nocontext"),
            Source.flashrag("triviaqa", validation="dev"),  # the unfiltered set: other sizes
        ),
        (_TRIVIAQA, _FLASHRAG),
        {"train": 138_384, "validation": 17_944},
        "unknown",
    ),
    "mathqa": Task(
        (Source("regisss/math_qa"), Source.parquet("allenai/math_qa", "default")),
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
        (Source("EdinburghNLP/xsum"), Source.parquet("EdinburghNLP/xsum", "default")),
        (_XSUM,),
        {"train": 204_045, "validation": 11_332, "test": 11_334},
        "unknown",
        metrics=_WRITING,
    ),
    **PROREFINE_TASKS,
    **ESPL_TASKS,
}
