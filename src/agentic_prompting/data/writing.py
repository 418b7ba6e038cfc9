"""The three writing sets (Prompt-R1, Table 3) from their public sources: long answers, compared by meaning.

What the paper's authors asked differs in each: the task texts are ours. Its BookSum task (an article for a title) uses
columns that public BookSum does not have and exists in the released files alone: `prompt_r1`, split `test/BookSum`. The
public set here is the usual one, a chapter and its summary.
"""

from __future__ import annotations

import re
from typing import Any

from .records import PARQUET_BRANCH, Reader, Row, Source, Task

SUMMARY_TASK = "Summarise this chapter of a book in a few paragraphs.\n\n{text}"
"""For BookSum. Variable: `{text}` (str), the chapter."""

STORY_TASK = "Write a short story for this idea: '{text}'"
"""For WritingPrompts. Variable: `{text}` (str), the idea without its tag."""

ARTICLE_TASK = "Write the news article that this sentence sums up: '{text}'"
"""For XSum, which the paper turns round. Variable: `{text}` (str), the summary."""

_WRITING_TAG = re.compile(r"^\s*\[\s*[A-Za-z]{2}\s*\]\s*")  # "[ WP ]", "[EU]": what kind of prompt it is


def story_idea(prompt: str) -> str:
    """A writing prompt without the tag in front: `"[ WP ] You wake up ."` gives `"You wake up ."`."""
    return _WRITING_TAG.sub("", prompt).strip()


def _asked(task: str, text: str) -> str:
    if not text.strip():
        raise ValueError("its text is empty")
    return task.replace("{text}", text.strip())


def _chapter_summaries(row: Row) -> list[Any]:
    """The texts of `summary[{source, text, analysis}]`."""
    return [summary["text"] for summary in row["summary"]]


WRITING_TASKS: dict[str, Task] = {
    "booksum": Task(
        sources=(Source("kmfoda/booksum"), Source("ubaada/booksum-complete-cleaned", "chapters")),
        readers=(
            Reader(
                ("chapter", "summary_text"),
                lambda row: _asked(SUMMARY_TASK, row["chapter"]),
                lambda row: [row["summary_text"]],
                lambda row: {"book": row["bid"]} if "bid" in row else {},
                ("bid",),
            ),
            Reader(("text", "summary"), lambda row: _asked(SUMMARY_TASK, row["text"]), _chapter_summaries),
        ),
        expected_rows={"train": 9_600, "validation": 1_484, "test": 1_431},
        licence="BSD-3-Clause",
        metrics=("semantic_similarity", "token_f1"),
    ),
    "writingprompts": Task(  # test: 15,138 rows, but 5,478 different prompts; samples are of different questions
        sources=(Source("euclaise/writingprompts"),),
        readers=(
            Reader(
                ("prompt", "story"),
                lambda row: _asked(STORY_TASK, story_idea(row["prompt"])),
                lambda row: [row["story"]],
            ),
        ),
        expected_rows={"train": 272_600, "validation": 15_620, "test": 15_138},
        licence="MIT",
        metrics=("semantic_similarity", "token_f1"),
    ),
    "xsum": Task(
        sources=(
            Source("EdinburghNLP/xsum"),
            Source("EdinburghNLP/xsum", revision=PARQUET_BRANCH, data_dir="default"),
        ),
        readers=(
            Reader(
                ("document", "summary"),
                lambda row: _asked(ARTICLE_TASK, row["summary"]),
                lambda row: [row["document"]],
            ),
        ),
        expected_rows={"train": 204_045, "validation": 11_332, "test": 11_334},
        licence="unknown",
        metrics=("semantic_similarity", "token_f1"),
    ),
}
