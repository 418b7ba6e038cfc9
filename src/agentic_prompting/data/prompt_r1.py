"""The released Prompt-R1 files as a record: the paper's own samples of its twelve sets, the best source for its tables.

Of the 128 rows of the GSM8K evaluation file 111 are GSM8K *training* questions, so its figures cannot be compared with
others' on GSM8K test; [`contamination_report`] counts such rows.
"""

from __future__ import annotations

from typing import Any

from .records import Reader, Row, Source, Task

_HEAD = "Question: "
_CUT = "\nFirst, provide a simple explanation of the question"  # occurs exactly once in every released message


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
    if not content.startswith(_HEAD) or _CUT not in content:
        raise ValueError(f"`prompt` is not in the released wrapper, '{_HEAD}…{_CUT.strip()}…': {content[:60]!r}")
    # Not at the first newline: DAPO's questions have several lines.
    question, _, instruction = content.removeprefix(_HEAD).partition(_CUT)
    return _HEAD, question, _CUT + instruction


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
"""Names of the twelve evaluation files; each is a split, `test/hotpot` for example."""

_FILES: dict[str, str | list[str]] = {
    "train": "train_data/train.parquet",
    "validation": "train_data/validation.parquet",
    "test": [f"eval_data/{name}.parquet" for name in EVALUATION_FILES],
    **{f"test/{name}": f"eval_data/{name}.parquet" for name in EVALUATION_FILES},
}

PROMPT_R1_TASKS: dict[str, Task] = {
    "prompt_r1": Task(
        sources=(Source("QwenQKing/Prompt-R1", files=_FILES),),
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
            **{f"test/{name}": 128 for name in EVALUATION_FILES},
        },
        licence="Apache-2.0",
    ),
}
