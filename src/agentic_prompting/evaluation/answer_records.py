"""Records of answers: one JSON line for each answer of a system, which can be scored without its
task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..records import Record, RecordFile
from .systems import Answer, Row


class AnswerKey(NamedTuple):
    """Identifies an answer of a system.

    Args:
        task (`str`): Name of the task.
        run (`int`): Number of the run.
        row_index (`int`): Index of the question in the task's sample.
    """

    task: str
    run: int
    row_index: int


def key_of(record: Mapping[str, Any]) -> AnswerKey:
    """Return the key of a record."""
    return AnswerKey(record["task"], record["run"], row_index_of(record))


def row_index_of(record: Mapping[str, Any]) -> int:
    """Return the index of a record's question in the task's sample: its field `place`."""
    return record["place"]


def is_answered(record: Mapping[str, Any]) -> bool:
    """Whether the system was asked and did not fail. It may have given no answer."""
    return record.get("error") is None


def make_record(system: str, key: AnswerKey, row: Row, answer: Answer) -> Record:
    """Return the record of an answer of a system to a row."""
    fields = answer.to_json()
    # With the question and its accepted answers, a record can be scored without the task.
    return {
        "system": system,
        "task": key.task,
        "run": key.run,
        "place": key.row_index,
        "id": str(row.get("id", key.row_index)),
        "question": row["question"],
        "answers": list(row["answers"]),
        "answer": fields.pop("text", None),
        **fields,
    }


def read_records(paths: Iterable[str | Path]) -> list[Record]:
    """Read all answers in some files. Of several answers with the same key, the last one counts.

    Raises:
        `ValueError`: If a file contains anything else. An incomplete last line is skipped.
    """
    # By system, too, because a file may hold the answers of several.
    records: dict[tuple[str, AnswerKey], Record] = {}
    for path in paths:
        for record in RecordFile(path):
            if not {"system", "task", "run", "place"} <= set(record):
                raise ValueError(f"{path} holds a line that is no record of an evaluation")
            records[record["system"], key_of(record)] = record
    return list(records.values())
