"""The answers of a system that an earlier, perhaps killed, evaluation has saved."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..records import Record, RecordFile, digest
from .answer_records import AnswerKey, is_answered, key_of
from .evaluation_tasks import EvaluationTask
from .systems import Row, System

logger = logging.getLogger(__name__)


def identity_of(system: System) -> dict[str, str]:
    """Return the fields by which saved answers of this system are known."""
    identity = {"settings": digest(system.settings)}
    if system.version is not None:
        identity["version"] = system.version
    return identity


def load_saved_answers(
    path: Path, system: System, tasks: Sequence[EvaluationTask]
) -> dict[AnswerKey, Record]:
    """Load the answers on disk to questions of the tasks, and update their accepted answers.

    Failed answers are removed from the file, so that they are asked for again. Answers to rows that
    have changed since stay in the file, and are asked for again, too.

    Raises:
        `ValueError`: If an answer is of another system, or to another question. The file is not
            changed.
    """
    record_file = RecordFile(path)
    identity = identity_of(system)
    rows_by_task = {task.name: task.rows for task in tasks}
    for record in record_file:
        _refuse_other_system(record, identity, path)
        _refuse_other_question(record, _find_row(rows_by_task, key_of(record)), path)

    # Remove failed answers. Of several records of a key, the last one counts.
    saved_records = {key_of(record): record for record in record_file.keep(is_answered)}

    # The rows may have changed since they were answered.
    records: dict[AnswerKey, Record] = {}
    changed_rows = 0
    for key, record in saved_records.items():
        row = _find_row(rows_by_task, key)
        if row is None:
            continue
        if _has_changed(row, record, system):
            changed_rows += 1
            continue
        updated_record = _update_accepted_answers(record, row)
        if updated_record is None:
            continue
        if updated_record is not record:
            record_file.append([updated_record])
        records[key] = updated_record
    if changed_rows:
        logger.warning(
            "%s: %d questions are asked again, because their rows have changed since they were "
            "answered",
            path,
            changed_rows,
        )
    return records


def _find_row(rows_by_task: Mapping[str, Sequence[Row]], key: AnswerKey) -> Row | None:
    """Return the row of an answer; `None` if its task or question is not asked any more."""
    rows = rows_by_task.get(key.task, [])
    return rows[key.row_index] if key.row_index < len(rows) else None


def _refuse_other_system(record: Record, identity: Mapping[str, str], path: Path) -> None:
    """Raise `ValueError` if a record is of another system, or of this one before a change."""
    # Another system, or this one with another prompt, model or sampling.
    if record.get("settings") != identity["settings"]:
        raise ValueError(
            f"{path} holds answers of another system, or of this one with other settings: use "
            "another output folder, or the settings that this one was started with"
        )
    # Answers that were saved without a version are not compared.
    versions = {identity.get("version"), record.get("version")} - {None}
    if len(versions) > 1:
        raise ValueError(
            f"{path} holds answers of before the code or the weights of this system were "
            "changed: use another output folder, or undo the change"
        )


def _refuse_other_question(record: Record, row: Row | None, path: Path) -> None:
    """Raise `ValueError` if a record has another question than the row with its index."""
    if row is not None and record["question"] != row["question"]:
        key = key_of(record)
        raise ValueError(
            f"{path} holds answers to another sample of {key.task} (question {key.row_index} "
            "differs): use the n, seed and held_out that it was started with, or another output "
            "folder"
        )


def _has_changed(row: Row, record: Record, system: System) -> bool:
    """Whether another column that the system reads differs from when the row was answered."""
    saved_row_version = record.get("row_version")
    return saved_row_version is not None and saved_row_version != system.row_version(row)


def _update_accepted_answers(record: Record, row: Row) -> Record | None:
    """Return the record with the accepted answers of the row; `None` if it must be asked again."""
    accepted_answers = list(row["answers"])
    if accepted_answers == record["answers"]:
        return record
    # A judge's verdict depends on the accepted answers of that time. Other scores are computed from
    # the record.
    if record.get("judged") is not None:
        return None
    return {**record, "answers": accepted_answers}
