"""The tables of `forms.py` and `warm_start.py`.

Importing this module needs no torch, as `recompute.py` wants it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentic_prompting.evaluation import wilson_interval
from benchmarks.lab import markdown

FORMS_RECORD = "forms.jsonl.gz"
COLUMNS = ("well formed", "asks", "understood", "answered")


def shares(counts: Mapping[str, Any]) -> list[str]:
    """The share of each column with Wilson's 95 % interval."""
    cells = []
    for column in COLUMNS:
        share = wilson_interval(counts[column], counts["n"])
        cells.append(f"{share.mean:.2f} [{share.low:.2f}, {share.high:.2f}]")
    return cells


def table(counts: Sequence[Mapping[str, Any]]) -> str:
    """One line for each form."""
    return markdown(["form", *COLUMNS], [[row["form"], *shares(row)] for row in counts])


def untrained(records: Sequence[Mapping[str, Any]]) -> str:
    """The latest counts of each untrained model in each form."""
    latest = {}
    for record in records:
        if record["kind"] == "untrained":
            for counts in record["counts"]:
                latest[record["model"], counts["form"]] = counts
    rows = []
    for (model, form), counts in latest.items():
        rows.append([model, form, counts["n"], *shares(counts)])
    return markdown(["model", "form", "questions", *COLUMNS], rows)


def warm_started(records: Sequence[Mapping[str, Any]]) -> str:
    """The latest warm start with each seed, before and after."""
    latest = {}
    for record in records:
        if record["kind"] == "warm start":
            latest[record["model"], record["seed"]] = record
    rows = []
    for (model, seed), record in latest.items():
        after = f"after {record['steps']} steps, {record['seconds']} s"
        for counts in record["counts"]:
            stage = "before" if counts["form"] == "before" else after
            rows.append([model, seed, stage, counts["n"], *shares(counts)])
    return markdown(["model", "seed", "", "questions", *COLUMNS], rows)
