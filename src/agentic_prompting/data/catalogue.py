"""Tables about the data sets: all of them, one in full, their state on the hub, and evaluation questions that occur in
training data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .loading import find_task, open_source
from .task import Source, Task, first_line, fitting_reader
from .tasks import PAIRS, TASKS


def list_tasks() -> str:
    """All sets as a table: name, splits with their rows, metrics, first source, licence."""
    rows = [
        (name, _splits(task), ", ".join(task.metrics), str(task.sources[0]), task.licence)
        for name, task in TASKS.items()
    ]
    rows += [
        (
            name,
            ", ".join(f"{split}: {'/'.join(part)}" for split, part in parts.items()),
            "",
            "a pair of sets",
            "",
        )
        for name, parts in PAIRS.items()
    ]
    return text_table(("name", "splits", "metrics", "first source", "licence"), rows)


def describe_task(name: str) -> str:
    """One set in full: splits, columns, every source in the order they are tried.

    Raises:
        `ValueError`: There is none of this name.
    """
    if name in PAIRS:
        parts = "\n".join(
            f"  {split}: {of}, split {theirs}" for split, (of, theirs) in PAIRS[name].items()
        )
        return f"{name}: a pair of sets\n{parts}"
    name, _, task = find_task(name)
    splits = [
        f"    {split}: {rows:,}{' (cut by row number)' if split in task.cuts else ''}"
        for split, rows in task.expected_rows.items()
    ]
    kept = (
        ['  questions without an answer are kept; their accepted answer is ""']
        if task.unanswerable
        else []
    )
    return "\n".join(
        [
            *(name, "  splits (rows)", *splits),
            *(
                "  sources, in the order they are tried",
                *(f"    {source}" for source in task.sources),
            ),
            *("  columns needed", *(f"    {', '.join(reader.columns)}" for reader in task.readers)),
            *(f"  metrics: {', '.join(task.metrics)}", f"  licence: {task.licence}", *kept),
        ]
    )


@dataclass(frozen=True)
class SourceCheck:
    """One split at one source.

    Args:
        task (`str`), split (`str`), source (`str`): The split and its source.
        problem (`str`): The difference from the record; empty if there is none.
        revision (`str`): The commit that was seen; empty if not known.
        rows (`int`, *optional*): Rows there, where the hub says so without a download.
        columns (`tuple[str, ...]`): The columns there.
    """

    task: str
    split: str
    source: str
    problem: str = ""
    revision: str = ""
    rows: int | None = None
    columns: tuple[str, ...] = ()


def check_sources(names: Sequence[str] = (), online: bool = False) -> list[SourceCheck]:
    """Compare the records with themselves and, `online`, with what their sources hold now.

    Online, the first row of each split is streamed from each source and read; nothing is downloaded whole.

    Args:
        names (`Sequence[str]`, *optional*): The sets; all by default.
        online (`bool`, *optional*, defaults to `False`): Whether to ask the hub.

    Raises:
        `ValueError`: A set does not exist.
    """
    behind = [part for name in names for part in PAIRS.get(name, {"": (name, "")}).values()]
    tasks = dict(find_task(name)[::2] for name, _ in behind) if names else TASKS
    look = _look_online if online else _look_at_record
    return [
        look(name, task, split, part)
        for name, task in tasks.items()
        for split in task.expected_rows
        for source in task.sources
        if not source.files or split in source.files
        for part in source.parts()
    ]


def check_table(checks: Iterable[SourceCheck]) -> str:
    """The checks as a table, problems last on their lines."""
    head = ("set", "split", "source", "revision", "rows", "state")
    rows = [
        (
            c.task,
            c.split,
            c.source,
            c.revision[:10],
            "" if c.rows is None else f"{c.rows:,}",
            c.problem or "ok",
        )
        for c in checks
    ]
    return text_table(head, rows)


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to equal width."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, ["-" * width for width in widths], *rows)
    ]
    return "\n".join(lines)


def _splits(task: Task) -> str:
    shown = [f"{split} {rows:,}" for split, rows in task.expected_rows.items() if "/" not in split]
    parts = sum("/" in split for split in task.expected_rows)
    return ", ".join(shown) + (f" ({parts} parts)" if parts else "")


def _look_at_record(name: str, task: Task, split: str, source: Source) -> SourceCheck:
    """Check the record alone: an unknown split, a reader of no columns, a cut of another size."""
    problems, cut = [], task.cuts.get(split)
    if set(source.splits) - set(task.expected_rows):
        problems.append(f"maps splits that the set does not have: {', '.join(source.splits)}")
    if cut is not None and len(cut.numbers(cut.whole or 0)) != task.expected_rows[split]:
        problems.append(f"its cut is not of {task.expected_rows[split]} rows")
    if not all(reader.columns for reader in task.readers):
        problems.append("a reader needs no column")
    return SourceCheck(name, split, str(source), "; ".join(problems))


def _look_online(name: str, task: Task, split: str, source: Source) -> SourceCheck:
    try:
        rows, revision = open_source(source, split, streaming=True), _revision(source)
        first = next(iter(rows))
        fitting_reader(name, task, list(first), str(source)).read(first)
    except Exception as error:  # as in loading: no common type
        return SourceCheck(name, split, str(source), f"{type(error).__name__}: {first_line(error)}")
    splits = getattr(getattr(rows, "info", None), "splits", None) or {}
    count = getattr(splits.get(source.splits.get(split, split)), "num_examples", None) or None
    whole = (task.cuts[split].whole if split in task.cuts else None) or task.expected_rows[split]
    wrong = count and not task.unique and task.order is None and abs(count - whole) > 0.01 * whole
    problem = f"{count:,} rows, {whole:,} expected" if wrong else ""
    return SourceCheck(name, split, str(source), problem, revision, count, tuple(first))


def _revision(source: Source) -> str:
    """The commit of a hub repository now; empty for files addressed one by one."""
    if "/" not in source.path:
        return ""
    from huggingface_hub import HfApi

    return str(HfApi().dataset_info(source.path, revision=source.revision).sha or "")


# Contamination --------------------------------------------------------------------------------------------------------
# Worth a look before any table is believed. The released Prompt-R1 evaluation file of GSM8K, for one, is mostly GSM8K's
# *training* set: 111 of its 128 questions.

_WORDS = re.compile(r"\w+")


@dataclass(frozen=True)
class Contamination:
    """Evaluation rows that occur in training rows.

    Args:
        rows (`int`): Evaluation rows looked at.
        exact (`tuple[str, ...]`): Ids of those whose question is a training question, case and punctuation aside.
        near (`tuple[str, ...]`): Ids of further ones that share a run of `run_length` words with a training question.
        run_length (`int`): In words.
    """

    rows: int
    exact: tuple[str, ...]
    near: tuple[str, ...]
    run_length: int

    def __str__(self) -> str:
        return (
            f"{len(self.exact)} of {self.rows} evaluation questions are training questions, "
            f"{len(self.near)} more share {self.run_length} words in a row with one"
        )


def contamination_report(
    evaluation: Iterable[Mapping[str, Any]],
    training: Iterable[Mapping[str, Any]],
    run_length: int = 13,
) -> Contamination:
    """Compare the questions of two data sets.

    Args:
        evaluation (`Iterable[Mapping]`): Rows with `question` and, where they have one, `id`.
        training (`Iterable[Mapping]`): Rows with `question`.
        run_length (`int`, *optional*, defaults to `13`): Words in a row that two questions must share to be near; 13 as
            in GPT-3's appendix C. Shorter questions can only be exact.

    Raises:
        `ValueError`: If `run_length` is below 1 or there is nothing to compare.
    """
    if run_length < 1:
        raise ValueError(f"run_length must be at least 1, got {run_length}")
    rows = list(evaluation)
    trained = [_words(row["question"]) for row in training]
    if not rows or not trained:
        raise ValueError(
            f"nothing to compare: {len(rows)} evaluation rows and {len(trained)} training rows"
        )
    whole = set(map(tuple, trained))
    runs = {run for words in trained for run in _runs(words, run_length)}
    exact, near = [], []
    for number, row in enumerate(rows):
        words, name = _words(row["question"]), str(row.get("id", number))
        if tuple(words) in whole:
            exact.append(name)
        elif any(run in runs for run in _runs(words, run_length)):
            near.append(name)
    return Contamination(len(rows), tuple(exact), tuple(near), run_length)


def _words(text: str) -> list[str]:
    return _WORDS.findall(text.lower())


def _runs(words: Sequence[str], length: int) -> Iterable[tuple[str, ...]]:
    return (tuple(words[start : start + length]) for start in range(len(words) - length + 1))
