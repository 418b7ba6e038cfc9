"""Converts the rows of any source to the schema of [`load_task`].

The schema: `id`, `question`, `answers` (list of accepted answers), `task`, `meta`. `meta` is JSON
text, because data sets have different columns, and Arrow cannot put rows of different structure
into one table.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ..llm.numbers import count_in_words, is_missing, value_text
from .file_formats import describe_position
from .task import Reader, Row, Task
from .validation import MissingQuestion, describe_missing_questions, select_columns

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

# A row in the schema of `load_task`, with `meta` as a dict.
Record: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class SourceRows:
    """Rows as their source has them.

    Args:
        rows (`datasets.Dataset` or `list[dict]`): The rows.
        reader (`Reader`): Reads one of them.
        origin (`str`): Where they come from, for `meta` and errors.
        numbers (`Sequence[int]`, *optional*): The row numbers at the source, if these rows are a
            subset. By default they are counted from 0.
        line_numbers (`Sequence[int]`, *optional*): The line of each row at the source, by row
            number, if it is a file that has lines.
    """

    rows: Dataset | Sequence[Row]
    reader: Reader
    origin: str
    numbers: Sequence[int] | None = None
    line_numbers: Sequence[int] = ()


def select_subset(name: str, task: Task, split: str, source_rows: SourceRows) -> SourceRows:
    """Select the rows of a split: those of its subset if the task has one, or all.

    Raises:
        `ValueError`: The source has other rows, or another order, than the subset was made for.
    """
    subset = task.subsets.get(split)
    if subset is None:
        return source_rows
    rows = source_rows.rows
    origin = source_rows.origin
    # The numbers mean the same rows only if nothing was added or removed.
    if subset.total_rows is not None and len(rows) != subset.total_rows:
        raise ValueError(
            f"{name}: split {split!r} is cut by row numbers out of {subset.total_rows:,} rows, "
            f"but {origin} has {len(rows):,}"
        )
    # They do only in the same order, too: compare the first question.
    numbers = subset.pick_numbers(len(rows))
    question = source_rows.reader.read(rows[numbers[0]]).question
    if subset.first_question not in question:
        raise ValueError(
            f"{name}: {origin} has its rows in another order: split {split!r} should begin with a "
            f"question about {subset.first_question!r}, not {question[:80]!r}"
        )

    # A data set selects without copying its rows; a list is indexed.
    selected: Dataset | Sequence[Row]
    if hasattr(rows, "select"):
        selected = rows.select(numbers)
    else:
        selected = [rows[number] for number in numbers]
    return replace(source_rows, rows=selected, numbers=numbers)


def read_records(
    name: str, task: Task, parts: Iterable[SourceRows], id_prefix: str
) -> list[Record]:
    """Convert all parts of a data set to records, in the order of the task's selection.

    Rows without an accepted answer are dropped, and duplicate questions if the task says so.

    Args:
        name (`str`): The name of the data set.
        task (`Task`): The data set.
        parts (`Iterable[SourceRows]`): Its rows, source by source.
        id_prefix (`str`): A row without an id gets this prefix and its number.

    Raises:
        `ValueError`: A row cannot be read, which is named, or rows have no question. Counts the
            latter, and names the first ones.
    """
    # Rows are numbered on from one source to the next, so their ids differ.
    records: list[Record] = []
    first_number = 0
    for part in parts:
        records.extend(_read_part(name, task, part, id_prefix, first_number))
        first_number += len(part.rows)
    if task.unique_questions:
        # As in the released code of E-SPL: the first position and the last answers are kept.
        records_by_question = {record["question"]: record for record in records}
        records = list(records_by_question.values())

    # The selection counts the rows that are left.
    if task.selection is None:
        return records
    return [records[number] for number in task.selection.pick_numbers(len(records))]


def _read_part(
    name: str, task: Task, part: SourceRows, id_prefix: str, first_number: int
) -> list[Record]:
    records: list[Record] = []
    rows_without_question: list[str] = []
    numbers = part.numbers or range(len(part.rows))
    # Decode only the columns that the reader uses: others may be large.
    rows = select_columns(part.rows, part.reader.all_columns)
    for number, row in zip(numbers, rows, strict=True):
        line_number = part.line_numbers[number] if part.line_numbers else 0
        row_name = f"{name}: {describe_position(part.origin, number, line_number)}"
        try:
            read_row = part.reader.read(row)
            # JSON can hold half of a surrogate pair, a table cannot.
            values = [read_row.question, read_row.answers, read_row.meta]
            json.dumps(values, ensure_ascii=False).encode()
        except MissingQuestion:
            # All such rows are named in one error, after the last one.
            line = f" (line {line_number})" if line_number else ""
            rows_without_question.append(f"row {number}{line}")
            continue
        except UnicodeEncodeError as error:
            surrogate = f"half of a surrogate pair, {error.object[error.start]!a}"
            raise ValueError(f"{row_name} cannot be read: it has {surrogate}") from None
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{row_name} cannot be read: {first_line(error)}") from None

        # The rows of blind tests have no answers.
        if not read_row.answers and not task.unanswerable:
            continue

        # The source's own id, or else the row's number.
        row_id = row.get(part.reader.id)
        if is_missing(row_id) or not value_text(row_id).strip():
            row_id = f"{id_prefix}-{first_number + number}"
        record = {
            "id": value_text(row_id),
            "question": read_row.question,
            "answers": read_row.answers or [""],
            "task": name,
            "meta": {"row": number, "source": part.origin, **read_row.meta},
            "context": read_row.context,
        }
        records.append(record)

    if rows_without_question:
        message = describe_missing_questions(
            part.origin, part.reader.question_column, rows_without_question
        )
        raise ValueError(f"{name}: {message}")

    # Tell how many rows were dropped; if all were, something is wrong.
    dropped = len(part.rows) - len(records)
    if dropped and not records:
        raise ValueError(
            f"{name}: no row of {part.origin} has an accepted answer "
            f"({count_in_words(dropped, 'row')})"
        )
    if dropped:
        logger.warning(
            f"{name}: dropped {count_in_words(dropped, 'row')} of {part.origin} without an "
            "accepted answer"
        )
    return records


def sample_records(name: str, records: list[Record], n: int, seed: int) -> list[Record]:
    """Sample records with different questions, in the order in which they are drawn.

    `meta` of each gets how it was drawn: `n`, `seed`, and the number of different questions `of`.

    Args:
        name (`str`): The name of the data set, for the error.
        records (`list[dict]`): The records. Of records with the same question the first one counts.
        n (`int`): The number of records to sample.
        seed (`int`): The seed.

    Raises:
        `ValueError`: There are fewer than `n` different questions.
    """
    # A question that occurs several times is drawn at most once.
    first_records: dict[tuple[str, str], Record] = {}
    for record in records:
        first_records.setdefault(question_key(record), record)
    candidates = list(first_records.values())
    if n > len(candidates):
        raise ValueError(
            f"{name}: n={n}, but there are only {len(candidates)} different questions with an "
            "answer"
        )
    # Record how each row was drawn.
    sample_meta = {"n": n, "seed": seed, "of": len(candidates)}
    sample = []
    for number in random.Random(seed).sample(range(len(candidates)), n):
        record = candidates[number]
        sample.append({**record, "meta": {**record["meta"], "sample": sample_meta}})
    return sample


def question_key(record: Record) -> tuple[str, str]:
    """Return what two records have in common if they ask the same: the question and its context."""
    return record["question"], record.get("context", "")


def to_dataset(records: Iterable[Record]) -> Dataset:
    """Convert records to a `datasets.Dataset`, with `meta` as JSON."""
    from datasets import Dataset, Features, List, Value

    # State the types: an empty list would get none from its values.
    text = Value("string")
    features = Features(
        {"id": text, "question": text, "answers": List(text), "task": text, "meta": text}
    )
    rows = []
    for record in records:
        row = {name: record[name] for name in features}
        rows.append({**row, "meta": json.dumps(record["meta"], ensure_ascii=False)})
    return Dataset.from_list(rows, features=features)


def as_dataset(data: Any) -> Any:
    """Convert a pandas `DataFrame` or a list of dicts to a `datasets.Dataset`.

    Args:
        data (`DataFrame`, `list[dict]`, or a dict of these by split): Anything else, such as a
            data set, is returned as it is.
    """
    from datasets import Dataset

    if isinstance(data, Mapping):
        return {name: as_dataset(split) for name, split in data.items()}
    if type(data).__module__.partition(".")[0] == "pandas":
        return Dataset.from_pandas(data, preserve_index=False)
    if isinstance(data, list) and data:
        # `from_list` takes the columns of the first row, and drops those that only others have.
        empty_row = dict.fromkeys(column for row in data for column in row)
        return Dataset.from_list([{**empty_row, **row} for row in data])
    return data


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, for errors that are one line."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else "no message"
